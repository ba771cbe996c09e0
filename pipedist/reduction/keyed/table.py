"""A table by key: sorted key columns, value columns, and the access of a dict.

Tables of one kind are merged in the fixed tree: the rows of a key are reduced over the leaves that have it, so the
bits of a value depend on the leaves alone, not on the calls that merge them or on the range of keys that a call gets.

| kind | a row | value of a key |
|---|---|---|
| counter | key | int |
| sum, min, max | key | number, date or array |
| moments | key | dict: count, missing, mean, m2, min, max |
| counts | key, and a counted value | a table of kind counter |
| unique | key, and one of its values | int: the number of different values |
| quantiles | key, and a bucket of values | dict: count, and p1 to p99 |
| top_k | key, for each of its k largest values | dict of arrays: value, and columns of the rows; the largest first |
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping, Sequence, ValuesView
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipedist.reduction.keyed import keys
from pipedist.reduction.keyed.keys import KeyColumn, TextColumn, common_dtype
from pipedist.reduction.keyed.texts import Concatenate, Ints, in_memory
from pipedist.reduction.keyed.values import (
    MOMENTS,
    Columns,
    Runs,
    in_tree,
    integers_of,
    largest_by_key,
    largest_first,
    merged_moments,
    of_runs,
    quantile_summary,
    widened,
)

NUMBERS = frozenset({"counter", "sum", "min", "max"})  # kinds with one number or array for a key
NESTED = frozenset({"counts", "unique", "quantiles"})  # kinds whose last key column is not part of the key
SEVERAL = NESTED | {"top_k"}  # kinds with several rows for a key
_EXTREMES = {"min": np.minimum, "max": np.maximum}
_CHUNK_ROWS = 4096  # rows that become Python objects at a time


@dataclass(frozen=True, eq=False, repr=False)
class KeyedTable(Mapping[Any, Any]):
    """A read-only mapping from keys to values, in columns.

    A key is text, an integer or a date, or a tuple of them if there are several key columns. A look-up is a binary
    search; the keys are sorted.

    Args:
        kind: the kind of the values, see the module.
        names: the names of the columns of a key.
        key_columns: the key columns; for some kinds one more, which is not part of the key.
        value_columns: value columns by name, arrays [rows, ...].
        k: for kind top_k, the number of rows of a key that are kept.

    Example:
        >>> from pipedist.combiners import counter
        >>> counts = counter.of(["to", "be", "or", "not", "to", "be"])
        >>> counts["be"], len(counts)
        (2, 4)
    """

    kind: str
    names: list[str]
    key_columns: list[KeyColumn]
    value_columns: Columns
    k: int = 0

    @property
    def rows(self) -> int:
        """The number of rows; more than keys for some kinds."""
        return len(self.key_columns[0])

    @property
    def height(self) -> int:
        """The number of rows of `columns`: more than keys for kinds counts and top_k."""
        return self.rows if self.kind in ("counts", "top_k") else len(self)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays())

    def arrays(self) -> Iterator[NDArray[Any]]:
        for column in self.key_columns:
            if isinstance(column, TextColumn):
                yield from (column.texts.data, column.texts.ends)
                if column.codes is not None:
                    yield column.codes
            else:
                yield column
        yield from self.value_columns.values()

    # -- the access of a dict

    def __len__(self) -> int:
        return len(self.starts) if self.kind in SEVERAL else self.rows

    def __iter__(self) -> Iterator[Any]:
        for found, _ in self._chunks(with_values=False):
            yield from found

    def __getitem__(self, key: Any) -> Any:
        lo, hi = self._span(key)
        if lo == hi:
            raise KeyError(key)
        if self.kind in SEVERAL:
            place = int(np.searchsorted(self.starts, lo))
            return self._cells(place, place + 1)[0]
        return self._cells(lo, hi)[0]

    def __contains__(self, key: object) -> bool:
        lo, hi = self._span(key)
        return lo < hi

    def items(self) -> ItemsView[Any, Any]:
        """Return the keys and values, in the order of the keys."""
        return _Items(self)

    def values(self) -> ValuesView[Any]:
        """Return the values, in the order of the keys."""
        return _Values(self)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Mapping):
            return len(self) == len(other) and dict(self.items()) == dict(other.items())
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        shown = ", ".join(f"{key!r}: {value!r}" for key, value in self.head(4))
        more = ", ..." if len(self) > 4 else ""
        return f"<{len(self):,} keys: {{{shown}{more}}}>"

    def head(self, count: int) -> list[tuple[Any, Any]]:
        """Return the first keys and values."""
        hi = min(count, len(self))
        return list(zip(self._keys(0, hi), self._cells(0, hi), strict=True))

    def largest(self, count: int) -> list[tuple[Any, Any]]:
        """Return the keys with the largest values, and these, the largest first; of equal ones the first key.

        Keys whose value is NaN are skipped.

        Raises:
            TypeError: the values are not single numbers.
        """
        columns = list(self.columns(with_keys=False).values())
        numbers = columns[0]
        if len(columns) > 1 or numbers.ndim > 1 or self.kind == "top_k":
            raise TypeError(f"only counters and numbers by key have largest values, not {self.kind}")
        return [
            (self._keys(at, at + 1)[0], self._cells(at, at + 1)[0])
            for at in largest_first(numbers)[:count].tolist()
        ]

    def _span(self, key: object) -> tuple[int, int]:
        width = len(self.names)
        given = key if width > 1 and isinstance(key, tuple) else (key,)
        lo, hi = 0, self.rows
        if len(given) != width:
            return 0, 0
        for column, part in zip(self.key_columns, given, strict=False):
            lo, hi = keys.span(column, part, lo, hi)
        return lo, hi

    @cached_property
    def starts(self) -> Ints:
        """The first row of each key, for a kind with several."""
        fresh = np.zeros(self.rows, bool)
        fresh[:1] = True
        for column in self.key_columns[: len(self.names)]:
            codes = column.codes if isinstance(column, TextColumn) else keys.numbers_of(column)
            assert codes is not None  # a text of its own for each row is that of a key with one row
            fresh[1:] |= codes[1:] != codes[:-1]
        return np.flatnonzero(fresh)

    @cached_property
    def _ends(self) -> Ints:
        return np.append(self.starts[1:], self.rows)

    def _chunks(self, *, with_values: bool) -> Iterator[tuple[list[Any], list[Any]]]:
        for lo in range(0, len(self), _CHUNK_ROWS):
            hi = min(lo + _CHUNK_ROWS, len(self))
            yield self._keys(lo, hi), self._cells(lo, hi) if with_values else []

    def _keys(self, lo: int, hi: int) -> list[Any]:
        """Return keys [lo, hi)."""
        columns = [keys.values_of(column, 0, hi - lo) for column in self._key_columns(lo, hi)]
        return columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))

    def _key_columns(self, lo: int, hi: int) -> list[KeyColumn]:
        columns = self.key_columns[: len(self.names)]
        if self.kind in SEVERAL:
            return [keys.take(column, self.starts[lo:hi]) for column in columns]
        return [keys.part(column, lo, hi) for column in columns]

    def _cells(self, lo: int, hi: int) -> list[Any]:
        """Return the values of keys [lo, hi)."""
        if self.kind == "counts":
            bounds = zip(self.starts[lo:hi].tolist(), self._ends[lo:hi].tolist(), strict=True)
            return [self._counter(a, b) for a, b in bounds]
        if self.kind == "top_k":
            bounds = zip(self.starts[lo:hi].tolist(), self._ends[lo:hi].tolist(), strict=True)
            return [{name: column[a:b] for name, column in self.value_columns.items()} for a, b in bounds]
        columns = self.columns(lo, hi, with_keys=False)
        cells = [_listed(column) for column in columns.values()]
        if self.kind in ("moments", "quantiles"):
            return [dict(zip(columns, row, strict=True)) for row in zip(*cells, strict=True)]
        return cells[0]

    def _counter(self, lo: int, hi: int) -> KeyedTable:
        """Return the counts in rows [lo, hi), which are of one key."""
        column = keys.part(self.key_columns[-1], lo, hi)
        if isinstance(column, TextColumn) and column.codes is not None:
            column = TextColumn(column.texts.take(column.codes), None)
        counts = {name: array[lo:hi] for name, array in self.value_columns.items()}
        return KeyedTable("counter", ["value"], [column], counts)

    # -- columns

    def columns(
        self, lo: int = 0, hi: int | None = None, *, with_keys: bool = True, texts: bool = False
    ) -> dict[str, Any]:
        """Return the columns of keys [lo, hi), by name: arrays [keys, ...], and texts as object arrays.

        Args:
            lo, hi: positions of keys; for kinds counts and top_k, of rows.
            with_keys: whether the key columns are among them.
            texts: return columns of text as `TextColumn`, without Python objects.
        """
        hi = self.height if hi is None else hi
        found: dict[str, Any] = {}
        if with_keys:
            if self.kind == "counts":
                parts = [keys.part(column, lo, hi) for column in self.key_columns]
                names = [*self.names, "value"]
            elif self.kind == "top_k":
                parts, names = [keys.part(column, lo, hi) for column in self.key_columns], self.names
            else:
                parts, names = self._key_columns(lo, hi), self.names
            for name, part in zip(names, parts, strict=True):
                found[name] = _texts(part) if isinstance(part, TextColumn) and not texts else part
        return {**found, **self._value_columns(lo, hi)}

    def _value_columns(self, lo: int, hi: int) -> dict[str, NDArray[Any]]:
        if self.kind == "top_k":
            return {name: column[lo:hi] for name, column in self.value_columns.items()}
        if self.kind == "unique":
            return {"unique": self._ends[lo:hi] - self.starts[lo:hi]}
        if self.kind == "quantiles":
            a, b = (int(self.starts[lo]), int(self._ends[hi - 1])) if hi > lo else (0, 0)
            buckets = self.key_columns[-1]
            assert isinstance(buckets, np.ndarray)
            count = self.value_columns["value"][a:b]
            return quantile_summary(buckets[a:b], count, self.starts[lo:hi] - a)
        if self.kind == "moments":
            return {name: self.value_columns[name][lo:hi] for name in MOMENTS}
        name = "count" if self.kind in ("counter", "counts") else "value"
        if "high" in self.value_columns:
            exact = integers_of(self.value_columns, lo, hi)
            limits = np.iinfo(np.uint64)
            dtype = (
                np.uint64 if min(exact, default=0) >= 0 and max(exact, default=0) <= limits.max else object
            )
            return {name: np.array(exact, dtype)}
        return {name: self.value_columns["value"][lo:hi]}

    @property
    def has_plain_keys(self) -> bool:
        """Whether a key is text or an integer, as in a dict of JSON."""
        return len(self.names) == 1 and keys.kind_of(self.key_columns[0]) != "dates"

    def records(self, lo: int = 0, hi: int | None = None) -> list[dict[str, Any]]:
        """Return the rows of `columns(lo, hi)` as dicts."""
        columns = self.columns(lo, hi)
        cells = [_listed(column) for column in columns.values()]
        return [dict(zip(columns, row, strict=True)) for row in zip(*cells, strict=True)]

    def blocks(self, rows: int, *, texts: bool = False) -> Iterator[dict[str, Any]]:
        """Yield all columns, some rows at a time; see `columns`."""
        for lo in range(0, max(self.height, 1), rows):
            yield self.columns(lo, min(lo + rows, self.height), texts=texts)


class _Items(ItemsView[Any, Any]):
    _mapping: KeyedTable

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        for found, cells in self._mapping._chunks(with_values=True):
            yield from zip(found, cells, strict=True)


class _Values(ValuesView[Any]):
    _mapping: KeyedTable

    def __iter__(self) -> Iterator[Any]:
        for _, cells in self._mapping._chunks(with_values=True):
            yield from cells


def _texts(column: TextColumn) -> NDArray[Any]:
    strings = keys.values_of(column, 0, len(column))
    return np.fromiter(strings, object, len(strings))


def _listed(column: NDArray[Any]) -> list[Any]:
    """Return the cells of a column: Python's numbers, NumPy's dates, or arrays."""
    return list(column) if column.ndim > 1 or column.dtype.kind in "mM" else column.tolist()


# -- merging -----------------------------------------------------------------------------------------


def merge(groups: Sequence[Sequence[KeyedTable]]) -> KeyedTable:
    """Merge tables in the fixed tree: first those of each group, then the groups' results.

    Raises:
        TypeError: the tables are of different kinds, or their keys or values of different types.
        ValueError: they have different columns, or values of different shapes.
        OverflowError: a sum exceeds its limit.
    """
    every = [table for group in groups for table in group]
    bits = max(map(len, groups)).bit_length()
    placed = [
        (table, (place << bits) + index)
        for place, group in enumerate(groups)
        for index, table in enumerate(group)
        if table.rows
    ]
    parts = [table for table, _ in placed]
    _check(parts)
    if len(parts) < 2:
        return parts[0] if parts else every[0]
    packed, size, unpacked = keys.pack(
        [keys.merge_columns(columns) for columns in zip(*(part.key_columns for part in parts), strict=True)]
    )
    if parts[0].kind == "top_k":
        found = joined_values(parts)
        largest = largest_by_key(packed, size, found["value"], parts[0].k)
        kept = {name: column.take(largest, axis=0) for name, column in found.items()}
        return replace(parts[0], key_columns=unpacked(packed.take(largest)), value_columns=kept)
    order, values = keys.sorted_rows(packed, size, has_runs=True)
    leaves = np.array([leaf for _, leaf in placed])
    leaves = leaves.astype(np.min_scalar_type(leaves[-1]))  # few bytes stay in the processor's cache
    runs = Runs.of(order, values, np.repeat(leaves, [part.rows for part in parts]).take(order))
    columns = unpacked(values.take(runs.starts))
    if len(columns) == 1 and isinstance(sole := columns[0], TextColumn):
        columns = [TextColumn(sole.texts, None)]  # each text is a key
    return KeyedTable(parts[0].kind, parts[0].names, columns, _merged_values(parts, runs))


def _merged_values(parts: Sequence[KeyedTable], runs: Runs) -> Columns:
    kind = parts[0].kind
    if kind == "unique":
        return {}
    columns = joined_values(parts)
    if kind == "moments":
        return in_tree(merged_moments, columns, runs)
    return of_runs(_EXTREMES.get(kind, np.add), columns, runs)


def _together(parts: Sequence[Columns], together: Concatenate = in_memory, *, is_sum: bool) -> Columns:
    """Concatenate value columns, whose integers may have several widths."""
    if len({column["value"].dtype for column in parts if "value" in column}) > 1 or any(
        "high" in part for part in parts
    ):
        parts = _alike(parts, is_sum=is_sum)
    return _concatenated(parts, together)


def _concatenated(parts: Sequence[Columns], together: Concatenate) -> Columns:
    found = {}
    for name in parts[0]:
        arrays = [part[name] for part in parts]
        shapes = sorted({array.shape[1:] for array in arrays})
        if len(shapes) > 1:
            raise ValueError(f"values by key of shapes {shapes[0]} and {shapes[1]} can't be combined")
        dtype = common_dtype(arrays)
        found[name] = together(array.astype(dtype, copy=False) for array in arrays)
    return found


def _alike(parts: Sequence[Columns], *, is_sum: bool) -> Sequence[Columns]:
    """Return value columns of one dtype: integers beside floats become floats."""
    kinds = {part["value"].dtype.kind for part in parts}
    if kinds & set("mM") and len(kinds) > 1:
        raise TypeError("some values by key are dates, and others are numbers")
    if not kinds <= set("iub"):
        return [
            {
                "value": np.array(integers_of(part, 0, len(part["value"])), np.float64)
                if "high" in part
                else part["value"]
            }
            for part in parts
        ]
    if is_sum:
        return [part if "high" in part else widened(part["value"]) for part in parts]
    if any(part["value"].dtype.kind != "u" and part["value"].min() < 0 for part in parts):
        limit = np.iinfo(np.int64).max
        if any(part["value"].dtype.kind == "u" and part["value"].max() > limit for part in parts):
            raise OverflowError("some values by key are negative, and others exceed int64: return floats")
        return [{"value": part["value"].astype(np.int64)} for part in parts]
    return [{"value": part["value"].astype(np.uint64)} for part in parts]


def _check(parts: Sequence[KeyedTable]) -> None:
    for part in parts[1:]:
        first = parts[0]
        if part.kind != first.kind:
            raise TypeError(f"components of kinds {first.kind} and {part.kind} can't be combined by key")
        if part.k != first.k:
            raise ValueError(f"the largest {first.k} and the largest {part.k} can't be combined: use one k")
        if part.value_columns.keys() != first.value_columns.keys() and first.kind == "top_k":
            one, other = (", ".join(each.value_columns) for each in (first, part))
            raise ValueError(f"components with the columns {one} and {other} can't be combined")
        if part.names != first.names or len(part.key_columns) != len(first.key_columns):
            raise ValueError(
                f"components with the key columns {first.names} and {part.names} can't be combined"
            )
        for a, b in zip(first.key_columns, part.key_columns, strict=True):
            one, other = keys.kind_of(a), keys.kind_of(b)
            if one != other:
                raise TypeError(
                    f"keys are {one} in some components, and {other} in others: convert them to one type"
                )


def joined_values(parts: Sequence[KeyedTable], together: Concatenate = in_memory) -> Columns:
    """Concatenate the value columns of tables with rows."""
    kind = parts[0].kind
    if kind == "unique":
        return {}
    columns = [part.value_columns for part in parts]
    if kind == "top_k":
        return _concatenated(columns, together)
    return _together(columns, together, is_sum=kind not in ("min", "max", "moments"))
