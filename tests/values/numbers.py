"""Strategies and a slow reference for the tests of reductions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import numpy as np
from hypothesis import strategies as st

INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
FLOATS = ("float16", "float32", "float64")


def fold_by_definition(leaves: Mapping[int, Any], combine: Callable[[Any, Any], Any]) -> Any:
    """The recursive definition: node(lo, hi) = combine(node(lo, mid), node(mid, hi))."""

    def node(lo: int, hi: int) -> Any:
        if hi - lo == 1:
            return leaves.get(lo)
        half = 1 << (hi - lo - 1).bit_length() - 1
        left, right = node(lo, lo + half), node(lo + half, hi)
        if left is None or right is None:
            return right if left is None else left
        return combine(left, right)

    return node(0, max(leaves) + 1) if leaves else None


def integer_components(dtype: str, *, rows_max: int = 5, components_max: int = 6) -> Any:
    """Components of one integer dtype, [rows, 2], extreme values included; rows may be 0."""
    info = np.iinfo(dtype)
    element = st.one_of(
        st.integers(-4, 4).filter(lambda value: value >= info.min),
        st.sampled_from([int(info.min), int(info.max)]),
        st.integers(int(info.min), int(info.max)),
    )
    rows = st.lists(st.tuples(element, element), max_size=rows_max)
    component = rows.map(lambda items: np.array(items, dtype).reshape(len(items), 2))
    return st.lists(component, min_size=1, max_size=components_max)


def float_components(dtype: str, *, rows_max: int = 5, components_max: int = 9) -> Any:
    """Components of one float dtype, [rows, 2], with NaN, infinities and signed zeros."""
    element = st.floats(width=np.dtype(dtype).itemsize * 8)
    rows = st.lists(st.tuples(element, element), max_size=rows_max)
    component = rows.map(lambda items: np.array(items, dtype).reshape(len(items), 2))
    return st.lists(component, min_size=1, max_size=components_max)


def rounded(value: Fraction, dtype: np.dtype[Any]) -> Any:
    """A fraction, correctly rounded (ties to even) to float32 or float64."""
    if dtype.itemsize == 8:
        return np.float64(float(value))
    near = np.float32(float(value))
    around = [near, np.nextafter(near, np.float32(-np.inf)), np.nextafter(near, np.float32(np.inf))]
    return min(
        (item for item in around if math.isfinite(item)),
        key=lambda item: (abs(Fraction(float(item)) - value), int(item.view(np.int32)) & 1),
    )


def bits(value: Any) -> Any:
    """The bytes of a value, with its dtype and shape."""
    array = np.asarray(value)
    return array.dtype.str, array.shape, array.tobytes()
