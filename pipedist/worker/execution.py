"""Executing calls: a pass's program, applied to the shards of a lease.

Every call runs the program's stages in order and collects what it emits. Calls of a lease run
one after the other, in the thread of the driver (the process's main thread). Only where a stage
is an async FUNCTION, and none is a class, up to `CALLS_AT_ONCE_MAX` calls of a lease overlap, on
one event loop which lives as long as the process: async functions wait for the outside world,
and their users expect that to overlap. Their results are still taken in order.

A call that raises is a failure of that call, whatever it raises: like `concurrent.futures`, a
worker outlives `sys.exit` and KeyboardInterrupt in a function. But these ask for an end, so the call
is not tried again; asyncio's CancelledError, which async code raises by accident, is an exception like
others. (asyncio itself stops its loop for a SystemExit in a task: one in a task that a function has
started ends the process.)
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Generator
from typing import TYPE_CHECKING, Any, NamedTuple

from pipedist.errors import PipedistError
from pipedist.program import Emit, Program, Shards, Tree
from pipedist.reductions import Reduction
from pipedist.worker import failures
from pipedist.worker.boundary import guard, own
from pipedist.worker.context import ReplicaContext, current
from pipedist.worker.failures import CallFailure
from pipedist.worker.output import importer
from pipedist.worker.shards import ShardFinder
from pipedist.worker.stages import Stage

if TYPE_CHECKING:
    import asyncio

CALLS_AT_ONCE_MAX = 16
"""How many calls of async functions overlap in one worker."""

Outcome = dict[str, Tree]
"""What one call sends back: {slot: tree}."""


class PersistentLoop:
    """The worker's event loop: made when the first async function needs it, then kept."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, awaitable: Awaitable[Any]) -> Any:
        """Run until `awaitable` is done and return its result."""
        import asyncio  # only async functions need it

        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self._loop)
        return self._loop.run_until_complete(awaitable)

    def close(self) -> None:
        """Close the loop, if there ever was one."""
        if self._loop is not None:
            self._loop.close()
            self._loop = None


class _Call:
    """One call while it runs.

    Args:
        number: its number in the pass.
        stage: the stage that it is in; the first one while its shard is looked for.
        permanent: an error here and now will come again on every attempt.
        reading: its shard is looked for.
        in_user_code: it is in a stage's function.
    """

    __slots__ = ("in_user_code", "number", "permanent", "reading", "replica", "stage", "step")

    def __init__(self, number: int, replicas: int, stage: str) -> None:
        self.number = number
        self.step, self.replica = divmod(number, replicas)
        self.stage = stage
        self.permanent = False
        self.reading = False
        self.in_user_code = False


