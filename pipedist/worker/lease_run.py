"""Execution of a lease's calls: one after the other, or overlapping if they only wait.

Calls run in the main thread, which is the thread of the worker's driver. Calls of leases that overlap are tasks of
one event loop that lives as long as the process: async functions wait for the outside world. In a pass whose leases
do not overlap, because its calls read states that change, up to `CALLS_AT_ONCE_MAX` calls of one lease overlap if a
stage is an async function. Within a lease, results are reported in order.

A call that raises fails alone, whatever it raises: like `concurrent.futures`, a worker survives `sys.exit` and
KeyboardInterrupt in a function. As both of them request an end, the call is not retried; asyncio's CancelledError,
which async code raises by accident, is treated like other exceptions. (asyncio itself stops its loop for a
SystemExit in a task: one in a task that a function has started ends the process.)
"""

from __future__ import annotations

import contextlib
import selectors
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

from pipedist.core.types import Tree
from pipedist.protocol.columns import SlotValues
from pipedist.protocol.program import Shards
from pipedist.worker import failures
from pipedist.worker.execution import PassExecutor
from pipedist.worker.failures import CallFailure
from pipedist.worker.inputs import LeaseShards
from pipedist.worker.outcomes import Outcome, Result
from pipedist.worker.plain_calls import PlainCalls, Tally
from pipedist.worker.progress import STOPPED_NS_MIN, Stepped
from pipedist.worker.stages import Call, CallHeld

if TYPE_CHECKING:
    import asyncio

CALLS_AT_ONCE_MAX = 32  # maximum number of overlapping calls of one lease
_WAIT_S_MAX = 1.0  # how long an event loop waits at a time


# -- event loop --------------------------------------------------------------------------

Outside = Callable[[], AbstractContextManager[None]]  # enters the time in which a replica only waits


class PersistentLoop:
    """An event loop that is made for the first async function, and kept."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._selector: _Selector | None = None

    def run(self, awaitable: Awaitable[Any], outside: Outside = contextlib.nullcontext) -> Any:
        """Run until `awaitable` is done; enter `outside` while the loop only waits."""
        import asyncio  # only async functions need it

        if self._loop is None or self._selector is None:
            self._selector = selector = _Selector()
            self._loop = asyncio.SelectorEventLoop(selector)
            self._loop.time = lambda: time.monotonic() - selector.stopped_s  # type: ignore[method-assign]
        asyncio.set_event_loop(self._loop)
        before, self._selector.outside = self._selector.outside, outside
        try:
            return self._loop.run_until_complete(awaitable)
        finally:
            self._selector.outside = before

    def close(self) -> None:
        if self._loop is not None:
            self._loop.close()
            self._loop = self._selector = None


class _Selector(selectors.DefaultSelector):
    """A selector that enters `outside` while it waits, and measures how long the process was stopped meanwhile.

    It returns after `_WAIT_S_MAX`, if not before, so that a stop is noticed which ends before the next timer is due.
    """

    outside: Outside = staticmethod(contextlib.nullcontext)
    stopped_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        with self.outside():
            if timeout is None or timeout <= 0:
                return super().select(timeout)
            began, used, timeout = time.monotonic(), time.process_time(), min(timeout, _WAIT_S_MAX)
            ready = super().select(timeout)
            late_s = time.monotonic() - began - timeout
            # a thread that holds the interpreter's lock makes it late, too, but computes
            if late_s >= STOPPED_NS_MIN / 1e9 and time.process_time() - used < late_s / 2:
                self.stopped_s += late_s
            return ready


class ExitRequested(Exception):
    """Carries SystemExit or KeyboardInterrupt of an async function past the event loop."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(cause)
        self.cause = cause


async def await_result(awaitable: Awaitable[Any]) -> Any:
    """Await the result of an async function; raise ExitRequested instead of SystemExit."""
    try:
        return await awaitable
    except (SystemExit, KeyboardInterrupt) as error:
        raise ExitRequested(error) from None


async def cancel_tasks(tasks: list[asyncio.Task[Any]]) -> None:
    """Cancel tasks, and wait up to one second for their clean-up."""
    import asyncio  # loaded already

    for task in tasks:
        task.cancel()
    done, _ = await asyncio.wait(tasks, timeout=1)
    for task in done:
        if not task.cancelled():
            task.exception()  # mark it as retrieved: asyncio would log it otherwise


# -- runs --------------------------------------------------------------------------------


class FinishedCalls(NamedTuple):
    """Finished calls [lo, lo + len(outcomes)) that are not reported yet."""

    lo: int
    outcomes: Sequence[Outcome]
    busy_ns: int


