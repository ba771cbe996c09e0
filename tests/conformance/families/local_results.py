"""Strategy.local_results."""

from __future__ import annotations

from tests.conformance.cases import Case, Outcome, Raised, Skip, Value, decode
from tests.conformance.session import Session

FAMILY = "local_results"


async def replay(case: Case, session: Session) -> Outcome:
    """Replay `local_results`."""
    if case.call["op"] == "local_results_of_variable":
        raise Skip("family of a later release: variables (local_results_of_variable)")
    if case.call["op"] != "local_results":
        raise Skip(f"unknown program {case.call['op']}")
    value = decode(case.call["value"])
    strategy = await session.strategy(case.strategy)
    try:
        return Outcome(Value(strategy.local_results(value)))
    except Exception as error:
        return Outcome(Raised(error))
