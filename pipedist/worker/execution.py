"""Executing calls: a pass's program, applied to one shard at a time.

Every call runs the program's stages in order and collects what it emits; how the calls of a lease
follow each other is `pipedist.worker.lease_run`'s, and `pipedist.worker.gangs`'s where they belong to
a gang. There, a shard may be empty: only stages that call collectives are called with it, and what the
others would have given is absent from the outcome.


Whether two executions of a call gave the same: what `--verify` compares.

A value is compared leaf by leaf, by digests of the bytes that would be sent. Leaves that can't be sent (of a
value that never leaves the worker) are not compared: what differs in them shows in what is made of them.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import Struct

from pipedist.core import dlpack, trees
from pipedist.core.types import Tree
from pipedist.errors import NonDeterministicError, PipedistError
from pipedist.protocol.codec import UnsendableError, encode
from pipedist.protocol.program import Emit, Program
from pipedist.reduction.tree import Reduction
from pipedist.worker import failures, process_setup
from pipedist.worker.array_isolation import as_readonly, take_ownership
from pipedist.worker.context import Collectives, ReplicaContext, current
from pipedist.worker.failures import CallFailure
from pipedist.worker.inputs import LeaseShards, Shard, ShardFinder, States
from pipedist.worker.log_forwarding import importer
from pipedist.worker.progress import CallProgress, StageClock, Stepped
from pipedist.worker.stages import Stage

if TYPE_CHECKING:
    from pipedist.worker.variables.replica import ReplicaVariables


Outcome = dict[str, Tree]
"""What one call sends back: {slot: tree}."""

Result = tuple[Outcome, int]
"""An outcome, and its size in bytes."""


class GangCallContext(NamedTuple):
    """What a call in a gang has, and others have not.

    Args:
        meet: what its collectives go through, by whether the function that calls them is async.
        device: that the replica was assigned, see `ReplicaContext.device`; "" for none.
        variables: what its functions read and assign; None where the step has no variables.
    """

    meet: Callable[[bool], Collectives]
    device: str
    variables: ReplicaVariables | None


class Call:
    """One call while it runs.

    Args:
        number: its number in the pass.
        stage: the stage that it is in; the first one while its shard is looked for.
        gang: its replica's in a gang; None outside of one.
        permanent: an error here and now will come again on every attempt.
        reading: its shard is looked for.
        in_user_code: it is in a stage's function.
    """

    __slots__ = ("gang", "in_user_code", "number", "permanent", "reading", "replica", "stage", "step")

    def __init__(self, number: int, replicas: int, stage: str, gang: GangCallContext | None = None) -> None:
        self.number = number
        self.step, self.replica = divmod(number, replicas)
        self.stage = stage
        self.gang = gang
        self.permanent = False
        self.reading = False
        self.in_user_code = False


class PassExecutor:
    """Executes calls of one pass.

    Args:
        program: the pass's program.
        threads: BLAS and OpenMP threads that this process was started with.
        clock: where it is noted which stage runs.
    """

    def __init__(self, program: Program, threads: int, clock: StageClock = CallProgress.clock) -> None:
        self.program = program
        self.clock = clock
        self._threads = threads
        self._stages = [Stage(stage, program.code) for stage in program.stages]
        self._is_noted = len(self._stages) > 1 or any(stage.limit_ns for stage in self._stages)
        """It is worth to be noted which stage runs."""
        self.finder = ShardFinder(program.reader, program.replicas)
        emits = [emit for emit in program.emits if emit.of >= -1]
        self._slots = [emit.slot for emit in emits]
        self._reduced = [(e, Reduction.of(e.op, e.axis)) for e in emits if e.op]
        self._whole = [e for e in emits if not e.op]
        self._assigned = [emit.slot for emit in program.emits if emit.of < -1]
        """Under which names a call sends back what it has assigned to variables."""
        self._sole = emits[0] if len(emits) == 1 and not emits[0].op and emits[0].of >= 0 else None
        """Of a program that sends back the whole value of one stage: that."""
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

    def call(self, number: int, gang: GangCallContext | None = None) -> Call:
        """Return a call that has not begun."""
        return Call(number, self.program.replicas, self.first_stage, gang)

    def use(self, states: States, values: Mapping[str, Tree]) -> None:
        """Take over the states that the next lease reads.

        Args:
            states: their versions.
            values: what stands for each in the functions' arguments, by name.

        Raises:
            RemoteProtocolError: the lease lacks a state that a stage reads.
        """
        for stage in self._stages:
            stage.use(states, values)

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

    def run(self, call: Call, shards: LeaseShards, wait: Callable[[Awaitable[Any]], Any]) -> Result:
        """Execute one call, in this thread.

        Args:
            wait: waits for what an async function returned; gives its result.

        Returns:
            The outcome, which nobody else can change, and its size in bytes.
        """
        shard = self._find(call, shards)
        empty = call.gang is not None and shards.is_empty(shard)
        values = self._values(call, shard, empty, wait)
        if self.program.verify:
            first = self._digests(values)
            del values
            values = self._values(call, shard, empty, wait)
            self._check_same(call, first, values)
        return self._emit(call, shard.value, values, empty)

    def _values(
        self, call: Call, shard: Shard, empty: bool, wait: Callable[[Awaitable[Any]], Any]
    ) -> list[Tree]:
        """Execute the stages, and return what each gave."""
        values: list[Tree] = []
        for stage in self._stages:
            if empty and (not stage.collectives or (stage.of >= 0 and values[stage.of] is _ABSENT)):
                values.append(_ABSENT)
                continue
            ctx = self._enter(stage, len(values) + 1, call, shard)
            token = current.set(ctx)
            try:
                result = self._begin(stage, call, shard, values, ctx)
                if hasattr(type(result), "__await__"):
                    result = wait(result)
                values.append(self._end(call, result))
                del result  # or `take_ownership` would see it as somebody else's
            finally:
                if process_setup.is_copy:
                    process_setup.end_copy(stage.name)
                if stage.limit_ns:
                    self.clock.stop(call.number)
                current.reset(token)
        return values

    async def run_among_others(self, call: Call, shards: LeaseShards) -> Result:
        """Execute one call, of no gang, as a task of the running loop; see `run`."""
        shard = self._find(call, shards)
        values = await self._values_among_others(call, shard)
        if self.program.verify:
            first = self._digests(values)
            del values
            values = await self._values_among_others(call, shard)
            self._check_same(call, first, values)
        return self._emit(call, shard.value, values, False)

    async def _values_among_others(self, call: Call, shard: Shard) -> list[Tree]:
        values: list[Tree] = []
        for stage in self._stages:
            ctx = self._enter(stage, 0, call, shard)
            token = current.set(ctx)
            try:
                result = self._begin(stage, call, shard, values, ctx)
                if hasattr(type(result), "__await__"):
                    result = await (Stepped(result, self.clock, call.number) if stage.limit_ns else result)
                values.append(self._end(call, result))
                del result
            finally:
                if process_setup.is_copy:
                    process_setup.end_copy(stage.name)
                if stage.limit_ns:
                    self.clock.stop(call.number)
                current.reset(token)
        return values

    def _digests(self, values: list[Tree]) -> list[Digests]:
        """Return the digests of what each stage gave."""
        from pipedist.worker.execution import digests_of  # few runs are verified

        return [digests_of(None if value is _ABSENT else value) for value in values]

    def _check_same(self, call: Call, first: list[Digests], values: list[Tree]) -> None:
        """Compare what each stage gave with what it gave the first time."""
        from pipedist.worker.execution import check_same  # loaded already

        call.permanent = True
        for stage, before, now in zip(self._stages, first, self._digests(values), strict=True):
            call.stage = stage.name
            check_same(before, now)
        call.permanent = False

    def _find(self, call: Call, shards: LeaseShards) -> Shard:
        if self.program.threads != self._threads:
            self._refuse_threads(call)
        call.reading = True
        shard = shards.find(call.number)
        call.reading = False
        return shard

    def _enter(self, stage: Stage, number: int, call: Call, shard: Shard) -> ReplicaContext:
        """Make ready for the function of a stage, number `number` from 1; return its context."""
        call.stage = stage.name
        if self._is_noted:
            self.clock.enter(number)
        if not stage.is_loaded:
            call.permanent = True
            self._load(stage, call)
            call.permanent = False
        gang = call.gang
        ctx = ReplicaContext(
            call.replica,
            self.program.replicas,
            call.step,
            shard.epoch,
            stage.name,
            shard.elements,
            self.program.seed,
            gang.meet(stage.is_async) if gang is not None and stage.collectives else None,
        )
        ctx.device = stage.device
        if gang is not None:
            ctx.device = gang.device or stage.device
            ctx.variables = gang.variables
        return ctx

    def _begin(self, stage: Stage, call: Call, shard: Shard, values: list[Tree], ctx: ReplicaContext) -> Any:
        """Call a stage's function in its context; return its result, or what must be awaited for it."""
        call.in_user_code = True
        owner = 0 if call.gang is None else call.replica
        if stage.is_class:
            stage.make_instance(owner)
        if stage.of >= 0:
            value = as_readonly(values[stage.of])
        else:
            value = as_readonly(shard.value) if self._shard_is_shared else shard.value
        if stage.limit_ns:
            self.clock.start(call.number, len(values) + 1, stage.limit_ns)
        return stage.call(value, ctx, owner)

    def _end(self, call: Call, result: Tree) -> Tree:
        call.in_user_code = False
        if call.gang is None or call.gang.variables is None:
            return result
        from pipedist.worker.variables.access import plain  # loaded already: there are variables

        return plain(result)

    def _emit(self, call: Call, shard: Tree, values: list[Tree], empty: bool) -> Result:
        """Collect what the call sends back. Empties `values`, so that fresh arrays need no copy."""
        call.permanent = True
        gang = call.gang
        if self._sole is not None and not empty and (gang is None or gang.variables is None):
            of = self._sole.of
            call.stage = self._stages[of].name
            box = [values[of]]
            values.clear()
            value, size = take_ownership(box)
            return {self._sole.slot: value}, size
        outcome: Outcome = dict.fromkeys(self._slots)
        size = 0
        for emit, reduction in self._reduced:
            call.stage = emit.slot
            value = values[emit.of] if emit.of >= 0 else _ABSENT if empty else shard
            if value is _ABSENT:
                del outcome[emit.slot]
                continue
            outcome[emit.slot], bytes_ = take_ownership([reduction.partial(dlpack.to_host(value))])
            del value
            size += bytes_
        owned: dict[int, Tree] = {}
        for emit in self._whole:
            of = emit.of
            call.stage = self._stage_name(emit)
            if (values[of] is _ABSENT) if of >= 0 else empty:
                del outcome[emit.slot]
                continue
            if of < 0:
                outcome[emit.slot] = shard
                continue
            if of not in owned:
                box = [values[of]]
                values[of] = None
                owned[of], bytes_ = take_ownership(box)
                size += bytes_
            outcome[emit.slot] = owned[of]
        if gang is not None and gang.variables is not None:
            size += self._emit_assigned(gang.variables, outcome)
        return outcome, size

    def _emit_assigned(self, side: ReplicaVariables, outcome: Outcome) -> int:
        from pipedist.worker.variables.replica import size_of

        assigned = side.assigned()
        if assigned is None:
            return 0
        for slot in self._assigned:
            outcome[slot] = assigned  # nobody else's, and read-only
        return size_of(assigned)

    def _refuse_threads(self, call: Call) -> None:
        call.permanent = True
        raise PipedistError(
            f"the spec wants threads_per_replica: {self.program.threads}, but this worker was started "
            f"with {self._threads}, which can change bits: start workers with the spec's number"
        )

    def failure(self, call: Call, error: BaseException, *, aborted: bool = False) -> CallFailure:
        """Return what is reported of a call that raised.

        Args:
            aborted: it did nothing wrong: its gang was ended.
        """
        final = call.permanent or (call.reading and isinstance(error, PipedistError)) or not _is_plain(error)
        return failures.describe(
            error,
            call=call.number,
            stage=call.stage,
            retryable=not final,
            in_user_code=call.in_user_code,
            aborted=aborted,
        )

    def unsendable(self, number: int, outcome: Outcome) -> CallFailure | None:
        """Return the failure of a call whose outcome can't be sent; None: it can."""
        for slot, value in outcome.items():
            try:
                encode(value)
            except UnsendableError as error:
                stage = self.stage_of(slot)
                told = UnsendableError(f"the result of stage {stage!r} can't be sent: {error}")
                return failures.describe(told, call=number, stage=stage, retryable=False, in_user_code=False)
        return None

    def close(self) -> None:
        """Let go of functions, instances and the reader's files."""
        self._stages.clear()
        self.finder.close()