class LeaseRun:
    """The execution of a lease's calls [lo, hi).

    `advance` belongs to the main thread. `take` may be called from one other thread meanwhile: so the results of
    short calls are sent while a long one runs. `begin` is called with the number of the call that will be reported
    next, before it runs.
    """

    def __init__(
        self,
        executor: PassExecutor,
        loop: PersistentLoop,
        shards: Shards,
        lo: int,
        hi: int,
        begin: Callable[[int], None],
    ) -> None:
        self.executor = executor
        self._loop = loop
        self._shards = LeaseShards(executor.finder, shards, lo, hi)
        self._hi = hi
        self._begin = begin
        self._next = lo  # the first call that has not begun
        self._tally = Tally()  # of calls that returned, from `_taken` on
        self._taken = lo  # the first call that has neither been taken nor raised
        self._reported_until_ns = self._tally.worked_until_ns
        self._overlaps = executor.calls_overlap
        self._plain_calls = executor.plain_calls  # with them, the tally has bare values
        self._running: deque[tuple[Call, asyncio.Task[Result]]] = deque()  # overlapping calls, in order
        self._is_abandoned = False  # they were cancelled

    def start(self, lease: int, on_done: Callable[[object], None]) -> None:
        """Begin all calls as tasks of the running loop, beside those of other leases; `collect` returns results."""
        import asyncio  # loaded already

        while self._next < self._hi:
            call = self.executor.call(self._next)
            call.lease, call.begin = lease, self._begin
            self._next += 1
            result = await_result(self.executor.run_among_others(call, self._shards))
            task = asyncio.ensure_future(Stepped(result, self.executor.clock, -1, call.begin_step).run())
            task.add_done_callback(on_done)
            self._running.append((call, task))

    def collect(self) -> CallFailure | None:
        """Add the outcomes of finished calls, in order; return the failure of the call after them, if it raised."""
        while self._running and self._running[0][1].done():
            call, task = self._running.popleft()
            try:
                self._finished(task.result())
            except BaseException as error:
                return self._failure(call, error)
        return None

    def elements(self) -> Iterator[tuple[int, list[Tree]]]:
        """Yield the results of elements of calls without a result, since the last time, by call."""
        for call, task in self._running:
            returned = task.done() and not task.cancelled() and task.exception() is None
            if call.fresh and (not returned or self._is_abandoned):
                fresh, call.fresh = call.fresh, []
                yield call.number, fresh

    @property
    def has_done(self) -> bool:
        """Whether `collect` has something to return."""
        return bool(self._running) and self._running[0][1].done() and not self._is_abandoned

    @property
    def is_over(self) -> bool:
        return self._next == self._hi and not self._running

    def _failure(self, call: Call, error: BaseException) -> CallFailure:
        cause = error.cause if isinstance(error, ExitRequested) else error
        return self.executor.failure(call, cause, aborted=isinstance(cause, CallHeld))

    def advance(self, slice_s: float, slice_bytes: int) -> CallFailure | None:
        """Execute calls until the slice is over, or a call raises; see `commands.Execute`.

        Return the failure of the first call that is not among the outcomes, or None.
        """
        self._tally.bytes = 0
        if self._overlaps is None:
            self._begin(self._next)  # the import of a user's module may end the process
            self._overlaps = self.executor.overlaps(self.executor.call(self._next))
            self._plain_calls = self.executor.plain_calls
        self._tally.worked_until_ns = self._reported_until_ns = start = time.perf_counter_ns()
        until_ns = start + int(slice_s * 1e9)
        if self._overlaps:
            failure: CallFailure | None = self._loop.run(self._overlapping(until_ns, slice_bytes))
            return failure
        if self._plain_calls is not None:
            return self._plain(self._plain_calls, until_ns, slice_bytes)
        return self._one_by_one(until_ns, slice_bytes)

    def take(self) -> FinishedCalls:
        """Return the outcomes since the last `take`, in order."""
        count = len(self._tally.outcomes)
        outcomes: Sequence[Outcome] = self._tally.outcomes[:count]
        if self._plain_calls is not None:
            outcomes = SlotValues(self.executor.outcomes.sole_slot, outcomes)
        del self._tally.outcomes[:count]
        lo = self._taken
        self._taken += count
        busy_ns = self._tally.worked_until_ns - self._reported_until_ns
        self._reported_until_ns = self._tally.worked_until_ns
        return FinishedCalls(lo, outcomes, busy_ns)

    def skip(self) -> None:
        """Record that the call after the last outcome has been reported as failed."""
        self._taken += 1

    def abandon(self) -> None:
        """Cancel the running calls; only `elements` is called after that."""
        if self._running and not self._is_abandoned:
            self._is_abandoned = True
            self._loop.run(cancel_tasks([task for _, task in self._running]))

    def _one_by_one(self, until_ns: int, slice_bytes: int) -> CallFailure | None:
        while self._next < self._hi:
            call = self.executor.call(self._next)
            self._begin(call.number)
            self._next += 1
            try:
                self._finished(self.executor.run(call, self._shards, self._wait))
            except BaseException as error:  # any exception of user code is a failure of its call
                return self._failure(call, error)
            if self._tally.worked_until_ns >= until_ns or self._tally.bytes >= slice_bytes:
                break
        return None

    def _plain(self, calls: PlainCalls, until_ns: int, slice_bytes: int) -> CallFailure | None:
        call = self.executor.call(self._next)
        failure: CallFailure | None = None
        try:
            numbers = range(self._next, self._hi)
            calls.run(
                call, self._shards, numbers, self._begin, self._wait, self._tally, until_ns, slice_bytes
            )
        except BaseException as error:  # any exception of user code is a failure of its call
            failure = self._failure(call, error)
        self._next = call.number + 1
        return failure

    def _wait(self, awaitable: Awaitable[Any]) -> Any:
        return self._loop.run(await_result(awaitable))

    def _finished(self, result: Result) -> None:
        outcome, size = result
        self._tally.bytes += size
        self._tally.worked_until_ns = time.perf_counter_ns()
        self._tally.outcomes.append(outcome)

    async def _overlapping(self, until_ns: int, slice_bytes: int) -> CallFailure | None:
        import asyncio  # loaded already: only async functions come here

        while True:
            while len(self._running) < CALLS_AT_ONCE_MAX and self._next < self._hi:
                call = self.executor.call(self._next)
                self._next += 1
                result = await_result(self.executor.run_among_others(call, self._shards))
                self._running.append((call, asyncio.ensure_future(result)))
            if not self._running:
                return None
            call, task = self._running[0]
            self._begin(call.number)
            rest_s = (until_ns - time.perf_counter_ns()) / 1e9
            if not task.done():
                await asyncio.wait({task}, timeout=max(rest_s, 0))
            if not task.done():
                return None
            self._running.popleft()
            try:
                self._finished(task.result())
            except BaseException as error:
                return self._failure(call, error)
            if self._tally.worked_until_ns >= until_ns or self._tally.bytes >= slice_bytes:
                return None


