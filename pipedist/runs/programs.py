"""Programs that workers execute for the passes of a plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pipedist.coordinator import GroupedByStep, Slots
from pipedist.core.types import FunctionRef, Tree
from pipedist.plan import DEFAULT_COLLECTIVES, PassPlan, Plan
from pipedist.plan.callables import exception_names
from pipedist.protocol.columns import SlotValues
from pipedist.protocol.limits import ELEMENTS_MAX, RESULT_OBJECTS_MAX
from pipedist.protocol.program import (
    OWN_STATE,
    Emit,
    JaxDevices,
    Program,
    ReaderConfig,
    StageProgram,
    StateValue,
)
from pipedist.reduction.tree import Reduction
from pipedist.spec import (
    GatherSpec,
    ReduceSpec,
    RunSpec,
    StageRef,
    StateRef,
    UpdateSpec,
    substitute,
)

_VALUE = "="  # prefix of the slot of a stage's whole value; stage names can't contain it

_STORED = "~"  # prefix of the slot of a run's value if it is worth storing for a reuse

COMBINED = "value"  # the slot of the value that a fold call returns

NEW = "new"  # the slot of the state that an update or an `init` function returns

FINISHED = "finished"  # the slot of the value that a `finish` returned

FINISH = ".finish"
"""The name of a `finish` in keys of calls, errors and timings is that of its stage and this; names have no dot."""

ENDS = "ends"  # the slot of the value that `until` returned


def slot_of(plan: Plan, name: str) -> str:
    """Return the slot of a stage's parts; equal values share one."""
    stage = plan.spec.stages[name]
    if name in plan.keyed:
        return name
    if isinstance(stage, RunSpec):
        return _VALUE + name
    if isinstance(stage, ReduceSpec) and stage.op is not None:
        return name
    return _VALUE + stage.of


def stored_slot(run: str) -> str:
    """Return the slot of a run's value in a list, which is empty if it is not worth storing."""
    return _STORED + run


def parts_of(slot: str, steps: Sequence[Sequence[Slots]]) -> Sequence[list[Tree]]:
    """Return the parts in a slot, for each step; stacked, if the results are.

    In a gang, empty shards are called too, but stages without collectives have no value there. Empty shards
    belong to the last replicas, so part r is always replica r's.
    """
    if type(steps) is GroupedByStep and type(steps.values) is SlotValues:
        has_slot = steps.values.slot == slot
        return GroupedByStep(steps.values.values, steps.replicas) if has_slot else [[] for _ in steps]
    if set(map(len, steps)) == {1}:  # one replica; as many inner loops would be most of the cost
        return [[slots[slot]] if slot in slots else [] for (slots,) in steps]
    return [[slots[slot] for slots in step if slot in slots] for step in steps]


def reduction_of(stage: ReduceSpec) -> Reduction:
    return Reduction.of(str(stage.op), stage.axis)


def pass_program(
    plan: Plan,
    pass_: PassPlan,
    reader: ReaderConfig,
    values: Mapping[str, Tree],
    streamed: Sequence[str],
    stored: Iterable[str] = (),
) -> Program:
    """Return the program that is executed on each shard of a pass.

    Args:
        values: the finished values of earlier phases, and the final states.
        streamed: stages whose values are sent back because they are streamed.
        stored: runs whose values are sent back to be stored for a reuse, if that is worth it.
    """
    spec = plan.spec
    index = {name: place for place, name in enumerate(pass_.runs)}
    index[pass_.root] = -1
    stages = []
    for name in pass_.runs:
        stage = spec.stages[name]
        if isinstance(stage, RunSpec):
            stages.append(
                StageProgram(
                    name,
                    plan.functions[name],
                    index[stage.of],
                    arguments(stage.with_, values),
                    collectives=bool(stage.collectives),
                    timeout_s=stage.timeout_s,
                    gpus=stage.gpus,
                    per_element=stage.per is not None,
                    ragged=stage.ragged,
                    concurrency=plan.calls_at_once(name) if stage.per else 0,
                    calls_per_s=stage.rate.calls / stage.rate.per_s if stage.rate else 0.0,
                    attempts=stage.retry.attempts if stage.retry else 1,
                    backoff_s=stage.retry.backoff_s if stage.retry else 0.0,
                    retry_on=exception_names(stage.retry.on) if stage.retry else (),
                    given_as=stage.as_,
                    quarantine=stage.on_error == "quarantine",
                )
            )
    emits = []
    whole = {*pass_.kept, *streamed} & {*pass_.runs}
    combined: set[str] = set()
    for name in pass_.folds:
        stage = spec.stages[name]
        if isinstance(stage, ReduceSpec) and stage.op is not None:
            reduction = reduction_of(stage)
            emits.append(Emit(name, index[stage.of], reduction.op.value, reduction.axis))
        elif name in plan.keyed:
            emits.append(Emit(name, index[stage.of], combine=plan.functions[name]))
        else:
            (combined if isinstance(stage, ReduceSpec) else whole).add(stage.of)
    for name in sorted(whole | combined):
        limit = RESULT_OBJECTS_MAX if name in whole else ELEMENTS_MAX
        emits.append(Emit(_VALUE + name, index[name], objects_max=limit))
    emits += [Emit(stored_slot(name), index[name], stored=True) for name in stored]
    kind = pass_.devices(spec)
    collectives = next(iter(pass_.communication(spec).values()), DEFAULT_COLLECTIVES)
    return Program(
        seed=spec.seed,
        replicas=spec.replicas,
        reader=reader,
        stages=tuple(stages),
        emits=tuple(emits),
        code=(str(spec.code),),
        threads=spec.threads_per_replica,
        verify=plan.verify,
        gang=pass_.gang,
        communication=(collectives.bytes_per_pack, collectives.timeout_s, collectives.implementation),
        jax=JaxDevices(kind, hosts=plan.hosts) if kind else None,
        fold=next(iter(pass_.folds), ""),
    )


