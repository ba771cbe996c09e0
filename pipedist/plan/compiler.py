"""Spec -> Plan: opens the sources, imports the functions, orders the phases, and checks it all.

A phase is forced by a value that must be finished before it is read (`${stages.NAME}` in a
`with`, or `after`). A run stage is in the phase of what it reads, or later if its `with` or
`after` say so; then the values of the run it reads are kept, and read again, rather than
computed twice: what was committed first is what every reader sees.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipedist.datasets.sources import Source, SourceError, open_source
from pipedist.errors import PlanError, Problem, UsageError
from pipedist.functions import FunctionNotFound, load, reference
from pipedist.outputs import check_output
from pipedist.plan.model import PassPlan, Plan
from pipedist.program import FunctionRef
from pipedist.spec import (
    GatherSpec,
    ReduceSpec,
    RunSpec,
    Spec,
    StageRef,
    StateRef,
    UpdateSpec,
    references,
)

LAUNCHERS = ("local", "connect")
"""What can start workers today."""


def compile_plan(spec: Spec, *, workers: int) -> Plan:
    """Plan a spec.

    Args:
        spec: a checked spec.
        workers: number of worker processes, for the plan's text only.

    Raises:
        PlanError: listing everything that is missing or not possible here, with its place.
    """
    problems = list(_not_yet(spec))
    if problems:
        raise PlanError(problems)
    sources = _open_sources(spec, problems)
    functions = _import_functions(spec, problems)
    problems += _check_outputs(spec)
    if problems:
        for source in sources.values():
            source.close()
        raise PlanError(problems)
    return Plan(spec, workers, sources, functions, _phases(spec))


def _not_yet(spec: Spec) -> Iterator[Problem]:
    """Yield what the language has and this version can't execute."""

    def problem(path: tuple[str | int, ...], what: str) -> Problem:
        return spec.problem(path, f"not yet: {what} comes with a later version of pipedist")

    for name, stage in spec.stages.items():
        place = ("stages", name)
        if isinstance(stage, UpdateSpec):
            yield problem((*place, "update"), "`update`, a state carried from step to step,")
        if not isinstance(stage, RunSpec):
            continue
        if stage.collectives:
            yield problem((*place, "collectives"), "`collectives: true`")
        if stage.on_error == "quarantine":
            yield problem((*place, "on_error"), "`on_error: quarantine`")
        if stage.timeout_s is not None:
            yield problem((*place, "timeout_s"), "`timeout_s`")
        for key, value in stage.with_.items():
            if any(isinstance(x, StateRef) for x in references(value)):
                yield problem((*place, "with", key), "`${state.NAME}`")
    if spec.cluster.launcher not in LAUNCHERS:
        yield problem(("cluster", "launcher"), f"the launcher {spec.cluster.launcher!r}")


# -- what is there ---------------------------------------------------------------------------


def _open_sources(spec: Spec, problems: list[Problem]) -> dict[str, Source]:
    sources: dict[str, Source] = {}
    for name, dataset in spec.datasets.items():
        place = ("datasets", name)
        config = dict(dataset.config)
        if dataset.kind == "function":
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
        stage = spec.stages[name]
        if isinstance(stage, GatherSpec):
            complaint = check_output(path, "gather", stage.per, stage.gather)
        elif isinstance(stage, ReduceSpec):
            complaint = check_output(path, "reduce", stage.per, stage.op)
        else:
            continue
        if complaint:
            yield spec.problem(("outputs", name), complaint)


# -- phases ------------------------------------------------------------------------------------


def _phases(spec: Spec) -> tuple[tuple[PassPlan, ...], ...]:
    phase_of: dict[str, int] = dict.fromkeys(spec.datasets, 0)
    roots: dict[str, str] = {name: name for name in spec.datasets}

    def phase(name: str) -> int:
        if name in phase_of:
            return phase_of[name]
        stage = spec.stages[name]
        own = phase(stage.of)
        if isinstance(stage, RunSpec):
            waits = [x.name for x in references(stage.with_) if isinstance(x, StageRef)] + list(stage.after)
            own = max([own, *(1 + phase(other) for other in waits)])
            roots[name] = roots[stage.of] if phase(stage.of) == own or stage.of in spec.datasets else stage.of
        phase_of[name] = own
        return own

    for name in spec.stages:
        phase(name)

    passes: list[PassPlan] = []
    groups: dict[tuple[int, str], list[str]] = {}
    for name in _topological(spec):
        groups.setdefault((phase_of[name], roots[name]), []).append(name)
    for stage in spec.stages.values():
        if not isinstance(stage, RunSpec) and stage.of in spec.datasets:
            groups.setdefault((0, stage.of), [])
    for (number, root), runs in sorted(groups.items()):
        folds = tuple(
            name
            for name, stage in spec.stages.items()
            if not isinstance(stage, RunSpec)
            and (stage.of in runs or (stage.of == root and root in spec.datasets and number == 0))
        )
        kept = tuple(r for r in runs if any(root_ == r for _, root_ in groups))
        dataset = root
        while dataset in spec.stages:
            dataset = spec.stages[dataset].of
        passes.append(PassPlan(number, dataset, root, tuple(runs), folds, kept))
    count = max((p.phase for p in passes), default=-1) + 1
    return tuple(tuple(p for p in passes if p.phase == number) for number in range(count))


def _topological(spec: Spec) -> list[str]:
    """Return the run stages, what is read before what reads it, otherwise as written."""
    order: list[str] = []

    def visit(name: str) -> None:
        stage = spec.stages.get(name)
        if isinstance(stage, RunSpec) and name not in order:
            visit(stage.of)
            order.append(name)

    for name in spec.stages:
        visit(name)
    return order
