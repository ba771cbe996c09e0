"""Execution of calls: a pass's program, applied to one shard at a time.

Each call runs the program's stages in order; `pipedist.worker.outcomes` collects the values that it sends back.
`pipedist.worker.lease_run` orders the calls of a lease, `pipedist.worker.gangs` those of a gang. In a gang, a
shard may be empty: only stages that call collectives are called with it, and the outcome lacks the values of the
others.

With `--verify`, each call is executed twice: see `pipedist.worker.verification`.
"""

from __future__ import annotations

import contextvars
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from operator import lt
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from pipedist.core.platform_id import process_usage
from pipedist.core.types import Tree
from pipedist.errors import PipedistError
from pipedist.protocol.program import Emit, Program
from pipedist.worker import failures, process_setup
from pipedist.worker.array_isolation import as_readonly
from pipedist.worker.context import ReplicaContext, current
from pipedist.worker.failures import CallFailure
from pipedist.worker.inputs import FinishedElements, LeaseShards, Shard, ShardFinder, States
from pipedist.worker.log_forwarding import importer
from pipedist.worker.outcomes import ABSENT, VALUES, OutcomeBuilder, Result
from pipedist.worker.plain_calls import PlainCalls
from pipedist.worker.progress import StageClock
from pipedist.worker.stages import Call, GangCallContext, Stage

if TYPE_CHECKING:
    from pipedist.worker.variables.replica import ReplicaVariable
    from pipedist.worker.verification import Digests
    from pipedist.worker.waiting_calls import OnRetry, WaitingStage, WorkerShare


