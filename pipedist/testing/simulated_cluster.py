"""A cluster in virtual time: the real coordinator; simulated network, processes and clock.

`SimulatedRouter` and `SimulatedLauncher` stand where `pipedist.transport.router.Router` and
`pipedist.cluster.launchers.local.LocalLauncher` do. What is real: the coordinator, the scheduler and its
checks, the workers' drivers and machines, codec and wire format, and the user's functions. What is not:
sockets and their keys, shared memory (gangs exchange through the scheduler's process), process
isolation (all workers share this process's modules), and what a process says about its devices.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from random import Random
from types import TracebackType
from typing import Any, Self, cast

from pipedist.cluster.base import Cluster
from pipedist.coordinator.coordinator import Coordinator
from pipedist.coordinator.launcher import WorkerExit
from pipedist.coordinator.pass_handle import PassHandle
from pipedist.coordinator.results import Chunk
from pipedist.core.gpus import Supply
from pipedist.errors import UsageError
from pipedist.protocol import messages as msg
from pipedist.protocol.codec import Frame, decode, encode
from pipedist.protocol.program import Program
from pipedist.protocol.wire import pack, unpack
from pipedist.scheduler import PassSettings, SchedulerLimits
from pipedist.scheduler import events as ev
from pipedist.testing.fakes import POISON, with_stand_ins
from pipedist.testing.faults import Faults
from pipedist.testing.network import FaultyNetwork
from pipedist.testing.simulated_process import SLOW_TIMES
from pipedist.testing.simulated_worker import Received, SimulatedWorker, frozen
from pipedist.testing.virtual_loop import VirtualLoop
from pipedist.worker.process_setup import boot_id
from pipedist.worker.progress import Running

STARTUP_S = 0.05
NEWS_S = 0.02
CALL_S_MAX = 0.02
"""How long a call takes at most, where nothing was declared: short and long ones are mixed."""


class SimulatedWorkers:
    """The processes of a simulated cluster, and the network between them and the coordinator.

    Args:
        loop: whose time it lives in.
        random: decides everything.
        faults: how often each kind happens.
        threads: BLAS and OpenMP threads that workers are taken to have.
    """

    stopped_s_max = 3.0

    def __init__(self, loop: VirtualLoop, random: Random, faults: Faults, threads: int) -> None:
        self.loop = loop
        self.random = random
        self.threads = threads
        self.network = FaultyNetwork(loop, random, faults, faithful=True)
        self.costs: dict[int, float] = {}
        """Seconds that a call of a pass takes, where that was declared."""
        self.router: SimulatedRouter | None = None
        self.launcher: SimulatedLauncher | None = None
        self.poisoned = 0
        """Messages of superseded attempts, whose results were replaced."""
        self.defects: list[BaseException] = []
        """What ended workers that nobody killed, and is no message's fault."""
        self.on_defect: Callable[[], object] = lambda: None
        self.left_at = ""
        """Where a function blocked when the simulation was interrupted, as in a traceback; "" if none did."""
        self._faults = faults
        self._turn_rate = faults.crash + faults.pause
        self._slow_rate = faults.slow

    def calm(self) -> None:
        """Let no new fault happen from now on."""
        self.network.calm()
        self._turn_rate = self._slow_rate = 0.0

    def soon(self, within_s: float, action: Callable[..., object], *args: object) -> None:
        """Let something happen within a time."""
        self.loop.at(self.loop.now + within_s * self.random.random(), action, *args)

    def disturbs(self) -> bool:
        """Return whether a fault strikes a worker in its turn."""
        return self._turn_rate > 0 and self.random.random() < self._turn_rate

    def draws_crash(self) -> bool:
        """Return whether that fault is a crash, and count it; else it is a pause."""
        crash = self.random.random() * (self._faults.crash + self._faults.pause) < self._faults.crash
        self.network.counts["crash" if crash else "pause"] += 1
        return crash

    def cost_s(self, pass_id: int) -> float:
        """Return how long a call of a pass takes."""
        cost = self.costs.get(pass_id)
        if cost is None:
            cost = CALL_S_MAX * self.random.random() ** 3
        if self._slow_rate and self.random.random() < self._slow_rate:
            self.network.counts["slow"] += 1
            cost *= SLOW_TIMES
        return cost

    def arrived(self, worker: SimulatedWorker, item: Received) -> None:
        """Something a worker sent has arrived at the coordinator."""
        if self.router is not None:
            self.router.arrived(worker, item)

    def exited(
        self,
        worker: SimulatedWorker,
        code: int | None,
        signal: int | None,
        text: str,
        running: Running | None,
    ) -> None:
        """A worker's process is gone."""
        if self.launcher is not None:
            self.launcher.exited(worker, code, signal, text, running)

    def note_error(self, worker: SimulatedWorker, error: BaseException) -> None:
        """Keep what ended a worker's driver."""
        from pipedist.errors import RemoteProtocolError

        if not isinstance(error, RemoteProtocolError):  # that is what spoiled messages lead to
            self.defects.append(error)
            self.on_defect()


