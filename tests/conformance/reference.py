"""What reduce and gather must answer where pipedist deviates, worked out from the JSON of a case.

A second, slow implementation that shares nothing with pipedist: integers are Python's, means are
fractions, floats are float64 rounded at the end.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from tests.conformance.cases import Json

INT_BITS = {"int8": 8, "int16": 16, "int32": 32, "int64": 64}
UINT_BITS = {"uint8": 8, "uint16": 16, "uint32": 32, "uint64": 64}
FLOATS = frozenset({"float16", "bfloat16", "float32", "float64", "complex64", "complex128"})
COMPONENTS = ("per_replica", "mirrored", "variable")
CONTAINERS = ("dict", "list", "tuple", "namedtuple")
OPS = ("sum", "mean", "min", "max", "prod")


class Refused(Exception):
    """The call must raise an error; the argument is the name of its class."""


def reduce_result(call: Mapping[str, Json], replicas: int) -> Json:
    """Return the RESULT that pipedist owes for a `reduce` call."""
    try:
        op = _op(call["reduce_op"])
        axes = _axes(call["axis"])
        if replicas > 1 and call["value"] == {"none": True}:
            return {"value": _plain(op, axes, call["value"])}

        def leaf(value: Json) -> Json:
            parts = components(value)
            if parts is not None:
                return _fold(op, axes, parts)
            return _fold(op, axes, [value]) if replicas == 1 else _plain(op, axes, value)

        return {"value": map_leaves(leaf, call["value"])}
    except Refused as refused:
        return {"error": str(refused)}


def gather_result(call: Mapping[str, Json]) -> Json:
    """Return the RESULT that pipedist owes for a `gather` call."""
    axis = call["axis"]
    if isinstance(axis, Mapping) and "py" in axis:
        axis = axis["py"]
    if type(axis) is not int:
        return {"error": "TypeError"}
    try:

        def leaf(value: Json) -> Json:
            parts = components(value)
            return value.get("numpy", value) if parts is None else _concatenate(axis, parts)

        return {"value": map_leaves(leaf, call["value"])}
    except Refused as refused:
        return {"error": str(refused)}


def components(value: Json) -> list[Json] | None:
    """Return the components of a per-replica VALUE, None for any other."""
    return next((value[key] for key in COMPONENTS if key in value), None)


def map_leaves(fn: Callable[[Json], Json], value: Json) -> Json:
    """Return a VALUE with `fn` applied to all that is no container and not None."""
    match value:
        case {"dict": items}:
            return {"dict": {key: map_leaves(fn, item) for key, item in items.items()}}
        case {"list": items}:
            return {"list": [map_leaves(fn, item) for item in items]}
        case {"tuple": items}:
            return {"tuple": [map_leaves(fn, item) for item in items]}
        case {"namedtuple": name, "fields": items}:
            return {"namedtuple": name, "fields": {key: map_leaves(fn, item) for key, item in items.items()}}
        case {"none": True}:
            return value
    return fn(value)


def leaves(value: Json) -> list[Json]:
    """Return all that is no container and not None in a VALUE."""
    found: list[Json] = []
    map_leaves(lambda leaf: found.append(leaf) or leaf, value)
    return found


def arrays(value: Json) -> list[Json]:
    """Return the arrays of a VALUE as `(dtype, shape, data)` objects, Python numbers included."""
    found = []
    for leaf in leaves(value):
        for part in components(leaf) or [leaf]:
            found += [_array(item) for item in leaves(part)]
    return found


def is_container(value: Json) -> bool:
    """Return whether a VALUE is a dict, list, tuple or namedtuple."""
    return any(key in value for key in CONTAINERS)


def _op(op: Json) -> str:
    name = op if isinstance(op, str) else op.get("str")
    if not isinstance(name, str) or name.lower() not in OPS:
        raise Refused("ValueError")
    return name.lower()


def _axes(axis: Json) -> tuple[int, ...] | None:
    if axis is None:
        return None
    if isinstance(axis, Mapping):
        axis = axis.get("list", axis.get("py"))
    axes = tuple(axis) if isinstance(axis, list) else (axis,)
    if any(type(item) is not int for item in axes):
        raise Refused("TypeError")
    if len(set(axes)) < len(axes):
        raise Refused("ValueError")
    return axes


def _plain(op: str, axes: tuple[int, ...] | None, value: Json) -> Json:
    if op == "mean" and axes is None:
        return value.get("numpy", value)
    raise Refused("ValueError")


def _array(value: Json) -> Json:
    if "numpy" in value:
        return value["numpy"]
    if "py" in value:
        dtype = {bool: "bool", int: "int64", float: "float64"}.get(type(value["py"]), "string")
        return {"dtype": dtype, "shape": [], "data": [value["py"]]}
    return value


def _resolve(axes: tuple[int, ...], rank: int) -> tuple[int, ...]:
    if any(not -rank <= axis < rank for axis in axes):
        raise Refused("ValueError")
    resolved = tuple(axis % rank for axis in axes)
    if len(set(resolved)) < len(resolved):
        raise Refused("ValueError")
    return resolved


def _fold(op: str, axes: tuple[int, ...] | None, components: Sequence[Json]) -> Json:
    parts = [_array(component) for component in components]
    if any("dtype" not in part for part in parts):
        raise Refused("ValueError")
    for part in parts:
        if part["dtype"] not in INT_BITS | UINT_BITS and part["dtype"] not in FLOATS:
            raise Refused("TypeError")
    dtype = parts[0]["dtype"]
    if dtype.startswith("complex") and op in ("min", "max"):
        raise Refused("TypeError")
    rows: list[np.ndarray] = []
    count, shape = 0, None
    for part in parts:
        x = np.empty(len(part["data"]), object)
        x[:] = [_number(item, dtype) for item in part["data"]]
        x = x.reshape(part["shape"])
        along = () if axes is None else _resolve(axes, x.ndim)
        kept = tuple(n for axis, n in enumerate(x.shape) if axis not in along)
        own = math.prod(x.shape[axis] for axis in along)
        if part["dtype"] != dtype:
            raise Refused("TypeError")
        if shape is not None and kept != shape:
            raise Refused("ValueError")
        shape = kept
        count += own
        rows.append(np.moveaxis(x, along, range(len(along))).reshape(own, math.prod(kept)))
    assert shape is not None
    table = np.concatenate(rows)
    if op in ("min", "max") and not len(table):
        return {"none": True}
    exact = dtype not in FLOATS
    results = [_reduce_column(op, list(column), count, exact) for column in table.T]
    if exact and op != "mean":
        bits = INT_BITS.get(dtype)
        low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if bits else (0, (1 << UINT_BITS[dtype]) - 1)
        if any(not low <= item <= high for item in results):
            raise Refused("OverflowError")
        return {"dtype": dtype, "shape": list(shape), "data": results}
    if exact:
        dtype = "float32" if dtype in ("int8", "uint8", "int16", "uint16") else "float64"
    if dtype.startswith("complex"):
        return {"dtype": dtype, "shape": list(shape), "data": [[item.real, item.imag] for item in results]}
    if dtype != "bfloat16":
        with np.errstate(all="ignore"):
            results = np.array(results, np.float64).astype(dtype).astype(np.float64).tolist()
    return {"dtype": dtype, "shape": list(shape), "data": [_plain_float(item) for item in results]}


def _number(item: Json, dtype: str) -> Any:
    if dtype.startswith("complex"):
        return np.complex128(complex(*item) if isinstance(item, list) else item)
    return np.float64(item) if dtype in FLOATS else item


def _plain_float(item: float) -> Json:
    return item if math.isfinite(item) else str(item)


def _reduce_column(op: str, column: list[Any], count: int, exact: bool) -> Any:
    with np.errstate(all="ignore"):
        if op == "prod":
            return functools.reduce(lambda a, b: a * b, column, 1 if exact else np.float64(1))
        if op in ("min", "max"):
            if not exact and any(np.isnan(item) for item in column):
                return np.float64("nan")
            return (min if op == "min" else max)(column)
        total = sum(column, 0 if exact else np.float64(0))
        if op == "sum":
            return total
        if count == 0:
            return math.nan
        return float(Fraction(total, count)) if exact else total / count


def _concatenate(axis: int, components: Sequence[Json]) -> Json:
    parts = [_array(component) for component in components]
    dtype = parts[0]["dtype"]
    if any(not part["shape"] for part in parts):
        raise Refused("ValueError")
    (along,) = _resolve((axis,), len(parts[0]["shape"]))
    for part in parts:
        if part["dtype"] != dtype:
            raise Refused("TypeError")
        if len(part["shape"]) != len(parts[0]["shape"]):
            raise Refused("ValueError")
        if any(
            n != m
            for i, (n, m) in enumerate(zip(part["shape"], parts[0]["shape"], strict=True))
            if i != along
        ):
            raise Refused("ValueError")
    blocks = []
    for part in parts:
        block = np.empty(len(part["data"]), object)
        block[:] = part["data"]
        blocks.append(block.reshape(part["shape"]))
    whole = np.concatenate(blocks, axis=along)
    return {"dtype": dtype, "shape": list(whole.shape), "data": whole.ravel().tolist()}
