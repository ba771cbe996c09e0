"""Key columns: text, integers or dates, and the grouping of rows by several of them.

A column of a table is an array of integers or dates, or a `TextColumn`. A column is RANKED for grouping: each row
gets the place of its key among the sorted distinct ones. The ranks of several columns are packed into one integer,
so rows are grouped by sorting integers, whatever the columns are.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Number
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipedist.reduction.keyed import texts
from pipedist.reduction.keyed.texts import Concatenate, Ints, Texts, in_memory

Key = str | int | np.datetime64 | datetime.date

_PACKED_MAX = 1 << 62
_RADIX_BITS_MAX = 48  # more digits take longer than comparisons
_DENSE_SIZE_MAX = 8  # integers below this multiple of their number are ranked in a table of them
_DENSE_ROWS = 1024


@dataclass(frozen=True, eq=False, slots=True)
class TextColumn:
    """A column of text.

    Args:
        texts: the distinct texts, sorted; none if they are those of another table (`pipedist.reduction.keyed.ranges`).
        codes: the place of each row's text among them, int32[rows]; None: each row has its own, in order.
    """

    texts: Texts
    codes: NDArray[np.int32] | None

    def __len__(self) -> int:
        return len(self.texts if self.codes is None else self.codes)

    def __getitem__(self, rows: slice | NDArray[Any]) -> TextColumn:
        """Return some rows: a slice, or an array of positions or of bools."""
        codes = np.arange(len(self), dtype=np.int32) if self.codes is None else self.codes
        return TextColumn(self.texts, codes[rows])


KeyColumn = NDArray[Any] | TextColumn


@dataclass(frozen=True, slots=True)
class Grouping:
    """Rows by key.

    Args:
        columns: the key columns of the distinct keys, sorted.
        codes: the place of each row's key among them, int64[rows].
        count: the number of distinct keys.
    """

    columns: list[KeyColumn]
    codes: Ints
    count: int


def group(columns: Sequence[Iterable[Any] | Texts | TextColumn]) -> Grouping:
    """Group rows by the keys in one or several columns of one length, in the order of the keys.

    Raises:
        TypeError: a key is neither text, nor an integer, nor a date.
        ValueError: the columns differ in length.
    """
    found = [_rank(column) for column in columns]
    if len({len(codes) for _, codes in found}) > 1:
        raise ValueError(
            f"key columns of different lengths: {', '.join(str(len(codes)) for _, codes in found)}"
        )
    if len(found) == 1:
        distinct, codes = found[0]
        sole: KeyColumn = TextColumn(distinct, None) if isinstance(distinct, Texts) else distinct
        return Grouping([sole], codes, len(distinct))
    ranked = [Ranked(codes, len(distinct), partial(_chosen, distinct)) for distinct, codes in found]
    packed, size, unpacked = pack(ranked)
    codes, present = _dense(packed, size)
    return Grouping(unpacked(present), codes, len(present))


@dataclass(frozen=True, slots=True)
class Ranked:
    """A key column whose rows have codes that compare as the keys do.

    Args:
        codes: int64[rows].
        size: a number that is larger than all codes.
        chosen: makes a column of the keys that have some codes.
    """

    codes: Ints
    size: int
    chosen: Callable[[Ints], KeyColumn]


def _chosen(distinct: Texts | NDArray[Any], codes: Ints) -> KeyColumn:
    return TextColumn(distinct, codes.astype(np.int32)) if isinstance(distinct, Texts) else distinct[codes]


def _rank(values: Iterable[Any] | Texts | TextColumn) -> tuple[Texts | NDArray[Any], Ints]:
    """Return the sorted distinct keys, and the place of each row's key among them."""
    if isinstance(values, Texts):
        codes, first = texts.ranks(values)
        return values.take(first), codes
    if isinstance(values, TextColumn):
        column = _used(values)
        return column.texts, np.arange(len(column)) if column.codes is None else column.codes.astype(np.int64)
    if not isinstance(values, np.ndarray):
        values = values if isinstance(values, list) else list(values)
        if values and isinstance(values[0], str):
            try:
                return texts.encode(values)
            except TypeError:  # others are no text; `_listed` raises the error
                pass
    array = values if isinstance(values, np.ndarray) else _listed(values)
    array = array.reshape(-1)
    kind = array.dtype.kind
    if kind == "U":
        return _rank(texts.of_unicode(array))
    if kind in "OT":
        return _rank(array.tolist())
    if kind == "M":
        array = array.astype(array.dtype.newbyteorder("="), copy=False)
        distinct, codes = _rank_integers(array.view(np.int64))
        return distinct.view(array.dtype), codes
    if kind == "f" and not array.size:
        array = array.astype(np.int64)
    elif kind not in "iub":
        raise TypeError(
            f"keys must be text, integers or dates, got {array.dtype}: round floats, or convert them to text"
        )
    return _rank_integers(_integers(array))


