"""Combine functions whose components are tables by key; `pipedist.combiners` has the instances."""

from __future__ import annotations

import collections
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import UnionType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipedist.reduction.keyed.keys import Grouping, TextColumn, dates_of, group, with_codes
from pipedist.reduction.keyed.table import NUMBERS, KeyedTable, merge
from pipedist.reduction.keyed.texts import Texts, of_strings
from pipedist.reduction.keyed.values import (
    MOMENTS,
    NAN_BUCKET,
    Columns,
    buckets_of,
    largest_by_key,
    moments_of,
    quantile,
    reduced_rows,
    variance,
)


class KeyedCombiner(ABC):
    """Combines tables by key: `of(keys, values)` makes one of the rows of a shard.

    Keys are text, integers, bools (as 0 and 1) or dates, in a list or an array. There are several key columns if
    `keys` is a tuple of columns, a dict of columns by name, or a list of tuples; then a key of the result is a tuple.

    A replica function may return a plain dict instead, also a `collections.Counter` or `defaultdict`; the worker
    converts it to a table.

    Args:
        name: the name of this object in its module, for errors.
        kind: the kind of its tables, see `pipedist.reduction.keyed.table`.
    """

    _base = "key"  # the name of a sole key column

    def __init__(self, name: str, kind: str) -> None:
        self.name = name
        self.kind = kind

    def of(self, keys: Any, values: ArrayLike) -> KeyedTable:
        """Group rows by key and reduce each group.

        Args:
            keys: [rows], or several such columns, see the class.
            values: [rows, ...].

        Raises:
            ValueError: keys and values differ in their number of rows.
            TypeError: a key is neither text, nor an integer, nor a date; or the values can't be reduced.
        """
        rows = _rows_of(values)
        names, columns = columns_of(keys, self._base)
        grouping = group(columns)
        if rows.shape[:1] != grouping.codes.shape:
            raise ValueError(
                f"{self.name}: keys of shape {grouping.codes.shape} do not match values of shape {rows.shape}"
            )
        return KeyedTable(self.kind, names, grouping.columns, self._reduced(grouping, rows))

    @abstractmethod
    def _reduced(self, grouping: Grouping, rows: NDArray[Any]) -> Columns:
        """Return the value columns of grouped rows."""

    def component(self, value: Any) -> KeyedTable:
        """Return the table of what a replica function returned: a table of this kind, or a dict.

        Raises:
            TypeError: it is neither, or a value of the dict is not of this kind.
        """
        if isinstance(value, KeyedTable):
            if value.kind != self.kind and {value.kind, self.kind} <= NUMBERS:
                return replace(value, kind=self.kind)
            if value.kind != self.kind:
                raise TypeError(
                    f"{self.name} combines what {self.name}.of(...) returned, not a table of {value.kind}"
                )
            return value
        if not isinstance(value, Mapping):
            raise TypeError(f"{self.name} combines dicts and {self.name}.of(...), not {type(value).__name__}")
        return self._of_dict(value)

    def _of_dict(self, value: Mapping[Any, Any]) -> KeyedTable:
        return self.of(_keys_of(value), _stacked(self.name, list(value.values())))

    def __call__(self, a: Any, b: Any) -> KeyedTable:
        """Combine two components, `a` before `b`."""
        return self.merge_groups([[a, b]])

    def merge_groups(self, groups: Sequence[Sequence[Any]]) -> KeyedTable:
        """Combine components in the fixed tree: first those of each group, then the groups' results."""
        try:
            return merge([[self.component(each) for each in group_] for group_ in groups])
        except (TypeError, ValueError, OverflowError) as error:
            raise type(error)(f"{self.name}: {error}") from error


class Counter(KeyedCombiner):
    """Counts the occurrences of each value: `{value: count}`.

    Example:
        >>> counter.of(["to", "be", "or", "not", "to", "be"])["be"]
        2
        >>> counter.of((["a", "a", "b"], [1, 1, 2]))["a", 1]
        2
    """

    _base = "value"

    def of(self, values: Any) -> KeyedTable:  # type: ignore[override]
        """Return the number of occurrences of each value.

        Args:
            values: text, integers, bools or dates, in a list or an array of any shape; or several columns, as in
                `KeyedCombiner`. A bool counts as 0 or 1.

        Raises:
            TypeError: a value has another type; round floats, or convert them to text, first.
        """
        names, columns = columns_of(values, self._base)
        if len(columns) == 1 and isinstance(columns[0], list) and {str}.issuperset(map(type, columns[0][:1])):
            return self._of_dict(collections.Counter(columns[0]))  # faster than to number the texts
        grouping = group(columns)
        counts = np.bincount(grouping.codes, minlength=grouping.count)
        return KeyedTable(self.kind, names, grouping.columns, {"value": counts})

    def _of_dict(self, value: Mapping[Any, Any]) -> KeyedTable:
        return super().of(_keys_of(value), _counts(self.name, list(value.values())))

    def _reduced(self, grouping: Grouping, rows: NDArray[Any]) -> Columns:
        return reduced_rows(np.add, grouping, rows)


