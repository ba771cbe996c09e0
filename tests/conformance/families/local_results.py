"""Strategy.local_results."""

from __future__ import annotations

from typing import Any

from tests.conformance.cases import Case, Outcome, Raised, Skip, Value, decode
from tests.conformance.families.variables import new_variable
from tests.conformance.session import Session

FAMILY = "local_results"


async def replay(case: Case, session: Session) -> Outcome:
    """Replay `local_results`."""
    strategy: Any = await session.strategy(case.strategy)
    try:
        match case.call:
            case {"op": "local_results", "value": value}:
                value = decode(value)
            case {"op": "local_results_of_variable", **options}:
                value = new_variable(strategy, "v", options)
            case {"op": op}:
                raise Skip(f"unknown program {op}")
        return Outcome(Value(strategy.local_results(value)))
    except Skip:
        raise
    except Exception as error:
        return Outcome(Raised(error))
