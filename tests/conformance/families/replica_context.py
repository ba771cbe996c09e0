"""Collectives and contexts in replica functions."""

from __future__ import annotations

from typing import Any

import pipedist
from tests.conformance import programs
from tests.conformance.cases import Case, Json, Outcome, Raised, Skip, Value
from tests.conformance.replica_context_deviations import DEVIATIONS as RULES
from tests.conformance.session import Session

FAMILY = "replica_context"
DEVIATIONS = RULES


async def replay(case: Case, session: Session) -> Outcome:
    """Do what the call says."""
    call = case.call
    match call["op"]:
        case "run":
            strategy = await session.strategy(case.strategy)
            return await _run(strategy, call["fn"], *programs.arguments_of(call))
        case "run_sequence":
            strategy = await session.strategy(case.strategy)
            return Outcome({"steps": [await _step(strategy, fn) for fn in call["fns"]]})
        case "two_strategies":
            return Outcome(
                {"steps": [await _step(await session.strategy(case.strategy), fn) for fn in call["fns"]]}
            )
        case "default_context":
            return await _run(pipedist.get_strategy(), call["fn"], (), {})
        case "contexts" if set(call) == {"op", "fn"}:
            return await _contexts(await session.strategy(case.strategy), call["fn"])
        case "run_in_run":
            strategy = await session.strategy(case.strategy)

            async def outer() -> Any:
                return await strategy.run(programs.function(["none"]))

            return await _outcome(strategy, outer)
        case "scope_in_run":
            strategy = await session.strategy(case.strategy)

            def enter() -> Any:
                with strategy.scope():
                    return None

            return await _outcome(strategy, enter)
        case "nested_scope":
            first = await session.strategy(case.strategy)
            second = first if call.get("same") else await session.strategy(case.strategy)
            try:
                with first.scope(), second.scope():
                    return Outcome(Value(1))
            except Exception as error:
                return Outcome(Raised(error))
    raise Skip(f"unknown program {call['op']}")


async def _run(strategy: Any, fn: Json, args: Any, kwargs: Any) -> Outcome:
    return await _outcome(strategy, programs.function(fn), args, kwargs)


async def _outcome(strategy: Any, function: Any, args: Any = (), kwargs: Any = None) -> Outcome:
    try:
        result = await strategy.run(function, args=args, kwargs=kwargs)
    except Exception as error:
        return Outcome(Raised(error), Raised(error))
    return Outcome(Value(result), Value(strategy.local_results(result)))


async def _step(strategy: Any, fn: Json) -> Value | Raised:
    result = (await _run(strategy, fn, (), {})).result
    assert isinstance(result, Value | Raised)
    return result


async def _contexts(strategy: Any, fn: Json) -> Outcome:
    """What an expression is outside of every scope, and inside of one."""
    evaluate = programs.function(fn)
    with strategy.scope():
        return Outcome(Value(evaluate()))
