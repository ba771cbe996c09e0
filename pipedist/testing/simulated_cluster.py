"""A cluster in virtual time: the real coordinator, with simulated network, processes and clock.

`SimulatedRouter` and `SimulatedLauncher` replace `pipedist.transport.router.Router` and
`pipedist.cluster.launchers.local.LocalLauncher`. Real are the coordinator, the scheduler and its
checks, the workers' drivers and machines, codec and wire format, and the user's functions. Not simulated are
sockets and their keys, shared memory (gangs exchange through the driver), process isolation (all
workers share this process's modules), and the devices of a process.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from random import Random
from typing import Any, Final, Self, cast

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from pipedist.cluster.base import Cluster
from pipedist.coordinator.coordinator import Coordinator
from pipedist.coordinator.launcher import WorkerExit
from pipedist.coordinator.pass_handle import PassHandle
from pipedist.coordinator.results import Chunk
from pipedist.core.gpus import Supply
from pipedist.core.types import FunctionRef
from pipedist.errors import UsageError
from pipedist.protocol import messages as msg
from pipedist.protocol.codec import Frame, decode, encode
from pipedist.protocol.program import Program
from pipedist.protocol.wire import pack, unpack
from pipedist.scheduler import PassSettings, SchedulerLimits
from pipedist.scheduler import events as ev
from pipedist.testing.faults import Faults
from pipedist.testing.simulated_process import Received, SimulatedHost, SimulatedProcess, frozen
from pipedist.testing.virtual_clock import VirtualLoop
from pipedist.worker.process_setup import boot_id
from pipedist.worker.progress import Running

STARTUP_S_MAX = 0.05
EXIT_REPORT_S_MAX = 0.02

POISON: Final = "POISON: the result of a superseded attempt, which must not count"


def fake_result(value: object, ctx: Any) -> NDArray[np.int64]:
    """Replace a replica function that is not executed: return an int64[1] that identifies the call."""
    call = f"{ctx.stage}/{ctx.step}/{ctx.replica_id_in_sync_group}"
    digest = hashlib.blake2b(call.encode(), digest_size=4).digest()
    return np.array([int.from_bytes(digest, "big")])


def with_fake_results(program: Program, costs: Mapping[str, float]) -> tuple[Program, float | None]:
    """Replace the functions of the stages with declared costs (seconds of a call) by `fake_result`.

    Returns the program, and the seconds of a call; None if no stage of it has a declared cost. UsageError if another
    stage reads the value of one that has.
    """
    declared = [stage.name for stage in program.stages if stage.name in costs]
    if not declared:
        return program, None
    stages = []
    for stage in program.stages:
        if stage.name in costs:
            reference = FunctionRef("fake result", "pipedist.testing.simulated_cluster:fake_result", b"")
            stages.append(replace(stage, function=reference, kwargs={}, form="shard", collectives=False))
            continue
        if stage.of >= 0 and program.stages[stage.of].name in costs:
            raise UsageError(
                f"costs: stage {stage.name} reads the value of {program.stages[stage.of].name}, which has a "
                f"declared cost and is not executed. Declare a cost for {stage.name} too"
            )
        stages.append(stage)
    return replace(program, stages=tuple(stages), jax=None), sum(costs[name] for name in declared)


class SimulatedRouter:
    """Replaces the coordinator's socket.

    Results of superseded attempts are replaced by POISON before they arrive; if they count, the results of
    the run differ.
    """

    endpoint = "simulated"

    def __init__(
        self,
        host: SimulatedHost,
        on_message: Callable[[bytes, msg.Message, list[memoryview]], None],
        on_reject: Callable[[str], None],
        on_lost: Callable[[bytes, str], None],
    ) -> None:
        self._host = host
        self._on_message = on_message
        self._on_reject = on_reject
        self._on_lost = on_lost
        self._peers: dict[bytes, SimulatedProcess] = {}
        self._dropped: set[bytes] = set()
        self._superseded: set[bytes] = set()  # identities whose results must not count
        self._leases: dict[tuple[bytes, int], int] = {}  # the pass of each valid lease, by identity and lease

    async def __aenter__(self) -> Self:
        self._host.on_arrival = self._arrived
        self._host.on_exit_reported = lambda process: self._superseded.add(process.identity)
        return self

    async def __aexit__(self, *raised: object) -> None:
        self._host.on_arrival = self._host.on_exit_reported = None

    def send(self, identity: bytes, message: msg.Message, payload: Sequence[Frame] = ()) -> bool:
        """Send to a worker; return whether it is reachable."""
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

    def send_all(self, messages: Sequence[tuple[bytes, msg.Message, Sequence[Frame]]]) -> list[bool]:
        """Send messages to workers; return which of them are reachable."""
        return [self.send(*each) for each in messages]

    def keep(self, identity: bytes) -> None:
        return

    def release(self, identity: bytes) -> None:
        return

    def drop(self, identity: bytes, reason: str = "") -> None:
        peer = self._peers.get(identity)
        if peer is None or identity in self._dropped:
            return
        if reason:
            self._on_reject(reason)
        self._dropped.add(identity)
        self._superseded.add(identity)

    def _arrived(self, process: SimulatedProcess, item: Received) -> None:
        identity = process.identity
        self._peers[identity] = process
        message, frames = item
        if identity in self._dropped:
            # The real router drops the message. Here it is passed on, to test the coordinator's own checks.
            process.connection.cut()
        if isinstance(message, msg.Results):
            valid = (identity, message.lease) in self._leases and identity not in self._superseded
            if not valid:
                self._host.poisoned += 1
                frames = frozen(encode([dict.fromkeys(call, POISON) for call in decode(frames)]))
        self._on_message(identity, message, frames)


class SimulatedLauncher:
    """Replaces the local launcher."""

    def __init__(self, host: SimulatedHost) -> None:
        self.on_exit: Callable[[WorkerExit], None] = lambda _exit: None
        self._host = host
        self._alive: dict[str, SimulatedProcess] = {}
        self._emptied = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._host.on_exit = self._exited
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.close(1.0)

    @property
    def pids(self) -> Mapping[str, int]:
        """Fake process ids, by name."""
        return {name: place for place, name in enumerate(self._alive, 1)}

    def running(self, _worker: str) -> Running | None:
        """Return None: calls are not watched in virtual time."""
        return None

    def start(self, worker: str, incarnation: int) -> None:
        before = self._alive.get(worker)
        if before is not None:
            before.kill()
        process = self._alive[worker] = SimulatedProcess(self._host, worker, incarnation)
        self._host.soon(STARTUP_S_MAX, process.begin)

    def kill(self, worker: str, incarnation: int | None = None) -> None:
        process = self._alive.get(worker)
        if process is not None and incarnation in (None, process.incarnation):
            self._host.soon(EXIT_REPORT_S_MAX, process.kill)

    def watch(self, _every_s: float) -> None:
        """Do nothing: in virtual time no call exceeds its timeout."""

    def _exited(
        self,
        process: SimulatedProcess,
        code: int | None,
        signal: int | None,
        text: str,
        running: Running | None,
    ) -> None:
        if self._alive.get(process.worker) is process:
            del self._alive[process.worker]
            if not self._alive:
                self._emptied.set()
        exit_ = WorkerExit(process.worker, process.incarnation, 0, code, signal, text, running)
        self._host.soon(EXIT_REPORT_S_MAX, self._report_exit, process, exit_)

    def _report_exit(self, process: SimulatedProcess, exit_: WorkerExit) -> None:
        if self._host.on_exit_reported is not None:
            self._host.on_exit_reported(process)
        self.on_exit(exit_)

    async def close(self, grace_s: float) -> None:
        """Wait up to `grace_s` until all workers have ended, then kill the others."""
        if self._alive:
            self._emptied.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self._emptied.wait()
        for process in list(self._alive.values()):
            process.kill()
        self._host.on_exit = None


class CheckedCoordinator(Coordinator):
    """The real coordinator, which checks the scheduler's invariants after each event."""

    simulated: SimulatedHost
    declared: Mapping[str, float]

    def post(self, event: ev.Event, chunk: Chunk | None = None) -> None:
        super().post(event, chunk)
        if not self._pumping:
            self._scheduler.validate()

    def open_pass(self, program: Program, *, settings: PassSettings, **how: Any) -> PassHandle:
        """Open a pass; functions with declared costs are not executed."""
        program, cost = with_fake_results(program, self.declared)
        handle = super().open_pass(program, settings=settings, **how)
        if cost is not None:
            self.simulated.costs[handle.id] = cost
        return handle

    def left_open(self) -> str:
        """Describe the remains of passes that have ended, or return ""."""
        passes, leases = self._scheduler._passes, self._scheduler._members.leases
        handles = self._passes.handles
        if handles or passes or leases:
            return f"{len(handles)} handles, {len(passes)} passes, {len(leases)} leases"
        return ""


