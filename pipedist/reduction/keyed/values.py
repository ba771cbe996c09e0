"""The arithmetic of value columns: of the rows of each key in a shard, and of tables in the fixed tree.

Columns are arrays [rows, ...] by name. Sums of integers are exact: where they may exceed int64, a column "value" holds
their low 32 bits and a column "high" the rest. Floats are added in the order of the rows within a shard, and in the
fixed tree (`pipedist.reduction.tree`) over the shards that have the key; a shard that lacks it does not count.

Quantiles come from counts in logarithmic buckets. A bucket is the sign, the exponent and the first six bits of the
fraction of a float64, so there are 64 buckets for each power of two, and the middle of a bucket differs from each of
its values by at most 1/128 of the value. A bucket is found by integer operations alone: its bits are the same on every
machine, and counts merge exactly, in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pipedist.reduction.keyed.keys import Grouping, sorted_rows, starts_of_runs
from pipedist.reduction.keyed.texts import Ints

Columns = dict[str, NDArray[Any]]

MOMENTS = ("count", "missing", "mean", "m2", "min", "max")

_LOW_BITS = 32
_LOW_MASK = (1 << _LOW_BITS) - 1
_INT64 = np.iinfo(np.int64)
RELATIVE_ERROR: Final = 1 / 128

_SHIFT: Final = 46  # bits of the fraction that are not part of a bucket
NAN_BUCKET: Final = 1 << 20  # the bucket of NaN, after all others
_LEVELS: Final = {"p1": 0.01, "p5": 0.05, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p95": 0.95, "p99": 0.99}

_FLOAT_EXACT_MAX = 1 << 53  # integers up to this are exact in float64
_HIGH_MAX = 1 << 62


@dataclass(frozen=True, slots=True)
class Runs:
    """Rows of several tables, sorted by key, and among equal keys by the leaf of the fixed tree.

    Args:
        order: the row at each place.
        starts: the first place of each key.
        inner: the places of rows that have a next one of their key.
        leaves: for each place the index of the row's leaf.
    """

    order: Ints
    starts: Ints
    inner: Ints
    leaves: NDArray[Any]

    @classmethod
    def of(cls, order: Ints, values: Ints, leaves: NDArray[Any]) -> Runs:
        """Return the runs of equal ones of sorted values."""
        fresh = starts_of_runs(values)
        return cls(order, np.flatnonzero(fresh), np.flatnonzero(~fresh[1:]), leaves)


def of_runs(ufunc: np.ufunc, columns: Columns, runs: Runs) -> Columns:
    """Reduce each key's rows; integers exactly, others in the fixed tree."""
    value = columns["value"]
    if value.dtype.kind in "iub":
        if ufunc is np.add:
            return _exact_sums(columns, runs.order, runs.starts)
        return {"value": ufunc.reduceat(value.take(runs.order, axis=0), runs.starts, axis=0)}

    def merged(a: Columns, b: Columns) -> Columns:
        found = ufunc(a["value"], b["value"])
        if ufunc is np.add and found.dtype.kind == "m":
            _check_durations(found, _floats(a["value"]) + _floats(b["value"]))
        return {"value": found}

    return in_tree(merged, columns, runs)


def in_tree(combine: Callable[[Columns, Columns], Columns], columns: Columns, runs: Runs) -> Columns:
    """Reduce each key's rows by `combine(a, b)`, which works row by row, in the fixed tree over their leaves.

    The nodes of two neighbouring rows of a key meet at the level that is the highest bit in which their leaves
    differ, whatever has been merged below. A node is kept in the place of its first row.
    """
    columns = _taken(columns, runs.order)
    differ = runs.leaves.take(runs.inner) ^ runs.leaves.take(runs.inner + 1)
    # The exponent of a number is the place of its highest bit.
    levels = ((differ.astype(np.float64).view(np.int64) >> 52) - 1023).astype(np.uint8)
    places = runs.inner.take(np.argsort(levels, kind="stable"))
    bounds = np.cumsum(np.bincount(levels)).tolist()
    # For the last row of a node its first one, and for the first one the last.
    head, end = np.arange(len(runs.order)), np.arange(len(runs.order))
    with np.errstate(all="ignore"):
        for lo, hi in zip([0, *bounds], bounds, strict=False):
            left, right = head.take(places[lo:hi]), places[lo:hi] + 1
            merged = combine(_taken(columns, left), _taken(columns, right))
            for name, column in columns.items():
                column[left] = merged[name]
            last = end.take(right)
            end[left], head[last] = last, left
    return _taken(columns, runs.starts)


