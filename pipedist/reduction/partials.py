"""The arithmetic of ONE leaf of a reduction: partial, join, finish.

A leaf's partial is `[code, count, data]`: its dtype ("f4", "i8", "bf16"), the number of components
(axis None) or rows (an axis) folded into it, and

| op, dtype | data of a scalar | data of an array |
|---|---|---|
| SUM and MEAN of integers | int, exact | `[limbs, bound]` (see `pipedist.reduction.exact_integers`) |
| PROD of integers | int, clipped to +-2**64 | `[magnitude, sign, mark]` |
| MIN and MAX of integers | int | the array |
| any op of floats | float (complex: a NumPy scalar) | the array, in the fold's dtype |
| MIN and MAX of no rows | None | None |

Fold rules (the spec language, "Stages"): float16 and bfloat16 fold in float32, other floats in their
own dtype, integers exactly; a final integer that does not fit is an OverflowError; MEAN of integers
is correctly rounded, to float32 for 8 and 16 bits and to float64 for more (tf.distribute's dtypes).
Python's int and float count as int64 and float64. NaNs of a result are canonical. Callers silence
NumPy's floating-point warnings: overflow to infinity and NaN are valid results.
"""

from __future__ import annotations

import enum
import importlib
import operator
from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from typing import Any, SupportsIndex, cast

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from pipedist.core.misuse_hints import conversion_hint, is_masked
from pipedist.reduction import exact_integers

_BLOCK_ROWS = (
    128  # rows are added sequentially before a tree starts; NumPy's own block size for the last axis
)
_LANES_MAX = 64  # limit of the rows combined into one wide vector
_LANE_ELEMENTS = 8192  # limit of such a vector: it fits into the L1 cache


class ReduceOp(enum.StrEnum):
    """How components become one value (tf.distribute.ReduceOp, and three more).

    Example:
        total = await strategy.reduce(pipedist.ReduceOp.SUM, losses, axis=None)  # or "sum"
    """

    SUM = "sum"
    MEAN = "mean"
    MIN = "min"
    MAX = "max"
    PROD = "prod"

    @classmethod
    def of(cls, op: ReduceOp | str) -> ReduceOp:
        """Return the operator of a name.

        Args:
            op: an operator, or its name (case-insensitive).

        Raises:
            ValueError: the name is unknown; the text lists the five names.
        """
        if isinstance(op, cls):
            return op
        try:
            return cls(op.lower())
        except (AttributeError, ValueError):
            names = ", ".join(repr(each.value) for each in cls)
            raise ValueError(f"{op!r} is not a reduce op; expected one of {names}") from None


class _Kind(Struct, frozen=True):
    """Fold rules of a dtype."""

    code: str  # name of the dtype in a partial, without byte order
    dtype: np.dtype[Any]  # dtype of the result of SUM, MIN, MAX, PROD
    fold: np.dtype[Any]  # dtype in which it is folded
    mean: np.dtype[Any]  # dtype of a MEAN
    exact: bool  # True for integers


def axes_of(axis: int | Sequence[int] | None) -> tuple[int, ...] | None:
    """Return the axes that a user passed (None, an int, or a list or tuple of ints) in normal form.

    A repeated axis is a ValueError, another type (or a bool) a TypeError.
    """
    if axis is None:
        return None
    axes = [axis_of(part) for part in (axis if isinstance(axis, (list, tuple)) else (axis,))]
    if len(set(axes)) < len(axes):
        raise ValueError(f"axis {axis!r} names an axis twice")
    return tuple(axes)


def axis_of(axis: object) -> int:
    """Return one axis as a plain int; raise TypeError if it is none (a bool is none)."""
    if isinstance(axis, (bool, np.bool_)) or not hasattr(type(axis), "__index__"):
        raise TypeError(f"`axis` must be an int, got {axis!r}")
    return operator.index(cast(SupportsIndex, axis))


