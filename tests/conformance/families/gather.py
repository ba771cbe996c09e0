"""Strategy.gather in cross-replica context."""

from __future__ import annotations

from tests.conformance import deviations
from tests.conformance.cases import Case, Outcome, Raised, Skip, Value, decode
from tests.conformance.families import run
from tests.conformance.programs import axis_of
from tests.conformance.session import Session

FAMILY = "gather"
DEVIATIONS = deviations.GATHER


async def replay(case: Case, session: Session) -> Outcome:
    """Replay `gather`, and `run` of a function that gathers where it must not."""
    if case.call["op"] == "run":
        return await run.replay(case, session)
    if case.call["op"] != "gather":
        raise Skip(f"unknown program {case.call['op']}")
    value = decode(case.call["value"])
    strategy = await session.strategy(case.strategy)
    try:
        result = await strategy.gather(value, axis=axis_of(case.call["axis"]))
    except Exception as error:
        return Outcome(Raised(error))
    return Outcome(Value(result))