def _taken(columns: Columns, rows: Ints) -> Columns:
    return {name: column.take(rows, axis=0) for name, column in columns.items()}


def _exact_sums(columns: Columns, order: Ints, starts: Ints) -> Columns:
    """Add the integers from each start on up to the next one."""
    value, high = columns["value"], columns.get("high")
    if not len(starts):
        return columns
    counts = np.diff(np.append(starts, len(order)))
    largest = max(-int(value.min()), int(value.max()))
    if high is None and largest * int(counts.max()) <= _INT64.max:
        return {"value": np.add.reduceat(value.astype(np.int64, copy=False)[order], starts, axis=0)}
    if value.ndim > 1:
        sums = np.add.reduceat(value.astype(object)[order], starts, axis=0)
        if sums.min() < _INT64.min or sums.max() > _INT64.max:
            raise OverflowError("a sum does not fit int64: add floats instead")
        return {"value": sums.astype(np.int64)}
    wide = columns if high is not None else widened(value)
    low = np.add.reduceat(wide["value"][order], starts)
    high = np.add.reduceat(wide["high"][order], starts)
    return narrowed(low, high)


def widened(value: NDArray[Any]) -> Columns:
    """Return integers as their low bits and the rest."""
    return {
        "value": (value & value.dtype.type(_LOW_MASK)).astype(np.int64),
        "high": (value >> value.dtype.type(_LOW_BITS)).astype(np.int64),
    }


def narrowed(low: Ints, high: Ints) -> Columns:
    """Return sums as one column if all of them fit int64, else as their low bits and the rest."""
    high = high + (low >> _LOW_BITS)
    low = low & _LOW_MASK
    if high.min() >= -(1 << 31) and high.max() < 1 << 31:
        return {"value": (high << _LOW_BITS) | low}
    if max(-int(high.min()), int(high.max())) > _HIGH_MAX:
        raise OverflowError("a sum by key exceeds 94 bits: add floats instead")
    return {"value": low, "high": high}


def exact_of(integers: list[int]) -> Columns:
    """Return Python's integers as columns."""
    low, high = min(integers, default=0), max(integers, default=0)
    for dtype in (np.int64, np.uint64):
        if np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max:
            return {"value": np.array(integers, dtype)}
    if max(-low, high).bit_length() > 94:
        raise OverflowError("an integer exceeds 94 bits: use floats instead")
    lows = np.array([each & _LOW_MASK for each in integers], np.int64)
    return narrowed(lows, np.array([each >> _LOW_BITS for each in integers], np.int64))


def integers_of(columns: Mapping[str, NDArray[Any]], lo: int, hi: int) -> list[int]:
    """Return the exact integers of rows [lo, hi)."""
    value: list[int] = columns["value"][lo:hi].tolist()
    if "high" not in columns:
        return value
    return [
        (high << _LOW_BITS) | low for low, high in zip(value, columns["high"][lo:hi].tolist(), strict=True)
    ]


# -- rows of a shard ---------------------------------------------------------------------------------


def reduced_rows(ufunc: np.ufunc, grouping: Grouping, rows: NDArray[Any]) -> Columns:
    """Reduce the rows of each key: rows [rows, ...] to a column "value" [keys, ...]."""
    if rows.dtype.kind == "O":
        found = rows.tolist()
        if all(type(each) in (int, bool) for each in found):
            columns = exact_of(found)
            return (
                of_runs(ufunc, columns, _runs_of(grouping))
                if ufunc is np.add
                else _extremes(ufunc, grouping, columns)
            )
        raise TypeError(f"values by key must be numbers or dates, got {_types_of(found)}")
    if rows.dtype.kind in "SUT":
        raise TypeError("values by key must be numbers or dates, got text")
    if rows.dtype.kind == "M" and ufunc is np.add:
        raise TypeError("dates can't be added: use by_key_min or by_key_max")
    if rows.dtype.kind == "b" and ufunc is np.add:
        rows = rows.astype(np.int64)
    if ufunc is not np.add:
        return _extremes(ufunc, grouping, {"value": rows})
    if rows.dtype.kind in "iu":
        if rows.ndim == 1 and rows.size:
            largest = max(-int(rows.min()), int(rows.max()))
            if largest * len(rows) <= _FLOAT_EXACT_MAX:  # every partial sum is exact
                sums = np.bincount(grouping.codes, rows, grouping.count)
                return {"value": sums.astype(np.int64)}
        runs = _runs_of(grouping)
        return _exact_sums({"value": rows}, runs.order, runs.starts)
    if rows.dtype.kind == "f" and rows.ndim == 1:
        return {"value": sums_of(grouping, rows)}
    runs = _runs_of(grouping)
    dtype = np.result_type(rows.dtype, np.float32) if rows.dtype.kind in "fcV" else rows.dtype
    with np.errstate(all="ignore"):
        sums = np.add.reduceat(rows.astype(dtype)[runs.order], runs.starts, axis=0)
    if dtype.kind == "m":
        _check_durations(sums, np.add.reduceat(_floats(rows)[runs.order], runs.starts, axis=0))
    return {"value": sums}