class Reduced(KeyedCombiner):
    """Adds the values of each key, or keeps the smallest or largest: `{key: number or array}`.

    Sums of integers are exact, up to 94 bits. Numbers that are floats are added in float64.
    """

    def __init__(self, name: str, kind: str, ufunc: np.ufunc) -> None:
        super().__init__(name, kind)
        self._ufunc = ufunc

    def _reduced(self, grouping: Grouping, rows: NDArray[Any]) -> Columns:
        return reduced_rows(self._ufunc, grouping, rows)


class MomentsByKey(KeyedCombiner):
    """The `moments` of each key: `{key: {"count", "missing", "mean", "m2", "min", "max"}}`."""

    def of(self, keys: Any, values: ArrayLike, *, skip_missing: bool = False) -> KeyedTable:
        """Group rows by key and return the moments of each group.

        Args:
            keys: [rows], or several such columns.
            values: real numbers [rows, ...].
            skip_missing: skip NaNs, and count them in "missing".

        Raises:
            ValueError: keys and values differ in their number of rows.
            TypeError: a key is neither text, nor an integer, nor a date; or the values are not real numbers.
        """
        rows = np.asarray(values)
        check_real("by_key_moments", rows)
        if skip_missing:
            return _SkippingMoments(self.name, self.kind).of(keys, rows)
        return super().of(keys, rows)

    def _reduced(self, grouping: Grouping, rows: NDArray[Any]) -> Columns:
        return moments_of(grouping, rows, skip_missing=False)

    def _of_dict(self, value: Mapping[Any, Any]) -> KeyedTable:
        names, columns = columns_of(_keys_of(value), self._base)
        grouping = group(columns)
        for component in value.values():
            if not isinstance(component, Mapping) or set(component) != set(MOMENTS):
                raise TypeError("by_key_moments combines dicts of what moments.of(values) returned")
        order = np.argsort(grouping.codes)
        fields = {name: np.array([each[name] for each in value.values()])[order] for name in MOMENTS}
        return KeyedTable(self.kind, names, grouping.columns, fields)

    def mean(self, table: KeyedTable) -> NDArray[np.float64]:
        """Return the mean of each key, in the order of the keys; NaN without rows."""
        return table.value_columns["mean"]

    def variance(self, table: KeyedTable, *, ddof: int = 0) -> NDArray[np.float64]:
        """Return the variance of each key; NaN unless it has more than `ddof` rows. See `Moments.variance`."""
        return np.asarray(variance(table.value_columns, ddof=ddof))

    def std(self, table: KeyedTable, *, ddof: int = 0) -> NDArray[np.float64]:
        """Return the standard deviation of each key, float64[keys, ...]; see `variance`."""
        return np.sqrt(self.variance(table, ddof=ddof))


class _SkippingMoments(MomentsByKey):
    def of(self, keys: Any, values: ArrayLike, *, skip_missing: bool = True) -> KeyedTable:
        return KeyedCombiner.of(self, keys, values)

    def _reduced(self, grouping: Grouping, rows: NDArray[Any]) -> Columns:
        return moments_of(grouping, rows, skip_missing=True)


class NestedCombiner(KeyedCombiner):
    """Combines tables whose rows have one more column beside the key: a value of the key."""

    def of(self, keys: Any, values: Any) -> KeyedTable:
        """Group rows by key, and the values of each key by value.

        Args:
            keys: [rows], or several such columns.
            values: [rows]: text, integers, bools or dates.

        Raises:
            ValueError: keys and values differ in their number of rows.
            TypeError: a key or value is neither text, nor an integer, nor a date.
        """
        names, columns = columns_of(keys, self._base)
        grouping = group([*columns, values])
        return KeyedTable(self.kind, names, grouping.columns, self._reduced(grouping, np.empty(0)))

    def _reduced(self, grouping: Grouping, rows: NDArray[Any]) -> Columns:
        return {"value": np.bincount(grouping.codes, minlength=grouping.count)}


class CounterByKey(NestedCombiner):
    """Counts the values of each key: `{key: {value: count}}`."""

    def _of_dict(self, value: Mapping[Any, Any]) -> KeyedTable:
        inner = [
            (key, each, count) for key, counts in value.items() for each, count in _mapping(counts).items()
        ]
        if not inner:
            return self.of([], [])
        keys, values, counts = (list(column) for column in zip(*inner, strict=True))
        names, columns = columns_of(keys, self._base)
        grouping = group([*columns, values])
        rows = reduced_rows(np.add, grouping, _counts(self.name, counts))
        return KeyedTable(self.kind, names, grouping.columns, rows)