class PassExecutor:
    """Executes calls of one pass.

    Args:
        program: the pass's program.
        loop: where async functions run.
        threads: BLAS and OpenMP threads that this process was started with.
    """

    def __init__(self, program: Program, loop: PersistentLoop, threads: int) -> None:
        self.program = program
        self.loop = loop
        self._threads = threads
        self._stages = [Stage(stage, program.code) for stage in program.stages]
        self._finder = ShardFinder(program.reader, program.replicas)
        self._reductions = [Reduction.of(e.op, e.axis) if e.op else None for e in program.emits]
        # A pass without a function emits for its reductions: their stages, by slot.
        names = [stage.name for stage in program.stages] or [emit.slot for emit in program.emits]
        self.first_stage = names[0] if names else ""
        readers = [stage.of for stage in program.stages]
        self._shard_is_shared = (readers + [emit.of for emit in program.emits]).count(-1) > 1

    def stage_of(self, slot: str) -> str:
        """Return the name of the stage whose value is emitted as `slot`."""
        return next((self._stage_name(e) for e in self.program.emits if e.slot == slot), self.first_stage)

    def _stage_name(self, emit: Emit) -> str:
        return self._stages[emit.of].name if emit.of >= 0 else self.first_stage

    def call(self, number: int) -> _Call:
        """Return a call that has not begun."""
        return _Call(number, self.program.replicas, self.first_stage)

    def overlaps(self, call: _Call) -> bool:
        """Whether calls may overlap. Loads the functions; an error is left for the calls to meet.

        Args:
            call: the one for whose sake they are loaded: what they print is its.
        """
        for stage in self._stages:
            try:
                self._load(stage, call)
            except BaseException:  # every call meets and reports it, each under its own number
                return False
        return any(s.is_async for s in self._stages) and not any(s.is_class for s in self._stages)

    def _load(self, stage: Stage, call: _Call) -> None:
        token = importer.set((stage.name, call.step, call.replica))
        try:
            stage.load()
        finally:
            importer.reset(token)

    def steps(
        self, call: _Call, shards: Shards, index: int
    ) -> Generator[Awaitable[Any], list[Any], tuple[Outcome, int]]:
        """Execute one call; yields what must be awaited, expects a list that holds its result.

        Returns:
            The outcome, which nobody else can change, and its size in bytes.
        """
        self._check_threads(call)
        call.reading = True
        shard = self._finder.find(shards, index, call.number)
        call.reading = False
        values: list[Tree] = []
        for stage in self._stages:
            call.stage = stage.name
            call.permanent = True
            self._load(stage, call)
            call.permanent = False
            ctx = ReplicaContext(
                replica_id_in_sync_group=call.replica,
                num_replicas_in_sync=self.program.replicas,
                step=call.step,
                epoch=shard.epoch,
                stage=stage.name,
                elements=shard.elements,
                seed=self.program.seed,
            )
            token = current.set(ctx)
            call.in_user_code = True
            try:
                stage.make_instance()
                if stage.of >= 0:
                    value = guard(values[stage.of])
                else:
                    value = guard(shard.value) if self._shard_is_shared else shard.value
                result = stage.call(value, ctx)
                del value
                if hasattr(type(result), "__await__"):
                    result = (yield result).pop()
            finally:
                current.reset(token)
            call.in_user_code = False
            values.append(result)
            del result
        return self._emit(call, shard.value, values)

    def _emit(self, call: _Call, shard: Tree, values: list[Tree]) -> tuple[Outcome, int]:
        """Collect what the call sends back. Empties `values`, so that fresh arrays need no copy."""
        outcome: Outcome = dict.fromkeys(emit.slot for emit in self.program.emits)
        size = 0
        call.permanent = True
        for emit, reduction in zip(self.program.emits, self._reductions, strict=True):
            if reduction is not None:
                call.stage = emit.slot
                value = values[emit.of] if emit.of >= 0 else shard
                outcome[emit.slot], bytes_ = own([reduction.partial(value)])
                del value
                size += bytes_
        owned: dict[int, Tree] = {}
        for emit in self.program.emits:
            if emit.op:
                continue
            call.stage = self._stage_name(emit)
            if emit.of < 0:
                outcome[emit.slot] = shard
                continue
            if emit.of not in owned:
                box = [values[emit.of]]
                values[emit.of] = None
                owned[emit.of], bytes_ = own(box)
                size += bytes_
            outcome[emit.slot] = owned[emit.of]
        return outcome, size

    def _check_threads(self, call: _Call) -> None:
        if self.program.threads != self._threads:
            call.permanent = True
            raise PipedistError(
                f"the spec wants threads_per_replica: {self.program.threads}, but this worker was started "
                f"with {self._threads}, which can change bits: start workers with the spec's number"
            )

    def failure(self, call: _Call, error: BaseException) -> CallFailure:
        """Return what is reported of a call that raised."""
        final = call.permanent or (call.reading and isinstance(error, PipedistError)) or not _is_plain(error)
        return failures.describe(
            error,
            call=call.number,
            stage=call.stage,
            retryable=not final,
            in_user_code=call.in_user_code,
        )

    def close(self) -> None:
        """Let go of functions, instances and the reader's files."""
        self._stages.clear()
        self._finder.close()


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
        shards: of calls [lo, hi), from `lo` on.
        begin: told the number of the call that will be reported next, before it runs.
    """

    def __init__(
        self,
        executor: PassExecutor,
        shards: Shards,
        lo: int,
        hi: int,
        begin: Callable[[int], None],
    ) -> None:
        self.executor = executor
        self._shards = shards
        self._lo = lo
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
        self._running: deque[tuple[_Call, asyncio.Task[tuple[Outcome, int]]]] = deque()
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
            failure: CallFailure | None = self.executor.loop.run(self._overlapping(until_ns, slice_bytes))
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
            self.executor.loop.run(_cancelled([task for _, task in running]))

    def _one_by_one(self, until_ns: int, slice_bytes: int) -> CallFailure | None:
        while self._next < self._hi:
            call = self.executor.call(self._next)
            self._begin(call.number)
            self._next += 1
            try:
                self._finished(self._run_alone(call))
            except BaseException as error:  # whatever user code raises is its call's failure
                return self.executor.failure(call, error.cause if isinstance(error, _Ended) else error)
            if self._worked_until_ns >= until_ns or self._bytes >= slice_bytes:
                break
        return None

    def _finished(self, result: tuple[Outcome, int]) -> None:
        outcome, size = result
        self._bytes += size
        self._worked_until_ns = time.perf_counter_ns()
        self._outcomes.append(outcome)

    def _run_alone(self, call: _Call) -> tuple[Outcome, int]:
        steps = self.executor.steps(call, self._shards, call.number - self._lo)
        try:
            awaitable = next(steps)
            while True:
                try:
                    box = [self.executor.loop.run(_awaited(awaitable))]
                except BaseException as error:
                    awaitable = steps.throw(error)
                else:
                    awaitable = steps.send(box)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]

    async def _run_among_others(self, call: _Call) -> tuple[Outcome, int]:
        try:
            return await self._step_by_step(call)
        except (SystemExit, KeyboardInterrupt) as error:
            raise _Ended(error) from None

    async def _step_by_step(self, call: _Call) -> tuple[Outcome, int]:
        steps = self.executor.steps(call, self._shards, call.number - self._lo)
        try:
            awaitable = next(steps)
            while True:
                try:
                    box = [await awaitable]
                except BaseException as error:
                    awaitable = steps.throw(error)
                else:
                    awaitable = steps.send(box)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]

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
                return self.executor.failure(call, error.cause if isinstance(error, _Ended) else error)
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


class _Ended(Exception):
    """Carries what asyncio would stop its loop for, out of an async function."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(cause)
        self.cause = cause


def _is_plain(error: BaseException) -> bool:
    """Whether it is an error, and no wish to end the process."""
    asyncio = sys.modules.get("asyncio")  # without it nobody raises its CancelledError
    return isinstance(error, Exception) or (asyncio is not None and isinstance(error, asyncio.CancelledError))


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    try:
        return await awaitable
    except (SystemExit, KeyboardInterrupt) as error:
        raise _Ended(error) from None


async def _cancelled(tasks: list[asyncio.Task[Any]]) -> None:
    """Cancel tasks and give them one second to clean up."""
    import asyncio  # loaded already

    for task in tasks:
        task.cancel()
    done, _ = await asyncio.wait(tasks, timeout=1)
    for task in done:
        if not task.cancelled():
            task.exception()  # nobody will ask for it again
