"""What workers are told about the passes of a plan: programs, the slots of their results, retries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipedist.coordinator import Slots
from pipedist.plan import PassPlan, Plan
from pipedist.program import Emit, Program, ReaderConfig, StageProgram, Tree
from pipedist.reductions import Reduction
from pipedist.spec import ReduceSpec, RunSpec, StageSpec, substitute

_VALUE = "="
"""Marks the slot of a stage's whole value; no stage's name contains it."""

COMBINED = "value"
"""The slot of what a fold call sends back."""


def slot_of(name: str, stage: StageSpec) -> str:
    """Return the slot in which a stage's parts come: partials have their own, values share one."""
    if isinstance(stage, RunSpec):
        return _VALUE + name
    if isinstance(stage, ReduceSpec) and stage.op is not None:
        return name
    return _VALUE + stage.of


def parts_of(slot: str, steps: Sequence[Sequence[Slots]]) -> list[list[Tree]]:
    """Return what the calls of some steps sent back in a slot."""
    return [[slots[slot] for slots in step] for step in steps]


def reduction_of(stage: ReduceSpec) -> Reduction:
    """Return the reduction of a stage with a built-in op."""
    return Reduction.of(str(stage.op), stage.axis)


def pass_program(
    plan: Plan, pass_: PassPlan, reader: ReaderConfig, values: Mapping[str, Tree], streamed: Sequence[str]
) -> Program:
    """Return what is executed on each shard of a pass.

    Args:
        reader: how its shards are found.
        values: the finished values of earlier phases.
        streamed: stages that are sent back because somebody streams them.
    """
    spec = plan.spec
    index = {name: place for place, name in enumerate(pass_.runs)}
    index[pass_.root] = -1
    stages = []
    for name in pass_.runs:
        stage = spec.stages[name]
        if isinstance(stage, RunSpec):
            kwargs = substitute(stage.with_, lambda ref: values[ref.name])
            stages.append(StageProgram(name, plan.functions[name], index[stage.of], kwargs))
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
    return Program(
        seed=spec.seed,
        replicas=spec.replicas,
        reader=reader,
        stages=tuple(stages),
        emits=tuple(emits),
        code=(str(spec.code),),
        threads=spec.threads_per_replica,
    )


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
    )


def retries_of(plan: Plan, pass_: PassPlan) -> dict[str, int]:
    """Return how often a call is tried again, by the stage that raised.

    "" stands for what comes before the first stage, reading the shard: it serves all of them.
    """
    stages = {name: plan.spec.stages[name] for name in pass_.runs}
    retries = {name: stage.retries for name, stage in stages.items() if isinstance(stage, RunSpec)}
    return {"": max(retries.values(), default=0), **retries}
