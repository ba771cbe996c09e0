"""Where pipedist answers something better than TensorFlow in replica context.

Each rule says which cases it concerns; what they must answer is worked out by `replicas_oracle`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from tests.conformance import deviations, replicas_oracle
from tests.conformance.cases import Case, Deviation, Json
from tests.conformance.deviations import local_results_of
from tests.conformance.explanations import (
    Explanation,
    agree,
    answered,
    any_of,
    number_as_axis,
    refused,
    where,
)
from tests.conformance.programs import operations
from tests.conformance.replicas_oracle import MISMATCH

_COLLECTIVES = ("all_reduce", "all_gather", "merge_call")


def _answer(case: Case) -> Json | None:
    call = case.call
    try:
        match call["op"]:
            case "run":
                return replicas_oracle.run(
                    call["fn"],
                    case.replicas,
                    call.get("args", []),
                    call.get("kwargs", {}),
                    plain=deviations.values_are_plain(case),
                    has_strategy=case.strategy is not None and case.strategy.kind != "default",
                )
            case "default_context":
                return replicas_oracle.run(call["fn"], 1, [], {}, plain=True, has_strategy=False)
            case "run_sequence" | "two_strategies":
                return {"steps": [replicas_oracle.run(fn, case.replicas, [], {}) for fn in call["fns"]]}
    except replicas_oracle.NoAnswer:
        pass
    return None


def _agrees(recorded: Json, own: Json) -> bool:
    if "steps" in own:
        return all(agree(a, b) for a, b in zip(recorded["steps"], own["steps"], strict=True))
    return agree(recorded, own)


def _rule(name: str, row: int, concerns: Callable[[Case], bool], explains: Explanation) -> Deviation:
    def expected(case: Case, recorded: Json) -> Json:
        if not concerns(case):
            return recorded
        own = _answer(case)
        if own is None or _agrees(recorded, own) or not explains(case, recorded, own):
            return recorded
        return own

    return Deviation(f"replica_context: {name}", row, expected, local_results_of)


def _programs(case: Case) -> Iterator[Json]:
    yield from case.call.get("fns", ())
    if "fn" in case.call:
        yield case.call["fn"]


def _parts(expression: Json) -> Iterator[list[Any]]:
    """Yield every operation in an expression."""
    if isinstance(expression, list):
        if expression and isinstance(expression[0], str):
            yield expression
            if expression[0] in ("const", "shared", "py"):
                return
        for part in expression:
            yield from _parts(part)
    elif isinstance(expression, dict):
        for part in expression.values():
            yield from _parts(part)


def _brought(case: Case) -> Iterator[list[Any]]:
    """Yield every operation in what is brought to a collective."""
    for program in _programs(case):
        for part in _parts(program):
            if part[0] in _COLLECTIVES:
                for operand in part[1:]:
                    yield from _parts(operand)


def _is_same_object(operand: Json, case: Case) -> bool:
    """Whether an operand is one and the same object in every replica."""
    match operand:
        case ["shared" | "py", _]:
            return True
        case ["arg", int(index)] if index < len(case.call.get("args", ())):
            return "per_replica" not in case.call["args"][index]
    return False


def _same_object(case: Case) -> bool:
    """Whether something that is brought is the same object in every replica."""
    return any(_is_same_object(part, case) for part in _brought(case))


def _left_alone(expression: Json, case: Case) -> Json:
    """Return the expression without the collectives that get the same object in every replica."""
    match expression:
        case ["all_reduce", op, ["list" | "tuple" as kind, items]]:
            return [kind, [_left_alone(["all_reduce", op, item], case) for item in items]]
        case ["all_gather", ["list" | "tuple" as kind, items], axis]:
            return [kind, [_left_alone(["all_gather", item, axis], case) for item in items]]
        case ["all_reduce", _, operand] | ["all_gather", operand, _] if _is_same_object(operand, case):
            return ["tensor", operand] if operand[0] == "py" else operand
        case ["merge_call", ["reduce" | "gather", *rest], [operand]] if _is_same_object(operand, case):
            return operand if ["marg", 0] in rest else expression
        case ["dict", items]:
            return ["dict", {key: _left_alone(item, case) for key, item in items.items()}]
        case ["list" | "tuple" | "seq" as kind, items]:
            return [kind, [_left_alone(item, case) for item in items]]
    return expression


def _as_first(expression: Json) -> Json:
    """Return the expression with the collective of replica 0 in place of those of the others."""
    match expression:
        case ["by_replica", [["all_reduce", op, _], *_] as branches]:
            return ["all_reduce", op, ["by_replica", [_operand(branch) for branch in branches]]]
        case ["by_replica", [["all_gather", _, axis], *_] as branches]:
            return ["all_gather", ["by_replica", [_operand(branch) for branch in branches]], axis]
    return expression


def _operand(branch: Json) -> Json:
    return branch[2] if branch[0] == "all_reduce" else branch[1]


def _with_sum(expression: Json) -> Json:
    """Return the expression with SUM in place of every operator that is no name."""
    match expression:
        case ["all_reduce", {"py": _}, operand]:
            return ["all_reduce", "SUM", operand]
    return expression


def _program(rewrite: Callable[[Json, Case], Json]) -> Explanation:
    """TensorFlow does what another program does."""

    def model(case: Case) -> Json:
        other = replace(case, call={**case.call, "fn": rewrite(case.call["fn"], case)})
        answer = _answer(other)
        if answer is None or "value" not in answer:
            raise ValueError("no value")
        return answer["value"]

    return where(lambda case: "fn" in case.call, answered(model))


def _counts_calls(case: Case, recorded: Json, own: Json) -> bool:
    """Some replicas made a different number of calls."""
    return own.get("error") == MISMATCH and recorded.get("error") == "RuntimeError"


def _next_fail(case: Case, recorded: Json, own: Json) -> bool:
    """Steps after a mismatch fail, or those of other shapes than before; all others are as told."""
    return all(
        agree(told, ours) or told.get("error") == "InvalidArgumentError"
        for told, ours in zip(recorded["steps"], own["steps"], strict=True)
    )


def _branches_differ(case: Case) -> bool:
    """Whether the replicas make different calls."""
    return any(
        part[0] == "by_replica" and len({str(_calls(branch)) for branch in part[1]}) > 1
        for program in _programs(case)
        for part in _parts(program)
    )


def _calls(expression: Json) -> list[Any]:
    return [
        [part[0], part[1] if part[0] == "all_reduce" else part[2], _keys(part)]
        for part in _parts(expression)
        if part[0] in _COLLECTIVES
    ]


def _keys(collective: Json) -> list[str]:
    return [key for part in collective if isinstance(part, list) and part[:1] == ["dict"] for key in part[1]]


def _dtypes(case: Case) -> set[str]:
    found = {part[1].get("dtype") for part in _brought(case) if part[0] in ("const", "shared")}
    found |= {part[2] for part in _brought(case) if part[0] == "cast"}
    return {dtype for dtype in found if dtype}


def _odd_operator(case: Case) -> bool:
    operators = [
        part[1] for program in _programs(case) for part in _parts(program) if part[0] == "all_reduce"
    ]
    return any(
        not isinstance(op, str) and str(op.get("str")).lower() not in ("sum", "mean") for op in operators
    )


def _gathers(case: Case) -> bool:
    return any("all_gather" in operations(program) for program in _programs(case))


def _axes(case: Case) -> list[Json]:
    return [part[2] for program in _programs(case) for part in _parts(program) if part[0] == "all_gather"]


def _negative_axis(case: Case) -> bool:
    """Whether something else than int32 is gathered along an axis that counts from the end."""
    return _dtypes(case) != {"int32"} and any(type(axis) is int and axis < 0 for axis in _axes(case))


def _reduces_trees(case: Case) -> bool:
    """Whether a tree of several dtypes, or arrays of different ones, are reduced."""
    return len(_dtypes(case)) > 1 and any("all_reduce" in operations(program) for program in _programs(case))


def _brings_tree(case: Case) -> bool:
    return any(part[0] in ("list", "tuple", "dict", "namedtuple") for part in _brought(case))


def _merges_sum(case: Case) -> bool:
    return any(part[:2] == ["reduce", "SUM"] for program in _programs(case) for part in _parts(program))


def _is_wider(case: Case, recorded: Json, own: Json) -> bool:
    """The same in int32."""
    wider = json.loads(json.dumps(recorded).replace('"int32"', '"int64"'))
    return wider != recorded and agree(wider, own)


def _ids_are_ints(case: Case, recorded: Json) -> Json:
    if "value" not in recorded or "fn" not in case.call:
        return recorded
    return {"value": deviations.ids_in(case.call["fn"], recorded["value"])}


def _always_per_replica(case: Case, recorded: Json) -> Json:
    return deviations.always_per_replica(case, recorded) if case.call["op"] == "run" else recorded


def _with_int_axis(fn: Json, case: Case) -> Json:
    return [*fn[:2], number_as_axis(fn[2])] if fn[0] == "all_gather" else fn


DEVIATIONS = (
    Deviation("replica_context: replica ids are Python ints", 19, _ids_are_ints, local_results_of),
    Deviation(
        "replica_context: a leaf is always per replica, None stays None",
        3,
        _always_per_replica,
        local_results_of,
    ),
    _rule(
        "replica ids are Python ints, whose reduction is int64",
        19,
        lambda case: any(
            "replica_id" in operations(p) or "num_replicas" in operations(p) for p in _programs(case)
        ),
        _is_wider,
    ),
    _rule(
        "operators are sum, mean, min, max, prod; others a ValueError",
        15,
        _odd_operator,
        any_of(refused("ValueError", "TypeError"), _program(lambda fn, case: _with_sum(fn))),
    ),
    _rule(
        "replicas that call different collectives get CollectiveMismatchError",
        22,
        _branches_differ,
        any_of(_counts_calls, _program(lambda fn, case: _as_first(fn))),
    ),
    _rule(
        "after a mismatch the next step works",
        23,
        lambda case: case.call["op"] in ("run_sequence", "two_strategies"),
        _next_fail,
    ),
    _rule(
        "what is the same object everywhere is reduced all the same",
        21,
        _same_object,
        any_of(
            _program(_left_alone),
            refused("AttributeError"),
            where(lambda case: _brings_tree(case) or _merges_sum(case), refused("ValueError", "IndexError")),
        ),
    ),
    _rule(
        "a tree may mix dtypes",
        24,
        _reduces_trees,
        refused("ValueError", "InvalidArgumentError"),
    ),
    _rule(
        "every numeric dtype is reduced, others are a TypeError",
        13,
        lambda case: (
            not _dtypes(case) <= {"float16", "float32", "float64", "int32", "int64"} and not _gathers(case)
        ),
        refused("InvalidArgumentError", "TypeError"),
    ),
    _rule(
        "MEAN of integers is a float, with one replica too",
        11,
        lambda case: case.replicas == 1 or case.call["op"] == "default_context",
        _program(lambda fn, case: fn[2] if fn[0] == "all_reduce" else fn),
    ),
    _rule(
        "every dtype is gathered; a scalar is not, nor by one replica",
        18,
        _gathers,
        any_of(
            where(
                lambda case: not _dtypes(case) <= {"float16", "float32", "float64", "int32", "int64"},
                refused("TypeError", "InvalidArgumentError"),
            ),
            where(
                lambda case: case.replicas == 1 or case.call["op"] == "default_context",
                _program(lambda fn, case: fn[1] if fn[0] == "all_gather" else fn),
            ),
            where(_negative_axis, refused("ValueError", "InvalidArgumentError")),
        ),
    ),
    _rule(
        "an axis that is no int is a TypeError",
        18,
        lambda case: any(type(axis) is not int for axis in _axes(case)),
        any_of(refused("ValueError", "InvalidArgumentError"), _program(_with_int_axis)),
    ),
)
