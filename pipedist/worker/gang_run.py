"""One member's part of a gang: all replicas of a lease at once, reported when all of them are over.

The replicas run in threads, the first one in the driver's (the process's main thread), one at a time:
they take turns where one waits in a collective, or for its event loop's outside world, so that user
code need not be thread-safe (`pipedist.collectives.gang`). An async function runs on a loop of its
replica's; its collectives wait in a thread beside it, so that the replica's other tasks go on.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from pipedist.collectives.channel import Channel, GangAborted
from pipedist.collectives.gang import LocalGang
from pipedist.collectives.options import Implementation
from pipedist.collectives.requests import CollectiveRequest
from pipedist.core.types import Tree
from pipedist.worker import forks
from pipedist.worker.context import Collectives
from pipedist.worker.execution import Call, Outcome, PassExecutor, Result, Seat
from pipedist.worker.failures import CallFailure
from pipedist.worker.loops import PersistentLoop
from pipedist.worker.progress import StageClock
from pipedist.worker.ranges import Ended, Taken, awaited
from pipedist.worker.shards import LeaseShards
from pipedist.worker.unawaited import Owed

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

    from pipedist.worker.variables import BoundVariables


NOT_SHARED = (
    "implementation 'shared' needs the gang's workers on one host, sharing memory, and these don't: use "
    "'auto', which shares memory where it can, or 'transport'"
)


class GangRun:
    """The execution of a lease that belongs to a gang; used like a `RangeRun`.

    Args:
        executor: of the lease's pass.
        loops: where async functions run: the main thread's, then those of other replicas; made longer.
        shards: of calls [lo, hi).
        lo, hi: the calls, all of one step.
        gang: of these replicas; run once.
        channel: closed when the gang is over; None where there are no other members.
        can_share: its members share memory.
        device_of: the name, in this process, of the device that a replica was assigned; "" for none.
        bound: the variables of the step; None where it has none.
        begin: told the number of a call before it runs.
        on_success: told when every call has returned.
    """

    def __init__(
        self,
        executor: PassExecutor,
        loops: list[PersistentLoop],
        shards: LeaseShards,
        lo: int,
        hi: int,
        *,
        gang: LocalGang,
        channel: Channel | None,
        can_share: bool,
        device_of: Callable[[int], str],
        bound: BoundVariables | None,
        begin: Callable[[int], None],
        on_success: Callable[[], None],
    ) -> None:
        self.executor = executor
        self._loops = loops
        self._shards = shards
        self._gang = gang
        self._channel = channel
        self._can_share = can_share
        self._device_of = device_of
        self._bound = bound
        self._begin = begin
        self._on_success = on_success
        self._next = lo
        """The first call that has been neither taken nor has raised."""
        self._hi = hi
        self._outcomes: list[Outcome] = []
        """Of calls from `_next` on, up to the first that did not return."""
        self._over: dict[int, Result | CallFailure] | None = None
        """What came of each call; None until the gang is over."""
        self._busy_ns = 0

    def advance(self, _slice_s: float, _slice_bytes: int) -> CallFailure | None:
        """Execute all calls, the first time; then go on to the next one that did not return.

        Returns:
            Its failure; None where all calls from the last one on returned.
        """
        if self._over is None:
            start = time.perf_counter_ns()
            self._over = self._execute()
            self._busy_ns = time.perf_counter_ns() - start
        at = self._next
        outcomes: list[Outcome] = []
        failure: CallFailure | None = None
        while at < self._hi:
            found = self._over.pop(at)
            if isinstance(found, CallFailure):
                failure = found
                break
            outcomes.append(found[0])
            at += 1
        self._outcomes = outcomes
        return failure

    def take(self) -> Taken:
        """Return the outcomes that have not been taken; none before the gang is over."""
        outcomes, self._outcomes = self._outcomes, []
        lo, self._next = self._next, self._next + len(outcomes)
        busy_ns, self._busy_ns = self._busy_ns, 0
        return Taken(lo, outcomes, busy_ns)

    def skip(self) -> None:
        """Take note that the call after the last outcome has been reported as failed."""
        self._next += 1

    def abandon(self) -> None:
        """End the replicas that wait for others; the driver is told when all have come to their end."""
        self._gang.abort("the scheduler has cancelled the step")

    def _execute(self) -> dict[int, Result | CallFailure]:
        numbers = range(self._next, self._hi)
        while len(self._loops) < len(numbers):
            self._loops.append(PersistentLoop())
        calls: list[Call] = []
        bodies: list[Callable[[], Result]] = []
        for number, loop in zip(numbers, self._loops, strict=False):
            replica = number % self.executor.program.replicas
            meeting = Meeting(
                self._gang, replica, can_share=self._can_share, clock=self.executor.clock, call=number
            )
            variables = None if self._bound is None else self._bound.of(replica)
            seat = Seat(meeting.of, self._device_of(replica), variables)
            call = self.executor.call(number, seat)
            calls.append(call)
            bodies.append(partial(self._run, call, meeting, loop))
        try:
            found = self._gang.run(bodies)
        finally:
            if self._channel is not None:
                self._channel.close()
        over: dict[int, Result | CallFailure] = {}
        for call, each in zip(calls, found, strict=True):
            over[call.number] = self._failure(call, each) if isinstance(each, BaseException) else each
        if not any(isinstance(each, CallFailure) for each in over.values()):
            self._on_success()
        return over

    def _run(self, call: Call, meeting: Meeting, loop: PersistentLoop) -> Result:
        """Execute one call, in its replica's thread."""

        def wait(awaitable: Awaitable[Any]) -> Any:
            result = loop.run(awaited(awaitable), meeting.outside)
            meeting.owed.settle()
            return result

        self._begin(call.number)
        try:
            return self.executor.run(call, self._shards, wait)
        finally:
            meeting.close()

    def _failure(self, call: Call, error: BaseException) -> CallFailure:
        if isinstance(error, Ended):
            error = error.cause
        return self.executor.failure(call, error, aborted=_was_aborted(error))


