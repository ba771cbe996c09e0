"""Spec -> Plan: opens the sources, imports the functions, orders the phases, and checks it all.

A phase is forced by a value that must be finished before it is read (`${stages.NAME}` in a
`with`, or `after`). A run stage is in the phase of what it reads, or later if its `with` or
`after` say so; then the values of the run it reads are kept, and read again, rather than
computed twice: what was committed first is what every reader sees.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

from pipedist.datasets.sources import Source, SourceError, open_source
from pipedist.errors import PlanError, Problem, UsageError
from pipedist.functions import FunctionNotFound, load, reference, uncallable
from pipedist.outputs import missing_package
from pipedist.plan.model import PassPlan, Plan
from pipedist.program import FunctionRef
from pipedist.spec import ReduceSpec, RunSpec, Spec, StageRef, references


def compile_plan(spec: Spec, *, workers: int) -> Plan:
    """Plan a spec.

    Args:
        spec: a checked spec.
        workers: number of worker processes, for the plan's text only.

    Raises:
        PlanError: listing everything that is missing or not possible here, with its place.
    """
    problems: list[Problem] = []
    with ExitStack() as stack:
        sources = _open_sources(spec, problems, stack)
        functions = _import_functions(spec, problems)
        problems += _check_outputs(spec)
        if problems:
            raise PlanError(problems)
        plan = Plan(spec, workers, sources, functions, _phases(spec))
        stack.pop_all()  # the sources are the plan's now
    return plan


# -- what is there ---------------------------------------------------------------------------


def _open_sources(spec: Spec, problems: list[Problem], stack: ExitStack) -> dict[str, Source]:
    sources: dict[str, Source] = {}
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
        except SourceError as error:
            key = [part for part in (error.key, error.name) if part]
            problem = spec.problem((*place, dataset.kind, *key), str(error), expected=error.expected)
            problems.append(replace(problem, nearest=error.nearest))
            continue
        stack.callback(source.close)
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


def _import_functions(spec: Spec, problems: list[Problem]) -> dict[str, FunctionRef]:
    functions: dict[str, FunctionRef] = {}
    code = [str(spec.code)]
    for name, stage in spec.stages.items():
        fn: str | Callable[..., Any] | None
        if isinstance(stage, RunSpec):
            verb, fn = "run", stage.run
        elif isinstance(stage, ReduceSpec):
            verb, fn = "reduce", stage.combine
        else:
            continue
        if fn is None:
            continue
        try:
            ref = reference(fn)
            found = load(ref, code) if ref.name else fn
        except (FunctionNotFound, UsageError) as error:
            problems.append(spec.problem(("stages", name, verb), str(error)))
            continue
        functions[name] = ref
        if isinstance(stage, RunSpec) and callable(found) and (wrong := uncallable(found, ref.label)):
            problems.append(spec.problem(("stages", name, verb), wrong))
            continue
        complaint = _unfit(found, stage) if callable(found) else None
        if complaint:
            key = "with" if isinstance(stage, RunSpec) and stage.with_ else verb
            problems.append(spec.problem(("stages", name, key), complaint))
    return functions


def _unfit(fn: Callable[..., Any], stage: RunSpec | ReduceSpec) -> str | None:
    """Return why a function can't be called as its stage does, None if it can."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # some built-in functions do not tell
        return None
    kwargs: dict[str, object] = {}
    args: tuple[object, ...] = (None,)
    if isinstance(stage, ReduceSpec):
        args = (None, None)
    else:
        kwargs = dict.fromkeys(stage.with_)
        if inspect.isclass(fn):
            args = ()
        elif "ctx" in signature.parameters and "ctx" not in kwargs:
            kwargs["ctx"] = None
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        label = getattr(fn, "__name__", str(fn))
        if isinstance(stage, ReduceSpec):
            return f"{label}{signature} can't be called as combine(a, b): {error}"
        shown = ", ".join(f"{key}=..." for key in stage.with_)
        given = (
            f"{label}({shown})" if inspect.isclass(fn) else f"{label}(shard{', ' if shown else ''}{shown})"
        )
        return f"{label}{signature} can't be called as {given}: {error}"
    return None


def _check_outputs(spec: Spec) -> Iterator[Problem]:
    for name, path in spec.outputs.items():
        if complaint := missing_package(path):
            yield spec.problem(("outputs", name), complaint)


# -- phases ------------------------------------------------------------------------------------


def _phases(spec: Spec) -> tuple[tuple[PassPlan, ...], ...]:
    order = _topological(spec)
    phase_of: dict[str, int] = dict.fromkeys(spec.datasets, 0)
    root_of: dict[str, str] = {name: name for name in spec.datasets}
    for name in order:
        stage = spec.stages[name]
        phase = phase_of[stage.of]
        if isinstance(stage, RunSpec):
            phase = max([phase, *(1 + phase_of[other] for other in _waits_for(stage))])
            again = phase > phase_of[stage.of] and stage.of in spec.stages
            root_of[name] = stage.of if again else root_of[stage.of]
        phase_of[name] = phase

    groups: dict[tuple[int, str], list[str]] = {}
    for name in order:
        if isinstance(spec.stages[name], RunSpec):
            groups.setdefault((phase_of[name], root_of[name]), []).append(name)
        elif spec.stages[name].of in spec.datasets:
            groups.setdefault((0, spec.stages[name].of), [])
    roots = {root for _, root in groups}
    passes: list[PassPlan] = []
    for (number, root), runs in sorted(groups.items()):
        folds = tuple(
            name
            for name, stage in spec.stages.items()
            if not isinstance(stage, RunSpec)
            and (stage.of in runs or (stage.of == root and root in spec.datasets and number == 0))
        )
        kept = tuple(name for name in runs if name in roots)
        dataset = root
        while dataset in spec.stages:
            dataset = spec.stages[dataset].of
        passes.append(PassPlan(number, dataset, root, tuple(runs), folds, kept))
    count = max((p.phase for p in passes), default=-1) + 1
    return tuple(tuple(p for p in passes if p.phase == number) for number in range(count))


def _waits_for(stage: RunSpec) -> list[str]:
    """Return the stages that must be complete before a run begins."""
    return [*(x.name for x in references(stage.with_) if isinstance(x, StageRef)), *stage.after]


def _topological(spec: Spec) -> list[str]:
    """Return all stages, what is read or waited for before what does so, otherwise as written."""
    graph: TopologicalSorter[str] = TopologicalSorter()
    for name, stage in spec.stages.items():
        needs = [stage.of, *(_waits_for(stage) if isinstance(stage, RunSpec) else ())]
        graph.add(name, *(other for other in needs if other in spec.stages))
    return list(graph.static_order())
