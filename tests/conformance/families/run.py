"""Strategy.run."""

from __future__ import annotations

from typing import Any

from tests.conformance import deviations, programs
from tests.conformance.cases import Case, Outcome, Raised, Skip, Value
from tests.conformance.session import Session

FAMILY = "run"
DEVIATIONS = deviations.RUN


async def replay(case: Case, session: Session) -> Outcome:
    """Replay `run` of a program, and `run_raw` of something that is no function."""
    call = case.call
    fn: Any
    if call["op"] == "run_raw":
        fn = call["fn"]
    elif call["op"] == "run":
        fn = programs.function(call["fn"])
    else:
        raise Skip(f"unknown program {call['op']}")
    unknown = set(call) - {"op", "fn", "args", "kwargs", "args_as"}
    if unknown:
        raise Skip(f"unknown program {call['op']} with {', '.join(sorted(unknown))}")
    args, kwargs = programs.arguments_of(call)
    strategy = await session.strategy(case.strategy)
    try:
        result = await strategy.run(fn, args=args, kwargs=kwargs)
    except Exception as error:
        return Outcome(Raised(error), Raised(error))
    return Outcome(Value(result), Value(strategy.local_results(result)))
