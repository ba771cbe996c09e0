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
from pipedist.testing.network import Connection
from tests.simulation.reference_model import Violation
from tests.simulation.worker_process import WorkerProcess

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation

STARTUP_S_MAX = 0.05
EXIT_REPORT_S_MAX = 0.02

Running = tuple[int, int] | None


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
        process = WorkerProcess(self._simulation, worker, incarnation, supervised=supervised)
        self.alive[worker] = process
        self._all.append(process)
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

    def exited(self, process: WorkerProcess, text: str, running: Running) -> None:
        """Report the exit of a process to the driver, a little later."""
        if self.alive.get(process.worker) is process:
            del self.alive[process.worker]
        self._simulation.note(process, text)
        if process.supervised:
            self._supervisors[process.worker].ended(process, text)
        else:
            self._soon(EXIT_REPORT_S_MAX, self._report_exit, process, text, running)

    def _report_exit(self, process: WorkerProcess, text: str, running: Running) -> None:
        due = self._due.pop(process.worker, None)
        self._simulation.driver.lost(process, text, running=running)
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

    def ended(self, process: WorkerProcess, text: str) -> None:
        self._connection.send_up(Goodbye(self.worker, process.incarnation, text, crashed=True))
        time = self._simulation.time
        time.at(time.now + 0.5, self._simulation.launcher.respawn, self, process.incarnation + 1)
