"""Exact sums, products and means of integer arrays, element by element.

NumPy wraps silently; here intermediate overflow has no effect, and a final value that does not fit is an
error.

Sums. A sum is int64 limbs, `limbs[0] + limbs[1] * 2**32 + ...`, each except the last in [0, 2**32), and
a bound on the magnitude of every element. While the bound is below 2**63 there is one limb, and an
addition is one int64 addition; limbs are added only when the bound requires it.

Products. Magnitudes of integers only grow, except through a zero: a product is a uint64 magnitude, a sign,
and a mark if the magnitude has passed 2**64. A marked element fits no dtype; only a zero can reset it.

Scalars use Python's integers, which are exact (`product` limits their size).
"""

from __future__ import annotations

from math import nextafter, prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

LIMB_BITS = 32
_LIMB_MASK = (1 << LIMB_BITS) - 1
_ONE_LIMB_MAX = (1 << 63) - 1
_PRODUCT_MAX = 1 << 64
_ROWS_MAX = (1 << 31) - 1

Limbs = NDArray[np.int64]
Product = tuple[NDArray[Any], ...]  # magnitude, sign and mark
Ints = NDArray[Any]  # arrays of any integer dtype


def sum_rows(x: Ints, axes: tuple[int, ...]) -> tuple[Limbs, int]:
    """Return the exact sums of `x` along `axes` (() only converts), and a bound on their magnitudes.

    Raises:
        ValueError: more than 2**31 - 1 elements are summed into one.
    """
    rows = prod(x.shape[axis] for axis in axes)
    if rows > _ROWS_MAX:
        raise ValueError(
            f"{rows} elements of one component are summed into one, at most {_ROWS_MAX} can be: "
            "return smaller components"
        )
    bound = _magnitude(x) * rows
    if bound <= _ONE_LIMB_MAX:
        total = np.add.reduce(x, axis=axes, dtype=np.int64) if axes else x.astype(np.int64)
        return np.asarray(total)[None], bound
    low = np.add.reduce((x & x.dtype.type(_LIMB_MASK)).astype(np.int64), axis=axes)
    high = np.add.reduce((x >> x.dtype.type(LIMB_BITS)).astype(np.int64), axis=axes)
    return _carry(np.stack([low, high])), bound


def add(a: Limbs, a_bound: int, b: Limbs, b_bound: int) -> tuple[Limbs, int]:
    """Return the limbs of `a + b` and their bound; shapes after the first axis must be equal."""
    bound = a_bound + b_bound
    count = max(_limbs_for(bound), len(a), len(b))
    if count == 1:
        return a + b, bound
    return _carry(_widen(a, count) + _widen(b, count)), bound


def to_integers(limbs: Limbs) -> NDArray[Any]:
    """Return the values as an object array of Python integers."""
    total = limbs[-1].astype(object)
    for limb in limbs[-2::-1]:
        total = (total << LIMB_BITS) + limb.astype(object)
    return np.asarray(total, dtype=object)


