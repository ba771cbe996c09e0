"""What workers are told about the passes of a plan: programs, the slots of their results, retries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipedist.coordinator import Slots
from pipedist.core.types import FunctionRef, Tree
from pipedist.plan import DEFAULT_COLLECTIVES, PassPlan, Plan
from pipedist.protocol.program import OWN_STATE, Emit, Program, ReaderConfig, StageProgram, StateValue
from pipedist.reduction.tree import Reduction
from pipedist.spec import (
    ReduceSpec,
    RunSpec,
    StageRef,
    StageSpec,
    StateRef,
    UpdateSpec,
    substitute,
)

_VALUE = "="
"""Marks the slot of a stage's whole value; no stage's name contains it."""

COMBINED = "value"
"""The slot of what a fold call sends back."""

NEW = "new"
"""The slot of the state that an update, or what makes the first one, sends back."""

ENDS = "ends"
"""The slot of what `until` returned."""


def slot_of(name: str, stage: StageSpec) -> str:
    """Return the slot in which a stage's parts come: partials have their own, values share one."""
    if isinstance(stage, RunSpec):
        return _VALUE + name
    if isinstance(stage, ReduceSpec) and stage.op is not None:
        return name
    return _VALUE + stage.of


def parts_of(slot: str, steps: Sequence[Sequence[Slots]]) -> list[list[Tree]]:
    """Return what the calls of some steps sent back in a slot.

    In a gang, empty shards are called too: what stages without collectives give is absent there. Empty
    shards are those of the last replicas, so part r is replica r's.
    """
    return [[slots[slot] for slots in step if slot in slots] for step in steps]


def reduction_of(stage: ReduceSpec) -> Reduction:
    """Return the reduction of a stage with a built-in op."""
    return Reduction.of(str(stage.op), stage.axis)


def pass_program(
    plan: Plan, pass_: PassPlan, reader: ReaderConfig, values: Mapping[str, Tree], streamed: Sequence[str]
) -> Program:
    """Return what is executed on each shard of a pass.

    Args:
        reader: how its shards are found.
        values: the finished values of earlier phases, and the states that don't change any more.
        streamed: stages that are sent back because somebody streams them.
    """
    spec = plan.spec
    index = {name: place for place, name in enumerate(pass_.runs)}
    index[pass_.root] = -1
    stages = []
    for name in pass_.runs:
        stage = spec.stages[name]
        if isinstance(stage, RunSpec):
            kwargs = arguments(stage.with_, values)
            of, fn = index[stage.of], plan.functions[name]
            stages.append(
                StageProgram(
                    name,
                    fn,
                    of,
                    kwargs,
                    collectives=bool(stage.collectives),
                    timeout_s=stage.timeout_s,
                    gpus=stage.gpus,
                )
            )
    emits = []
    whole = {*pass_.kept, *streamed} & {*pass_.runs}
    for name in pass_.folds:
        stage = spec.stages[name]
        if isinstance(stage, ReduceSpec) and stage.op is not None:
            reduction = reduction_of(stage)
            emits.append(Emit(slot_of(name, stage), index[stage.of], reduction.op.value, reduction.axis))
        else:
            whole.add(stage.of)
    emits += [Emit(_VALUE + name, index[name]) for name in sorted(whole)]
    said = next(iter(pass_.communication(spec).values()), DEFAULT_COLLECTIVES)
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
        communication=(said.bytes_per_pack, said.timeout_s, said.implementation),
    )


def arguments(with_: Mapping[str, Tree], values: Mapping[str, Tree]) -> dict[str, Tree]:
    """Return the arguments of a stage: finished values, and places for those that still change."""

    def value_of(ref: StageRef | StateRef) -> Tree:
        return (
            StateValue(ref.name) if isinstance(ref, StateRef) and ref.name not in values else values[ref.name]
        )

    return {name: substitute(value, value_of) for name, value in with_.items()}


def combine_program(plan: Plan, name: str) -> Program:
    """Return the program of a reduce stage's `combine` function: a call folds groups of components."""
    return Program(
        seed=plan.spec.seed,
        replicas=1,
        reader=None,
        stages=(StageProgram(name, plan.functions[name], -1, {}, "combine"),),
        emits=(Emit(COMBINED, 0),),
        code=(str(plan.spec.code),),
        threads=plan.spec.threads_per_replica,
        verify=plan.verify,
    )


def init_program(plan: Plan, name: str, init: FunctionRef) -> Program:
    """Return the program of the function that makes a state's first value."""
    return _alone(plan, (StageProgram(name, init, -1, {}, "apply"),), (Emit(NEW, 0),))


def update_program(plan: Plan, name: str, values: Mapping[str, Tree]) -> Program:
    """Return the program of an update: a call makes a state of a state and a value.

    Args:
        values: the finished values of earlier phases.
    """
    stage = plan.spec.stages[name]
    if not isinstance(stage, UpdateSpec):
        raise TypeError(f"stage {name} is no update")
    own = {OWN_STATE: StateValue(name)}
    kwargs = {**own, **arguments(stage.with_, values)}
    stages = [StageProgram(name, plan.functions[name], -1, kwargs, "update")]
    emits = [Emit(NEW, 0)]
    until = plan.states[name].until
    if until is not None:
        stages.append(StageProgram(name, until, 0, own, "update"))
        emits.append(Emit(ENDS, 1))
    return _alone(plan, tuple(stages), tuple(emits))


def _alone(plan: Plan, stages: tuple[StageProgram, ...], emits: tuple[Emit, ...]) -> Program:
    """Return a program whose steps are one call each, at once: so that each can read states of its own."""
    return Program(
        seed=plan.spec.seed,
        replicas=1,
        reader=None,
        stages=stages,
        emits=emits,
        code=(str(plan.spec.code),),
        threads=plan.spec.threads_per_replica,
        verify=plan.verify,
        gang=True,
    )


def retries_of(plan: Plan, pass_: PassPlan) -> dict[str, int]:
    """Return how often a call is tried again, by the stage that raised.

    "" stands for what comes before the first stage, reading the shard: it serves all of them.
    """
    stages = {name: plan.spec.stages[name] for name in pass_.runs}
    retries = {name: stage.retries for name, stage in stages.items() if isinstance(stage, RunSpec)}
    return {"": max(retries.values(), default=0), **retries}


def quarantine_of(plan: Plan, pass_: PassPlan) -> frozenset[str]:
    """Return the stages whose failures cost the guilty elements, and not the run."""
    stages = {name: plan.spec.stages[name] for name in pass_.runs}
    return frozenset(n for n, s in stages.items() if isinstance(s, RunSpec) and s.on_error == "quarantine")
