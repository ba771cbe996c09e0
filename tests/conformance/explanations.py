"""What TensorFlow does where a rule deviates: a recorded result must be explained to be replaced.

A rule that applies to a case replaces the recorded result only if this result is what the rule tells of
TensorFlow: an error of a certain class, or the value that a small model of TensorFlow gives. Any other
recorded result stays what the case expects.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from tests.conformance import reference
from tests.conformance.cases import Case, Json, decode, decode_array
from tests.conformance.compare import ACCIDENTS, KINDS, value_difference
from tests.conformance.replicas_oracle import MISMATCH, to_json

Explanation = Callable[[Case, Json, Json], bool]
"""`(case, recorded, own)`: whether the recorded result, which differs from pipedist's own, is as told."""

Model = Callable[[Case], Json]
"""The VALUE that TensorFlow answers; raises an exception where it does not know."""


def agree(recorded: Json, own: Json) -> bool:
    """Return whether TensorFlow's result is what pipedist owes anyway."""
    if "error" in own:
        if "error" not in recorded:
            return False
        told, ours = (KINDS.get(name, name) for name in (recorded["error"], own["error"]))
        # A mismatch of replicas is a ValueError too.
        return recorded["error"] in ACCIDENTS or told == ours or (ours == MISMATCH and told == "VALUE")
    return "value" in recorded and same_value(recorded["value"], own["value"])


def same_value(recorded: Json, own: Json) -> bool:
    """Return whether two VALUEs are the same."""
    return value_difference(recorded, decode(own)) is None


def refused(*errors: str) -> Explanation:
    """TensorFlow raises one of these, pipedist answers, or says in another way what is wrong."""
    return lambda case, recorded, own: recorded.get("error") in errors


def answered(model: Model) -> Explanation:
    """TensorFlow answers what the model gives."""

    def explains(case: Case, recorded: Json, own: Json) -> bool:
        if "value" not in recorded:
            return False
        try:
            return same_value(recorded["value"], model(case))
        except (ValueError, TypeError, KeyError, IndexError, reference.Refused):
            return False

    return explains


def any_of(*explanations: Explanation) -> Explanation:
    """One of several explanations."""
    return lambda case, recorded, own: any(explains(case, recorded, own) for explains in explanations)


def where(condition: Callable[[Case], bool], explains: Explanation) -> Explanation:
    """An explanation of some of the cases."""
    return lambda case, recorded, own: condition(case) and explains(case, recorded, own)


# -- models of reduce and gather -------------------------------------------------------------------


def first_components(case: Case) -> Json:
    """The value with replica 0's component in each leaf."""
    return reference.map_leaves(
        lambda leaf: (reference.components(leaf) or [leaf.get("numpy", leaf)])[0], case.call["value"]
    )


def wrapped(case: Case) -> Json:
    """The reduction in the dtype of the integers, which wraps around; so does the denominator of MEAN."""
    op, axis = case.call["reduce_op"], case.call["axis"]
    mean = str(op if isinstance(op, str) else op["str"]).lower() == "mean"
    axes = tuple(axis) if isinstance(axis, list) else axis

    def leaf(value: Json) -> Json:
        parts = [decode_array(part.get("numpy", part)) for part in reference.components(value) or [value]]
        dtype = parts[0].dtype
        if dtype.kind not in "iu":
            raise ValueError("no integers")
        if axes is None:
            total, count = np.sum(np.stack(parts), axis=0, dtype=dtype), len(parts)
        else:
            total = np.sum([np.sum(part, axis=axes, dtype=dtype) for part in parts], axis=0, dtype=dtype)
            along = axes if isinstance(axes, tuple) else (axes,)
            count = sum(math.prod(part.shape[each] for each in along) for part in parts)
            count = int(np.asarray(count).astype(dtype))
        if not mean:
            return to_json(np.asarray(total))
        small = dtype.itemsize <= 2
        with np.errstate(all="ignore"):
            quotient = (
                np.asarray(total).astype(np.float64) / count if count else np.asarray(total) / np.float64(0)
            )
        return to_json(np.asarray(quotient).astype(np.float32 if small else np.float64))

    return reference.map_leaves(leaf, case.call["value"])