class SimulatedRouter:
    """Stands for the coordinator's socket.

    Results of attempts that were superseded are replaced by POISON before they arrive: if they
    count all the same, that is seen.

    Args:
        workers: whom it speaks with.
        on_message, on_reject, on_lost: as of the real one.
    """

    endpoint = "simulated"

    def __init__(
        self,
        workers: SimulatedWorkers,
        on_message: Callable[[bytes, msg.Message, list[memoryview]], None],
        on_reject: Callable[[str], None],
        on_lost: Callable[[bytes, str], None],
    ) -> None:
        self._workers = workers
        self._on_message = on_message
        self._on_reject = on_reject
        self._on_lost = on_lost
        self._peers: dict[bytes, SimulatedWorker] = {}
        self._dropped: set[bytes] = set()
        self._superseded: set[bytes] = set()
        """Identities of which nothing counts any more."""
        self._leases: dict[tuple[bytes, int], int] = {}
        """Pass of each lease that stands, by identity and lease."""

    async def __aenter__(self) -> Self:
        self._workers.router = self
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._workers.router = None

    def send(self, identity: bytes, message: msg.Message, payload: Sequence[Frame] = ()) -> bool:
        """Send to a worker; return whether it can be reached."""
        peer = self._peers.get(identity)
        if peer is None or identity in self._dropped or not peer.connection.is_open:
            return False
        match message:
            case msg.Assign(lease=lease, pass_id=pass_id) | msg.AssignGang(lease=lease, pass_id=pass_id):
                self._leases[identity, lease] = pass_id
            case msg.Cancel(lease):
                self._leases.pop((identity, lease), None)
            case msg.Unbind(pass_id):
                for key in [k for k, p in self._leases.items() if p == pass_id and k[0] == identity]:
                    del self._leases[key]
            case msg.Refuse():
                self._superseded.add(identity)
        peer.connection.send_down((unpack(pack(message)), frozen(payload)))
        return True

    def drop(self, identity: bytes, reason: str = "") -> None:
        """Never again hear or speak to a worker."""
        peer = self._peers.get(identity)
        if peer is None or identity in self._dropped:
            return
        if reason:
            self._on_reject(reason)
        self._dropped.add(identity)
        self._superseded.add(identity)

    def supersede(self, worker: SimulatedWorker) -> None:
        """Take note that the coordinator was told of a worker's end."""
        self._superseded.add(worker.identity)

    def arrived(self, worker: SimulatedWorker, item: Received) -> None:
        """Hand over what a worker sent."""
        identity = worker.identity
        self._peers[identity] = worker
        message, frames = item
        if identity in self._dropped:
            # The real one keeps it to itself. The coordinator has fences of its own: so it is told.
            worker.connection.cut()
        if isinstance(message, msg.Results):
            stands = (identity, message.lease) in self._leases and identity not in self._superseded
            if not stands:
                self._workers.poisoned += 1
                frames = frozen(encode([dict.fromkeys(call, POISON) for call in decode(frames)]))
        self._on_message(identity, message, frames)


