"""Values as rows: a row per index of axis 0, a column per leaf path; or a given table. `.csv` and `.jsonl`.

Cells have the encoding of `pipedist.outputs.encoding`. A .csv has commas, a header row, line feeds, and quotes as
RFC 4180 requires.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy as np

from pipedist.core import ragged
from pipedist.core.files import AtomicFile
from pipedist.core.types import Tree
from pipedist.errors import OutputError
from pipedist.outputs import encoding
from pipedist.outputs.sink import Sink, Target
from pipedist.outputs.spool import Array, Columns, Leaves
from pipedist.reduction.keyed.table import KeyedTable

_QUOTED = re.compile('[",\r\n]')
_ROWS = 4096  # rows of a block that is read from temporary files
_BLOCK_ROWS = 2**16  # rows of a table by key that are converted at a time


class RowSink(Sink):
    """Turns values into columns of equal length."""

    flat = True  # a cell holds one number or text, so a leaf has no axes but axis 0
    plain = True  # whether columns have types, and a column of a table that has axes becomes several

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._table = target.table
        self._dtypes: dict[str, Any] = {}
        self._keys: list[str] = []  # the keys of the first records

    def _append(self, value: Tree) -> None:
        if value is None:
            if self._mode == "each":
                raise OutputError(
                    f"{self.label}: value {self._count} is null, which has no columns. Write .jsonl."
                )
            return
        if type(value) is list and not value:  # no records
            return
        if isinstance(value, KeyedTable) and self._mode == "one":
            self._table_by_key(value)
            return
        columns = self._columns(value, self._leaves, self._keys)
        self._check(columns, self._dtypes)
        self._rows(columns)

    def _table_by_key(self, value: KeyedTable) -> None:
        """Append a table by key, some rows at a time."""
        for block in value.blocks(_BLOCK_ROWS):
            columns = _spread(block) if self.plain else block
            self._check(columns, self._dtypes)
            self._rows(columns)

    def check(self, value: Tree) -> None:
        if value is not None:
            self._check(self._columns(value, self._new_leaves(), []), {})

    def _columns(self, value: Tree, leaves: Leaves, keys: list[str]) -> Columns:
        if self._table is not None:
            try:
                columns = self._table(value)
            except (TypeError, ValueError) as error:
                raise OutputError(f"{self.label}: {error}") from error
            return _spread(columns) if self.plain else columns
        if ragged.are_records(value):
            return self._columns_of_records(value, keys)
        arrays = leaves.take(value)
        if self._mode == "each" or (self._mode == "one" and all(array.ndim == 0 for array in arrays)):
            arrays = [array[None] for array in arrays]
        return {leaves.names[index]: arrays[index] for index in leaves.order}

    def _columns_of_records(self, records: list[dict[str, Any]], keys: list[str]) -> Columns:
        """Return a column for each of the keys, at first those of these records; an absent key is None."""
        names = list(dict.fromkeys(name for record in records for name in record))
        keys += [] if keys else names
        if not keys:
            raise OutputError(f"{self.label}: the first records have no keys, so no columns. Write .jsonl.")
        if more := [name for name in names if name not in keys]:
            raise OutputError(
                f"{self.label}: a record has the key {more[0]!r}, but the columns are those of the first ones: "
                f"{', '.join(keys)}. Return it in all records, or write .jsonl."
            )
        return {name: ragged.objects([record.get(name) for record in records]) for name in keys}

    def _check(self, columns: dict[str, Array], dtypes: dict[str, Any]) -> None:
        first = next(iter(columns), "")
        for name, array in columns.items():
            dtype = dtypes.setdefault(name, array.dtype)
            problem = ""
            if array.ndim == 0:
                problem = " is a single value beside columns. Write .npz or .json."
            elif self.flat and array.ndim > 1:
                problem = (
                    f" has axes {array.shape[1:]} beside the rows, and a cell holds one value. Write .npz."
                )
            elif self.plain and array.dtype.kind in "cV":
                problem = f" has dtype {array.dtype}, which a cell can't hold. Write .npz."
            elif self._mode == "pieces" and self._axis % array.ndim != 0:
                problem = f" is gathered along axis {self._axis}, and rows are axis 0. Write .npz."
            elif len(array) != len(columns[first]):
                problem = f" has {len(array)} rows, leaf {first!r} has {len(columns[first])}. Write .npz."
            elif not ragged.fit(array.dtype, dtype):
                problem = (
                    f": all rows must have one dtype: first {dtype}, now {array.dtype}. Return one dtype in every "
                    "call, as with x.astype(np.float64)."
                )
            if problem:
                raise OutputError(f"{self.label}: leaf {name!r}{problem}")

    @abstractmethod
    def _rows(self, columns: dict[str, Array]) -> None: ...


class CsvSink(RowSink):
    """A header row, then a line per row."""

    _out: AtomicFile
    _header = False

    def _rows(self, columns: dict[str, Array]) -> None:
        if not columns:
            return
        lines = []
        if not self._header:
            self._header = True
            lines.append(_line(tuple(map(_quoted, columns))))
        cells = [self._cells(name, array) for name, array in columns.items()]
        lines.extend(map(_line, zip(*cells, strict=True)))
        self._out.file.write("".join(lines).encode(errors="surrogatepass"))

    def _cells(self, name: str, array: Array) -> list[str]:
        values = encoding.array_to_json(array)
        if array.dtype.kind == "O" and any(isinstance(value, list | dict) for value in values):
            raise OutputError(
                f"{self.label}: leaf {name!r} has lists or dicts, and a cell holds one value. "
                "Write .jsonl or .parquet."
            )
        return list(map(_cell, values))

    def _complete(self) -> None:
        """Do nothing: all rows are written."""


class JsonLinesSink(RowSink):
    """An object per row, or per value of a step or epoch."""

    flat = False
    plain = False

    _out: AtomicFile
    _is_spooled = False

    def _append(self, value: Tree) -> None:
        if ragged.are_records(value):
            for record in value:
                self._line(encoding.to_json(record))
            return
        if type(value) is list and not value:  # no records
            return
        if self._mode == "each":
            self._line(_columns_of_row(value, self.label))
            return
        if self._mode == "pieces" and value is not None:
            arrays = self._leaves.take(value)
            if self._count == 1:
                self._is_spooled = any(array.ndim and self._axis % array.ndim != 0 for array in arrays)
            if self._is_spooled:
                self._pieces.append(value)
                return
        super()._append(value)

    def check(self, value: Tree) -> None:
        if ragged.are_records(value):
            encoding.to_json(value)
        elif self._mode == "each":
            _columns_of_row(value, self.label)
        else:
            super().check(value)

    def _rows(self, columns: dict[str, Array]) -> None:
        cells = [encoding.array_to_json(array, (name,)) for name, array in columns.items()]
        for row in zip(*cells, strict=True):
            self._line(dict(zip(columns, row, strict=True)))

    def _complete(self) -> None:
        names = [self._leaves.names[index] for index in self._leaves.order]
        spools = {name: self._pieces.spools[name] for name in names if name in self._pieces.spools}
        lengths = {name: spool.shape[0] for name, spool in spools.items()}
        if len(set(lengths.values())) > 1:
            raise OutputError(
                f"{self.label}: the leaves have different numbers of rows: {lengths}. Write .npz."
            )
        for blocks in zip(*(spool.blocks(_ROWS) for spool in spools.values()), strict=True):
            self._rows(dict(zip(spools, blocks, strict=True)))

    def _line(self, row: dict[str, Any]) -> None:
        self._out.file.write((encoding.text(row, sort_keys=False) + "\n").encode())


def _spread(columns: Columns) -> Columns:
    """Return columns of single values: a column with axes becomes "NAME/0", "NAME/1", ..."""
    spread: Columns = {}
    for name, array in columns.items():
        for index in np.ndindex(array.shape[1:]):
            spread["/".join([name, *map(str, index)])] = array[(slice(None), *index)]
    return spread


def _columns_of_row(value: Tree, target: str) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name, cell in _flat(value, ()):
        if name in row:
            raise OutputError(f"{target}: two leaves have the same path {name!r}")
        row[name] = cell
    return row


def _flat(tree: Tree, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    node = encoding.node(tree)
    if node is None:
        yield "/".join(path) or "value", encoding.to_json(tree)
    elif node[0] == "object":
        for name, value in encoding.key_texts(node[1], path):
            yield from _flat(value, (*path, name))
    else:
        for index, value in enumerate(node[1]):
            yield from _flat(value, (*path, str(index)))


def _cell(value: encoding.Json) -> str:
    if isinstance(value, str):
        return _quoted(value)
    if value is None or isinstance(value, bool):
        return {None: "", True: "true", False: "false"}[value]
    return repr(value)


def _quoted(text: str) -> str:
    return '"' + text.replace('"', '""') + '"' if _QUOTED.search(text) else text


def _line(cells: tuple[str, ...]) -> str:
    # readers skip empty lines, so a single empty cell is quoted
    return (",".join(cells) if cells != ("",) else '""') + "\n"