def copies_reduced(case: Case) -> Json:
    """The reduction of a plain value as if every replica had computed it."""

    def leaf(value: Json) -> Json:
        return (
            value
            if reference.components(value)
            else {"per_replica": [value.get("numpy", value)] * case.replicas}
        )

    call = {**case.call, "value": reference.map_leaves(leaf, case.call["value"])}
    return _value(reference.reduce_result(call, case.replicas))


def bool_as_axis(case: Case) -> Json:
    """The reduction along axis 0 or 1 that False or True stands for."""
    axis = case.call["axis"]["py"]
    if type(axis) is not bool:
        raise ValueError("no bool")
    return _value(reference.reduce_result({**case.call, "axis": int(axis)}, case.replicas))


def number_as_axis(axis: Json) -> Json:
    """Return the int that a bool, or a list or tuple of one number, stands for as an axis."""
    match axis:
        case {"py": bool(number)} | {"list": [int(number)]} | [int(number)]:
            return int(number)
    raise ValueError("no number")


def gathered_along_number(case: Case) -> Json:
    """The values gathered along the axis that a bool or a list stands for."""
    return _value(reference.gather_result({**case.call, "axis": number_as_axis(case.call["axis"])}))


def one_array(case: Case, recorded: Json, own: Json) -> bool:
    """The leaves of a list or tuple are added together."""
    return "dtype" in recorded.get("value", {}) and any(
        kind in case.call["value"] for kind in ("list", "tuple", "namedtuple")
    )


def nearly(case: Case, recorded: Json, own: Json) -> bool:
    """The same, as far as folding in 16 bits allows: dtype, shape, and numbers within one percent."""
    if "value" not in recorded or "value" not in own:
        return False
    try:
        told, ours = (decode_array(result["value"]) for result in (recorded, own))
    except (KeyError, ValueError):
        return False
    if told.dtype != ours.dtype or told.shape != ours.shape:
        return False
    a, b = told.astype(np.float64), ours.astype(np.float64)
    overflowed = ~np.isfinite(a) & (np.abs(b) > 3e4)
    return bool(np.all(np.isclose(a, b, rtol=1e-2, atol=1e-2, equal_nan=True) | overflowed))


def all_zero(case: Case) -> bool:
    """Whether the value is nothing but zeros."""
    return all(not item for array in reference.arrays(case.call["value"]) for item in array.get("data", [1]))


def _value(result: Json) -> Json:
    if "value" not in result:
        raise ValueError(f"refused: {result}")
    return result["value"]


# -- models of datasets ----------------------------------------------------------------------------


def cut_otherwise(recorded: Json, own: Json) -> bool:
    """Return whether two readings have the same rows in the same order, cut into batches of other sizes.

    Args:
        recorded, own: of one worker: `elements`, or `steps` and `end`.
    """
    if not {"steps", "elements"} & set(recorded) or set(recorded) != set(own):
        return False
    if recorded.get("end") != own.get("end"):
        return False
    told, ours = (_batches(each.get("steps", each.get("elements"))) for each in (recorded, own))
    if [row for batch in told for row in batch] != [row for batch in ours for row in batch]:
        return False
    if _widths(recorded) - _widths(own):
        return False
    sizes = [[len(batch) for batch in batches if batch] for batches in (told, ours)]
    return sizes[0] != sizes[1] or len(told) < len(ours)


def _widths(reading: Json) -> set[int]:
    """Return the numbers of replicas in the steps of a reading."""
    leaves = [leaf for step in reading.get("steps", ()) for leaf in reference.leaves(step)]
    return {len(reference.components(leaf) or []) for leaf in leaves}


def _batches(elements: Json) -> list[list[Json]]:
    """Return the rows of each element, or of each replica's part of it, for each leaf of a tree."""
    parts: list[Json] = []
    for element in elements:
        for leaf in reference.leaves(element) if isinstance(element, dict) else [element]:
            parts += (reference.components(leaf) or [leaf]) if isinstance(leaf, dict) else [leaf]
    return [_rows(part) for part in parts]


def _rows(element: Json) -> list[Json]:
    match element:
        case {"dtype": dtype, "shape": [_, *rest], "data": data}:
            each = max(1, math.prod(rest))
            return [[dtype, rest, data[i : i + each]] for i in range(0, len(data), each)]
        case {"dtype": dtype, "shape": [], "data": data}:
            return [[dtype, [], data]]
        case list():
            return [row for item in element for row in (_rows(item) if isinstance(item, dict) else [item])]
    return [element]
