"""Execution of gang leases: all replicas of a lease at once, reported when all of them are over.

The replicas run in threads, the first one in the main thread, and one at a time: they take turns whenever one waits
in a collective, or for the outside world of its event loop, so user code need not be thread-safe
(`pipedist.collectives.gang`). An async function runs on an event loop of its replica; its collectives wait in a
thread of their own, so the replica's other tasks continue.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from pipedist.collectives.channel import Channel, GangAborted
from pipedist.collectives.gang import LocalGang, OnStalled
from pipedist.collectives.options import CommunicationOptions, Implementation
from pipedist.collectives.requests import CollectiveRequest, UnawaitedCollectives
from pipedist.collectives.segment import GangSegments
from pipedist.collectives.thread_pool import ReplicaThreadPool
from pipedist.core.types import Tree
from pipedist.errors import RemoteProtocolError, UsageError
from pipedist.protocol.messages import AssignGang, spans
from pipedist.protocol.program import Shards
from pipedist.worker import process_setup
from pipedist.worker.context import Collectives
from pipedist.worker.devices import Devices
from pipedist.worker.execution import PassExecutor
from pipedist.worker.failures import CallFailure
from pipedist.worker.inputs import LeaseShards
from pipedist.worker.lease_run import ExitRequested, FinishedCalls, PersistentLoop, await_result
from pipedist.worker.outcomes import Outcome, Result
from pipedist.worker.relay_channel import RelayBuffer, RelayChannel, RelayClient
from pipedist.worker.stages import Call, GangCallContext

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

    from pipedist.collectives.shared import SharedChannel
    from pipedist.worker.variables.replica import BoundVariables


class GangRunFactory:
    """Makes the runs of gang leases; owns the threads, event loops and memory that they share."""

    def __init__(self, client: RelayClient, loop: PersistentLoop) -> None:
        self._client = client
        self.loops = [loop]  # the main thread's, then those of other replicas; extended as needed
        self._threads = ReplicaThreadPool()
        self._segments = GangSegments()
        self.shared: SharedChannel | None = None
        """The channel of the latest gang that shared memory; the segments of others may be unmapped."""
        self._shared_by: tuple[str, int, int] | None = None  # its segment's name, member and members
        self._devices = Devices()

    def new_run(
        self,
        assigned: AssignGang,
        executor: PassExecutor,
        shards: Shards,
        buffer: RelayBuffer,
        *,
        bound: BoundVariables | None,
        begin: Callable[[int], None],
        on_success: Callable[[], None] | None,
        kind: Callable[..., GangRun],
    ) -> GangRun:
        """Return the run of a lease, or raise DevicesUnseen, and PipedistError if it cannot be executed."""
        program, lo, hi = executor.program, assigned.lo, assigned.hi
        replicas, first = program.replicas, lo % program.replicas
        local = local_replicas(first, hi - lo, replicas, assigned.member, assigned.members)
        if program.devices:
            self._devices.show(program.devices[local.start : local.stop])
        channel = self._channel(assigned, replicas, _options(*program.communication).implementation, buffer)
        own = LeaseShards(executor.finder, shards, lo, hi)
        return kind(self, executor, own, lo, hi, assigned, local, channel, bound, begin, on_success)

    def new_gang(
        self, executor: PassExecutor, local: range, channel: Channel | None, lease: int
    ) -> LocalGang:
        program = executor.program
        return LocalGang(
            replicas=program.replicas,
            local=local,
            channel=channel,
            options=_options(*program.communication),
            on_stalled=self.on_stalled(lease),
            threads=self._threads,
        )

    def on_stalled(self, lease: int) -> OnStalled:
        return partial(self._client.report_stalled, lease)

    def device_of(self, executor: PassExecutor, replica: int) -> str:
        """Return this process's name of a replica's device; "": none."""
        devices = executor.program.devices
        return self._devices.name_of(devices[replica]) if devices else ""

    def _channel(
        self, assigned: AssignGang, replicas: int, implementation: Implementation, buffer: RelayBuffer
    ) -> Channel | None:
        if assigned.members == 1:
            return None
        if assigned.segment and implementation is not Implementation.TRANSPORT:
            return self._shared_channel(assigned, replicas)
        if implementation is Implementation.SHARED:
            raise UsageError(NOT_SHARED)
        return RelayChannel(self._client, assigned.lease, buffer, assigned.member, assigned.members)

    def _shared_channel(self, assigned: AssignGang, replicas: int) -> SharedChannel:
        """Return the channel through the gang's segment: that of the gang before, if it had the same members."""
        key = assigned.segment, assigned.member, assigned.members
        if self.shared is not None and self._shared_by == key:
            self.shared.begin(assigned.serial)
            return self.shared
        from pipedist.collectives.shared import SharedChannel  # as large as the rest of the package

        self.shared = SharedChannel(
            self._segments.get(assigned.segment),
            serial=assigned.serial,
            member=assigned.member,
            spans=[range(a, b) for a, b in spans(replicas, assigned.members)],
        )
        self._shared_by = key
        return self.shared

    def close(self) -> None:
        self._threads.close()
        for loop in self.loops[1:]:
            loop.close()
        self._segments.close()