class SimulatedCluster(Cluster):
    """A cluster of workers in virtual time, for one run, inside a `VirtualLoop`.

    Args:
        workers: number of workers.
        seed: determines all random decisions.
        faults: the rates of the faults; None: no faults.
        costs: seconds of virtual time of a call, by stage. The function of such a stage is not executed;
            its value is an int64[1] made of (stage, step, replica).
        threads_per_replica: number of threads that workers report.

    Raises:
        UsageError: `faults` contains `error`: the functions of a spec decide when they raise.

    Example:
        >>> simulate("spec.yaml", seeds=range(20), faults=Faults(crash=0.05))  # uses a SimulatedCluster
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
                "faults: `error` is not available for a spec, because its own functions decide when they raise"
            )
        self._costs = dict(costs or {})
        self._threads = threads_per_replica
        self.simulated: SimulatedHost | None = None

    def _make(self, stack: AsyncExitStack) -> Coordinator:
        loop = asyncio.get_running_loop()
        if not isinstance(loop, VirtualLoop):
            raise UsageError("SimulatedCluster needs a VirtualLoop. Use pipedist.testing.simulate")
        self.simulated = simulated = SimulatedHost(loop, Random(self._seed), self._faults, self._threads)
        coordinator = CheckedCoordinator(
            router_factory=cast(Any, partial(SimulatedRouter, simulated)),
            launcher_factory=lambda _endpoint: cast(Any, SimulatedLauncher(simulated)),
            workers=[f"w{i}" for i in range(self._workers)],
            limits=SchedulerLimits(deaths_max=1_000_000, failed_starts_max=1_000_000),
            boot=boot_id(),
        )
        coordinator.simulated, coordinator.declared = simulated, self._costs
        return coordinator