def _integers(array: NDArray[Any]) -> NDArray[Any]:
    """Return integers as int64; as uint64 if one exceeds it."""
    if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
        return array
    return array.astype(np.int64, copy=False)


def _rank_integers(array: NDArray[Any]) -> tuple[NDArray[Any], Ints]:
    if not array.size:
        return array, np.empty(0, np.int64)
    low = int(array.min())
    size = int(array.max()) - low + 1
    if size > _PACKED_MAX:
        distinct, codes = np.unique(array, return_inverse=True)
        return distinct, codes.astype(np.int64, copy=False)
    codes, present = _dense(_offsets(array, low), size)
    return _keys_at(array.dtype, low, present), codes


def _offsets(array: NDArray[Any], low: int) -> Ints:
    offsets: Ints = (array - array.dtype.type(low)).astype(np.int64, copy=False)
    return offsets


def _keys_at(dtype: np.dtype[Any], low: int, offsets: Ints) -> NDArray[Any]:
    found: NDArray[Any] = offsets.astype(dtype) + dtype.type(low)
    return found


def _listed(keys: list[Any]) -> NDArray[Any]:
    """Return a list of keys that are not text as an array of integers or dates."""
    types = set(map(type, keys))
    if any(issubclass(cls, str) for cls in types):
        other = next(key for key in keys if not isinstance(key, str))
        if isinstance(other, Number | bytes | np.generic | datetime.date):
            raise TypeError(
                f"some keys are text, and others are not, as {other!r}: convert them to one type first, "
                "for example [str(key) for key in keys]"
            )
        raise TypeError(f"keys must be text, integers or dates, got object: convert {other!r} to text")
    if type(None) not in types and (found := dates_of(keys)) is not None and found.dtype.kind == "M":
        return found
    if types and all(issubclass(cls, int | np.integer | np.bool_) for cls in types):
        low, high = int(min(keys)), int(max(keys))
        for dtype in (np.int64, np.uint64):
            if np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max:
                return np.array(keys, dtype)
        raise TypeError(
            f"integers as keys have at most 64 bits, got both {low} and {high}: convert them to text"
        )
    array = np.asarray(keys)
    if array.dtype.kind not in "iubMUf":
        raise TypeError(
            f"keys must be text, integers or dates, got {array.dtype}: round floats, or convert them to text"
        )
    return array


def dates_of(cells: list[Any]) -> NDArray[Any] | None:
    """Return Python's dates as datetime64, and its durations as timedelta64; None if there are other cells.

    A cell that is None is NaT. Dates are days, and microseconds if one has a time.

    Raises:
        TypeError: a time has a time zone, or a part of a microsecond.
    """
    types = set(map(type, cells)) - {type(None)}
    if types and all(issubclass(cls, datetime.timedelta | np.timedelta64) for cls in types):
        if not any(issubclass(cls, datetime.timedelta) for cls in types):
            return np.array(cells, "m8")
        return _microseconds(cells, "m8[us]")
    if not types or not all(issubclass(cls, datetime.date | np.datetime64) for cls in types):
        return None
    if not any(issubclass(cls, datetime.datetime) for cls in types):
        return np.array(cells, "M8")
    zoned = next((cell for cell in cells if getattr(cell, "tzinfo", None) is not None), None)
    if zoned is not None:
        raise TypeError(
            f"{zoned} has a time zone: t.astimezone(datetime.UTC).replace(tzinfo=None) is the same time in UTC, "
            "without one"
        )
    return _microseconds(cells, "M8[us]")


