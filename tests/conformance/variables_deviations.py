"""Where pipedist's variables answer something better than TensorFlow's.

Each rule says which programs it concerns; what they must answer is worked out here, step by step, with
`replicas_oracle` for what replica functions do.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.conformance import deviations, reference, replicas_oracle
from tests.conformance.cases import Case, Deviation, Json, decode
from tests.conformance.compare import value_difference
from tests.conformance.explanations import agree
from tests.conformance.programs import operations
from tests.conformance.replicas_oracle import Raised, Variable, changed, operand, to_json


def _answer(case: Case, *, of_tensorflow: bool = False) -> Json | None:
    """Return what a program must answer, None where the oracle does not know.

    Args:
        of_tensorflow: what TensorFlow answers: each replica has a copy of an on_write variable, and nothing
            keeps the copies equal but an aggregation; integers are divided without their remainder.
    """
    plain = deviations.values_are_plain(case)
    one_place = plain or (case.strategy is not None and case.strategy.kind == "central_storage")
    try:
        variables = {
            name: _create(spec, case.replicas, one_place) for name, spec in case.call["vars"].items()
        }
        if of_tensorflow and not one_place:
            for variable in variables.values():
                if not variable.on_read and (variable.aggregation == "NONE" or not _assigns_inside(case)):
                    variable.copies *= case.replicas
                    variable.on_read, variable.aggregation = True, DIVERGING
                elif not variable.on_read and variable.aggregation == "ONLY_FIRST_REPLICA":
                    variable.aggregation = replicas_oracle.FIRST_ALONE
                elif variable.on_read and variable.aggregation in ("SUM", "NONE"):
                    variable.aggregation = f"{variable.aggregation}{OF_TENSORFLOW}"
        steps = [
            # TensorFlow does not look at results that are ignored.
            {**step, "fn": ["seq", [step["fn"], ["none"]]]}
            if of_tensorflow and step.get("result") is False
            else step
            for step in case.call["steps"]
        ]
        return {"steps": [_step(case, step, variables, plain, one_place) for step in steps]}
    except Raised as raised:
        return raised.result
    except replicas_oracle.NoAnswer:
        return None


DIVERGING = "DIVERGING"
"""Aggregation of an on_write variable whose copies are independent: a read returns replica 0's."""

OF_TENSORFLOW = " of TensorFlow"
"""Suffix of the aggregation of an on_read variable that is assigned as TensorFlow does it."""


def _create(spec: Json, replicas: int, one_place: bool) -> Variable:
    initial = np.asarray(decode(spec["initial"]))
    aggregation = spec.get("aggregation") or "NONE"
    synchronization = spec.get("synchronization") or "AUTO"
    if synchronization == "NONE" or (aggregation == "MEAN" and initial.dtype.kind in "iu"):
        raise Raised("ValueError")
    on_read = synchronization == "ON_READ" and not one_place
    return Variable([initial] * (replicas if on_read else 1), aggregation, on_read)


def _step(case: Case, step: Json, variables: dict[str, Variable], plain: bool, one_place: bool) -> Json:
    if step["do"] == "run":
        before = copy.deepcopy(variables)
        result = replicas_oracle.run(
            step["fn"], case.replicas, step.get("args", []), {}, plain=plain, variables=variables
        )
        if "error" in result:
            variables.update(before)
            return result
        return {"none": True} if step.get("result") is False else result["value"]
    variable = variables[step["var"]]
    try:
        return _outside(case, step, variable, one_place)
    except Raised as raised:
        return raised.result