class UniqueByKey(NestedCombiner):
    """Counts the different values of each key, exactly: `{key: count}`.

    A table has a row for each key and value, so it has as many as there are pairs.
    """

    def _reduced(self, grouping: Grouping, rows: NDArray[Any]) -> Columns:
        return {}

    def _of_dict(self, value: Mapping[Any, Any]) -> KeyedTable:
        pairs = [(key, each) for key, values in value.items() for each in values]
        return self.of([key for key, _ in pairs], [each for _, each in pairs])


class TopKByKey(KeyedCombiner):
    """The k largest values of each key, largest first, with columns of their rows.

    The value of a key is a dict of arrays: "value", and the columns of the rows. Among equal values the first in
    dataset order is kept. NaNs are skipped; a key that has no others is absent.

    Example:
        >>> from pipedist.combiners import by_key_top_k
        >>> late = by_key_top_k.of(["UA", "AA", "UA"], [5, 30, 20], k=1, rows={"tail": np.array(["N1", "N2", "N3"])})
        >>> late["UA"]["value"].tolist(), late["UA"]["tail"].tolist()
        ([20], ['N3'])
    """

    def of(  # type: ignore[override]
        self, keys: Any, values: ArrayLike, k: int, rows: Mapping[str, ArrayLike] | None = None
    ) -> KeyedTable:
        """Group rows by key and keep those with the k largest values of each.

        Args:
            keys: [rows], or several such columns.
            values: real numbers or dates [rows].
            k: number of values of a key, at least 1; equal in all components.
            rows: columns [rows, ...] of numbers, dates or text that are kept with the values.

        Raises:
            ValueError: `k` is less than 1, or columns differ in their number of rows.
            TypeError: a key is neither text, nor an integer, nor a date; or a column has other values.
        """
        names, columns = columns_of(keys, self._base)
        grouping = group(columns)
        kept = {"value": _rows_of(values)}
        for name, column in (rows or {}).items():
            if name == "value" or name in names:
                raise ValueError(f"{self.name}: two columns have the name {name!r}")
            kept[name] = _rows_of(column)
        for name, each in kept.items():
            if each.shape[:1] != grouping.codes.shape:
                raise ValueError(
                    f"{self.name}: keys of shape {grouping.codes.shape} do not match {name!r} of shape {each.shape}"
                )
            if each.dtype.kind == "O" and set(map(type, each.flat)) <= {str}:
                kept[name] = each = each.astype(np.str_)
            if each.dtype.kind not in ("iufM" if name == "value" else "biufcmMU"):
                raise TypeError(f"{self.name}: column {name!r} has values of dtype {each.dtype}")
        if k < 1 or kept["value"].ndim != 1:
            raise ValueError(
                f"{self.name} needs k >= 1 and values with one axis, got k={k}, shape {kept['value'].shape}"
            )
        found = largest_by_key(grouping.codes, max(1, grouping.count), kept["value"], k)
        codes = grouping.codes.take(found)
        key_columns = [with_codes(column, codes) for column in grouping.columns]
        return KeyedTable(
            self.kind, names, key_columns, {name: each.take(found, axis=0) for name, each in kept.items()}, k
        )

    def _reduced(self, grouping: Grouping, rows: NDArray[Any]) -> Columns:
        raise NotImplementedError  # rows are kept

    def _of_dict(self, value: Mapping[Any, Any]) -> KeyedTable:
        raise TypeError("by_key_top_k combines what by_key_top_k.of(...) returned, not dicts")


class QuantilesByKey(NestedCombiner):
    """Quantiles of the values of each key, from counts in buckets: `{key: {"count", "p1", ..., "p99"}}`.

    A quantile of level q differs from the value of rank floor(q * (count - 1)) by at most 1/128 of it. The buckets are
    those of `pipedist.reduction.keyed.values`: they merge exactly. A NaN makes all quantiles of its key NaN.
    """

    def of(self, keys: Any, values: ArrayLike, *, skip_missing: bool = False) -> KeyedTable:
        """Group rows by key and count each group's values in buckets.

        Args:
            keys: [rows], or several such columns.
            values: real numbers [rows].
            skip_missing: skip the rows whose value is NaN; a key that has no others is absent.

        Raises:
            ValueError: keys and values differ in their number of rows.
            TypeError: a key is neither text, nor an integer, nor a date; or the values are not real numbers.
        """
        rows = np.asarray(values)
        check_real("by_key_quantiles", rows)
        table = super().of(keys, buckets_of(rows))
        if not skip_missing:
            return table
        there = np.asarray(table.key_columns[-1]) != NAN_BUCKET
        return replace(
            table,
            key_columns=[with_codes(column, np.flatnonzero(there)) for column in table.key_columns],
            value_columns={name: column[there] for name, column in table.value_columns.items()},
        )

    def _of_dict(self, value: Mapping[Any, Any]) -> KeyedTable:
        raise TypeError("by_key_quantiles combines what by_key_quantiles.of(...) returned, not dicts")

    def quantile(self, table: KeyedTable, levels: Sequence[float]) -> NDArray[np.float64]:
        """Return quantiles of each key, float64[keys, levels], in the order of the keys.

        Args:
            table: the result of `of` or of a reduction.
            levels: from 0 to 1.
        """
        buckets = np.asarray(table.key_columns[-1])
        return quantile(buckets, table.value_columns["value"], table.starts, levels)


