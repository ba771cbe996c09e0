"""The states of a spec: their functions are found, their first values read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from pipedist.core.types import FunctionRef, Tree
from pipedist.errors import Problem
from pipedist.plan.callables import Callables, CallSignature
from pipedist.plan.model import Granularity, StatePlan
from pipedist.spec import GatherSpec, InitFile, InitFunction, InitLiteral, ReduceSpec, Spec, UpdateSpec


def plan_states(
    spec: Spec, callables: Callables, functions: dict[str, FunctionRef], problems: list[Problem]
) -> dict[str, StatePlan]:
    """Return how each state begins and ends.

    Args:
        spec: a checked spec.
        callables: finds functions.
        functions: the update functions are added to these.
        problems: where what is missing or does not fit is noted.
    """
    states = {}
    for name, stage in spec.stages.items():
        if not isinstance(stage, UpdateSpec):
            continue
        place = ("stages", name)
        with_ = CallSignature(("state", "value"), tuple(stage.with_))
        update = callables.find(stage.update, with_, (*place, "update"), (*place, "with"))
        if update is not None:
            functions[name] = update
        until = None
        if stage.until is not None:
            at = (*place, "until")
            until = callables.find(stage.until, CallSignature(("old", "new")), at, at)
        init: FunctionRef | None = None
        arguments: dict[str, Tree] = {}
        value: Tree = None
        match stage.init:
            case InitLiteral():
                value = stage.init.value
            case InitFunction(function, arguments):
                form = CallSignature((), tuple(arguments))
                at = (*place, "init")
                init = callables.find(function, form, (*at, "function"), (*at, "with"))
            case InitFile(path):
                try:
                    value = read_value(Path(spec.folder) / path)
                except (OSError, ValueError) as error:
                    reason = getattr(error, "strerror", None) or str(error)
                    problems.append(
                        spec.problem(
                            (*place, "init", "file"),
                            f"the state can't begin as {path}: {reason}",
                            expected=f"a {Path(path).suffix} file, relative to the spec's folder",
                        )
                    )
        source = spec.stages[stage.of]
        per: Granularity = source.per if isinstance(source, ReduceSpec | GatherSpec) else "run"
        states[name] = StatePlan(per, init, arguments, value, until)
    return states


def read_value(path: Path) -> Tree:
    """Return what a .npy, .npz or .json file holds: an array, a dict of them, or any tree.

    Raises:
        OSError: it can't be read.
        ValueError: it holds something else, or Python objects.
    """
    if path.suffix == ".json":
        return json.loads(path.read_text(encoding="utf-8"))
    loaded = np.load(path, allow_pickle=False)
    if isinstance(loaded, np.ndarray):
        return loaded
    with loaded:
        return dict(loaded)
