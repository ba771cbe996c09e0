"""The workers of a simulation: processes of a launcher, and others that connect by themselves.

The launcher reports exits through a separate channel without faults: a report may arrive before the last
results of the process, or after them. A worker that connects by itself has a supervisor, which is never stopped, but
whose connection may have faults. The supervisor sends heartbeats while its process runs and is not stopped, and
starts the next incarnation when it has ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipedist.protocol.messages import Goodbye, Heartbeat, Message, Refuse
from pipedist.testing.faults import STOPPED_S_MAX
from pipedist.testing.network import PARTITION_S_MAX, Connection
from tests.simulation.reference_model import Violation
from tests.simulation.worker_process import End, WorkerProcess

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation

STARTUP_S_MAX = 0.05
EXIT_REPORT_S_MAX = 0.02

LATE_HEARTBEATS = 0.3
"""Share of the ended processes whose last heartbeat arrives late, after the report of their end."""

RESTART_S = 0.5
"""How soon a supervisor starts the next incarnation."""

SILENT_ENDS = 0.5
"""Share of the processes with an unknown call whose supervisor ends with them, and reports nothing."""

SILENT_RESTART_S = 8.0
"""How soon such a host is back: after the heartbeat timeout."""

UNKNOWN_CALLS = 0.3
"""Share of the ended processes of which it is not known what they executed."""


class SimulatedLauncher:
    """All processes, running and ended.

    Args:
        simulation: the simulation.
    """

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._all: list[WorkerProcess] = []
        self.alive: dict[str, WorkerProcess] = {}
        """The running process of each worker name."""
        self._started: dict[str, int] = {}
        """The latest started incarnation of each worker."""
        self._due: dict[str, int] = {}
        """Incarnations to start when the previous process has ended."""
        self._supervisors: dict[str, Supervisor] = {}

    def clear(self) -> None:
        """Break the reference cycles of all processes."""
        for process in self._all:
            process.clear()

    # -- managed workers --------------------------------------------------------------------------

    def start(self, worker: str, incarnation: int) -> None:
        """Start a managed process, as soon as the previous one has ended.

        Raises:
            Violation: the incarnation is not new.
        """
        if incarnation <= self._started.get(worker, -1):
            raise Violation(f"incarnation {incarnation} of {worker} was started before")
        self._started[worker] = incarnation
        before = self.alive.get(worker)
        if before is not None:
            self._due[worker] = incarnation
            self._soon(EXIT_REPORT_S_MAX, before.kill)
            return
        self._spawn(worker, incarnation, supervised=False)

    def kill(self, process: WorkerProcess) -> None:
        """Kill a managed process."""
        self._soon(EXIT_REPORT_S_MAX, process.kill)

    def _spawn(self, worker: str, incarnation: int, *, supervised: bool) -> WorkerProcess:
        simulation = self._simulation
        process = WorkerProcess(simulation, worker, incarnation, supervised=supervised)
        self.alive[worker] = process
        self._all.append(process)
        if not supervised and simulation.fails_to_start():
            self._soon(STARTUP_S_MAX, process.exit, "exit code 1")
        else:
            self._soon(STARTUP_S_MAX, process.begin)
        return process

    def _soon(self, within_s: float, action: object, *args: object) -> None:
        time, random = self._simulation.time, self._simulation.random
        time.at(time.now + within_s * random.random(), action, *args)  # type: ignore[arg-type]

    # -- workers that connect by themselves ----------------------------------------------------------------------

    def connect(self, worker: str) -> None:
        """Start a worker of another host."""
        self._supervisors[worker] = supervisor = Supervisor(self._simulation, worker)
        supervisor.process = self._spawn(worker, 0, supervised=True)
        supervisor.beat()

    def respawn(self, supervisor: Supervisor, incarnation: int) -> None:
        """Start the next incarnation of a worker of another host."""
        supervisor.process = self._spawn(supervisor.worker, incarnation, supervised=True)

    # -- events of processes -----------------------------------------------------------------

    def rejoin(self, process: WorkerProcess) -> None:
        """Start the next incarnation of a worker of another host, while the last one runs."""
        supervisor = self._supervisors[process.worker]
        if supervisor.process is process:
            self.respawn(supervisor, process.incarnation + 1)

    def exited(self, process: WorkerProcess, end: End) -> None:
        """Report the end of a process to the driver, a little later."""
        if self.alive.get(process.worker) is process:
            del self.alive[process.worker]
        self._simulation.note(process, end.text)
        if end.timed_out is None and self._simulation.random.random() < UNKNOWN_CALLS:
            end = end._replace(running=None)
        if process.supervised:
            self._supervisors[process.worker].ended(process, end)
        elif end.left:  # after its Goodbye
            time = self._simulation.time
            time.at(time.now + EXIT_REPORT_S_MAX, self._report_exit, process, end)
        else:
            self._soon(EXIT_REPORT_S_MAX, self._report_exit, process, end)

    def _report_exit(self, process: WorkerProcess, end: End) -> None:
        due = self._due.pop(process.worker, None)
        self._simulation.driver.lost(process, end)
        if due is not None and process.worker not in self.alive:
            self._spawn(process.worker, due, supervised=False)

    def stopped(self, process: WorkerProcess, for_s: float) -> None:
        """Kill a stopped managed process if it is stopped for too long."""
        if not process.supervised and for_s > STOPPED_S_MAX:
            time = self._simulation.time
            time.at(time.now + STOPPED_S_MAX, self._kill_stopped, process)

    def _kill_stopped(self, process: WorkerProcess) -> None:
        if process.alive and process.asleep:
            process.kill()


class Supervisor:
    """Sends heartbeats for one worker of another host, and restarts it."""

    def __init__(self, simulation: Simulation, worker: str) -> None:
        self._simulation = simulation
        self.worker = worker
        self.process: WorkerProcess | None = None
        self._connection = self._connect()

    def _connect(self) -> Connection:
        return self._simulation.network.connect(
            up=lambda message: self._simulation.driver.receive_from_supervisor(self, message),
            down=self._receive,
            on_cut=self._reconnect,
        )

    def _reconnect(self) -> None:
        self._connection = self._connect()

    def beat(self) -> None:
        process, simulation = self.process, self._simulation
        if process is not None and process.alive and not process.asleep:
            self._connection.send_up(Heartbeat(self.worker, process.incarnation))
        simulation.time.at(simulation.time.now + simulation.limits.heartbeat_timeout_s / 3, self.beat)

    def refuse(self, before: int) -> None:
        """Send it the driver's message that its processes before this incarnation were evicted."""
        self._connection.send_down(Refuse("this incarnation is not a member", before))

    def _receive(self, message: Message) -> None:
        if (
            self.process is not None
            and isinstance(message, Refuse)
            and not 0 < message.before <= self.process.incarnation
        ):
            self.process.kill()

    def ended(self, process: WorkerProcess, end: End) -> None:
        """Report the end of a process, and start the next incarnation unless there is one."""
        lease, call = end.running or (0, 0)
        is_timed_out = end.timed_out is not None
        goodbye = Goodbye(
            self.worker, process.incarnation, end.text, not end.left, lease, call, 0, is_timed_out
        )
        is_silent = end.running is None and not end.left and self._simulation.random.random() < SILENT_ENDS
        if not is_silent:
            self._connection.send_up(goodbye)
        time, random = self._simulation.time, self._simulation.random.random
        if random() < LATE_HEARTBEATS:
            late = Heartbeat(self.worker, process.incarnation)
            driver = self._simulation.driver
            time.at(time.now + PARTITION_S_MAX * random(), driver.receive_from_supervisor, self, late)
        if self.process is not process:
            return
        after_s = SILENT_RESTART_S if is_silent else RESTART_S
        time.at(time.now + after_s, self._simulation.launcher.respawn, self, process.incarnation + 1)