def _outside(case: Case, step: Json, variable: Variable, one_place: bool) -> Json:
    each = variable.copies * (1 if variable.on_read else case.replicas)
    match step["do"]:
        case "read" | "numpy":
            return to_json(_read(variable))
        case "local_values":
            return {"tuple": [to_json(copy) for copy in each]}
        case "add_one":
            return to_json(np.asarray(_read(variable) + 1))
        case "reduce":
            value = {"per_replica": [to_json(c) for c in each]} if variable.on_read else to_json(each[0])
            call = {"reduce_op": step["reduce_op"], "axis": step["axis"], "value": value}
            return _unwrapped(reference.reduce_result(call, case.replicas))
        case "gather":
            value = {"per_replica": [to_json(copy) for copy in each]}
            return _unwrapped(reference.gather_result({"axis": step["axis"], "value": value}))
        case "update" if variable.aggregation == DIVERGING:
            parts = reference.components(step["value"]) or [step["value"]] * case.replicas
            pairs = zip(each, parts, strict=True)
            variable.copies = [
                np.asarray(changed("assign_add", copy, operand(decode(part), copy))) for copy, part in pairs
            ]
            return {"mirrored": [to_json(copy) for copy in variable.copies]}
        case "update" if not variable.on_read:
            value = decode(step["value"])
            if "per_replica" in step["value"]:
                raise Raised("ValueError")
            variable.copies = [changed("assign_add", each[0], operand(value, each[0]))]
            return {"mirrored": [to_json(variable.copies[0])] * case.replicas}
    how = step["do"].removesuffix("_in_scope")
    if how not in ("assign", "assign_add", "assign_sub"):
        raise replicas_oracle.NoAnswer
    parts = reference.components(step["value"])
    if parts is not None and variable.aggregation == DIVERGING:
        pairs = zip(each, parts, strict=True)
        variable.copies = [
            np.asarray(changed(how, copy, operand(decode(part), copy))) for copy, part in pairs
        ]
        return {"none": True}
    if parts is not None:
        raise Raised("TypeError" if variable.on_read else "ValueError")
    value = operand(decode(step["value"]), each[0])
    if not variable.on_read:
        variable.copies = [changed(how, each[0], value)]
    elif variable.aggregation == f"SUM{OF_TENSORFLOW}" and how == "assign":
        variable.copies = [np.asarray(value / case.replicas).astype(value.dtype)] * case.replicas
    elif not variable.aggregation.startswith("SUM"):
        variable.copies = [changed(how, copy, value) for copy in each]
    elif how != "assign":
        raise Raised("ValueError")
    elif value.dtype.kind in "iu":
        part = value // case.replicas
        variable.copies = [value - part * (case.replicas - 1), *[part] * (case.replicas - 1)]
    else:
        variable.copies = [(value / case.replicas).astype(value.dtype)] * case.replicas
    variable.copies = [np.asarray(copy) for copy in variable.copies]
    if variable.aggregation == f"NONE{OF_TENSORFLOW}":
        raise Raised("ValueError")  # it can't return the new value
    return {"none": True}


def _read(variable: Variable) -> np.ndarray:
    aggregation = variable.aggregation.removesuffix(OF_TENSORFLOW)
    if not variable.on_read or aggregation in ("ONLY_FIRST_REPLICA", DIVERGING):
        return variable.copies[0]
    if aggregation == "NONE":
        if len(variable.copies) == 1 and variable.aggregation != aggregation:
            return variable.copies[0]
        raise Raised("ValueError")
    value = {"per_replica": [to_json(copy) for copy in variable.copies]}
    call = {"reduce_op": aggregation, "axis": None, "value": value}
    return np.asarray(decode(_unwrapped(reference.reduce_result(call, len(variable.copies)))))


def _unwrapped(result: Json) -> Json:
    if "error" in result:
        raise Raised(result["error"])
    return result["value"]


def _step_agrees(recorded: Json, own: Json) -> bool:
    if "error" in own or "error" in recorded:
        return "error" in own and agree(recorded, own)
    return value_difference(recorded, decode(own)) is None


def _rule(name: str, row: int, concerns: Callable[[Case], bool]) -> Deviation:
    def expected(case: Case, recorded: Json) -> Json:
        if case.call["op"] != "variable_program" or not concerns(case) or _asks_properties(case):
            return recorded
        own = _answer(case)
        if own is None:
            return recorded
        if "error" in own or "error" in recorded:
            return recorded
        for told in (recorded, case.expect_function):  # what it was traced to is as good
            if told is not None and all(map(_step_agrees, told["steps"], own["steps"])):
                return recorded
        return own if _is_explained(case, recorded, own) else recorded

    return Deviation(f"variables: {name}", row, expected)


def _is_explained(case: Case, recorded: Json, own: Json) -> bool:
    """Return whether each step is as pipedist's own, or as TensorFlow does it."""
    model = _answer(case, of_tensorflow=True)
    others = own["steps"] if model is None or "error" in model else model["steps"]
    return len(recorded["steps"]) == len(own["steps"]) and all(
        _step_agrees(told, ours)
        or _step_agrees(_without_variables(told), other)
        or _is_mean_or_mismatch(told, ours)
        for told, ours, other in zip(recorded["steps"], own["steps"], others, strict=True)
    )