_ABSENT = object()
"""Stands for the value of a stage that was not called."""


def _is_plain(error: BaseException) -> bool:
    """Whether it is an error, and no wish to end the process."""
    asyncio = sys.modules.get("asyncio")  # without it nobody raises its CancelledError
    return isinstance(error, Exception) or (asyncio is not None and isinstance(error, asyncio.CancelledError))


_DIGEST_BYTES = 16


class Digests(Struct, frozen=True):
    """What a value was.

    Args:
        leaves: digest of each leaf, by its path; "" of a bare one.
        structure: of the tree around them.
    """

    leaves: Mapping[str, bytes]
    structure: str


def digests_of(value: Tree) -> Digests:
    """Return the digests of a value as it is now: whoever holds it may change it later."""
    leaves, structure = trees.flatten(value)
    paths = trees.treedef_paths(structure)
    found = ((path, _digest(leaf)) for path, leaf in zip(paths, leaves, strict=True))
    return Digests({path: digest for path, digest in found if digest is not None}, trees.describe(structure))


def _digest(leaf: trees.Leaf) -> bytes | None:
    try:
        frames = encode(take_ownership([leaf])[0])
    except UnsendableError:
        return None
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for frame in frames:
        digest.update(frame)
    return digest.digest()


def check_same(first: Digests, second: Digests) -> None:
    """Compare two executions of a stage's function on one shard.

    Raises:
        NonDeterministicError: they differ; it names the first place, in the order of paths.
    """
    before, now = first.leaves, second.leaves
    for path in dict.fromkeys((*before, *now)):
        if before.get(path) != now.get(path):
            place = f"at {path!r} in its value" if path else "in its value"
            one = path not in before or path not in now
            raise NonDeterministicError(_text(f"{place}{', which one of them has not' if one else ''}"))
    if first.structure != second.structure:
        raise NonDeterministicError(_text(f"{first.structure} and then {second.structure}"))


def _text(where: str) -> str:
    return (
        f"two executions of this call gave different results, {where}: the function is not deterministic in "
        "(shard, with, ctx), so another run may give other results. Usual causes: clocks; random numbers "
        "that are not of ctx.rng; what one call leaves behind for the next, in globals or in an instance; "
        "the order of a set; threads"
    )