def _floats(durations: NDArray[Any]) -> NDArray[np.float64]:
    return np.where(np.isnat(durations), np.nan, durations.view(np.int64).astype(np.float64))


def _check_durations(sums: NDArray[Any], approximate: NDArray[np.float64]) -> None:
    """Raise OverflowError if sums of durations, which NumPy adds modulo 2**64, are far from the floats' sums."""
    if (np.abs(sums.view(np.int64) - approximate) > 1 << 62).any():  # not for NaN, the sum with a NaT
        raise OverflowError(f"a sum of durations does not fit {sums.dtype}: return them in a coarser unit")


def _types_of(cells: list[Any]) -> str:
    return " and ".join(sorted({type(cell).__qualname__ for cell in cells})) or "objects"


def sums_of(grouping: Grouping, rows: NDArray[Any]) -> NDArray[np.float64]:
    """Add each key's floats one after the other, in float64."""
    return np.asarray(
        np.bincount(grouping.codes, rows.astype(np.float64, copy=False), grouping.count), np.float64
    )


def _extremes(ufunc: np.ufunc, grouping: Grouping, columns: Columns) -> Columns:
    if "high" in columns:
        raise OverflowError("an integer does not fit 64 bits: use floats instead")
    rows = columns["value"]
    if rows.ndim == 1:
        if rows.dtype.kind in "fV":
            rows = rows.astype(np.float64)
        elif rows.dtype.kind in "iu":
            rows = rows.astype(np.uint64 if rows.dtype == np.uint64 else np.int64)
    runs = _runs_of(grouping)
    with np.errstate(all="ignore"):
        return {"value": ufunc.reduceat(rows[runs.order], runs.starts, axis=0)}


def _runs_of(grouping: Grouping) -> Runs:
    """Return the rows of a shard by key, each key's in their own order."""
    order, codes = sorted_rows(grouping.codes, max(1, grouping.count))
    return Runs.of(order, codes, np.zeros(len(order), np.uint8))


def moments_of(grouping: Grouping, rows: NDArray[Any], *, skip_missing: bool) -> Columns:
    """Return count, missing, mean, m2, min and max of the rows of each key, in float64."""
    x = rows.astype(np.float64)
    shape = (grouping.count, *x.shape[1:])
    columns = {
        name: np.empty(shape, np.int64 if name in ("count", "missing") else np.float64) for name in MOMENTS
    }
    runs = _runs_of(grouping)
    with np.errstate(all="ignore"):
        for inner in np.ndindex(x.shape[1:]):
            at = (slice(None), *inner)
            for name, column in _moments(grouping, x[at], runs.order, runs.starts, skip_missing).items():
                columns[name][at] = column
    return columns


def _moments(
    grouping: Grouping, x: NDArray[np.float64], order: Ints, starts: Ints, skip_missing: bool
) -> Columns:
    codes, keys = grouping.codes, grouping.count
    total = np.bincount(codes, minlength=keys)
    present = ~np.isnan(x) if skip_missing else np.ones(len(x), bool)
    count = np.bincount(codes[present], minlength=keys) if skip_missing else total
    some = np.maximum(count, 1)
    mean = np.bincount(codes, np.where(present, x, 0.0), keys) / some
    deviations = np.where(present, x - mean[codes], 0.0)
    drift = np.bincount(codes, deviations, keys)  # zero but for rounding, which it corrects
    mean = mean + drift / some
    m2 = np.bincount(codes, deviations * deviations, keys) - drift * drift / some
    low = np.minimum.reduceat(np.where(present, x, np.inf)[order], starts) if len(starts) else mean
    high = np.maximum.reduceat(np.where(present, x, -np.inf)[order], starts) if len(starts) else mean
    empty = count == 0
    return {
        "count": count,
        "missing": total - count,
        "mean": np.where(empty, np.nan, mean),
        "m2": np.maximum(m2, 0.0),
        "min": np.where(empty, np.nan, low),
        "max": np.where(empty, np.nan, high),
    }