class OverlappingRuns:
    """The runs of leases that overlap: their calls are tasks of one event loop."""

    def __init__(self, loop: PersistentLoop) -> None:
        self._loop = loop
        self.runs: dict[int, LeaseRun | RejectedLeaseRun] = {}

    def advance(self, slice_s: float, fileno: int) -> None:
        """Let calls go on until one is over, the file `fileno` is readable (-1: none), or time has passed."""
        self._loop.run(self._advance(slice_s, fileno))

    async def _advance(self, slice_s: float, fileno: int) -> None:
        import asyncio  # only async functions need it

        loop, news = asyncio.get_running_loop(), asyncio.Event()
        for lease, run in list(self.runs.items()):  # the reporter's thread may end runs
            if isinstance(run, RejectedLeaseRun):
                news.set()
            else:
                run.start(lease, self._on_done)
        self._news = news
        if any(run.has_done for run in list(self.runs.values())):
            news.set()
        if fileno >= 0:
            loop.add_reader(fileno, news.set)
        try:
            async with asyncio.timeout(slice_s):
                await news.wait()
        except TimeoutError:
            pass
        finally:
            if fileno >= 0:
                loop.remove_reader(fileno)

    def _on_done(self, _task: object) -> None:
        self._news.set()

    def drop(self, lease: int) -> bool:
        """End the run of a lease; return False if there is none."""
        run = self.runs.pop(lease, None)
        if run is not None:
            run.abandon()
        return run is not None


class RejectedLeaseRun:
    """The run of a lease whose calls cannot be executed: each of them fails.

    `stage` is the stage that fails; "" if the program is unknown.
    """

    has_done = True

    def __init__(self, error: Exception, stage: str, lo: int, hi: int) -> None:
        self._hi = hi
        self._error = error
        self._stage = stage
        self._next = lo

    def advance(self, _slice_s: float, _slice_bytes: int) -> CallFailure:
        return failures.describe(
            self._error, call=self._next, stage=self._stage, retryable=False, in_user_code=False
        )

    def collect(self) -> CallFailure:
        return self.advance(0.0, 0)

    def elements(self) -> Iterator[tuple[int, list[Tree]]]:
        return iter(())

    def take(self) -> FinishedCalls:
        return FinishedCalls(self._next, [], 0)

    def skip(self) -> None:
        self._next += 1

    @property
    def is_over(self) -> bool:
        return self._next >= self._hi

    def abandon(self) -> None:
        """Do nothing: no call runs."""