def resolve_axes(axes: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return axes as non-negative numbers; raise ValueError if one is out of range, or repeated (0 and -1)."""
    resolved, ndim = [], len(shape)
    for axis in axes:
        if not -ndim <= axis < ndim:
            why = "a scalar has no axes" if ndim == 0 else f"the shape is {shape}"
            raise ValueError(f"axis {axis} is out of range: {why}")
        resolved.append(axis % ndim)
    if len(set(resolved)) < len(resolved):
        raise ValueError(f"axis {list(axes)} names an axis twice: the shape is {shape}")
    return tuple(resolved)


def leaf_partial(op: ReduceOp, axis: tuple[int, ...] | None, leaf: Any) -> list[Any]:
    """Reduce one leaf of a component to its partial.

    Raises:
        TypeError: the leaf is not numeric (bool, str, bytes, ...).
        ValueError: it lacks an axis of the reduction, or two axes are the same.
    """
    cls = type(leaf)
    if axis is None and cls is float:
        return ["f8", 1, leaf]
    if axis is None and cls is int and op is not ReduceOp.PROD:
        return ["i8", 1, leaf]
    kind, x = _array_of(leaf)
    if kind.dtype.kind == "c" and op in (ReduceOp.MIN, ReduceOp.MAX):
        raise TypeError(f"complex numbers have no {op.value}")
    axes = () if axis is None else resolve_axes(axis, np.shape(x))
    count = 1 if axis is None else prod(x.shape[axis] for axis in axes)
    data = _exact_data(op, x, axes, count) if kind.exact else _float_data(op, x, axes, count, kind)
    return [kind.code, count, data]


def join_leaf(op: ReduceOp, a: list[Any], b: list[Any]) -> list[Any]:
    """Combine the partials of one leaf of two neighbouring ranges of calls, `a` before `b`.

    Different dtypes are a TypeError, different shapes a ValueError.
    """
    code, count, x = a
    if is_blank(a) or is_blank(b):
        return b if is_blank(a) else a
    if code != b[0]:
        raise TypeError(
            f"components of dtypes {_kind_named(code).dtype.name} and {_kind_named(b[0]).dtype.name} "
            "can't be reduced together; return one dtype in every call, as with x.astype(np.float64)"
        )
    y = b[2]
    if x is None or y is None:
        return b if x is None else a
    x_shape, y_shape = shape_of(x), shape_of(y)
    if x_shape != y_shape:
        raise ValueError(
            f"components of shapes {x_shape} and {y_shape} can't be reduced together; where only the "
            "number of rows differs, reduce along an axis (axis=0)"
        )
    return [code, count + b[1], _joined(op, x, y, code)]


def is_blank(part: list[Any]) -> bool:
    """Return whether a partial is that of `np.array([])`: no rows, and neither their dtype nor their shape."""
    return part[1] == 0 and part[0] == "f8" and (part[2] is None or type(part[2]) is float)


def look_of(part: list[Any]) -> list[Any]:
    """Return the dtype and the shape of a partial, for `without_rows`."""
    return [part[0], list(shape_of(part[2]))]


def dtype_of(look: list[Any]) -> np.dtype[Any]:
    return _kind_named(look[0]).dtype


def without_rows(op: ReduceOp, look: list[Any]) -> list[Any]:
    """Return the partial of no rows of a known dtype and shape."""
    code, shape = look
    return leaf_partial(op, (0,), np.empty((0, *shape), _kind_named(code).dtype))


def join_numbers(op: ReduceOp, a: list[Any], b: list[Any]) -> list[Any] | None:
    """Combine sums of float64 and of integers as `join_leaf` does, without NumPy; None for others."""
    code, count, x = a
    y = b[2]
    if code != b[0] or type(x) is not type(y) or op not in SUMS:
        return None
    if (type(x) is float and code == "f8") or type(x) is int:
        return [code, count + b[1], x + y]
    return None


def sum_in_tree(numbers: Sequence[float]) -> float:
    """Return the sum of at least one number, in the order of `FoldTree`."""
    while len(numbers) > 1:
        pairs = [a + b for a, b in zip(numbers[::2], numbers[1::2], strict=False)]
        numbers = pairs if len(numbers) % 2 == 0 else [*pairs, numbers[-1]]
    return numbers[0]


def finish_leaf(op: ReduceOp, part: list[Any]) -> Any:
    """Return the value of a leaf's last partial: an array, a NumPy scalar, or None for no rows.

    An integer result that does not fit its dtype is an OverflowError.
    """
    code, count, data = part
    if data is None:
        return None
    kind = _kind_named(code)
    return _finish_exact(op, kind, count, data) if kind.exact else _finish_float(op, kind, count, data)


def _array_of(leaf: Any) -> tuple[_Kind, Any]:
    """Return a leaf's kind and its C-ordered array (Python's integers stay as they are)."""
    if isinstance(leaf, (np.ndarray, np.generic)):
        if type(leaf) is not np.ndarray and is_masked(leaf):
            raise TypeError(f"expected numbers, got a masked array; {conversion_hint(leaf)}")
        x = np.asarray(leaf, order="C")
    elif isinstance(leaf, bool):
        raise TypeError("expected numbers, got bool; cast it first, for example with astype('int64')")
    elif isinstance(leaf, int):
        return _kind_of(_INT64), np.asarray(leaf, object)
    elif isinstance(leaf, (float, complex)):
        x = np.asarray(leaf)
    else:  # also objects that NumPy could convert: labels of a column would be lost silently
        hint = conversion_hint(leaf)
        raise TypeError(f"expected numbers, got {type(leaf).__name__}" + (hint and f"; {hint}"))
    return _kind_of(x.dtype), x


@lru_cache(maxsize=256)
def _kind_of(dtype: np.dtype[Any]) -> _Kind:
    native = dtype.newbyteorder("=")
    if native.kind in "iu":
        mean = np.dtype(np.float32 if native.itemsize <= 2 else np.float64)
        return _Kind(native.str[1:], native, native, mean, exact=True)
    if native.name == "bfloat16":
        return _Kind("bf16", native, np.dtype(np.float32), native, exact=False)
    if native.kind in "fc":
        fold = np.dtype(np.float32) if native == np.float16 else native
        return _Kind(native.str[1:], native, fold, native, exact=False)
    raise TypeError(f"expected numbers, got dtype {dtype}; cast it first, for example with astype('int64')")


@lru_cache(maxsize=256)
def _kind_named(code: str) -> _Kind:
    if code != "bf16":
        return _kind_of(np.dtype(code))
    # Optional package, needed only for this dtype.
    return _kind_of(np.dtype(importlib.import_module("ml_dtypes").bfloat16))


def _exact_data(op: ReduceOp, x: NDArray[Any], axes: tuple[int, ...], count: int) -> Any:
    if x.ndim == 0:  # also a Python int, of any size
        return exact_integers.product(int(x), 1) if op is ReduceOp.PROD else int(x)
    scalar = x.ndim == len(axes)
    if op in (ReduceOp.SUM, ReduceOp.MEAN):
        limbs, bound = exact_integers.sum_rows(x, axes)
        return int(exact_integers.to_integers(limbs)) if scalar else [limbs, bound]
    if op is ReduceOp.PROD:
        magnitude, negative, beyond = exact_integers.product_rows(x, axes)
        if not scalar:
            return [magnitude, negative, beyond]
        value = 1 << 64 if beyond else int(magnitude)
        return -value if negative else value
    if count == 0:
        return None
    x = x.astype(x.dtype.newbyteorder("="), copy=False)
    extreme = UFUNCS[op].reduce(x, axis=axes) if axes else x
    return int(extreme) if scalar else extreme


def _float_data(op: ReduceOp, x: NDArray[Any], axes: tuple[int, ...], count: int, kind: _Kind) -> Any:
    x = x.astype(kind.fold, copy=False)
    if op in (ReduceOp.MIN, ReduceOp.MAX):
        if count == 0:
            return None
        folded = UFUNCS[op].reduce(x, axis=axes) if axes else x
    else:
        folded = _fold_rows(UFUNCS[op], x, axes) if axes else x
    if np.ndim(folded):
        return folded
    return float(folded) if kind.fold.char in "fd" else folded[()]


def _fold_rows(ufunc: np.ufunc, x: NDArray[Any], axes: tuple[int, ...]) -> Any:
    """Add or multiply along axes; the rounding error grows with the logarithm of the rows.

    Along the last axes NumPy does that itself. Along others it adds row after row, and a float32
    sum of ones would stop at 2**24; so blocks of rows are folded, then blocks of blocks. Several rows
    are combined into one wide vector, so that narrow rows are added at memory bandwidth. The order
    depends only on the shape.
    """
    kept = tuple(axis for axis in range(x.ndim) if axis not in axes)
    shape = tuple(x.shape[axis] for axis in kept)
    rows = prod(x.shape[axis] for axis in axes)
    if kept == tuple(range(len(kept))):
        return ufunc.reduce(x.reshape(*shape, rows), axis=-1)
    x = x.transpose((*sorted(axes), *kept)).reshape(rows, *shape)
    width = max(1, prod(shape))
    lanes = max(1, min(_LANES_MAX, _LANE_ELEMENTS // width))
    while len(x) >= 2 * _BLOCK_ROWS * lanes:
        whole = len(x) - len(x) % (_BLOCK_ROWS * lanes)
        groups = whole // (_BLOCK_ROWS * lanes)  # reshape cannot infer -1 for arrays without elements
        blocks = x[:whole].reshape(groups, _BLOCK_ROWS, lanes * prod(shape))
        folded = ufunc.reduce(blocks, axis=1).reshape(groups * lanes, *shape)
        x = np.concatenate([folded, x[whole:]])
    while len(x) > _BLOCK_ROWS:
        x = ufunc.reduceat(x, np.arange(0, len(x), _BLOCK_ROWS), axis=0)
    return ufunc.reduce(x, axis=0)


def shape_of(data: Any) -> Any:
    """Return the shape of the array that a leaf's data represents."""
    if type(data) is not list:
        return getattr(data, "shape", ())
    return data[0].shape[1:] if len(data) == 2 else data[0].shape  # [limbs, bound], [magnitude, sign, mark]


