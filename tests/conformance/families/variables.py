"""Variables: made in a strategy's scope, read and assigned in replica functions and outside."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

import pipedist
from tests.conformance import programs, variables_deviations
from tests.conformance.cases import Case, Json, Outcome, Raised, Skip, Value, decode
from tests.conformance.session import Session

FAMILY = "variables"
DEVIATIONS = variables_deviations.DEVIATIONS


async def replay(case: Case, session: Session) -> Outcome:
    """Create the variables, and do the steps in order."""
    match case.call["op"]:
        case "variable_program":
            _check(case.call["steps"])
            return await _program(case, await session.strategy(case.strategy))
        case "create_variable":
            note, strategy = case.call["note"], await session.strategy(case.strategy)
            return await _create(note, strategy, await session.strategy(case.strategy))
    raise Skip(f"unknown program {case.call['op']}")


def _check(steps: Json) -> None:
    for step in steps:
        if step["do"] not in _STEPS:
            raise Skip(f"unknown program step {step['do']}")
        if step["do"] == "run":
            programs.check(step["fn"])


def new_variable(strategy: Any, name: str, options: Json) -> pipedist.Variable:
    """Return a variable of a case, made in the strategy's scope."""
    unknown = set(options) - {"initial", "synchronization", "aggregation", "trainable"}
    if unknown:
        raise Skip(f"unknown program variable with {', '.join(sorted(unknown))}")
    given = {key: options[key] for key in options if key != "initial"}
    with strategy.scope():
        return pipedist.Variable(decode(options["initial"]), name=name, **given)


async def _program(case: Case, strategy: Any) -> Outcome:
    try:
        variables = {name: new_variable(strategy, name, spec) for name, spec in case.call["vars"].items()}
    except Skip:
        raise
    except Exception as error:
        return Outcome(Raised(error))
    results: list[Any] = []
    for step in case.call["steps"]:
        try:
            results.append(await _STEPS[step["do"]](strategy, variables, step))
        except Exception as error:
            results.append(Raised(error))
    return Outcome({"steps": results})


async def _run(strategy: Any, variables: dict[str, Any], step: Json) -> Any:
    fn = programs.function(step["fn"], variables)
    result = await strategy.run(fn, args=tuple(decode(arg) for arg in step.get("args", ())))
    return Value(None) if step.get("result") is False else Value(result)


async def _read(strategy: Any, variables: dict[str, Any], step: Json) -> Any:
    return Value(variables[step["var"]].value())


async def _numpy(strategy: Any, variables: dict[str, Any], step: Json) -> Any:
    return Value(variables[step["var"]].numpy())


async def _local_values(strategy: Any, variables: dict[str, Any], step: Json) -> Any:
    return Value(strategy.local_results(variables[step["var"]]))


async def _assign(strategy: Any, variables: dict[str, Any], step: Json) -> Any:
    method = getattr(variables[step["var"]], step["do"].removesuffix("_in_scope"))
    value = decode(step["value"])
    if step["do"].endswith("_in_scope"):
        with strategy.scope():
            method(value)
    else:
        method(value)
    return Value(None)


async def _reduce(strategy: Any, variables: dict[str, Any], step: Json) -> Any:
    op, axis = programs.op_of(step["reduce_op"]), programs.axis_of(step["axis"])
    return Value(await strategy.reduce(op, variables[step["var"]], axis=axis))


async def _gather(strategy: Any, variables: dict[str, Any], step: Json) -> Any:
    return Value(await strategy.gather(variables[step["var"]], axis=programs.axis_of(step["axis"])))


async def _add_one(strategy: Any, variables: dict[str, Any], step: Json) -> Any:
    return Value(variables[step["var"]] + 1)


async def _properties(strategy: Any, variables: dict[str, Any], step: Json) -> Any:
    variable = variables[step["var"]]
    on_read = variable.synchronization is pipedist.VariableSynchronization.ON_READ
    return {
        "synchronization": variable.synchronization.name,
        "aggregation": variable.aggregation.name,
        "trainable": variable.trainable,
        "shape": list(variable.shape),
        "dtype": variable.dtype.name,
        # pipedist has one class for all; which kind it is, is its synchronization.
        "class": "SyncOnReadVariable" if on_read else "MirroredVariable",
    }


async def _update(strategy: Any, variables: dict[str, Any], step: Json) -> Any:
    def add(copy: Any, value: Any) -> Any:
        return copy.assign_add(value)

    return Value(await strategy.update(variables[step["var"]], add, args=(decode(step["value"]),)))


_STEPS = {
    "run": _run,
    "read": _read,
    "numpy": _numpy,
    "local_values": _local_values,
    "reduce": _reduce,
    "gather": _gather,
    "add_one": _add_one,
    "properties": _properties,
    "update": _update,
} | {name + scope: _assign for name in ("assign", "assign_add", "assign_sub") for scope in ("", "_in_scope")}


def place_of(note: Json) -> str | None:
    """Return the place that words tell a variable is made in; None where it is the strategy's scope.

    Raises:
        Skip: the words tell no place that is known.
    """
    if not isinstance(note, str):
        return None
    if "inside" in note:
        return "replica function"
    if "strategy" in note and "other" in note:
        return "another strategy"
    if "outside" in note:
        return "no scope"
    raise Skip(f"unknown program create_variable {note}")


async def _create_elsewhere(place: str, strategy: Any, other: Any) -> Any:
    """Use a variable in the strategy's replicas that was made elsewhere."""
    with contextlib.ExitStack() as scope:
        if place == "another strategy":
            scope.enter_context(other.scope())
        made = None if place == "replica function" else pipedist.Variable(1.0)

    def use() -> Any:
        return (pipedist.Variable(1.0) if made is None else made).value()

    return await strategy.run(use)


async def _create(note: Json, strategy: Any, other: Any) -> Outcome:
    """Create one variable, and return what it is."""
    place = place_of(note)
    if place is not None:
        try:
            return Outcome(Value(await _create_elsewhere(place, strategy, other)))
        except Exception as error:
            return Outcome(Raised(error))
    if not isinstance(note, dict) or set(note) - {
        "initial",
        "synchronization",
        "aggregation",
        "trainable",
        "dtype",
    }:
        raise Skip(f"unknown program create_variable {note}")
    initial = decode(note["initial"]) if isinstance(note["initial"], dict) else note["initial"]
    given = {key: note[key] for key in note if key != "initial"}
    try:
        with strategy.scope():
            made = pipedist.Variable((lambda: np.float32(1)) if initial == "callable" else initial, **given)
    except Exception as error:
        return Outcome(Raised(error))
    return Outcome(
        Value(
            {
                "aggregation": made.aggregation.name,
                "synchronization": made.synchronization.name,
                "trainable": made.trainable,
            }
        )
    )