class PassExecutor:
    """Executes calls of one pass; `threads` is this process's number of BLAS and OpenMP threads."""

    def __init__(
        self,
        program: Program,
        threads: int,
        clock: StageClock | None = None,
        on_retry: OnRetry = lambda _stage, _call, _attempt, _timed_out, _text: None,
    ) -> None:
        self.program = program
        self.clock = clock or StageClock()
        self._threads = threads
        self._on_retry = on_retry
        self._stages = [Stage(stage, program.code) for stage in program.stages]
        self._records_stage = len(self._stages) > 1 or any(stage.limit_ns for stage in self._stages)
        """Whether to record the running stage (needed if there are several, or any has a timeout)."""
        self.reads_states = (
            True  # whether states are set that a lease without any must remove; True: not known
        )
        self.finder = ShardFinder(program.reader, program.replicas, program.code)
        self.outcomes = OutcomeBuilder(program)
        self._times_stages = self.outcomes.stores or len(self._stages) > 1
        self._stages_s = [0.0] * len(self._stages)  # since `take_costs`
        self.loaded_at_cpu_ns = 0  # the processor time of the process when it had imported the functions
        self._first_stage = program.first_stage
        readers = [stage.of for stage in program.stages]
        self._limited = [stage.name for stage in program.stages if stage.is_limited]
        self._quota, self._sharing = (0,) * len(self._limited), 1  # until `use_quota`
        self._quota_is_unmet = False  # whether it is lower than before, and was not confirmed
        self._waiting_stages: dict[str, WaitingStage] = {}
        self.calls_overlap: bool | None = None
        """Whether calls of a lease may overlap; None until all functions are loaded."""
        self.plain_calls: PlainCalls | None = None  # from then on, if the program is plain
        self.waits = any(stage.waits for stage in self._stages)
        """Whether its calls are tasks of an event loop, because they wait for elements, attempts or a rate."""
        self._shard_is_shared = (readers + [emit.of for emit in program.emits]).count(-1) > 1
        self._is_step = (
            readers == [-1]
            and program.gang
            and program.reader is None
            and program.threads == threads
            and not (self._shard_is_shared or self._records_stage or self.outcomes.stores or program.verify)
        )
        """Whether a call is one function of values that came with its lease: a step of a training loop."""

    def call(self, number: int, gang: GangCallContext | None = None) -> Call:
        return Call(number, *divmod(number, self.program.replicas), self._first_stage, gang)

    def use(
        self, states: States, values: Mapping[str, Tree], variables: Mapping[str, ReplicaVariable] = {}
    ) -> None:
        """Set the states that the next leases read, and their values by name, those of variables again."""
        self.reads_states = bool(states)
        for stage in self._stages:
            stage.use(states, values, variables)

    def overlaps(self, call: Call) -> bool:
        """Load the functions; return whether calls may overlap.

        Output of the imported modules belongs to `call`, the first one. The calls raise errors of loading.
        """
        for stage in self._stages:
            try:
                self._load(stage, call)
            except BaseException:  # each call raises and reports it, under its own number
                return False
        self.calls_overlap = any(s.is_async for s in self._stages) and not any(
            s.is_class and s.is_async for s in self._stages
        )
        if not self.calls_overlap and self._is_plain():
            self.plain_calls = PlainCalls(self.program, self._stages[0], self.outcomes)
        return self.calls_overlap

    def _is_plain(self) -> bool:
        """Return whether the program is one function of the shard, whose whole value is sent."""
        if len(self._stages) != 1 or self.outcomes.sole is None:
            return False
        stage, program = self._stages[0], self.program
        return (
            stage.takes_shard_only
            and program.threads == self._threads
            and not (self._shard_is_shared or self.waits or self.outcomes.stores or program.verify)
            and not (stage.collectives or stage.limit_ns)
        )

    def use_quota(self, calls: tuple[int, ...], sharing: int) -> None:
        """Set how much of the limits of stages the calls may use; see `messages.Quota`."""
        self._quota_is_unmet = sharing > 0 and (self._quota_is_unmet or any(map(lt, calls, self._quota)))
        self._quota, self._sharing = calls, sharing
        for waiting in self._waiting_stages.values():
            self._set_share(waiting.share)

    def _set_share(self, share: WorkerShare) -> None:
        share.use(dict(zip(self._limited, self._quota, strict=False)).get(share.stage.name, 0), self._sharing)

    def quota_met(self) -> tuple[int, ...] | None:
        """Return a quota that is lower than before, once no more calls run than it allows."""
        shares = [waiting.share for waiting in self._waiting_stages.values()]
        if not self._quota_is_unmet or any(share.running > share.calls_max for share in shares):
            return None
        self._quota_is_unmet = False
        return self._quota

    def _waiting(self, stage: Stage) -> WaitingStage:
        if stage.name not in self._waiting_stages:
            from pipedist.worker.waiting_calls import WaitingStage  # most workers have no such stage

            waiting = WaitingStage(stage, self.program.seed, self.clock, self._on_retry)
            self._set_share(waiting.share)
            self._waiting_stages[stage.name] = waiting
        return self._waiting_stages[stage.name]

    def _load(self, stage: Stage, call: Call) -> None:
        if stage.is_loaded:
            return
        token = importer.set((stage.name, call.step, call.replica))
        try:
            stage.load()
        finally:
            importer.reset(token)
        self.loaded_at_cpu_ns = process_usage()[1]

    def run(self, call: Call, shards: LeaseShards, wait: Callable[[Awaitable[Any]], Any]) -> Result:
        """Execute one call in this thread; return its outcome, which no other code can change.

        `wait` waits for an awaitable that an async function returned, and returns its result.
        """
        if self.waits and call.gang is None:
            result: Result = wait(self.run_among_others(call, shards))
            return result
        if self._is_step and not (stage := self._stages[0]).is_class:
            value = shards.value(call.number)
            if type(value) is list:
                return self._run_steps(stage, call, value, wait)
            if stage.is_loaded:
                return self._run_step(stage, call, value, wait)
        shard = self._find(call, shards)
        empty = call.gang is not None and self.finder.is_empty(shard)
        values = self._values(call, shard, empty, wait)
        if self.program.verify:
            first = self._digests(values)
            del values
            values = self._values(call, shard, empty, wait)
            self._check_same(call, first, values)
        return self.outcomes.collect(call, shard.value, values, empty=empty)

    def _run_step(
        self, stage: Stage, call: Call, value: Tree, wait: Callable[[Awaitable[Any]], Any]
    ) -> Result:
        """Do what `run` does, of which a step needs little: the rest would be most of a short step."""
        ctx = self._context(stage, call, _NO_SHARD, None)
        token = current.set(ctx)
        call.in_user_code = True
        try:
            box = [stage.call(value, ctx, call.replica)]
            if (kind := type(box[0])) not in VALUES and hasattr(kind, "__await__"):
                box[0] = wait(box[0])
            box[0] = self._end(call, box[0])  # a variable in the result has its value here
        finally:
            if process_setup.is_copy:
                process_setup.end_copy(stage.name)
            current.reset(token)
        gang, sole = call.gang, self.outcomes.sole
        if sole is None or gang is None:
            return self.outcomes.collect(call, None, [box.pop()], empty=False)
        call.permanent = True
        return self.outcomes.of_step(box, sole, gang.variables)

    def _run_steps(
        self, stage: Stage, call: Call, values: list[Tree], wait: Callable[[Awaitable[Any]], Any]
    ) -> Result:
        """Execute several steps of a replica, one after the other; return the results of those before the first that
        raised, called a collective, or has no result that can be sent. The driver has that one executed alone.
        """
        first, gang, results, size = call.step, call.gang, list[Tree](), 0
        slot = self.outcomes.sole_slot  # there is one: such steps have no variables
        assert gang is not None
        try:
            if not stage.is_loaded:
                self._load(stage, call)
            for place, value in enumerate(values):
                call.step = first + place
                alone = AloneOnly(stage.is_async)
                call.gang = replace(gang, collectives=alone.of)
                context = contextvars.copy_context()  # as each step alone has
                owned, bytes_ = context.run(self._run_step, stage, call, value, wait)
                if alone.was_called:
                    break
                results.append(owned[slot])
                size += bytes_
        except BaseException:  # executed again, alone, it is an outcome
            pass
        call.gang, call.permanent = gang, False
        return {slot: results}, size

    @property
    def plain_step(self) -> tuple[Stage, Emit] | None:
        """The function of its steps and what it emits, if they need no general run; see `worker.prepared_step`."""
        sole = self.outcomes.sole
        if not self._is_step or sole is None:
            return None
        stage = self._stages[0]
        return (stage, sole) if stage.is_loaded and not (stage.is_class or stage.is_async) else None

    def _values(
        self, call: Call, shard: Shard, empty: bool, wait: Callable[[Awaitable[Any]], Any]
    ) -> list[Tree]:
        values: list[Tree] = []
        for stage in self._stages:
            if empty and (not stage.collectives or (stage.of >= 0 and values[stage.of] is ABSENT)):
                values.append(ABSENT)
                continue
            ctx = self._enter(stage, len(values) + 1, call, shard)
            token = current.set(ctx)
            began = time.monotonic() if self._times_stages else 0.0
            try:
                result = self._begin(stage, call, shard, values, ctx)
                if hasattr(type(result), "__await__"):
                    result = wait(result)
                call.in_user_code = False
                values.append(result if call.gang is None else self._end(call, result))
                if self._times_stages:
                    self._count_time(call, len(values) - 1, began)
                del result  # `take_ownership` would count it as another reference
            finally:
                if process_setup.is_copy:
                    process_setup.end_copy(stage.name)
                if stage.limit_ns:
                    self.clock.stop(call.number)
                current.reset(token)
        return values

    def run_at_once(
        self,
        calls: Sequence[Call],
        shards: LeaseShards,
        execute: Callable[[Stage, Sequence[Tree]], Sequence[Tree]],
    ) -> list[Result]:
        """Execute calls of a gang together.

        `execute` calls a stage's function on the values of all of them, and returns the results.
        """
        found = [self._find(call, shards) for call in calls]
        values = self._values_at_once(calls, found, execute)
        if self.program.verify:
            first = [self._digests(own) for own in values]
            values = self._values_at_once(calls, found, execute)
            for call, before, own in zip(calls, first, values, strict=True):
                self._check_same(call, before, own)
        return [
            self.outcomes.collect(call, shard.value, own, empty=False)
            for call, shard, own in zip(calls, found, values, strict=True)
        ]

    def _values_at_once(
        self,
        calls: Sequence[Call],
        found: Sequence[Shard],
        execute: Callable[[Stage, Sequence[Tree]], Sequence[Tree]],
    ) -> list[list[Tree]]:
        values: list[list[Tree]] = [[] for _ in calls]
        for place, stage in enumerate(self._stages):
            inputs: list[Tree] = []
            for call, shard, own in zip(calls, found, values, strict=True):
                self._prepare(stage, place + 1, call)
                inputs.append(self._input(stage, shard, own))
                call.in_user_code = True
            for call, own, result in zip(calls, values, execute(stage, inputs), strict=True):
                own.append(self._end(call, result))
        return values

    async def run_among_others(self, call: Call, shards: LeaseShards) -> Result:
        """Execute one call outside of a gang, as a task of the running loop; see `run`."""
        shard = self._find(call, shards)
        finished = {} if self.program.verify else shards.finished(call.number)
        values = await self._values_among_others(call, shard, finished)
        if self.program.verify:
            first = self._digests(values)
            del values
            values = await self._values_among_others(call, shard, finished)
            self._check_same(call, first, values)
        return self.outcomes.collect(call, shard.value, values, empty=False)

    async def _values_among_others(self, call: Call, shard: Shard, finished: FinishedElements) -> list[Tree]:
        """Return the values of the stages; `finished` has elements that need no execution."""
        values: list[Tree] = []
        for place, stage in enumerate(self._stages):
            call.place = place + 1
            self._enter(stage, call.place if call.lease else 0, call, shard)
            began = time.monotonic() if self._times_stages else 0.0
            value = self._input(stage, shard, values)
            context = partial(self._context, stage, call, shard)
            if stage.program.per_element:
                done = {element: found for (at, element), found in finished.items() if at == place}
                result = await self._waiting(stage).elements(call, shard.elements, value, done, context)
            else:
                result = await self._waiting(stage).attempts(call, value, partial(context, shard.elements))
            values.append(self._end(call, result))
            if self._times_stages:
                self._count_time(call, place, began)
            del result
        return values

    def _count_time(self, call: Call, place: int, began: float) -> None:
        seconds = time.monotonic() - began
        self._stages_s[place] += seconds
        call.seconds.append(seconds)

    def take_costs(self) -> tuple[int, tuple[int, ...]]:
        """Return the time for reading and, in a program of several stages, in each since the last time; nanoseconds."""
        reading_ns, self.finder.reading_ns = self.finder.reading_ns, 0
        if len(self._stages) < 2:
            return reading_ns, ()
        stages_ns = tuple(int(seconds * 1e9) for seconds in self._stages_s)
        self._stages_s = [0.0] * len(self._stages)
        return reading_ns, stages_ns

    @staticmethod
    def _digests(values: list[Tree]) -> list[Digests]:
        from pipedist.worker.verification import digests_of  # few runs verify

        return [digests_of(None if value is ABSENT else value) for value in values]

    def _check_same(self, call: Call, first: list[Digests], values: list[Tree]) -> None:
        from pipedist.worker.verification import check_same  # loaded already

        call.permanent = True
        for stage, before, now in zip(self._stages, first, self._digests(values), strict=True):
            call.stage = stage.name
            check_same(before, now)
        call.permanent = False

    def _find(self, call: Call, shards: LeaseShards) -> Shard:
        if self.program.threads != self._threads:
            call.permanent = True
            raise PipedistError(
                f"the spec requires threads_per_replica: {self.program.threads}, but this worker was started "
                f"with {self._threads}, which can change bits: start workers with the number in the spec"
            )
        call.reading = True
        shard = shards.find(call.number)
        call.reading = False
        return shard

    def _enter(self, stage: Stage, number: int, call: Call, shard: Shard) -> ReplicaContext:
        """Prepare the function of stage `number`, from 1; return its context."""
        self._prepare(stage, number, call)
        return self._context(stage, call, shard, shard.elements)

    def _prepare(self, stage: Stage, number: int, call: Call) -> None:
        call.stage = stage.name
        if self._records_stage:
            self.clock.enter(number)
        if not stage.is_loaded:
            call.permanent = True
            self._load(stage, call)
            call.permanent = False

    def _context(
        self,
        stage: Stage,
        call: Call,
        shard: Shard,
        elements: range | NDArray[np.int64] | None,
        element: int | None = None,
    ) -> ReplicaContext:
        gang = call.gang
        ctx = ReplicaContext(
            call.replica,
            self.program.replicas,
            call.step,
            shard.epoch,
            stage.name,
            elements,
            self.program.seed,
            gang.collectives(stage.is_async) if gang is not None and stage.collectives else None,
            element=element,
        )
        ctx.device = stage.device
        if gang is not None:
            ctx.device = gang.device or stage.device
            ctx.variables = gang.variables
        return ctx

    def _begin(self, stage: Stage, call: Call, shard: Shard, values: list[Tree], ctx: ReplicaContext) -> Any:
        """Call a stage's function; return its result, or an awaitable of it."""
        call.in_user_code = True
        owner = 0 if call.gang is None else call.replica
        if stage.is_class:
            stage.make_instance(owner)
        value = self._input(stage, shard, values)
        if stage.limit_ns:
            self.clock.start(call.number, len(values) + 1, stage.limit_ns)
        return stage.call(value, ctx, owner)

    def _input(self, stage: Stage, shard: Shard, values: list[Tree]) -> Tree:
        if stage.of >= 0:
            return as_readonly(values[stage.of])
        return as_readonly(shard.value) if self._shard_is_shared else shard.value

    def _end(self, call: Call, result: Tree) -> Tree:
        call.in_user_code = False
        if call.gang is None or call.gang.variables is None:
            return result
        from pipedist.worker.variables.access import plain  # loaded already: there are variables

        return plain(result)

    def failure(self, call: Call, error: BaseException, *, aborted: bool = False) -> CallFailure:
        """Return the failure of a call that raised, or whose gang another call has ended."""
        final = call.permanent or (call.reading and isinstance(error, PipedistError)) or not _is_plain(error)
        return failures.describe(
            error,
            call=call.number,
            stage=call.stage,
            retryable=not final,
            in_user_code=call.in_user_code,
            aborted=aborted,
            culprits=call.culprits,
        )

    def close(self) -> None:
        self._stages.clear()
        self.finder.close()


class NeedsOthers(BaseException):
    """A collective was called in one of several steps that are executed without the other replicas."""


class AloneOnly:
    """The collectives of a step that is executed without the other replicas: none."""

    def __init__(self, is_async: bool) -> None:
        self.is_async = is_async
        self.was_called = False

    def of(self, _is_async: bool) -> AloneOnly:
        return self

    def call(self, _request: object) -> Any:
        self.was_called = True
        raise NeedsOthers("this step is executed again, with the other replicas")


_NO_SHARD = Shard(None, None, 0)


def _is_plain(error: BaseException) -> bool:
    """Return whether it is an error, not a request to end the process."""
    asyncio = sys.modules.get("asyncio")  # not loaded: nothing raises its CancelledError
    return isinstance(error, Exception) or (asyncio is not None and isinstance(error, asyncio.CancelledError))