def _without_variables(told: Json) -> Json:
    """Return a VALUE in which a replica's own copy of a variable is its value."""
    match told:
        case {"per_replica": parts}:
            return {"per_replica": [_without_variables(part) for part in parts]}
        case {"variable": [part]}:
            return part
    return told


def _is_mean_or_mismatch(told: Json, ours: Json) -> bool:
    """Whether TensorFlow returned a variable as its mean, or counted merge_calls of replicas."""
    if "error" in ours:
        return ours["error"] == replicas_oracle.MISMATCH and told.get("error") == "RuntimeError"
    return "variable" in told and all(_step_agrees(part, ours) for part in told["variable"])


def _always_per_replica(case: Case, recorded: Json) -> Json:
    """The results of `run` are per replica."""
    if case.call["op"] != "variable_program" or "steps" not in recorded:
        return recorded
    steps = [
        deviations.always_per_replica(case, {"value": told})["value"]
        if step["do"] == "run" and step.get("result") is not False and "error" not in told
        else told
        for step, told in zip(case.call["steps"], recorded["steps"], strict=True)
    ]
    return {**recorded, "steps": steps}


def _asks_properties(case: Case) -> bool:
    return any(step["do"] == "properties" for step in case.call["steps"])


def _has(case: Case, **traits: Any) -> bool:
    """Whether a variable has one of the given values in each of the given options."""
    return any(
        all((spec.get(key) or _DEFAULTS[key]) in options for key, options in traits.items())
        for spec in case.call["vars"].values()
    )


_DEFAULTS = {"synchronization": "AUTO", "aggregation": "NONE"}
_ON_WRITE = ("AUTO", "ON_WRITE")


def _does(case: Case, *kinds: str) -> bool:
    return any(step["do"].removesuffix("_in_scope") in kinds for step in case.call["steps"])


def _assigns_per_replica(case: Case) -> bool:
    """Whether a per-replica value is assigned, or an update is given one, outside of replica functions."""
    return any(
        step["do"] != "run" and reference.components(step.get("value", {})) is not None
        for step in case.call["steps"]
    )


def _assigns_inside(case: Case) -> bool:
    return any(
        step["do"] == "run" and operations(step["fn"]) & {"assign", "assign_add", "assign_sub"}
        for step in case.call["steps"]
    )


def _branches_inside(case: Case) -> bool:
    return any(step["do"] == "run" and "by_replica" in operations(step["fn"]) for step in case.call["steps"])


def _created_inside(case: Case, recorded: Json) -> Json:
    if case.call["op"] == "create_variable" and "inside" in str(case.call["note"]):
        return {"error": "ValueError", "message": "create it outside"}
    return recorded


def _created_elsewhere(case: Case, recorded: Json) -> Json:
    note = case.call.get("note")
    if isinstance(note, str) and "inside" not in note and "value" in recorded:
        return {"error": "ValueError", "message": "create it in the scope of the strategy that uses it"}
    return recorded


DEVIATIONS = (
    Deviation("variables: a leaf is always per replica, None stays None", 3, _always_per_replica),
    _rule(
        "several replicas assign an on_write variable only with an aggregation",
        43,
        lambda case: _has(case, synchronization=_ON_WRITE, aggregation=("NONE",)) and _assigns_inside(case),
    ),
    _rule("a per-replica value is not assigned outside of replica functions", 43, _assigns_per_replica),
    _rule(
        "the integers of an on_read sum add up to what was assigned",
        44,
        lambda case: _has(case, synchronization=("ON_READ",), aggregation=("SUM",)) and _does(case, "assign"),
    ),
    _rule(
        "an on_read variable without aggregation can be assigned outside, but not read",
        45,
        lambda case: (
            _has(case, synchronization=("ON_READ",), aggregation=("NONE",))
            and (_does(case, "assign", "assign_add", "assign_sub") or case.replicas == 1)
        ),
    ),
    _rule("replicas that assign differently get CollectiveMismatchError", 22, _branches_inside),
    _rule("the mean of a variable is its value", 17, lambda case: _does(case, "reduce", "gather")),
    Deviation("variables: a replica function can't create one", 59, _created_inside),
    Deviation("variables: replicas share only variables of their strategy's scope", 46, _created_elsewhere),
)
