"""Executes one call as a worker does, in this process, and keeps its exception alive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import msgspec
from msgspec import Struct

from pipedist.core.types import Tree
from pipedist.errors import CollectiveTimeoutError, LocalProtocolError, PipedistError
from pipedist.plan import Plan
from pipedist.protocol.codec import Frame, encode
from pipedist.protocol.program import Program, Shards, from_frames, load_tree, to_frames
from pipedist.runs.programs import NEW, init_program, reduction_of
from pipedist.spec import ReduceSpec, StageSpec
from pipedist.worker.execution import Call, Outcome, PassExecutor, Result
from pipedist.worker.failures import CallFailure
from pipedist.worker.inputs import LeaseShards
from pipedist.worker.lease_run import LeaseRun, PersistentLoop, cancel_tasks

_SLICE_S, _SLICE_BYTES = 1e6, 2**62
"""A slice that nothing exceeds."""


class LoneCall(Struct, frozen=True):
    """What is executed.

    Args:
        stage: whose value is asked for.
        slot: where that is.
        program: of the pass; it emits that value too.
        emitted: the slots that the call sends back to its run.
        lo, hi: the calls: one, or all of a gang's step.
        number: the one that is asked for.
        shards: of calls [lo, hi).
        states: value of each state that they read.
    """

    stage: StageSpec
    slot: str
    program: Program
    emitted: frozenset[str]
    lo: int
    hi: int
    number: int
    shards: Shards
    states: Mapping[str, Tree]


class Replayed(Struct, frozen=True):
    """What came of a call.

    Args:
        has_value: the stage was called; in a gang, not every stage is with an empty shard.
        value: what the stage returned; of a reduce, the call's part of it.
        failure: as a worker tells it; None: the call returned.
        error: the exception, with its traceback; None where there is none to be had.
        culprit: the replica that failed: the call's own, or one of its gang's.
    """

    has_value: bool
    value: Tree = None
    failure: CallFailure | None = None
    error: BaseException | None = None
    culprit: int = 0


class _Witness(PassExecutor):
    """Keeps the exceptions that its calls raised."""

    def __init__(self, program: Program) -> None:
        super().__init__(program, program.threads)
        self.errors: dict[int, BaseException] = {}
        self.waiting: dict[int, Call] = {}

    def failure(self, call: Call, error: BaseException, *, aborted: bool = False) -> CallFailure:
        """As `PassExecutor`."""
        self.errors[call.number] = error
        return super().failure(call, error, aborted=aborted)

    async def run_among_others(self, call: Call, shards: LeaseShards) -> Result:
        """As `PassExecutor`; keeps where a call that was waiting has been cancelled."""
        try:
            return await super().run_among_others(call, shards)
        except BaseException as error:
            self.waiting[call.number], self.errors[call.number] = call, error
            raise


def execute(lone: LoneCall) -> Replayed:
    """Execute a call, and of a gang its whole step."""
    with ExitStack() as stack:
        executor = _Witness(from_frames(_received(to_frames(lone.program))))
        stack.callback(executor.close)
        told = lone.shards
        fields = [told.ids, told.locations, told.values, told.states]
        shards = Shards(*load_tree(_received(encode(fields)), "the arguments of this call"))
        executor.use(shards.states or {}, lone.states)
        outcomes, failures = _run(executor, shards, lone, stack)
        for number in [n for n in outcomes if not failures]:
            sent = {slot: value for slot, value in outcomes[number].items() if slot in lone.emitted}
            if (failure := executor.unsendable(number, sent)) is not None:
                failures[number] = failure
        if failures:
            own = failures.get(lone.number)
            guilty = own
            if own is None or own.aborted:
                guilty = next(
                    (f for f in failures.values() if not f.aborted), own or next(iter(failures.values()))
                )
            assert guilty is not None  # one of those that are there
            replica = guilty.call % lone.program.replicas
            return Replayed(False, None, guilty, executor.errors.get(guilty.call), replica)
        return _value(lone, outcomes[lone.number])


def _received(frames: list[Frame]) -> list[memoryview]:
    """Return frames as they come out of a socket: read-only."""
    return [memoryview(frame).toreadonly() for frame in frames]


def _run(
    executor: _Witness, shards: Shards, lone: LoneCall, stack: ExitStack
) -> tuple[dict[int, Outcome], dict[int, CallFailure]]:
    loop = PersistentLoop()
    stack.callback(loop.close)
    run: Any = None
    if lone.program.gang:
        run = _gang_run(executor, loop, shards, lone, stack)
    else:
        run = LeaseRun(executor, loop, shards, lone.lo, lone.hi, _ignore)
    outcomes: dict[int, Outcome] = {}
    failures: dict[int, CallFailure] = {}
    while len(outcomes) + len(failures) < lone.hi - lone.lo:
        try:
            failure = run.advance(_SLICE_S, _SLICE_BYTES)
        except KeyboardInterrupt as interrupt:  # Ctrl-C, while an async function waits for something
            loop.run(_end_tasks())
            call = executor.waiting.get(lone.number)
            if call is None:
                raise
            where = executor.errors[lone.number].__traceback__
            return {}, {lone.number: executor.failure(call, interrupt.with_traceback(where))}
        taken = run.take()
        outcomes.update(enumerate(taken.outcomes, taken.lo))
        if failure is not None:
            failures[failure.call] = failure
            run.skip()
    return outcomes, failures


async def _end_tasks() -> None:
    import asyncio  # loaded already: there are async functions

    await cancel_tasks([task for task in asyncio.all_tasks() if task is not asyncio.current_task()])


def _gang_run(
    executor: _Witness, loop: PersistentLoop, shards: Shards, lone: LoneCall, stack: ExitStack
) -> Any:
    """Return the run of a gang that has one member: all replicas are threads of this process."""
    from pipedist.protocol.messages import AssignGang
    from pipedist.worker.gangs import GangRunFactory
    from pipedist.worker.relay_channel import RelayBuffer

    gangs = GangRunFactory(_Nobody(), loop)
    stack.callback(gangs.close)
    assigned = AssignGang(0, 0, lone.lo, lone.hi, 0, 0, 0, 1, "")
    return gangs.new_run(
        assigned, executor, shards, RelayBuffer(), bound=None, begin=_ignore, on_success=_do_nothing
    )


def _ignore(_call: int) -> None:
    """Nobody wants to know which call runs."""


def _do_nothing() -> None:
    """Nothing is kept for a step that follows."""


class _Nobody:
    """Stands for the scheduler, whom a gang of one member has nothing to tell."""

    def contribute(self, lease: int, number: int, payload: Sequence[Frame]) -> None:
        """There are no others."""
        raise LocalProtocolError("a gang of one member brings nothing")

    def listen(self, lease: int, timeout_s: float) -> None:
        """There are no others."""
        raise LocalProtocolError("a gang of one member waits for nobody")

    def report_stalled(self, lease: int, members: tuple[int, ...], text: str) -> None:
        """A collective has waited too long for a replica: that is what its call fails with."""
        raise CollectiveTimeoutError(text)


def _value(lone: LoneCall, outcome: Outcome) -> Replayed:
    slot = lone.slot
    if slot not in outcome:
        return Replayed(False)
    value = outcome[slot]
    if isinstance(lone.stage, ReduceSpec) and lone.stage.op is not None:
        value = reduction_of(lone.stage).finish(value)
    return Replayed(True, value)


def first_value(plan: Plan, name: str) -> Tree:
    """Return the first version of a state.

    Raises:
        PipedistError: the function that makes it failed.
    """
    planned = plan.states[name]
    if planned.init is None:
        return planned.value
    program = msgspec.structs.replace(init_program(plan, name, planned.init), gang=False)
    shards = Shards(values=[((), dict(planned.arguments))])
    made = execute(LoneCall(plan.spec.stages[name], NEW, program, frozenset([NEW]), 0, 1, 0, shards, {}))
    if made.failure is not None:
        raise PipedistError(
            f"the first value of state {name} can't be made: {made.failure.text}"
        ) from made.error
    return made.value
