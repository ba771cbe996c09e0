"""Where a TPUStrategy answers otherwise than a mirrored strategy, because its functions are compiled.

The rules concern what a program does; they come after those of its family.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tests.conformance.cases import Case, Deviation, Json
from tests.conformance.deviations import local_results_of
from tests.conformance.programs import stacked

ROW = 50


def _parts(expression: Json) -> Iterator[list[Any]]:
    """Yield every operation in an expression."""
    if isinstance(expression, list):
        if expression and isinstance(expression[0], str):
            yield expression
            if expression[0] in ("const", "shared", "py"):
                return
        for part in expression:
            yield from _parts(part)
    elif isinstance(expression, Mapping):
        for part in expression.values():
            yield from _parts(part)


def _each(change: Callable[[Json, Json], Json]) -> Callable[[Case, Json], Json]:
    """Apply `change(program, expectation)` to the program of a case, or to each of its steps."""

    def expected(case: Case, recorded: Json) -> Json:
        call = case.call
        if call.get("op") in ("run", "default_context") and "fn" in call:
            return change(call["fn"], recorded)
        if call.get("op") == "variable_program" and isinstance(recorded, Mapping) and "steps" in recorded:
            steps = zip(call["steps"], recorded["steps"], strict=True)
            return {"steps": [change(step["fn"], own) if "fn" in step else own for step, own in steps]}
        if "fns" in call and isinstance(recorded, Mapping) and "steps" in recorded:
            return {"steps": [change(f, r) for f, r in zip(call["fns"], recorded["steps"], strict=True)]}
        return recorded

    return expected


def _branches(program: Json, recorded: Json) -> Json:
    """A choice among branches by the traced replica id is an error, except among constants of one shape."""
    for part in _parts(program):
        if part[0] == "by_replica" and stacked(part[1]) is None:
            return {"error": "TypeError"}
    return recorded


def _merge_call(program: Json, recorded: Json) -> Json:
    return {"error": "RuntimeError"} if any(part[0] == "merge_call" for part in _parts(program)) else recorded


def _ids(program: Json, recorded: Json) -> Json:
    """The replica id, and numbers computed from it, are traced int32 arrays, not Python ints."""
    if not isinstance(recorded, Mapping):
        return recorded
    if "value" in recorded:
        return {"value": _ids(program, recorded["value"])}
    match program:
        case ["dict", dict(items)] if "dict" in recorded:
            return {"dict": {key: _ids(items[key], own) for key, own in recorded["dict"].items()}}
        case ["list" | "tuple" as kind, list(items)] if kind in recorded:
            return {kind: [_ids(item, own) for item, own in zip(items, recorded[kind], strict=True)]}
        case _ if "per_replica" in recorded and any(part[0] == "replica_id" for part in _parts(program)):
            return {"per_replica": [_traced(own) for own in recorded["per_replica"]]}
    return recorded


def _traced(expected: Json) -> Json:
    if isinstance(expected, Mapping) and set(expected) == {"py"} and type(expected["py"]) is int:
        return {"dtype": "int32", "shape": [], "data": [expected["py"]]}
    return expected


def _shapes(program: Json, recorded: Json) -> Json:
    """JAX raises TypeError for operands of unlike shapes."""
    own = {part[0] for part in _parts(program)}
    unlike = isinstance(recorded, Mapping) and "Incompatible shapes" in str(recorded.get("message"))
    return {"error": "TypeError"} if unlike and not own & {"all_reduce", "all_gather"} else recorded


def _training(case: Case, recorded: Json) -> Json:
    """A step of replicas with unlike numbers of rows cannot assign to their variables."""
    call = case.call
    if call.get("op") != "train_linear":
        return recorded
    sizes = {call["global_batch"], 0 if call["drop_remainder"] else call["rows"] % call["global_batch"]}
    return {"error": "ValueError"} if any(size % case.replicas for size in sizes) else recorded


def _rule(name: str, change: Callable[[Json, Json], Json]) -> Deviation:
    return Deviation(f"jax: {name}", ROW, _each(change), local_results_of)


RULES: tuple[Deviation, ...] = (
    _rule("operands of unlike shapes are a TypeError", _shapes),
    _rule("merge_call is an error", _merge_call),
    _rule("a branch by replica id is an error", _branches),
    Deviation("jax: replicas with unlike shapes cannot assign", ROW, _training),
    _rule("the replica id is an int32 array", _ids),
)
