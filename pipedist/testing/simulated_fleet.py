"""Where the workers of a simulation come from: a launcher's processes, and others that dial in.

The launcher's news of exits come over a way of their own, which has no faults: they may come before
the last results of the process, or after. A worker that dialled in has a supervisor, which is never
stopped, but whose connection may be partitioned like any other; it sends heartbeats as long as its
process is alive and not stopped, and starts the next incarnation when it has ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipedist.protocol.messages import Goodbye, Heartbeat, Message, Refuse
from pipedist.testing.books import Violation
from pipedist.testing.network import Connection
from pipedist.testing.simulated_process import SimulatedProcess

if TYPE_CHECKING:
    from pipedist.testing.simulation import Simulation

STARTUP_S = 0.05
"""How long a process takes to come up at most."""

NEWS_S = 0.02
"""How long the news of an exit take at most."""

STOPPED_S_MAX = 3.0
"""How long a worker of the launcher may be stopped before it is killed."""

Running = tuple[int, int] | None


class SimulatedFleet:
    """All processes, alive and gone.

    Args:
        world: that they live in.
    """

    def __init__(self, world: Simulation) -> None:
        self._world = world
        self._all: list[SimulatedProcess] = []
        self.alive: dict[str, SimulatedProcess] = {}
        """The process that lives under each name."""
        self._started: dict[str, int] = {}
        """The latest incarnation of each worker that was to be started."""
        self._due: dict[str, int] = {}
        """Incarnations to start when the process before has ended."""
        self._supervisors: dict[str, _Supervisor] = {}

    def let_go(self) -> None:
        """Take every process apart from its connection, and from what it does."""
        for process in self._all:
            process.let_go()

    # -- the launcher's --------------------------------------------------------------------------

    def start(self, worker: str, incarnation: int) -> None:
        """Start a process of the launcher, as soon as the one before has ended.

        Raises:
            Violation: it is no new life.
        """
        if incarnation <= self._started.get(worker, -1):
            raise Violation(f"incarnation {incarnation} of {worker} was started before")
        self._started[worker] = incarnation
        before = self.alive.get(worker)
        if before is not None:
            self._due[worker] = incarnation
            self._soon(NEWS_S, before.kill)
            return
        self._spawn(worker, incarnation, supervised=False)

    def kill(self, process: SimulatedProcess) -> None:
        """Kill a process of the launcher."""
        self._soon(NEWS_S, process.kill)

    def _spawn(self, worker: str, incarnation: int, *, supervised: bool) -> SimulatedProcess:
        process = SimulatedProcess(self._world, worker, incarnation, supervised=supervised)
        self.alive[worker] = process
        self._all.append(process)
        self._soon(STARTUP_S, process.begin)
        return process

    def _soon(self, within_s: float, action: object, *args: object) -> None:
        time, random = self._world.time, self._world.random
        time.at(time.now + within_s * random.random(), action, *args)  # type: ignore[arg-type]

    # -- those that dial in ----------------------------------------------------------------------

    def dial_in(self, worker: str) -> None:
        """Let a worker of another host come up; it dials in."""
        self._supervisors[worker] = supervisor = _Supervisor(self._world, worker)
        supervisor.process = self._spawn(worker, 0, supervised=True)
        supervisor.beat()

    def respawn(self, supervisor: _Supervisor, incarnation: int) -> None:
        """Start the next incarnation of a worker that dialled in."""
        supervisor.process = self._spawn(supervisor.worker, incarnation, supervised=True)

    # -- what happens to processes -----------------------------------------------------------------

    def exited(self, process: SimulatedProcess, text: str, running: Running) -> None:
        """A process is gone: somebody tells the hub, in time."""
        if self.alive.get(process.worker) is process:
            del self.alive[process.worker]
        self._world.note(process, text)
        if process.supervised:
            self._supervisors[process.worker].ended(process, text)
        else:
            self._soon(NEWS_S, self._tell_exit, process, text, running)

    def _tell_exit(self, process: SimulatedProcess, text: str, running: Running) -> None:
        due = self._due.pop(process.worker, None)
        self._world.hub.lost(process, text, running=running)
        if due is not None and process.worker not in self.alive:
            self._spawn(process.worker, due, supervised=False)

    def stopped(self, process: SimulatedProcess, for_s: float) -> None:
        """A process is stopped: the launcher kills its own if that lasts too long."""
        if not process.supervised and for_s > STOPPED_S_MAX:
            time = self._world.time
            time.at(time.now + STOPPED_S_MAX, self._kill_stopped, process)

    def _kill_stopped(self, process: SimulatedProcess) -> None:
        if process.alive and process.asleep:
            process.kill()


class _Supervisor:
    """Heartbeats for one worker that dialled in, and starts it again."""

    def __init__(self, world: Simulation, worker: str) -> None:
        self._world = world
        self.worker = worker
        self.process: SimulatedProcess | None = None
        self._connection = self._connect()

    def _connect(self) -> Connection:
        return self._world.network.connect(
            up=lambda message: self._world.hub.heard(self, message),
            down=self._receive,
            on_cut=self._reconnect,
        )

    def _reconnect(self) -> None:
        self._connection = self._connect()

    def beat(self) -> None:
        process, world = self.process, self._world
        if process is not None and process.alive and not process.asleep:
            self._connection.send_up(Heartbeat(self.worker, process.incarnation))
        world.time.at(world.time.now + world.limits.heartbeat_timeout_s / 3, self.beat)

    def refuse(self, before: int) -> None:
        """Say, from the hub, that its processes before this incarnation were put out."""
        self._connection.send_down(Refuse("this incarnation is not a member", before))

    def _receive(self, message: Message) -> None:
        if (
            self.process is not None
            and isinstance(message, Refuse)
            and not 0 < message.before <= self.process.incarnation
        ):
            self.process.kill()

    def ended(self, process: SimulatedProcess, text: str) -> None:
        self._connection.send_up(Goodbye(self.worker, process.incarnation, text, crashed=True))
        time = self._world.time
        time.at(time.now + 0.5, self._world.fleet.respawn, self, process.incarnation + 1)
