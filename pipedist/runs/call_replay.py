"""Executes one call in this process, as a worker does.

The exception of the call is kept, with its traceback.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import msgspec
from msgspec import Struct

from pipedist.core.types import Tree
from pipedist.errors import CollectiveTimeoutError, LocalProtocolError, PipedistError, UsageError
from pipedist.plan import Plan
from pipedist.protocol.codec import Frame, encode
from pipedist.protocol.program import Program, Shards, from_frames, load_tree, to_frames
from pipedist.runs.programs import FINISHED, NEW, init_program, reduction_of
from pipedist.spec import ReduceSpec, StageSpec
from pipedist.worker.devices import DevicesUnseen
from pipedist.worker.execution import PassExecutor
from pipedist.worker.failures import CallFailure
from pipedist.worker.inputs import LeaseShards
from pipedist.worker.lease_run import LeaseRun, PersistentLoop, cancel_tasks
from pipedist.worker.leases import gang_run_of
from pipedist.worker.outcomes import Outcome, Result
from pipedist.worker.stages import Call

_SLICE_S, _SLICE_BYTES = 1e6, 2**62  # limits of a slice that no call exceeds


class CallReplay(Struct, frozen=True):
    """The program and inputs of a call to execute.

    Args:
        slot: the slot of the wanted value; the program of the pass emits it too.
        emitted: the slots that the call sends back in the run.
        lo, hi: the calls: one, or all of a gang's step.
        number: the number of the wanted call.
        shards: the shards of calls [lo, hi).
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
    """The outcome of a replayed call.

    Args:
        has_value: whether the stage was called; in a gang, some stages skip empty shards.
        value: the value that the stage returned; for a reduce, the call's part.
        failure: the failure as a worker reports it.
        error: the exception with its traceback, None if it is not available.
        culprit: the replica that failed: the call's own, or another one of its gang.
    """

    has_value: bool
    value: Tree = None
    failure: CallFailure | None = None
    error: BaseException | None = None
    culprit: int = 0


class _RecordingExecutor(PassExecutor):
    """An executor that keeps the exceptions of its calls."""

    def __init__(self, program: Program) -> None:
        super().__init__(program, program.threads)
        self.errors: dict[int, BaseException] = {}
        self.waiting: dict[int, Call] = {}

    def failure(self, call: Call, error: BaseException, *, aborted: bool = False) -> CallFailure:
        self.errors[call.number] = error
        return super().failure(call, error, aborted=aborted)

    async def run_among_others(self, call: Call, shards: LeaseShards) -> Result:
        """Execute a call, and keep the place where it was cancelled."""
        try:
            return await super().run_among_others(call, shards)
        except BaseException as error:
            self.waiting[call.number], self.errors[call.number] = call, error
            raise


def execute(replay: CallReplay) -> Replayed:
    """Execute a call; for a gang, execute the whole step."""
    with ExitStack() as stack:
        executor = _RecordingExecutor(from_frames(_received(to_frames(replay.program))))
        stack.callback(executor.close)
        sent = replay.shards
        fields = [sent.ids, sent.locations, sent.values, sent.states]
        shards = Shards(*load_tree(_received(encode(fields)), "the arguments of this call"))
        executor.use(shards.states or {}, replay.states)
        executor.use_quota(executor.program.limits, 1)
        outcomes, failures = _run(executor, shards, replay, stack)
        for number in [n for n in outcomes if not failures]:
            emitted = {slot: value for slot, value in outcomes[number].items() if slot in replay.emitted}
            if (failure := executor.outcomes.unsendable(number, emitted)) is not None:
                failures[number] = failure
        if failures:
            own = [failures[replay.number]] if replay.number in failures else []
            found = [*own, *failures.values()]
            reported = next((failure for failure in found if not failure.aborted), found[0])
            replica = reported.call % replay.program.replicas
            return Replayed(False, None, reported, executor.errors.get(reported.call), replica)
        outcome = outcomes[replay.number]
        if replay.slot not in outcome:
            return Replayed(False)
        value = outcome[replay.slot]
        stage = replay.stage
        if isinstance(stage, ReduceSpec) and stage.op is not None and replay.slot != FINISHED:
            value = reduction_of(stage).finish(value)
        return Replayed(True, value)