def _microseconds(cells: list[Any], dtype: str) -> NDArray[Any]:
    known = [None if cell != cell else cell for cell in cells]  # pandas has a NaT of its own
    found = np.array(known, dtype)
    for cell, rounded in zip(known, found, strict=True):
        # Times of pandas have nanoseconds, which those of Python lack.
        rest = getattr(cell, "nanosecond", 0) or getattr(cell, "nanoseconds", 0)
        if rest or (isinstance(cell, np.datetime64 | np.timedelta64) and rounded != cell):
            raise TypeError(
                f"{cell!r} is no whole number of microseconds: pass an array with the unit ns, as with "
                "series.to_numpy()"
            )
    return found


# -- integers ----------------------------------------------------------------------------------------


def pack(ranked: Sequence[Ranked]) -> tuple[Ints, int, Callable[[Ints], list[KeyColumn]]]:
    """Pack the codes of several columns into one integer for each row, which compares as the keys do.

    Returns:
        The integers int64[rows], a number that is larger than all of them, and a function that makes the columns of
        the keys that have some of these integers.
    """
    first = ranked[0]
    packed, size = first.codes, first.size
    steps: list[
        tuple[Ranked, Ints | None]
    ] = []  # further columns, and the integers before, if they are ranked
    for column in ranked[1:]:
        present = None
        if size * max(1, column.size) > _PACKED_MAX:
            packed, present = _dense(packed, size)
            size, column = len(present), _ranked_anew(column)
        packed, size = packed * max(1, column.size) + column.codes, size * max(1, column.size)
        steps.append((column, present))

    def unpacked(values: Ints) -> list[KeyColumn]:
        found = []
        for column, present in reversed(steps):
            rest = values // max(1, column.size)
            found.append(column.chosen(values - rest * max(1, column.size)))
            values = rest if present is None else present[rest]
        return [first.chosen(values), *reversed(found)]

    return packed, size, unpacked


def _ranked_anew(column: Ranked) -> Ranked:
    """Return a column whose codes are smaller than the number of rows."""
    codes, present = _dense(column.codes, column.size)
    return Ranked(codes, len(present), lambda codes: column.chosen(present[codes]))


def _dense(packed: Ints, size: int) -> tuple[Ints, Ints]:
    """Return the rank of each integer in [0, size) among the distinct ones, and these, sorted."""
    n = len(packed)
    if size <= _DENSE_SIZE_MAX * n + _DENSE_ROWS:
        is_present = np.zeros(size, bool)
        is_present[packed] = True
        rank = np.cumsum(is_present, dtype=np.int32 if size < 1 << 31 else np.int64)
        return rank.take(packed).astype(np.int64) - 1, np.flatnonzero(is_present)
    order, values = sorted_rows(packed, size)
    fresh = starts_of_runs(values)
    codes = np.empty(n, np.int64)
    codes[order] = np.cumsum(fresh) - 1
    return codes, values.take(np.flatnonzero(fresh))


def starts_of_runs(values: NDArray[Any]) -> NDArray[np.bool_]:
    """Return for each place of sorted values whether its value is another one than that before it."""
    fresh = np.ones(len(values), bool)
    np.not_equal(values[1:], values[:-1], out=fresh[1:])
    return fresh


def sorted_rows(packed: Ints, size: int, *, has_runs: bool = False) -> tuple[Ints, Ints]:
    """Sort integers in [0, size); return the rows in their order, and the sorted integers.

    Among equal integers rows are in their own order.

    Args:
        has_runs: whether they are a few sorted runs, which NumPy's stable sort of numbers merges.
    """
    bits = (size - 1).bit_length()
    if has_runs or bits > _RADIX_BITS_MAX:
        order = np.argsort(packed, kind="stable")
    else:
        order = np.argsort(packed.astype(np.uint16), kind="stable")  # NumPy sorts 16 bits by radix
        for shift in range(16, bits, 16):
            order = order.take(np.argsort((packed.take(order) >> shift).astype(np.uint16), kind="stable"))
    return order, packed.take(order)


# -- columns of tables -------------------------------------------------------------------------------