def arguments(with_: Mapping[str, Tree], values: Mapping[str, Tree]) -> dict[str, Tree]:
    """Return the arguments of a stage: finished values, references to states."""

    def value_of(ref: StageRef | StateRef) -> Tree:
        is_changing = isinstance(ref, StateRef) and ref.name not in values
        return StateValue(ref.name) if is_changing else values[ref.name]

    return {name: substitute(value, value_of) for name, value in with_.items()}


def combine_program(plan: Plan, name: str) -> Program:
    """Return the program of a `combine` function, whose calls fold groups."""
    stage = StageProgram(name, plan.functions[name], -1, {}, "combine")
    return _alone(plan, (stage,), (Emit(COMBINED, 0, objects_max=ELEMENTS_MAX),), gang=False)


def init_program(plan: Plan, name: str, init: FunctionRef) -> Program:
    return _alone(
        plan, (StageProgram(name, init, -1, {}, "apply"),), (Emit(NEW, 0, objects_max=ELEMENTS_MAX),)
    )


def update_program(plan: Plan, name: str, values: Mapping[str, Tree]) -> Program:
    """Return the program of an update: (state, value) -> next state."""
    stage = plan.spec.stages[name]
    assert isinstance(stage, UpdateSpec)
    own = {OWN_STATE: StateValue(name)}
    kwargs = {**own, **arguments(stage.with_, values)}
    stages = [StageProgram(name, plan.functions[name], -1, kwargs, "update")]
    emits = [Emit(NEW, 0, objects_max=ELEMENTS_MAX)]
    until = plan.states[name].until
    if until is not None:
        stages.append(StageProgram(name, until, 0, {**own, **plan.states[name].until_arguments}, "update"))
        emits.append(Emit(ENDS, 1))
    return _alone(plan, tuple(stages), tuple(emits))


def finish_program(plan: Plan, name: str, values: Mapping[str, Tree]) -> Program:
    """Return the program of the `finish` of a stage; its calls get `((value,), {})`."""
    stage = plan.spec.stages[name]
    assert isinstance(stage, ReduceSpec | GatherSpec)
    kwargs = arguments(stage.with_, values)
    called = StageProgram(name + FINISH, plan.finishes[name], -1, kwargs, "apply", timeout_s=stage.timeout_s)
    return _alone(plan, (called,), (Emit(FINISHED, 0, objects_max=ELEMENTS_MAX),), gang=False)


def _alone(
    plan: Plan, stages: tuple[StageProgram, ...], emits: tuple[Emit, ...], *, gang: bool = True
) -> Program:
    """Return a program whose steps have one call."""
    return Program(
        seed=plan.spec.seed,
        replicas=1,
        reader=None,
        stages=stages,
        emits=emits,
        code=(str(plan.spec.code),),
        threads=plan.spec.threads_per_replica,
        verify=plan.verify,
        gang=gang,
    )


def retries_of(plan: Plan, pass_: PassPlan) -> dict[str, int]:
    """Return the number of retries of a call, by the stage that raised.

    "" stands for reading the shard, which precedes the first stage and serves all of them.
    """
    stages = {name: plan.spec.stages[name] for name in pass_.runs}
    retries = {name: stage.retries for name, stage in stages.items() if isinstance(stage, RunSpec)}
    return {"": max(retries.values(), default=0), **retries}


def quarantine_of(plan: Plan, pass_: PassPlan) -> frozenset[str]:
    """Return the stages whose failures quarantine the culprits."""
    stages = {name: plan.spec.stages[name] for name in pass_.runs}
    return frozenset(n for n, s in stages.items() if isinstance(s, RunSpec) and s.on_error == "quarantine")
