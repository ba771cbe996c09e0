"""Where pipedist answers something better than TensorFlow in replica context.

Each rule says which cases it concerns; what they must answer is worked out by `replicas_oracle`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tests.conformance import deviations, replicas_oracle
from tests.conformance.cases import Case, Deviation, Json
from tests.conformance.deviations import agree, local_results_of
from tests.conformance.programs import operations

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


def _rule(name: str, row: int, concerns: Callable[[Case], bool]) -> Deviation:
    def expected(case: Case, recorded: Json) -> Json:
        if not concerns(case):
            return recorded
        own = _answer(case)
        return recorded if own is None or _agrees(recorded, own) else own

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


def _same_object(case: Case) -> bool:
    """Whether what is brought may be one and the same object in every replica."""
    plain = [i for i, arg in enumerate(case.call.get("args", ())) if "per_replica" not in arg]
    return any(
        part[0] in ("shared", "py") or (part[0] == "arg" and part[1] in plain) for part in _brought(case)
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


DEVIATIONS = (
    _rule("operators are sum, mean, min, max, prod; others a ValueError", 15, _odd_operator),
    _rule("replicas that call different collectives get CollectiveMismatchError", 22, _branches_differ),
    _rule(
        "after a mismatch the next step works",
        23,
        lambda case: case.call["op"] in ("run_sequence", "two_strategies"),
    ),
    _rule("what is the same object everywhere is reduced all the same", 21, _same_object),
    _rule("a tree may mix dtypes", 24, lambda case: len(_dtypes(case)) > 1),
    _rule(
        "every numeric dtype is reduced, others are a TypeError",
        13,
        lambda case: (
            not _dtypes(case) <= {"float16", "float32", "float64", "int32", "int64"} and not _gathers(case)
        ),
    ),
    _rule(
        "MEAN of integers is a float, with one replica too",
        11,
        lambda case: case.replicas == 1 or case.call["op"] == "default_context",
    ),
    _rule("every dtype is gathered; a scalar is not, nor by one replica", 18, _gathers),
    _rule(
        "replica ids are Python ints",
        19,
        lambda case: any("replica_id" in operations(p) for p in _programs(case)),
    ),
    _rule("a leaf is always per replica, None stays None", 3, lambda case: True),
)
