"""Ranges of keys, in which large tables are merged: cut at the same keys, merged one by one, and joined.

Texts to which rows refer by codes are few beside the rows, so they are sorted once, and not in each range:
the first table of a range has the texts of all, and the codes of all are places in them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipedist.reduction.keyed import keys, texts
from pipedist.reduction.keyed.keys import KeyColumn, TextColumn
from pipedist.reduction.keyed.table import KeyedTable, joined_values
from pipedist.reduction.keyed.texts import Concatenate, Texts, in_memory


@dataclass
class _Shared:
    """The texts of a key column of all tables.

    Args:
        texts: the distinct ones, sorted.
        places: the places of each table's texts among them, int32.
        used: for each range that was cut, which of them it has, as packed bits.
    """

    texts: Texts
    places: list[NDArray[np.int32]]
    used: dict[int, NDArray[np.uint8]] = field(default_factory=dict)


class Ranges:
    """Tables with rows, cut into ranges of keys of about equal sizes.

    The largest table decides the keys.

    Args:
        count: the number of ranges.
        read: returns the rows of an array, which may be in a file, in memory.
        after_each: called when a table was searched.
    """

    def __init__(
        self,
        tables: Sequence[KeyedTable],
        count: int,
        read: Callable[[NDArray[Any]], NDArray[Any]] = np.asarray,
        after_each: Callable[[], None] = lambda: None,
    ) -> None:
        self._tables = tables
        self._read = read
        largest = max(tables, key=lambda table: table.rows)
        places = [largest.rows * part // count for part in range(1, count)]
        bounds = [[keys.values_of(column, at, at + 1)[0] for column in largest.key_columns] for at in places]
        self._bounds: list[list[int]] = []
        for table in tables:
            self._bounds.append(_cuts(table, bounds))
            after_each()
        self._shared: dict[int, _Shared] = {}
        for number, columns in enumerate(zip(*(table.key_columns for table in tables), strict=True)):
            if isinstance(columns[0], TextColumn) and columns[0].codes is not None:
                self._shared[number] = self._union(columns)

    def _union(self, columns: Sequence[KeyColumn]) -> _Shared:
        found = [column.texts for column in columns if isinstance(column, TextColumn)]
        union, places = texts.union_in_turn(
            [Texts(self._read(each.data), self._read(each.ends)) for each in found]
        )
        return _Shared(union, [each.astype(np.int32) for each in places])

    def cut(self, place: int) -> list[KeyedTable]:
        """Return the rows of a range, of each table; they fit only each other."""
        rows = [each[place : place + 2] for each in self._bounds]
        columns = [
            [self._rows_of(column, lo, hi) for column in table.key_columns]
            for table, (lo, hi) in zip(self._tables, rows, strict=True)
        ]
        for number, shared in self._shared.items():
            self._share(number, shared, place, columns)
        return [
            replace(
                table,
                key_columns=own,
                value_columns={name: self._read(each[lo:hi]) for name, each in table.value_columns.items()},
            )
            for table, own, (lo, hi) in zip(self._tables, columns, rows, strict=True)
        ]

    def _rows_of(self, column: KeyColumn, lo: int, hi: int) -> KeyColumn:
        if not isinstance(column, TextColumn):
            return self._read(column[lo:hi])
        if column.codes is not None:
            return TextColumn(column.texts, self._read(column.codes[lo:hi]))
        found = column.texts.cut(lo, hi)
        return TextColumn(Texts(self._read(found.data), self._read(found.ends)), None)

    def _share(self, number: int, shared: _Shared, place: int, columns: list[list[KeyColumn]]) -> None:
        is_used = np.zeros(len(shared.texts), bool)
        codes = [places.take(_codes(own[number])) for places, own in zip(shared.places, columns, strict=True)]
        for each in codes:
            is_used[each] = True
        shared.used[place] = np.packbits(is_used)
        rank = np.cumsum(is_used, dtype=np.int32) - np.int32(1)
        found = shared.texts.take(np.flatnonzero(is_used))
        for own, each in zip(columns, codes, strict=True):
            own[number] = TextColumn(found, rank.take(each))
            if len(each):
                found = texts.NONE  # the first table with rows has them

    def join(self, merged: Sequence[KeyedTable], together: Concatenate = in_memory) -> KeyedTable:
        """Concatenate the merged tables of all ranges, column by column."""
        found = [(place, table) for place, table in enumerate(merged) if table.rows]
        tables = [table for _, table in found]
        columns: list[KeyColumn] = []
        for number, column in enumerate(zip(*(table.key_columns for table in tables), strict=True)):
            shared = self._shared.get(number)
            if shared is None:
                columns.append(keys.joined(column, together))
                continue
            size = len(shared.texts)
            used = (np.unpackbits(shared.used[place], count=size) for place, _ in found)
            columns.append(
                TextColumn(
                    shared.texts,
                    together(
                        np.flatnonzero(bits).astype(np.int32).take(_codes(own))
                        for bits, own in zip(used, column, strict=True)
                    ),
                )
            )
        return replace(tables[0], key_columns=columns, value_columns=joined_values(tables, together))


def _cuts(table: KeyedTable, bounds: Sequence[Sequence[Any]]) -> list[int]:
    """Return the rows at which a table is cut, from 0 to the number of its rows."""
    rows = [0]
    for key in bounds:
        lo, hi = 0, table.rows
        for column, each in zip(table.key_columns, key, strict=True):
            lo, hi = keys.span(column, each, lo, hi)
        rows.append(max(lo, rows[-1]))
    return [*rows, table.rows]


def _codes(column: KeyColumn) -> NDArray[np.int32]:
    assert isinstance(column, TextColumn)
    assert column.codes is not None
    return column.codes