@lru_cache(maxsize=64)
def _options(bytes_per_pack: int, timeout_s: float | None, implementation: str) -> CommunicationOptions:
    return CommunicationOptions(bytes_per_pack, timeout_s, Implementation.of(implementation))


@lru_cache(maxsize=256)
def local_replicas(first: int, count: int, replicas: int, member: int, members: int) -> range:
    """Return the replicas of a member's calls; RemoteProtocolError if they are another member's."""
    local = range(first, first + count)
    if members > replicas or local != range(*spans(replicas, members)[member]):
        raise RemoteProtocolError(
            f"calls of {count} replicas from {first} do not belong to member {member} of {members}, with "
            f"{replicas} replicas"
        )
    return local


NOT_SHARED = (
    "implementation 'shared' needs all workers of the gang on one host, with shared memory, which they do not "
    "have: use 'auto', which shares memory if possible, or 'transport'"
)


@dataclass(eq=False)
class GangRun:
    """The execution of a lease that belongs to a gang; used like a `LeaseRun`."""

    factory: GangRunFactory
    executor: PassExecutor
    shards: LeaseShards
    lo: int
    hi: int
    assigned: AssignGang
    local: range  # its replicas
    channel: Channel | None  # closed when the gang is over; None if there are no other members
    bound: BoundVariables | None
    begin: Callable[[int], None]  # called with the number of a call before it runs
    on_success: Callable[[], None] | None  # called when every call has returned

    def __post_init__(self) -> None:
        self._next = self.lo  # the first call that has neither been taken nor raised
        self._outcomes: list[Outcome] = []  # of calls from `_next` on, up to the first that did not return
        self._over: dict[int, Result | CallFailure] | None = None  # by call, when the gang is over
        self._busy_ns = 0
        self.gang = self.factory.new_gang(self.executor, self.local, self.channel, self.assigned.lease)

    @property
    def is_relayed(self) -> bool:
        """Whether the driver process relays its collectives: its lease must be known before it executes."""
        return isinstance(self.channel, RelayChannel)

    @property
    def outcomes(self) -> Sequence[Outcome]:
        """The outcomes that `take` will return."""
        return self._outcomes

    def advance(self, _slice_s: float, _slice_bytes: int) -> CallFailure | None:
        """Execute all calls at the first time; then go to the next failure, and return it."""
        if self._over is None:
            start = time.perf_counter_ns()
            self._over = self._execute()
            self._busy_ns = time.perf_counter_ns() - start
        outcomes: list[Outcome] = []
        failure: CallFailure | None = None
        for number in range(self._next, self.hi):
            found = self._over.pop(number)
            if isinstance(found, CallFailure):
                failure = found
                break
            outcomes.append(found[0])
        self._outcomes = outcomes
        return failure

    def take(self) -> FinishedCalls:
        """Return the outcomes since the last `take`; none before the gang is over."""
        outcomes, self._outcomes = self._outcomes, []
        lo, self._next = self._next, self._next + len(outcomes)
        busy_ns, self._busy_ns = self._busy_ns, 0
        return FinishedCalls(lo, outcomes, busy_ns)

    def skip(self) -> None:
        self._next += 1

    def abandon(self) -> None:
        """End the replicas that wait for others; `advance` returns when all have ended."""
        if self._over is None:
            self.gang.abort("the scheduler has cancelled the step")

    def _execute(self) -> dict[int, Result | CallFailure]:
        numbers, loops = range(self._next, self.hi), self.factory.loops
        while len(loops) < len(numbers):
            loops.append(PersistentLoop())
        calls: list[Call] = []
        bodies: list[Callable[[], Result]] = []
        executor, assigned, bound = self.executor, self.assigned, self.bound
        for number, loop in zip(numbers, loops, strict=False):
            replica = number % executor.program.replicas
            collectives = ReplicaCollectives(self, replica, number, loop)
            variables = None if bound is None else bound.of(replica)
            device = self.factory.device_of(executor, replica) if executor.program.devices else ""
            call = executor.call(number, GangCallContext(collectives.of, device, variables))
            if assigned.step >= 0:  # else the functions see the step as its number in the pass
                call.step = assigned.step
            calls.append(call)
            bodies.append(partial(self._run, call, collectives))
        found: list[Result | BaseException]
        try:
            found = self.gang.run(bodies)
        finally:
            if self.channel is not None:
                self.channel.close()
        over: dict[int, Result | CallFailure] = {}
        has_failed = False
        for call, each in zip(calls, found, strict=True):
            if isinstance(each, BaseException):
                has_failed = True
                over[call.number] = self._failure(call, each)
            else:
                over[call.number] = each
        if self.on_success is not None and not has_failed:
            self.on_success()
        return over

    def conclude(self, call: Call, found: Result | BaseException) -> None:
        """Set the outcome of the only replica, which was executed elsewhere."""
        self.gang.end_alone(failed=isinstance(found, BaseException))
        self._over = {call.number: self._failure(call, found) if isinstance(found, BaseException) else found}

    def _run(self, call: Call, collectives: ReplicaCollectives) -> Result:
        self.begin(call.number)
        try:
            return self.executor.run(call, self.shards, collectives.wait)
        finally:
            collectives.close()

    def _failure(self, call: Call, error: BaseException) -> CallFailure:
        if isinstance(error, ExitRequested):
            error = error.cause
        return self.executor.failure(call, error, aborted=_was_aborted(error))


