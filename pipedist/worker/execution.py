"""Executing calls: a pass's program, applied to one shard at a time.

Every call runs the program's stages in order and collects what it emits; how the calls of a lease
follow each other is `pipedist.worker.ranges`'s.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Generator
from typing import TYPE_CHECKING, Any

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


class Call:
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

    def call(self, number: int) -> Call:
        """Return a call that has not begun."""
        return Call(number, self.program.replicas, self.first_stage)

    def overlaps(self, call: Call) -> bool:
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

    def _load(self, stage: Stage, call: Call) -> None:
        token = importer.set((stage.name, call.step, call.replica))
        try:
            stage.load()
        finally:
            importer.reset(token)

    def steps(
        self, call: Call, shards: Shards, index: int
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

    def _emit(self, call: Call, shard: Tree, values: list[Tree]) -> tuple[Outcome, int]:
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

    def _check_threads(self, call: Call) -> None:
        if self.program.threads != self._threads:
            call.permanent = True
            raise PipedistError(
                f"the spec wants threads_per_replica: {self.program.threads}, but this worker was started "
                f"with {self._threads}, which can change bits: start workers with the spec's number"
            )

    def failure(self, call: Call, error: BaseException) -> CallFailure:
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


def _is_plain(error: BaseException) -> bool:
    """Whether it is an error, and no wish to end the process."""
    asyncio = sys.modules.get("asyncio")  # without it nobody raises its CancelledError
    return isinstance(error, Exception) or (asyncio is not None and isinstance(error, asyncio.CancelledError))