def kind_of(column: KeyColumn) -> str:
    """Return the type of a key column, for errors and comparisons."""
    if isinstance(column, TextColumn):
        return "text"
    return "integers" if column.dtype.kind in "iu" else "dates"


def take(column: KeyColumn, rows: NDArray[Any]) -> KeyColumn:
    """Return some rows of a column, in the order of the keys."""
    if isinstance(column, np.ndarray):
        found: NDArray[Any] = column[rows]
        return found
    if column.codes is None:
        return TextColumn(column.texts.take(rows), None)
    return TextColumn(column.texts, column.codes[rows])


def with_codes(column: KeyColumn, rows: Ints) -> KeyColumn:
    """Return some rows of a column, which may be repeated, in the order of the keys."""
    if isinstance(column, TextColumn) and column.codes is None:
        return _used(TextColumn(column.texts, rows.astype(np.int32)))
    found = take(column, rows)
    return _used(found) if isinstance(found, TextColumn) else found


def part(column: KeyColumn, lo: int, hi: int) -> KeyColumn:
    """Return the rows [lo, hi) of a column, with all texts of the column."""
    if not isinstance(column, TextColumn):
        return column[lo:hi]
    if column.codes is None:
        return TextColumn(column.texts.cut(lo, hi), None)
    return TextColumn(column.texts, column.codes[lo:hi])


def _used(column: TextColumn) -> TextColumn:
    """Return a column without texts that no row has."""
    if column.codes is None:
        return column
    used = np.zeros(len(column.texts), bool)
    used[column.codes] = True
    if used.all():
        return column
    rank = np.cumsum(used, dtype=np.int32) - np.int32(1)
    return TextColumn(column.texts.take(np.flatnonzero(used)), rank[column.codes])


def encode_text(strings: Iterable[str]) -> TextColumn:
    """Return texts as a column of distinct texts and codes.

    A function that uses texts for several key columns encodes them once: slices of the column, and rows that an array
    of bools or positions selects, are columns too.

    Args:
        strings: [rows] of text.

    Raises:
        TypeError: one of them is no text.

    Example:
        >>> from pipedist.combiners import counter, encode_text
        >>> words = encode_text(["to", "be", "or", "not", "to", "be"])
        >>> counter.of((words[:-1], words[1:]))["to", "be"]
        2
    """
    distinct, codes = texts.encode(strings)
    return TextColumn(distinct, codes.astype(np.int32))


def merge_columns(parts: Sequence[KeyColumn]) -> Ranked:
    """Concatenate the parts of one column, and rank its rows."""
    if isinstance(parts[0], TextColumn):
        columns = [part for part in parts if isinstance(part, TextColumn)]
        union = parts[0].texts
        if len(columns[-1].texts):
            union, places = texts.union([column.texts for column in columns])
            found = np.concatenate(list(map(_placed, columns, places)))
        else:
            found = np.concatenate([column.codes for column in columns if column.codes is not None])
        return Ranked(found.astype(np.int64), len(union), partial(_chosen, union))
    column = _concatenated([part for part in parts if isinstance(part, np.ndarray)])
    numbers = numbers_of(column)
    low = int(numbers.min())
    size = int(numbers.max()) - low + 1
    if size <= _PACKED_MAX:
        return Ranked(
            _offsets(numbers, low), size, lambda codes: _keys_at(numbers.dtype, low, codes).view(column.dtype)
        )
    distinct, codes = _rank_integers(numbers)
    return Ranked(codes, len(distinct), lambda codes: distinct[codes].view(column.dtype))


def numbers_of(column: NDArray[Any]) -> NDArray[Any]:
    """Return integers that compare as the keys do: those of dates, among which NaT is equal to itself and the first."""
    return column.view(np.int64) if column.dtype.kind == "M" else column


def _placed(column: TextColumn, places: Ints) -> NDArray[np.int32]:
    """Return the places of a column's rows, given those of its texts."""
    narrow = places.astype(np.int32)
    return narrow if column.codes is None else narrow[column.codes]


