"""Lists of similar items as columns: one array instead of many.

The results of a range of calls are a list of dicts of one structure with small values: an array of one
element, the partial of a reduction. Each separate value costs a microsecond on each side; stacked, a
tenth. A COLUMN holds the n values at one place of the items:

| column | values |
|---|---|
| `[ARRAY, array]` | arrays of one dtype and shape, stacked along a new first axis |
| `[SCALAR, array]` | NumPy scalars of one dtype |
| `[DICT, keys, columns]` | dicts of the same keys in the same order |
| `[LIST, columns]`, `[TUPLE, columns]` | lists or tuples of one length |
| `[PLAIN, list]` | any other values, unchanged |

Values from a column of arrays are views of it, and keep all of it in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any, Final, Generic, TypeVar, overload

import numpy as np

from pipedist.protocol.limits import DEPTH_MAX, ELEMENTS_MAX, MIB

ITEMS_MIN: Final = 8  # minimum items of a column; for fewer it does not pay

STACKED_BYTES_MAX: Final = 512  # of a stacked array; a larger one costs more to copy than to send
COLUMN_BYTES_MAX: Final = 1 * MIB  # maximum size of a stack: one value of it keeps all of it in memory
NODE_BYTES_MIN: Final = 1  # per object in a message's columns: bounds objects; a dict takes 200 bytes
ARRAY, SCALAR, DICT, LIST, TUPLE, PLAIN = range(6)
_STACKED_KINDS: Final = "biufc"
_DEPTH_MAX: Final = 16  # maximum depth of an item; deeper ones are seldom similar

Column = list[Any]


Values = TypeVar("Values", bound=Sequence[Any] | np.ndarray[Any, Any])


class SlotValues(Sequence[dict[str, Any]], Generic[Values]):
    """The dicts {slot: value} of consecutive calls, as the slot and their values, which may be one stacked array."""

    __slots__ = ("slot", "values")

    def __init__(self, slot: str, values: Values) -> None:
        self.slot = slot
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    @overload
    def __getitem__(self, place: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, place: slice) -> SlotValues[Values]: ...
    def __getitem__(self, place: int | slice) -> dict[str, Any] | SlotValues[Values]:
        found: Any = self.values[place]
        return SlotValues(self.slot, found) if isinstance(place, slice) else {self.slot: found}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        slot = self.slot
        return iter([{slot: value} for value in self.values])


class Unlike(Exception):
    """The items are not similar, or too small."""


def columns_of(items: list[Any] | SlotValues[list[Any]]) -> Column:
    """Return the column of items; Unlike: it would not have fewer objects, or too many for their bytes."""
    if type(items) is SlotValues:
        column = [DICT, [items.slot], [_column(items.values, _DEPTH_MAX - 1)]]
    else:
        column = _column(items, _DEPTH_MAX)
    if column[0] == PLAIN or nodes_of(column) * NODE_BYTES_MIN > _item_bytes(column):
        raise Unlike
    return column


def nodes_of(column: Column) -> int:
    """Return the number of objects of one item, itself included; ValueError: not a column."""
    nodes, pending = 0, [column]
    while pending:
        column = pending.pop()
        nodes += 1
        if type(column) is not list or len(column) < 2 or nodes > ELEMENTS_MAX:
            raise ValueError("a malformed column")
        if column[0] in (DICT, LIST, TUPLE):
            if type(column[-1]) is not list:
                raise ValueError("a malformed column")
            pending += column[-1]
    return nodes


def fits(nodes: int, items: int, size_bytes: int) -> bool:
    """Return whether columns may have this many objects for their bytes."""
    return nodes * items * NODE_BYTES_MIN <= size_bytes and nodes * items <= ELEMENTS_MAX


def stacked_values_of(column: Column, count: int) -> SlotValues[np.ndarray[Any, Any]] | None:
    """Return the `count` items of a column if they are dicts of one slot with arrays, which stay stacked; else None.

    An object for each array would be most of the cost of short calls. Raises ValueError as `items_of` does.
    """
    if column[0] != DICT or len(column) != 3:
        return None
    slots, columns = column[1:]
    if type(slots) is not list or len(slots) != 1 or type(slots[0]) is not str or len(columns) != 1:
        return None
    kind = columns[0][0]
    if type(kind) is not int or kind != ARRAY:
        return None
    return SlotValues(slots[0], _stacked(columns[0], count))


def items_of(column: Column, count: int, depth: int = DEPTH_MAX) -> list[Any]:
    """Return the `count` items of a column; the caller has checked their number with `fits`.

    Raises ValueError for a column that `columns_of` would not return.
    """
    kind = column[0]
    if type(kind) is not int or depth == 0:
        raise ValueError("a malformed column")
    if kind in (ARRAY, SCALAR, PLAIN) and len(column) == 2:
        values = column[1]
        if kind == PLAIN:
            if type(values) is not list or len(values) != count:
                raise ValueError(f"a column that is not a list of {count} values")
            return values
        return list(_stacked(column, count))
    if kind == DICT and len(column) == 3:
        keys, columns = column[1:]
        if type(keys) is not list or not {str, int}.issuperset(map(type, keys)):
            raise ValueError("a column of dicts whose keys are not all str or int")
        if len(set(keys)) != len(keys) or len(columns) != len(keys):
            raise ValueError("a column of dicts with a repeated key, or without values")
        if len(keys) == 1:
            key = keys[0]
            return [{key: value} for value in items_of(columns[0], count, depth - 1)]
        rows = _rows(columns, count, depth)
        return [dict(zip(keys, row, strict=True)) for row in rows]
    if kind in (LIST, TUPLE) and len(column) == 2:
        rows = _rows(column[1], count, depth)
        return rows if kind == TUPLE else list(map(list, rows))
    raise ValueError("a malformed column")


def _stacked(column: Column, count: int) -> np.ndarray[Any, Any]:
    kind, values = column
    if (
        type(values) is not np.ndarray
        or values.dtype.kind not in _STACKED_KINDS
        or values.shape[:1] != (count,)
        or (values.ndim > 1) != (kind == ARRAY)
    ):
        raise ValueError(f"a column that is not an array of {count} values")
    return values


def _rows(columns: Sequence[Column], count: int, depth: int) -> list[tuple[Any, ...]]:
    if not columns:
        return [()] * count
    return list(zip(*[items_of(column, count, depth - 1) for column in columns], strict=True))


def _column(values: Sequence[Any], depth: int) -> Column:
    types = set(map(type, values))
    if len(types) == 1 and depth:
        (cls,) = types
        if cls is np.ndarray:
            return _arrays(values)
        if cls is dict:
            return _dicts(values, depth)
        if cls is list or cls is tuple:
            if len(set(map(len, values))) == 1:
                below = [_column(column, depth - 1) for column in zip(*values, strict=True)]
                return [LIST if cls is list else TUPLE, below]
        elif issubclass(cls, np.generic):
            return _scalars(values)
    return [PLAIN, list(values)]


def _dicts(values: Sequence[dict[Any, Any]], depth: int) -> Column:
    keys = list(values[0])
    if not {str, int}.issuperset(map(type, keys)):  # also rejects True, which equals 1
        return [PLAIN, list(values)]
    if len(keys) == 1:
        # Cheaper than comparing keys: each dict has one key, and it is this one.
        if set(map(len, values)) != {1}:
            return [PLAIN, list(values)]
        try:
            column = list(map(itemgetter(keys[0]), values))
        except KeyError:
            return [PLAIN, list(values)]
        if type(keys[0]) is int and {int} != {type(next(iter(value))) for value in values}:
            return [PLAIN, list(values)]
        return [DICT, keys, [_column(column, depth - 1)]]
    if len(set(map(tuple, values))) > 1 or {type(k) for value in values for k in value} - {str}:
        return [PLAIN, list(values)]
    rows = zip(*[value.values() for value in values], strict=True)
    return [DICT, keys, [_column(column, depth - 1) for column in rows]]


def _arrays(values: Sequence[np.ndarray[Any, Any]]) -> Column:
    first = values[0]
    dtype, shape = first.dtype, first.shape
    if (
        not shape
        or dtype.kind not in _STACKED_KINDS
        or not dtype.isnative
        or first.nbytes > STACKED_BYTES_MAX
        or first.nbytes * len(values) > COLUMN_BYTES_MAX
        or {value.dtype for value in values} != {dtype}
        or {value.shape for value in values} != {shape}
    ):
        return [PLAIN, list(values)]
    return [ARRAY, np.concatenate(values).reshape(len(values), *shape)]


def _scalars(values: Sequence[np.generic]) -> Column:
    dtype = values[0].dtype
    if dtype.kind not in _STACKED_KINDS or not dtype.isnative:
        return [PLAIN, list(values)]
    return [SCALAR, np.array(values, dtype)]


def _item_bytes(column: Column) -> int:
    """Return the approximate size of one item, at least that of the first one."""
    kind, values = column[0], column[-1]
    if kind in (ARRAY, SCALAR):
        return int(values[0].nbytes)
    if kind != PLAIN:
        return sum(map(_item_bytes, values))
    value = values[0]
    if type(value) is float:
        return 9
    if isinstance(value, np.ndarray | np.generic):
        return 1 + int(value.nbytes)
    return 1 + (len(value) if type(value) in (str, bytes, list, tuple, dict) else 0)
