"""Spec -> Plan: opens the sources, imports the functions, orders the phases, and checks it all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from pipedist.core.functions import FunctionNotFound, load, reference
from pipedist.core.gpus import Supply
from pipedist.core.types import FunctionRef
from pipedist.datasets.sources import Source, SourceError, open_source
from pipedist.errors import PlanError, Problem, UsageError
from pipedist.plan.callables import Callables, CallSignature
from pipedist.plan.gpu_checks import check_gpus, supply_for
from pipedist.plan.model import PassPlan, Plan
from pipedist.plan.phases import ConflictingTrainingInputs, links_of, phases
from pipedist.plan.states import plan_states
from pipedist.plan.view import plural
from pipedist.spec import TORCH_IMPLEMENTATIONS, ReduceSpec, RunSpec, Spec, StageSpec
from pipedist.spec.training import TrainingStages, training_of


def compile_plan(spec: Spec, *, workers: int, verify: bool = False, supply: Supply | None = None) -> Plan:
    """Plan a spec.

    Args:
        spec: a checked spec.
        workers: number of worker processes; it decides nothing but whether the plan is possible, and how
            GPUs are divided.
        verify: have every call executed twice.
        supply: the GPUs of a cluster that is there already; None: those of the spec's own.

    Raises:
        PlanError: listing everything that is missing or not possible here, with its place.
    """
    problems: list[Problem] = []
    with ExitStack() as stack:
        sources = _open_sources(spec, problems, stack)
        callables = Callables(spec, problems)
        functions = _import_functions(spec, callables)
        states = plan_states(spec, callables, functions, problems)
        problems += _check_outputs(spec)
        training = training_of(tuple(spec.datasets), links_of(spec))
        ordered = _phases(spec, training, problems)
        if problems:
            raise PlanError(problems)
        supply = supply or supply_for(spec, workers)
        plan = Plan(spec, workers, sources, functions, states, ordered, supply, verify)
        problems += _check_gangs(plan)
        problems += _check_communication(plan)
        problems += check_gpus(plan)
        if problems:
            raise PlanError(problems)
        stack.pop_all()  # the sources are the plan's now
    return plan


# -- what is there ---------------------------------------------------------------------------


def _open_sources(spec: Spec, problems: list[Problem], stack: ExitStack) -> dict[str, Source]:
    sources: dict[str, Source] = {}
    forgiving = {_dataset_of(spec, name) for name, stage in spec.stages.items() if _sets_aside(stage)}
    for name, dataset in spec.datasets.items():
        place = ("datasets", name)
        config = dict(dataset.config)
        if isinstance(config.get("call"), str):  # a callable is called here, and need not travel
            try:
                config["call"] = load(reference(config["call"]), [str(spec.code)])
            except (FunctionNotFound, UsageError) as error:
                problems.append(spec.problem((*place, "function", "call"), str(error)))
                continue
        try:
            source = open_source(dataset.kind, config, folder=Path(spec.folder))
            stack.callback(source.close)
            if name not in forgiving:
                source.probe()
        except SourceError as error:
            key = [part for part in (error.key, error.name) if part]
            problem = spec.problem((*place, dataset.kind, *key), str(error), expected=error.expected)
            problems.append(replace(problem, nearest=error.nearest))
            continue
        sources[name] = source
        if dataset.shuffle and not source.random_access:
            problems.append(
                spec.problem(
                    (*place, "shuffle"),
                    "shuffle needs random access, and this dataset can only be read from front to back",
                    expected="a source of arrays or files, or shuffle: false",
                )
            )
    return sources


def _sets_aside(stage: StageSpec) -> bool:
    """Return whether a stage sets elements aside, also those that can't be read."""
    return isinstance(stage, RunSpec) and stage.on_error == "quarantine"


def _dataset_of(spec: Spec, name: str) -> str:
    """Return the dataset that a run comes from."""
    while name in spec.stages:
        name = spec.stages[name].of
    return name


def _import_functions(spec: Spec, callables: Callables) -> dict[str, FunctionRef]:
    """Return how the functions of runs and the combine functions travel."""
    functions: dict[str, FunctionRef] = {}
    for name, stage in spec.stages.items():
        place = ("stages", name)
        ref = None
        if isinstance(stage, RunSpec):
            form = CallSignature(("shard",), tuple(stage.with_), serves_calls=True)
            ref = callables.find(stage.run, form, (*place, "run"), (*place, "with"))
        elif isinstance(stage, ReduceSpec) and stage.combine is not None:
            at = (*place, "reduce")
            ref = callables.find(stage.combine, CallSignature(("a", "b"), name="combine"), at, at)
        if ref is not None:
            functions[name] = ref
    return functions


def _check_outputs(spec: Spec) -> Iterator[Problem]:
    if spec.outputs:
        from pipedist.outputs import missing_package  # most embedded runs write no files
    for name, path in spec.outputs.items():
        if complaint := missing_package(path):
            yield spec.problem(("outputs", name), complaint)


def _phases(
    spec: Spec, training: TrainingStages | None, problems: list[Problem]
) -> tuple[tuple[PassPlan, ...], ...]:
    try:
        return phases(spec, training)
    except ConflictingTrainingInputs as error:
        problems.append(spec.problem(("stages", error.stage, "of"), str(error), expected="one reading"))
        return ()


def _check_gangs(plan: Plan) -> Iterator[Problem]:
    """A run in a gang is called with empty shards too: then what it reads must be there."""
    for pass_ in plan.passes:
        division = plan.division(pass_.dataset)
        if not pass_.gang or division is None or not division.steps_per_epoch:
            continue
        last = division.steps_per_epoch - 1
        parts = division.parts(last)
        for name in pass_.runs if parts < division.replicas else ():
            stage = plan.spec.stages[name]
            source = plan.spec.stages.get(stage.of)
            if not getattr(stage, "collectives", False) or source is None:
                continue
            if not getattr(source, "collectives", False):
                yield plan.spec.problem(
                    ("stages", name, "of"),
                    f"step {last} of an epoch has {plural(parts, 'shard')} for "
                    f"{plural(division.replicas, 'replica')}, and an empty shard has no value of "
                    f"`{stage.of}`, for `{name}` to join the collectives with",
                    expected=f"`collectives: true` on `{stage.of}` too, or `drop_remainder: true`",
                )


def _check_communication(plan: Plan) -> Iterator[Problem]:
    """The stages of a gang communicate alike; torch.distributed needs torch, and a worker a replica."""
    replicas = plan.spec.replicas
    for pass_ in plan.passes:
        said = pass_.communication(plan.spec)
        for name, collectives in said.items():
            first = next(iter(said))
            place = ("stages", name, "collectives")
            if collectives != said[first]:
                yield plan.spec.problem(
                    place,
                    f"`{name}` and `{first}` are called in one gang, and say different things of its "
                    "collectives",
                    expected=f"the same as in `{first}`, or `collectives: true`",
                )
            elif name == first and (road := collectives.implementation) in TORCH_IMPLEMENTATIONS:
                if replicas > plan.workers:
                    yield plan.spec.problem(
                        (*place, "implementation"),
                        f"`{road}` needs a worker for each replica: there are {plural(replicas, 'replica')} "
                        f"on {plural(plan.workers, 'worker')}",
                        expected=f"--workers {replicas}, or `implementation: auto`",
                    )
                if find_spec("torch") is None:
                    yield plan.spec.problem(
                        (*place, "implementation"),
                        f"`{road}` goes through torch.distributed, and torch is not installed",
                        expected="pip install torch, or `implementation: auto`",
                    )