def _concatenated(arrays: Sequence[NDArray[Any]], together: Concatenate = in_memory) -> NDArray[Any]:
    dtypes = {array.dtype for array in arrays}
    if dtypes == {np.dtype(np.int64), np.dtype(np.uint64)}:
        if any(array.dtype == np.int64 and array.min() < 0 for array in arrays):
            raise TypeError("some keys are negative, and others exceed int64: convert them to text")
        arrays = [array.astype(np.uint64) for array in arrays]
    dtype = common_dtype(arrays)
    return together(array.astype(dtype, copy=False) for array in arrays)


def common_dtype(arrays: Sequence[NDArray[Any]]) -> np.dtype[Any]:
    """Return the dtype of arrays together.

    Raises:
        TypeError: values would be rounded, or become text.
        OverflowError: a date or duration does not fit the unit of others, which NumPy does not notice.
    """
    found = np.result_type(*arrays)
    kinds = {array.dtype.kind for array in arrays}
    if (found.kind == "f" and kinds <= set("iu")) or (found.kind in "US" and kinds != {found.kind}):
        names = " and ".join(sorted({str(array.dtype) for array in arrays}))
        raise TypeError(f"values of dtypes {names} can't be combined: convert them to one dtype")
    for array in arrays:
        if found.kind not in "mM" or array.dtype == found:
            continue
        if (array.astype(found).astype(array.dtype) != array)[~np.isnat(array)].any():
            raise OverflowError(f"a value of {array.dtype} does not fit {found}: convert them to one unit")
    return found


def joined(parts: Sequence[KeyColumn], together: Concatenate) -> KeyColumn:
    """Concatenate the parts of a column whose keys are in order; texts are those of a sole column."""
    columns = [part for part in parts if isinstance(part, TextColumn)]
    if columns:
        return TextColumn(texts.concatenate([column.texts for column in columns], together), None)
    return _concatenated([part for part in parts if isinstance(part, np.ndarray)], together)


def values_of(column: KeyColumn, lo: int, hi: int) -> list[Any]:
    """Return the keys of rows [lo, hi) as Python's text and integers, or as dates."""
    if isinstance(column, TextColumn):
        if column.codes is None:
            return column.texts.strings(lo, hi)
        codes = column.codes[lo:hi]
        used, places = np.unique(codes, return_inverse=True)
        strings = column.texts.take(used).strings()
        return [strings[place] for place in places.tolist()]
    return dates(column[lo:hi]) if column.dtype.kind == "M" else column[lo:hi].tolist()


def dates(array: NDArray[Any]) -> list[Any]:
    """Return dates as Python's, and those that Python cannot have as NumPy's."""
    found = array.tolist()
    return list(array) if any(isinstance(each, int) for each in found) else found


def span(column: KeyColumn, key: object, lo: int, hi: int) -> tuple[int, int]:
    """Return the rows that have a key, among the sorted rows [lo, hi); an empty range at its place if none has it."""
    if isinstance(column, TextColumn):
        if not isinstance(key, str):
            return lo, lo
        place = column.texts.find(key)
        is_there = place >= 0
        place = place if is_there else -1 - place
        if column.codes is None:
            place = min(max(place, lo), hi)
            return place, min(place + is_there, hi)
        rows: NDArray[Any] = column.codes[lo:hi]
        left = lo + int(np.searchsorted(rows, np.int32(place)))
        return left, lo + int(np.searchsorted(rows, np.int32(place), side="right")) if is_there else left
    rows = numbers_of(column[lo:hi])
    if column.dtype.kind == "M":
        if not isinstance(key, datetime.date | np.datetime64 | None):
            return lo, lo
        date = np.datetime64("NaT" if key is None else key)  # `values_of` returns None for NaT
        found = date.astype(column.dtype)
        wanted: Any = found.view(np.int64)
        if found != date and not np.isnat(date):  # of a finer unit
            place = lo + int(np.searchsorted(rows, wanted, side="right" if found < date else "left"))
            return place, place
    else:
        if (
            not isinstance(key, int | float | np.number | np.bool_)
            or not np.isfinite(key)
            or key != (number := int(key))
        ):
            return lo, lo
        limits = np.iinfo(column.dtype)
        if not limits.min <= number <= limits.max:
            return (lo, lo) if number < limits.min else (hi, hi)
        wanted = column.dtype.type(number)
    return lo + int(np.searchsorted(rows, wanted)), lo + int(np.searchsorted(rows, wanted, side="right"))
