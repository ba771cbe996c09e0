"""The calls of a lease, one after the other or, where they only wait, some at a time.

Calls run in the thread of the driver (the process's main thread). Only where a stage is an async
FUNCTION, and none is a class, up to `CALLS_AT_ONCE_MAX` calls of a lease overlap, on one event loop
which lives as long as the process: async functions wait for the outside world, and their users expect
that to overlap. Their results are still taken in order.

A call that raises is a failure of that call, whatever it raises: like `concurrent.futures`, a
worker outlives `sys.exit` and KeyboardInterrupt in a function. But these ask for an end, so the call
is not tried again; asyncio's CancelledError, which async code raises by accident, is an exception like
others. (asyncio itself stops its loop for a SystemExit in a task: one in a task that a function has
started ends the process.)
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from pipedist.protocol.program import Shards
from pipedist.worker import failures
from pipedist.worker.execution import Call, Outcome, PassExecutor, Result
from pipedist.worker.failures import CallFailure
from pipedist.worker.loops import PersistentLoop

if TYPE_CHECKING:
    import asyncio

CALLS_AT_ONCE_MAX = 16
"""How many calls of async functions overlap in one worker."""


class Taken(NamedTuple):
    """Finished calls [lo, lo + len(outcomes)) which have not been reported yet."""

    lo: int
    outcomes: list[Outcome]
    busy_ns: int


class RangeRun:
    """The execution of one lease.

    `advance` belongs to the main thread. `take` may be called from another one meanwhile, one
    at a time: that is how the results of short calls get out while a long one runs.

    Args:
        executor: of the lease's pass.
        loop: where async functions run.
        shards: of calls [lo, hi), from `lo` on.
        begin: told the number of the call that will be reported next, before it runs.
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
        self._shards = executor.finder.of_lease(shards, lo, hi)
        self._hi = hi
        self._begin = begin
        self._next = lo
        """The first call that has not been begun."""
        self._outcomes: list[Outcome] = []
        """Of calls that returned, from `_taken` on."""
        self._taken = lo
        """The first call that has been neither taken nor has raised."""
        self._bytes = 0
        """Size of `_outcomes`, and of those taken since the slice began."""
        self._worked_until_ns = self._reported_until_ns = time.perf_counter_ns()
        self._overlaps: bool | None = None
        self._running: deque[tuple[Call, asyncio.Task[Result]]] = deque()
        """Overlapping calls that have begun, in order."""

    def advance(self, slice_s: float, slice_bytes: int) -> CallFailure | None:
        """Execute calls until the slice is over, or one raises.

        Args:
            slice_s: begin no call after this time, seconds.
            slice_bytes: begin no call when outcomes of this size have gathered.

        Returns:
            The failure of the first call that is not among the outcomes, or None.
        """
        self._bytes = 0
        if self._overlaps is None:
            self._begin(self._next)  # the import of a user's module may end the process
            self._overlaps = self.executor.overlaps(self.executor.call(self._next))
        self._worked_until_ns = self._reported_until_ns = start = time.perf_counter_ns()
        until_ns = start + int(slice_s * 1e9)
        if self._overlaps:
            failure: CallFailure | None = self._loop.run(self._overlapping(until_ns, slice_bytes))
            return failure
        return self._one_by_one(until_ns, slice_bytes)

    def take(self) -> Taken:
        """Return the outcomes of calls that finished since the last time, in order."""
        count = len(self._outcomes)
        outcomes = self._outcomes[:count]
        del self._outcomes[:count]
        lo = self._taken
        self._taken += count
        busy_ns = self._worked_until_ns - self._reported_until_ns
        self._reported_until_ns = self._worked_until_ns
        return Taken(lo, outcomes, busy_ns)

    def skip(self) -> None:
        """Take note that the call after the last outcome has been reported as failed."""
        self._taken += 1

    def abandon(self) -> None:
        """Give up what is running."""
        if self._running:
            running, self._running = self._running, deque()
            self._loop.run(cancelled([task for _, task in running]))

    def _one_by_one(self, until_ns: int, slice_bytes: int) -> CallFailure | None:
        while self._next < self._hi:
            call = self.executor.call(self._next)
            self._begin(call.number)
            self._next += 1
            try:
                self._finished(self.executor.run(call, self._shards, self._wait))
            except BaseException as error:  # whatever user code raises is its call's failure
                return self.executor.failure(call, error.cause if isinstance(error, Ended) else error)
            if self._worked_until_ns >= until_ns or self._bytes >= slice_bytes:
                break
        return None

    def _wait(self, awaitable: Awaitable[Any]) -> Any:
        return self._loop.run(awaited(awaitable))

    def _finished(self, result: Result) -> None:
        outcome, size = result
        self._bytes += size
        self._worked_until_ns = time.perf_counter_ns()
        self._outcomes.append(outcome)

    async def _run_among_others(self, call: Call) -> Result:
        try:
            return await self.executor.run_among_others(call, self._shards)
        except (SystemExit, KeyboardInterrupt) as error:
            raise Ended(error) from None

    async def _overlapping(self, until_ns: int, slice_bytes: int) -> CallFailure | None:
        import asyncio  # loaded already: only async functions come here

        while True:
            while len(self._running) < CALLS_AT_ONCE_MAX and self._next < self._hi:
                call = self.executor.call(self._next)
                self._next += 1
                self._running.append((call, asyncio.ensure_future(self._run_among_others(call))))
            if not self._running:
                return None
            call, task = self._running[0]
            self._begin(call.number)
            left_s = (until_ns - time.perf_counter_ns()) / 1e9
            if not task.done():
                await asyncio.wait({task}, timeout=max(left_s, 0))
            if not task.done():
                return None
            self._running.popleft()
            try:
                self._finished(task.result())
            except BaseException as error:
                return self.executor.failure(call, error.cause if isinstance(error, Ended) else error)
            if self._worked_until_ns >= until_ns or self._bytes >= slice_bytes:
                return None


class RefusedRange:
    """The execution of a lease whose calls can't be made: each of them fails, for good.

    Args:
        error: why.
        stage: whose failure it is; "" where the program is not known.
        lo: the first call.
    """

    def __init__(self, error: Exception, stage: str, lo: int) -> None:
        self._error = error
        self._stage = stage
        self._next = lo

    def advance(self, _slice_s: float, _slice_bytes: int) -> CallFailure:
        """Return the failure of the next call."""
        return failures.describe(
            self._error, call=self._next, stage=self._stage, retryable=False, in_user_code=False
        )

    def take(self) -> Taken:
        """Return that no call has finished."""
        return Taken(self._next, [], 0)

    def skip(self) -> None:
        """Take note that the next call has been reported as failed."""
        self._next += 1

    def abandon(self) -> None:
        """Nothing is running."""


class Ended(Exception):
    """Carries what asyncio would stop its loop for, out of an async function.

    Args:
        cause: SystemExit or KeyboardInterrupt.
    """

    def __init__(self, cause: BaseException) -> None:
        super().__init__(cause)
        self.cause = cause


async def awaited(awaitable: Awaitable[Any]) -> Any:
    """Await what an async function returned; a wish to end the process is carried past the loop."""
    try:
        return await awaitable
    except (SystemExit, KeyboardInterrupt) as error:
        raise Ended(error) from None


async def cancelled(tasks: list[asyncio.Task[Any]]) -> None:
    """Cancel tasks and give them one second to clean up."""
    import asyncio  # loaded already

    for task in tasks:
        task.cancel()
    done, _ = await asyncio.wait(tasks, timeout=1)
    for task in done:
        if not task.cancelled():
            task.exception()  # nobody will ask for it again