def merged_moments(a: Mapping[str, Any], b: Mapping[str, Any]) -> Columns:
    """Return the moments of the rows of both, by Chan's formula, row by row."""
    n_a, n_b = np.asarray(a["count"]), np.asarray(b["count"])
    count = n_a + n_b
    with np.errstate(all="ignore"):
        some = np.maximum(count, 1)
        delta = np.asarray(b["mean"]) - a["mean"]
        merged = {
            "mean": a["mean"] + delta * (n_b / some),
            "m2": np.asarray(a["m2"]) + b["m2"] + delta * delta * (n_a / some * n_b),
            "min": np.minimum(a["min"], b["min"]),
            "max": np.maximum(a["max"], b["max"]),
        }
    for name, value in merged.items():
        merged[name] = np.where(n_a == 0, b[name], np.where(n_b == 0, a[name], value))
    return {"count": count, "missing": np.asarray(a["missing"]) + b["missing"], **merged}


def variance(moments: Mapping[str, Any], *, ddof: int = 0) -> Any:
    """Return the variance; NaN unless there are more than `ddof` rows."""
    divisor = np.asarray(moments["count"]) - ddof
    with np.errstate(all="ignore"):
        value = np.where(divisor > 0, moments["m2"] / np.maximum(divisor, 1), np.nan)
    return value if value.ndim else float(value)


# -- the largest -------------------------------------------------------------------------------------


def largest_first(x: NDArray[Any]) -> Ints:
    """Return the positions of all values except NaNs, largest first, stable."""
    present = np.flatnonzero(x == x)
    backwards = np.argsort(x[present][::-1], kind="stable")[::-1]
    return np.asarray(present[len(present) - 1 - backwards], np.int64)


def largest_by_key(codes: Ints, size: int, x: NDArray[Any], k: int) -> Ints:
    """Return the rows with the k largest values of each key, by key, largest first; the first of equal ones.

    Args:
        codes: the key of each row, int64[rows], below `size`.
        x: the value of each row.
    """
    rows = largest_first(x)
    order, found = sorted_rows(codes.take(rows), size)
    starts = np.flatnonzero(starts_of_runs(found)) if len(found) else order
    place = np.arange(len(found)) - np.repeat(starts, np.diff(starts, append=len(found)))
    return rows.take(order[place < k])


# -- quantiles --------------------------------------------------------------------------------------


def buckets_of(values: NDArray[Any]) -> Ints:
    """Return the bucket of each number, int64; buckets are ordered as their numbers."""
    x = values.astype(np.float64)
    size = (np.abs(x).view(np.int64) >> _SHIFT).astype(np.int64)
    return np.where(np.isnan(x), NAN_BUCKET, np.where(x < 0, -size, size))


def middles(buckets: Ints) -> NDArray[np.float64]:
    """Return the middle of each bucket."""
    size = np.abs(buckets)
    half = np.where(size == 0, 0, 1 << (_SHIFT - 1))  # the bucket of 0 has numbers below 1e-307 too
    x = ((size << _SHIFT) + half).view(np.float64)
    x = np.where(size == 0x7FF << (52 - _SHIFT), np.inf, x)
    return np.where(buckets == NAN_BUCKET, np.nan, np.where(buckets < 0, -x, x))


def quantile(buckets: Ints, counts: Ints, starts: Ints, levels: Sequence[float]) -> NDArray[np.float64]:
    """Return quantiles of each key: float64[keys, levels].

    Args:
        buckets, counts: int64[rows], sorted by key and bucket.
        starts: the first row of each key.
        levels: from 0 to 1; the quantile is near the value of rank floor(level * (count - 1)).
    """
    if not len(starts):
        return np.empty((0, len(levels)))
    ends = np.append(starts[1:], len(buckets))
    total = np.cumsum(counts)
    before = total[starts] - counts[starts]
    size = total[ends - 1] - before
    values = middles(buckets)
    has_nan = buckets[ends - 1] == NAN_BUCKET
    found = np.empty((len(starts), len(levels)))
    for place, level in enumerate(levels):
        rank = np.floor(level * (size - 1)).astype(np.int64)
        at = np.searchsorted(total, before + rank, side="right")
        found[:, place] = np.where(has_nan, np.nan, values[at])
    return found


def quantile_summary(buckets: Ints, counts: Ints, starts: Ints) -> dict[str, NDArray[Any]]:
    """Return the count and the usual quantiles of each key."""
    found = quantile(buckets, counts, starts, list(_LEVELS.values()))
    sizes = np.add.reduceat(counts, starts) if len(starts) else counts[:0]
    return {"count": sizes, **{name: found[:, place] for place, name in enumerate(_LEVELS)}}