class Meeting:
    """How one replica reaches the others, from its plain functions and from its async ones.

    The baton is the replica's, not a thread's. While a collective of an async function is under way, it
    is that collective's, in a thread beside the loop; so then the loop goes on without it.

    Args:
        gang: of the replica.
        replica: its number.
        can_share: the gang has no member that is out of reach of its shared memory.
        clock: told when the replica waits for others: that is not its own time.
        call: the number of its call.
    """

    def __init__(
        self, gang: LocalGang, replica: int, *, can_share: bool, clock: StageClock, call: int
    ) -> None:
        self._gang = gang
        self._replica = replica
        self._can_share = can_share
        self._clock = clock
        self._call = call
        self._thread: ThreadPoolExecutor | None = None
        self._under_way = 0
        """Collectives of async functions that are not over."""
        self._lock = threading.Lock()
        """Guards `_under_way`."""
        self.owed = Owed()
        """What its async functions have not awaited yet."""

    def of(self, is_async: bool) -> Collectives:
        """Return what a function's collectives go through."""
        return _Awaited(self) if is_async else _Blocking(self)

    def call(self, request: CollectiveRequest) -> Tree:
        """Make a collective, and wait for it."""
        options = request.options
        if options is not None and not self._can_share and options.implementation is Implementation.SHARED:
            raise ValueError(NOT_SHARED)
        self._clock.pause(self._call)
        try:
            return self._gang.call(self._replica, request)
        finally:
            self._clock.resume(self._call)

    async def later(self, request: CollectiveRequest) -> Tree:
        """Make a collective, while the loop's other tasks go on.

        One thread, so that collectives are made one after the other, in the order of their first await.
        """
        import asyncio  # only async functions need it
        from concurrent.futures import ThreadPoolExecutor

        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, f"pipedist-replica-{self._replica}")
        context = contextvars.copy_context()
        with self._lock:
            self._under_way += 1
        collective = self._thread.submit(context.run, self._for_loop, request)
        collective.add_done_callback(self._note_end)  # not where it is awaited: that may be cancelled
        return await asyncio.wrap_future(collective)

    def _for_loop(self, request: CollectiveRequest) -> Tree:
        """Do `call`, for a future of a loop: one that is to hold a StopIteration never comes to its end."""
        try:
            return self.call(request)
        except StopIteration as error:
            raise RuntimeError(f"{request.label or request.kind} raised StopIteration") from error

    def _note_end(self, _collective: Future[Tree]) -> None:
        with self._lock:
            self._under_way -= 1

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Let other replicas run while the loop has nothing to do."""
        if forks.is_copy:  # the others are not here: nobody would hand the baton back
            yield
            return
        with self._lock:
            has_baton = self._under_way == 0
        if not has_baton:
            yield
            return
        with self._gang.outside(self._replica):
            yield

    def close(self) -> None:
        """Wait for a collective that nobody awaits any more: the others have to meet it."""
        self.owed.drop()
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)


class _Blocking:
    is_async = False

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting

    def call(self, request: CollectiveRequest) -> Tree:
        return self._meeting.call(request)


class _Awaited:
    is_async = True

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting

    def call(self, request: CollectiveRequest) -> Awaitable[Tree]:
        return self._meeting.owed.add(request, self._meeting.later(request))


def _was_aborted(error: BaseException) -> bool:
    """Whether a call failed only because its gang had ended: also where it raised while it cleaned up."""
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        if isinstance(each, GangAborted):
            return True
        seen.add(id(each))
        each = each.__cause__ or each.__context__
    return False