def columns_of(keys: Any, base: str) -> tuple[list[str], list[Any]]:
    """Return the names of the key columns, and the columns."""
    if isinstance(keys, Mapping):
        if not keys:
            raise ValueError("keys as a dict of columns need at least one column")
        return list(map(str, keys)), [array_of(column) for column in keys.values()]
    if isinstance(keys, tuple) and keys and not any(map(_is_single, keys)):
        columns = [array_of(column) for column in keys]
    else:
        keys = array_of(keys)
        if not isinstance(keys, list) or not keys or type(keys[0]) is not tuple:
            return [base], [keys]
        width = len(keys[0])
        if set(map(type, keys)) != {tuple} or set(map(len, keys)) != {width} or not width:
            raise TypeError("some keys are tuples, and others are not, or have another length")
        columns = [list(column) for column in zip(*keys, strict=True)]
    return [f"{base}/{place}" for place in range(len(columns))], columns


def _keys_of(value: Mapping[Any, Any]) -> list[Any] | Texts:
    """Return the keys of a dict as a column."""
    keys = list(value)
    # Texts that a dict has once need no hash table that numbers them.
    return of_strings(keys) if keys and _all_are(str, keys) else keys


def _is_single(key: object) -> bool:
    if isinstance(key, list | Texts | TextColumn):
        return False
    return isinstance(key, str | bytes) or np.ndim(key) == 0  # type: ignore[arg-type]


def array_of(column: Any) -> Any:
    """Return a column as a list or an array."""
    if isinstance(column, np.ndarray | list | Texts | TextColumn):
        return column
    return np.asarray(column) if hasattr(column, "__array__") else list(column)


def _rows_of(values: ArrayLike) -> NDArray[Any]:
    """Return values as an array; integers on both sides of 2**63 stay exact, and Python's dates are NumPy's."""
    if isinstance(values, list) and values and {int}.issuperset(map(type, values)):
        return _integers(values)
    if isinstance(values, Mapping):
        raise TypeError(
            "values by key must be an array, got a dict: np.column_stack makes one of several columns"
        )
    rows = np.asarray(values)
    found = dates_of(rows.tolist()) if rows.dtype.kind == "O" and rows.ndim == 1 else None
    return rows if found is None else found


def _integers(values: list[Any]) -> NDArray[Any]:
    """Return integers as int64, or as Python's if one exceeds it."""
    try:
        return np.fromiter(values, np.int64, len(values))
    except OverflowError:
        return np.array(list(map(int, values)), object)


def _stacked(name: str, cells: list[Any]) -> NDArray[Any]:
    """Return the values of a dict as rows."""
    if _all_are(int, cells):
        return _integers(cells) if cells else np.empty(0)
    if (found := dates_of(cells)) is not None:
        return found
    try:
        rows = np.stack([np.asarray(cell) for cell in cells])
    except ValueError as error:
        raise ValueError(f"{name}: the values of a dict differ in shape: {error}") from None
    if rows.dtype.kind not in "biufcmMV":
        raise TypeError(f"{name}: the values of a dict must be numbers or arrays of them, got {rows.dtype}")
    return rows


def _counts(name: str, counts: list[Any]) -> NDArray[Any]:
    if not _all_are(int | np.integer, counts):
        raise TypeError(f"{name} adds whole numbers: to add floats by key, use by_key_sum")
    return _integers(counts)


def _all_are(classes: type | UnionType, values: list[Any]) -> bool:
    return all(issubclass(cls, classes) for cls in set(map(type, values)))


def _mapping(value: Any) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"by_key_counter combines dicts of dicts, not of {type(value).__name__}")
    return value


def check_real(name: str, values: NDArray[Any]) -> None:
    if values.dtype.kind not in "iuf" and values.dtype.name != "bfloat16":
        raise TypeError(f"{name} needs real numbers, got {values.dtype}")