def _received(frames: list[Frame]) -> list[memoryview]:
    """Return frames as a socket returns them: read-only."""
    return [memoryview(frame).toreadonly() for frame in frames]


def _run(
    executor: _RecordingExecutor, shards: Shards, replay: CallReplay, stack: ExitStack
) -> tuple[dict[int, Outcome], dict[int, CallFailure]]:
    loop = PersistentLoop()
    stack.callback(loop.close)
    run: Any = None
    if replay.program.gang:
        run = _gang_run(executor, loop, shards, replay, stack)
    else:
        run = LeaseRun(executor, loop, shards, replay.lo, replay.hi, lambda _: None)
    outcomes: dict[int, Outcome] = {}
    failures: dict[int, CallFailure] = {}
    while len(outcomes) + len(failures) < replay.hi - replay.lo:
        try:
            failure = run.advance(_SLICE_S, _SLICE_BYTES)
        except KeyboardInterrupt as interrupt:  # Ctrl-C while an async function is waiting
            loop.run(_end_tasks())
            call = executor.waiting.get(replay.number)
            if call is None:
                raise
            where = executor.errors[replay.number].__traceback__
            return {}, {replay.number: executor.failure(call, interrupt.with_traceback(where))}
        taken = run.take()
        outcomes.update(enumerate(taken.outcomes, taken.lo))
        if failure is not None:
            failures[failure.call] = failure
            run.skip()
    return outcomes, failures


async def _end_tasks() -> None:
    import asyncio  # already loaded if there are async functions

    await cancel_tasks([task for task in asyncio.all_tasks() if task is not asyncio.current_task()])


def _gang_run(
    executor: _RecordingExecutor, loop: PersistentLoop, shards: Shards, replay: CallReplay, stack: ExitStack
) -> Any:
    """Return the run of a gang whose replicas are all in this process."""
    from pipedist.protocol.messages import AssignGang
    from pipedist.worker.gangs import GangRunFactory
    from pipedist.worker.relay_channel import RelayBuffer

    gangs = GangRunFactory(_NullScheduler(), loop)
    stack.callback(gangs.close)
    assigned = AssignGang(0, 0, replay.lo, replay.hi, 0, 0, 0, 1, "")
    try:
        return gangs.new_run(
            assigned,
            executor,
            shards,
            RelayBuffer(),
            bound=None,
            begin=lambda _: None,
            on_success=lambda: None,
            kind=gang_run_of(replay.program.jax is not None),
        )
    except DevicesUnseen as error:
        count = replay.program.replicas
        raise UsageError(
            f"the call needs other devices than this process has opened ({error}), because a module of the spec uses "
            f"jax when it is imported. Set XLA_FLAGS=--xla_force_host_platform_device_count={count}"
            if replay.program.jax is not None
            else str(error)
        ) from None


class _NullScheduler:
    """A null object in place of the scheduler, for a gang with one member."""

    def contribute(self, lease: int, number: int, payload: Sequence[Frame]) -> None:
        raise LocalProtocolError("a gang of one member sends no data")

    def listen(self, lease: int, timeout_s: float) -> None:
        raise LocalProtocolError("a gang of one member does not wait for data")

    def report_stalled(self, lease: int, members: tuple[int, ...], text: str) -> None:
        raise CollectiveTimeoutError(text)


def first_value(plan: Plan, name: str) -> Tree:
    planned = plan.states[name]
    if planned.init is None:
        return planned.value
    program = msgspec.structs.replace(init_program(plan, name, planned.init), gang=False)
    shards = Shards(values=[((), dict(planned.arguments))])
    made = execute(CallReplay(plan.spec.stages[name], NEW, program, frozenset([NEW]), 0, 1, 0, shards, {}))
    if made.failure is not None:
        raise PipedistError(
            f"can't make the first value of state {name}: {made.failure.text}"
        ) from made.error
    return made.value