class ReplicaCollectives:
    """The collectives of one replica, for plain and for async functions.

    The turn belongs to a replica, not to a thread. While a collective of an async function is under way, the
    turn belongs to the thread of that collective, and the event loop continues without it.
    """

    is_async = False  # it executes those of a plain function itself; `of` returns what serves an async one

    def __init__(self, run: GangRun, replica: int, number: int, loop: PersistentLoop) -> None:
        self._run = run
        self._replica = replica
        self._loop = loop
        self._number = number  # of its call
        self._thread: ThreadPoolExecutor | None = None
        self._under_way = 0  # collectives of async functions that are not over
        self._lock = threading.Lock()  # guards `_under_way`
        self.unawaited: UnawaitedCollectives | None = None  # requested by an async function, but not awaited

    def of(self, is_async: bool) -> Collectives:
        if not is_async:
            return self
        self.unawaited = UnawaitedCollectives()
        return _AsyncCalls(self, self.unawaited)

    def wait(self, awaitable: Awaitable[Any]) -> Any:
        """Wait for what an async function returned, and return its result."""
        result = self._loop.run(await_result(awaitable), self.outside)
        if self.unawaited is not None:
            self.unawaited.check()
        return result

    def call(self, request: CollectiveRequest) -> Tree:
        options = request.options
        if options is not None and self._run.is_relayed and options.implementation is Implementation.SHARED:
            raise ValueError(NOT_SHARED)
        clock = self._run.executor.clock  # pauses while the replica waits for others
        clock.pause(self._number)
        try:
            return self._run.gang.call(self._replica, request)
        finally:
            clock.resume(self._number)

    async def later(self, request: CollectiveRequest) -> Tree:
        """Execute a collective, while the loop's other tasks continue.

        One thread executes them, one after the other, in the order in which they were first awaited.
        """
        import asyncio  # only async functions need it
        from concurrent.futures import ThreadPoolExecutor

        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, f"pipedist-replica-{self._replica}")
        context = contextvars.copy_context()
        with self._lock:
            self._under_way += 1
        collective = self._thread.submit(context.run, self._for_loop, request)
        collective.add_done_callback(self._on_end)  # not after the await below, which may be cancelled
        return await asyncio.wrap_future(collective)

    def _for_loop(self, request: CollectiveRequest) -> Tree:
        """Execute a collective for a future, which cannot hold a StopIteration."""
        try:
            return self.call(request)
        except StopIteration as error:
            raise RuntimeError(f"{request.label or request.kind} raised StopIteration") from error

    def _on_end(self, _collective: Future[Tree]) -> None:
        with self._lock:
            self._under_way -= 1

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Let other replicas run while the loop has nothing to do."""
        if process_setup.is_copy:  # a copy has no other replicas, so the turn would never come back
            yield
            return
        with self._lock:
            has_turn = self._under_way == 0
        if not has_turn:
            yield
            return
        with self._run.gang.outside(self._replica):
            yield

    def close(self) -> None:
        """Wait for a collective whose await was cancelled: others take part in it."""
        if self.unawaited is not None:
            self.unawaited.drop()
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)


@dataclass(slots=True, eq=False)
class _AsyncCalls:
    _collectives: ReplicaCollectives
    _unawaited: UnawaitedCollectives

    is_async = True

    def call(self, request: CollectiveRequest) -> Awaitable[Tree]:
        return self._unawaited.add(request, self._collectives.later(request))


def _was_aborted(error: BaseException) -> bool:
    """Return whether a call failed only because its gang had ended."""
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        if isinstance(each, GangAborted):
            return True
        seen.add(id(each))
        each = each.__cause__ or each.__context__
    return False