def _joined(op: ReduceOp, x: Any, y: Any, code: str) -> Any:
    if type(x) is list:
        if op is ReduceOp.PROD:
            return list(exact_integers.multiply(tuple(x), tuple(y)))
        return list(exact_integers.add(*x, *y))
    if type(x) is int:
        return _JOIN_INTEGERS[op](x, y)
    value = _JOIN_FLOATS[op](x, y)
    if type(x) is not float:
        return value
    # Exact in float64, so one more rounding gives the bits of the float32 result.
    return float(value if code == "f8" else np.float32(value))


def _finish_exact(op: ReduceOp, kind: _Kind, count: int, data: Any) -> Any:
    if type(data) is int:
        if op is ReduceOp.MEAN:
            return exact_integers.divide(data, count, kind.mean)
        return exact_integers.cast_integer(data, kind.dtype)
    if op is ReduceOp.MEAN:
        return exact_integers.mean(data[0], count, kind.mean)
    if op is ReduceOp.SUM:
        return exact_integers.cast_sum(data[0], kind.dtype)
    if op is ReduceOp.PROD:
        return exact_integers.cast_product(tuple(data), kind.dtype)
    return data


def _finish_float(op: ReduceOp, kind: _Kind, count: int, data: Any) -> Any:
    if type(data) is float and kind.code == "f8" and count:
        number = data / count if op is ReduceOp.MEAN else data
        return np.float64(number if number == number else np.nan)
    value = np.asarray(data, kind.fold)
    if op is ReduceOp.MEAN:
        # Divide float32 in float64, so that a count beyond 2**24 rounds only once.
        value = np.asarray(np.divide(value, count, dtype=_WIDER.get(kind.fold.char, kind.fold)))
    nan = np.isnan(value)
    if nan.any():
        value = value.copy()
        value[nan] = np.nan
    result = value.astype(kind.dtype)
    return result if result.ndim else result[()]


_INT64 = np.dtype(np.int64)
SUMS = frozenset({ReduceOp.SUM, ReduceOp.MEAN})
_WIDER = {"f": np.dtype(np.float64), "F": np.dtype(np.complex128)}
UFUNCS: dict[ReduceOp, np.ufunc] = {
    ReduceOp.SUM: np.add,
    ReduceOp.MEAN: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PROD: np.multiply,
}
_Join = dict[ReduceOp, Callable[[Any, Any], Any]]
_JOIN_FLOATS: _Join = {**UFUNCS, **dict.fromkeys(SUMS, operator.add), ReduceOp.PROD: operator.mul}
_JOIN_INTEGERS: _Join = {
    **dict.fromkeys(SUMS, operator.add),
    ReduceOp.MIN: min,
    ReduceOp.MAX: max,
    ReduceOp.PROD: exact_integers.product,
}