def cast_sum(limbs: Limbs, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return the sums in an integer dtype; raise OverflowError if one does not fit."""
    values: NDArray[Any] = limbs[0] if len(limbs) == 1 else to_integers(limbs)
    if values.size:
        _check_fits(int(values.min()), dtype)
        _check_fits(int(values.max()), dtype)
    return values.astype(dtype)


def cast_integer(value: int, dtype: np.dtype[Any]) -> Any:
    """Return a Python integer as a scalar of an integer dtype; raise OverflowError if it does not fit."""
    _check_fits(value, dtype)
    return dtype.type(value)


def mean(limbs: Limbs, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return `sum / count`, correctly rounded to float32 or float64; NaN if `count` is 0."""
    if count == 0:
        return np.full(limbs.shape[1:], np.nan, dtype)
    if len(limbs) > 1 or count > 1 << 53:
        values = to_integers(limbs)
        rounded = [divide(int(value), count, dtype) for value in values.ravel()]
        return np.array(rounded, dtype).reshape(values.shape)
    sums = limbs[0]
    # Below 2**53 both operands are exact in float64, so one division rounds once.
    risky = np.abs(sums) > 1 << 53
    quotient = sums.astype(np.float64) / count
    if dtype.itemsize == 4:
        risky |= _float32_midpoint(quotient)
    result: NDArray[Any] = quotient.astype(dtype)
    for index in np.argwhere(risky):
        place = tuple(index)
        result[place] = divide(int(sums[place]), count, dtype)
    return result


def divide(total: int, count: int, dtype: np.dtype[Any]) -> Any:
    """Return `total / count`, correctly rounded to float32 or float64; NaN if `count` is 0."""
    if count == 0:
        return dtype.type(np.nan)
    quotient = total / count  # Python divides integers correctly rounded
    if dtype.itemsize == 4 and _float32_midpoint(np.float64(quotient)):
        from fractions import Fraction  # rarely needed, and slow to import

        # Rounding twice would be wrong here: step towards the true quotient first.
        true = Fraction(total, count)
        if Fraction(quotient) != true:
            quotient = nextafter(quotient, np.inf if true > quotient else -np.inf)
    return dtype.type(quotient)


def product(a: int, b: int) -> int:
    """Return `a * b`, clipped to +-2**64; a later zero still absorbs it."""
    return max(-_PRODUCT_MAX, min(_PRODUCT_MAX, a * b))


def product_rows(x: Ints, axes: tuple[int, ...]) -> Product:
    """Return the exact products of `x` along `axes` as magnitude, sign and mark."""
    negative = np.asarray(x < 0)
    magnitude = x.astype(np.uint64) if x.dtype.kind == "u" else np.abs(x.astype(np.int64)).view(np.uint64)
    kept = tuple(axis for axis in range(x.ndim) if axis not in axes)
    shape = tuple(x.shape[axis] for axis in kept)
    rows = prod(x.shape[axis] for axis in axes)
    order = (*axes, *kept)
    whole = (magnitude, negative, np.zeros(x.shape, bool))
    part: Product = tuple(each.transpose(order).reshape(rows, *shape) for each in whole)
    while rows > 1:
        even = rows // 2 * 2
        folded = multiply(tuple(each[0:even:2] for each in part), tuple(each[1:even:2] for each in part))
        part = tuple(np.concatenate([a, b[even:]]) for a, b in zip(folded, part, strict=True))
        rows = len(part[0])
    if rows == 0:
        return np.ones(shape, np.uint64), np.zeros(shape, bool), np.zeros(shape, bool)
    return tuple(each[0] for each in part)


def multiply(a: Product, b: Product) -> Product:
    """Return the product of two products; shapes must be equal."""
    zero = (a[0] == 0) | (b[0] == 0)
    limit = np.uint64(_PRODUCT_MAX - 1) // np.maximum(b[0], np.uint64(1))
    beyond = (a[2] | b[2] | (a[0] > limit)) & ~zero
    magnitude = np.where(zero, np.uint64(0), np.where(beyond, np.uint64(1), a[0] * b[0]))
    return magnitude, a[1] ^ b[1], beyond


def cast_product(part: Product, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return products in an integer dtype; raise OverflowError if one does not fit."""
    magnitude, negative, beyond = part
    info = np.iinfo(dtype)
    if beyond.any():
        raise OverflowError(
            f"a product is beyond 2**64 and does not fit {dtype.name} ({info.min}..{info.max})"
        )
    too_big = magnitude > np.where(negative, np.uint64(-info.min), np.uint64(info.max))
    too_big &= magnitude != 0
    if too_big.any():
        place = tuple(np.argwhere(too_big)[0])
        value = int(magnitude[place])
        _check_fits(-value if negative[place] else value, dtype)
    signed = magnitude.astype(dtype)
    return np.where(negative, -signed, signed) if dtype.kind == "i" else signed


def _magnitude(x: Ints) -> int:
    if x.dtype.itemsize < 8:
        info = np.iinfo(x.dtype)
        return max(-int(info.min), int(info.max))
    if x.size == 0:
        return 0
    return max(-int(x.min()), int(x.max()), 0)


def _limbs_for(bound: int) -> int:
    if bound <= _ONE_LIMB_MAX:
        return 1
    # The last limb holds bits from 32 * (count - 1) on, and needs one spare bit for a carry.
    return max(2, -(-(bound.bit_length() - 62) // LIMB_BITS) + 1)


def _widen(limbs: Limbs, count: int) -> Limbs:
    if len(limbs) == count:
        return limbs
    wide = np.empty((count, *limbs.shape[1:]), np.int64)
    last = len(limbs) - 1
    wide[:last] = limbs[:last]
    rest = limbs[last]
    for index in range(last, count - 1):
        wide[index] = rest & _LIMB_MASK
        rest = rest >> LIMB_BITS
    wide[count - 1] = rest
    return wide


def _carry(limbs: Limbs) -> Limbs:
    """Bring all limbs but the last into [0, 2**32); works in place."""
    for index in range(len(limbs) - 1):
        limbs[index + 1] += limbs[index] >> LIMB_BITS
        limbs[index] &= _LIMB_MASK
    return limbs


def _float32_midpoint(x: Any) -> Any:
    """Return where a float64 may lie exactly halfway between two neighbouring float32."""
    bits = np.asarray(x).view(np.int64)
    return (bits & 0x1FFFFFFF) == 0x10000000


def _check_fits(value: int, dtype: np.dtype[Any]) -> None:
    info = np.iinfo(dtype)
    if not info.min <= value <= info.max:
        shown = "beyond 2**64" if abs(value) >= _PRODUCT_MAX else str(value)
        raise OverflowError(f"the result {shown} does not fit {dtype.name} ({info.min}..{info.max})")
