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
from tests.conformance.deviations import agree
from tests.conformance.programs import operations
from tests.conformance.replicas_oracle import Raised, Variable, changed, operand, to_json


def _answer(case: Case) -> Json | None:
    """Return what a program must answer, None where the oracle does not know."""
    plain = deviations.values_are_plain(case)
    one_place = plain or (case.strategy is not None and case.strategy.kind == "central_storage")
    try:
        variables = {
            name: _create(spec, case.replicas, one_place) for name, spec in case.call["vars"].items()
        }
        return {"steps": [_step(case, step, variables, plain, one_place) for step in case.call["steps"]]}
    except Raised as raised:
        return raised.result
    except replicas_oracle.NoAnswer:
        return None


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
        case "update" if not variable.on_read:
            value = decode(step["value"])
            if "per_replica" in step["value"]:
                raise Raised("ValueError")
            variable.copies = [changed("assign_add", each[0], operand(value, each[0]))]
            return {"mirrored": [to_json(variable.copies[0])] * case.replicas}
    how = step["do"].removesuffix("_in_scope")
    if how not in ("assign", "assign_add", "assign_sub"):
        raise replicas_oracle.NoAnswer
    if reference.components(step["value"]) is not None:
        raise Raised("TypeError" if variable.on_read else "ValueError")
    value = operand(decode(step["value"]), each[0])
    if not variable.on_read:
        variable.copies = [changed(how, each[0], value)]
    elif variable.aggregation != "SUM":
        variable.copies = [changed(how, copy, value) for copy in each]
    elif how != "assign":
        raise Raised("ValueError")
    elif value.dtype.kind in "iu":
        part = value // case.replicas
        variable.copies = [value - part * (case.replicas - 1), *[part] * (case.replicas - 1)]
    else:
        variable.copies = [(value / case.replicas).astype(value.dtype)] * case.replicas
    variable.copies = [np.asarray(copy) for copy in variable.copies]
    return {"none": True}


def _read(variable: Variable) -> np.ndarray:
    if not variable.on_read or variable.aggregation == "ONLY_FIRST_REPLICA":
        return variable.copies[0]
    if variable.aggregation == "NONE":
        raise Raised("ValueError")
    value = {"per_replica": [to_json(copy) for copy in variable.copies]}
    call = {"reduce_op": variable.aggregation, "axis": None, "value": value}
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
            return recorded if "error" in recorded and agree(recorded, own) else own
        for told in (recorded, case.expect_function):  # what it was traced to is as good
            if told is not None and all(map(_step_agrees, told["steps"], own["steps"])):
                return recorded
        return own

    return Deviation(f"variables: {name}", row, expected)


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
    if case.call["op"] == "create_variable" and case.call["note"] == "inside run":
        return {"error": "ValueError", "message": "create it outside"}
    return recorded


DEVIATIONS = (
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
    _rule(
        "a leaf is always per replica, None stays None",
        3,
        lambda case: _does(case, "run"),
    ),
    Deviation("variables: a replica function can't create one", 59, _created_inside),
)
