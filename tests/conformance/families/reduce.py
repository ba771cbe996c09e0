"""Strategy.reduce in cross-replica context."""

from __future__ import annotations

from typing import Any

from tests.conformance import deviations
from tests.conformance.cases import Case, Json, Outcome, Raised, Skip, Value, decode
from tests.conformance.families import run
from tests.conformance.session import Session

FAMILY = "reduce"
DEVIATIONS = deviations.REDUCE


async def replay(case: Case, session: Session) -> Outcome:
    """Replay `reduce`, and `run` of a function that reduces where it must not."""
    if case.call["op"] == "run":
        return await run.replay(case, session)
    if case.call["op"] != "reduce":
        raise Skip(f"unknown program {case.call['op']}")
    value = decode(case.call["value"])
    strategy = await session.strategy(case.strategy)
    try:
        result = await strategy.reduce(op_of(case.call["reduce_op"]), value, axis=axis_of(case.call["axis"]))
    except Exception as error:
        return Outcome(Raised(error))
    return Outcome(Value(result))


def op_of(op: Json) -> Any:
    """Return the operator of a call: "SUM" is the enum member, {"str": s} a string, {"py": x} an object."""
    import pipedist

    match op:
        case str():
            return pipedist.ReduceOp[op]
        case {"str": text}:
            return text
        case {"py": plain}:
            return plain
    raise Skip(f"unknown program reduce_op {op}")


def axis_of(axis: Json) -> Any:
    """Return the axis of a call: [0] is a tuple, {"list": [0]} a list, {"py": x} an object."""
    match axis:
        case list():
            return tuple(axis)
        case {"list": items}:
            return items
        case {"py": plain}:
            return plain
    return axis