class SimulatedLauncher:
    """Stands for the local launcher.

    Args:
        workers: that it starts and ends.
    """

    def __init__(self, workers: SimulatedWorkers) -> None:
        self.on_exit: Callable[[WorkerExit], None] = lambda _exit: None
        self._workers = workers
        self._alive: dict[str, SimulatedWorker] = {}
        self._emptied = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._workers.launcher = self
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close(1.0)

    @property
    def pids(self) -> Mapping[str, int]:
        """Numbers that stand for process ids, by name."""
        return {name: place for place, name in enumerate(self._alive, 1)}

    def running(self, _worker: str) -> Running | None:
        """Nobody looks."""
        return None

    @property
    def alive(self) -> Sequence[SimulatedWorker]:
        """The processes that are alive."""
        return list(self._alive.values())

    def start(self, worker: str, incarnation: int) -> None:
        """Start a worker's process."""
        before = self._alive.get(worker)
        if before is not None:
            before.kill()
        process = self._alive[worker] = SimulatedWorker(self._workers, worker, incarnation)
        self._workers.soon(STARTUP_S, process.begin)

    def kill(self, worker: str, incarnation: int | None = None) -> None:
        """Kill a worker's process."""
        process = self._alive.get(worker)
        if process is not None and incarnation in (None, process.incarnation):
            self._workers.soon(NEWS_S, process.kill)

    def watch(self, _every_s: float | None) -> None:
        """Nobody looks: in virtual time a call takes as long as it may."""

    def exited(
        self,
        process: SimulatedWorker,
        code: int | None,
        signal: int | None,
        text: str,
        running: Running | None,
    ) -> None:
        """A process is gone: the coordinator is told, in time."""
        if self._alive.get(process.worker) is process:
            del self._alive[process.worker]
            if not self._alive:
                self._emptied.set()
        exit_ = WorkerExit(process.worker, process.incarnation, 0, code, signal, text, running)
        self._workers.soon(NEWS_S, self._tell, process, exit_)

    def _tell(self, process: SimulatedWorker, exit_: WorkerExit) -> None:
        if self._workers.router is not None:
            self._workers.router.supersede(process)
        self.on_exit(exit_)

    async def close(self, grace_s: float) -> None:
        """Wait until all workers are gone, and kill those that are not after `grace_s`."""
        if self._alive:
            self._emptied.clear()
            try:
                async with asyncio.timeout(grace_s):
                    await self._emptied.wait()
            except TimeoutError:
                pass
        for process in self.alive:
            process.kill()
        self._workers.launcher = None


class CheckedCoordinator(Coordinator):
    """The real coordinator; after each event the scheduler's invariants are checked."""

    simulated: SimulatedWorkers
    declared: Mapping[str, float]

    def post(self, event: ev.Event, chunk: Chunk | None = None) -> None:
        """Let the scheduler handle an event, and check its invariants."""
        super().post(event, chunk)
        if not self._pumping:
            self._scheduler.validate()

    def open_pass(self, program: Program, *, settings: PassSettings, **how: Any) -> PassHandle:
        """Begin a pass; functions of declared costs are not executed."""
        program, cost = with_stand_ins(program, self.declared)
        handle = super().open_pass(program, settings=settings, **how)
        if cost is not None:
            self.simulated.costs[handle.id] = cost
        return handle

    def left_open(self) -> str:
        """Return what is left of passes that are over, "" if nothing is."""
        passes, leases = self._scheduler._passes, self._scheduler._members.leases
        handles = self._passes.handles
        if handles or passes or leases:
            return f"{len(handles)} handles, {len(passes)} passes, {len(leases)} leases"
        return ""


class SimulatedCluster(Cluster):
    """Workers in virtual time; for one run, inside a `VirtualLoop`.

    Args:
        workers: how many.
        seed: decides everything.
        faults: how often each kind happens.
        costs: seconds of virtual time that a call takes, by stage; such a stage's function is not
            executed, and a stand-in made of (stage, step, replica) is its value.
        threads_per_replica: what workers are taken to have.

    Raises:
        UsageError: `error` is among the faults: how often a call may raise is the spec's own matter.
    """

    def __init__(
        self,
        workers: int,
        *,
        seed: int = 0,
        faults: Faults | None = None,
        costs: Mapping[str, float] | None = None,
        threads_per_replica: int = 1,
    ) -> None:
        super().__init__(workers, Supply((math.inf,) * workers, (), "devices are not simulated"))
        self._seed = seed
        self._faults = faults or Faults()
        if self._faults.error:
            raise UsageError(
                "faults: error is not simulated for a spec, whose own functions decide when they raise"
            )
        self._costs = dict(costs or {})
        self._threads = threads_per_replica
        self.simulated: SimulatedWorkers | None = None

    def _make(self, stack: AsyncExitStack) -> Coordinator:
        loop = asyncio.get_running_loop()
        if not isinstance(loop, VirtualLoop):
            raise UsageError("a simulated cluster lives in a VirtualLoop: use pipedist.testing.simulate")
        simulated = SimulatedWorkers(loop, Random(self._seed), self._faults, self._threads)
        self.simulated = simulated
        router_factory: Any = lambda *callbacks: SimulatedRouter(simulated, *callbacks)  # noqa: E731
        coordinator = CheckedCoordinator(
            router_factory=router_factory,
            launcher_factory=lambda _endpoint: cast(Any, SimulatedLauncher(simulated)),
            workers=[f"w{i}" for i in range(self._workers)],
            limits=SchedulerLimits(deaths_max=1_000_000, failed_starts_max=1_000_000),
            boot=boot_id(),
        )
        coordinator.simulated, coordinator.declared = simulated, self._costs
        return coordinator
