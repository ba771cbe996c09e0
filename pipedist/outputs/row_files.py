"""`.csv` and `.jsonl`: a row for each index of axis 0, a column for each leaf path; or a given table.

Cells are in the encoding of `pipedist.outputs.encoding`. csv: comma, header row, lines end with
a line feed, cells are quoted where RFC 4180 asks for it.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pipedist.errors import OutputError
from pipedist.outputs import encoding
from pipedist.outputs.leaves import Array, Leaves
from pipedist.outputs.piecewise import Piecewise
from pipedist.outputs.sink import Mode, Sink
from pipedist.program import Tree

Columns = dict[str, Array]
"""Columns by name: arrays [rows, ...]."""

_QUOTED = re.compile('[",\r\n]')
_ROWS = 4096
"""Rows of a block that went through temporary files."""


class RowSink(Sink):
    """Turns values into columns of equal length.

    `flat`: a cell holds one number or text, so a leaf has no axes but axis 0.

    Args:
        path, mode, axis, label: as for `Sink`.
        table: makes the columns of the one value; None: they are its leaves.
    """

    flat = True

    def __init__(
        self, path: Path, mode: Mode, axis: int, label: str, table: Callable[[Tree], Columns] | None = None
    ) -> None:
        super().__init__(path, mode, axis, label)
        self._table = table
        self._leaves = Leaves(bare="value", target=label)
        self._dtypes: dict[str, Any] = {}

    def _append(self, value: Tree) -> None:
        if value is None:
            if self._mode == "each":
                raise OutputError(
                    f"{self.label}: value {self._count} is null, which has no columns: write .jsonl"
                )
            return
        columns = self._columns(value, self._leaves)
        self._check(columns, self._dtypes)
        self._rows(columns)

    def _fits(self, value: Tree) -> None:
        if value is not None:
            self._check(self._columns(value, Leaves(bare="value", target=self.label)), {})

    def _columns(self, value: Tree, leaves: Leaves) -> Columns:
        if self._table is not None:
            try:
                columns = self._table(value)
            except (TypeError, ValueError) as error:
                raise OutputError(f"{self.label}: {error}") from error
            return _spread(columns) if self.flat else columns
        arrays = leaves.take(value)
        if self._mode == "each" or (self._mode == "one" and all(array.ndim == 0 for array in arrays)):
            arrays = [array[None] for array in arrays]
        return dict(zip(leaves.names, arrays, strict=True))

    def _check(self, columns: dict[str, Array], dtypes: dict[str, Any]) -> None:
        first = next(iter(columns), "")
        for name, array in columns.items():
            leaf = f"{self.label}: leaf {name!r}"
            if array.ndim == 0:
                raise OutputError(f"{leaf} is a single value beside columns: write .npz or .json")
            if self.flat and array.ndim > 1:
                axes = array.shape[1:]
                raise OutputError(
                    f"{leaf} has axes {axes} beside the rows, and a cell holds one value: write .npz"
                )
            if self.flat and array.dtype.kind in "cV":
                raise OutputError(f"{leaf} has dtype {array.dtype}, which fits no cell: write .npz")
            if self._mode == "pieces" and self._axis % array.ndim != 0:
                raise OutputError(
                    f"{leaf} is gathered along axis {self._axis}, and rows are axis 0: write .npz"
                )
            if len(array) != len(columns[first]):
                raise OutputError(
                    f"{leaf} has {len(array)} rows, leaf {first!r} has {len(columns[first])}: write .npz"
                )
            dtype = dtypes.setdefault(name, array.dtype)
            if array.dtype != dtype and not (array.dtype.kind == dtype.kind and dtype.kind in "US"):
                raise OutputError(f"{leaf}: one column has one dtype: first {dtype}, now {array.dtype}")

    @abstractmethod
    def _rows(self, columns: dict[str, Array]) -> None: ...


class CsvSink(RowSink):
    """A header row, and a line for each row."""

    _header = False

    def _rows(self, columns: dict[str, Array]) -> None:
        if not columns:
            return
        lines = []
        if not self._header:
            self._header = True
            lines.append(_line(tuple(map(_quoted, columns))))
        cells = [_cells(array) for array in columns.values()]
        lines.extend(map(_line, zip(*cells, strict=True)))
        self._out.file.write("".join(lines).encode(errors="surrogatepass"))

    def _complete(self) -> None:
        """Nothing is left to write."""


class JsonLinesSink(RowSink):
    """An object for each row, or for each step's or epoch's value."""

    flat = False

    def __init__(
        self, path: Path, mode: Mode, axis: int, label: str, table: Callable[[Tree], Columns] | None = None
    ) -> None:
        super().__init__(path, mode, axis, label, table)
        self._pieces = Piecewise(path, axis, "value", label)
        self._aside = False

    def _append(self, value: Tree) -> None:
        if self._mode == "each":
            self._line(_columns_of_row(value, self.label))
        elif self._mode == "pieces" and value is not None:
            arrays = self._leaves.take(value)
            if self._count == 1:
                self._aside = any(array.ndim and self._axis % array.ndim != 0 for array in arrays)
            if self._aside:
                self._pieces.append(value)
            else:
                super()._append(value)
        else:
            super()._append(value)

    def _fits(self, value: Tree) -> None:
        if self._mode == "each":
            _columns_of_row(value, self.label)
        else:
            super()._fits(value)

    def _rows(self, columns: dict[str, Array]) -> None:
        cells = [encoding.array_to_json(array, (name,)) for name, array in columns.items()]
        for row in zip(*cells, strict=True):
            self._line(dict(zip(columns, row, strict=True)))

    def _complete(self) -> None:
        spools = self._pieces.spools
        lengths = {name: spool.shape[0] for name, spool in spools.items()}
        if len(set(lengths.values())) > 1:
            raise OutputError(
                f"{self.label}: the leaves have different numbers of rows: {lengths}: write .npz"
            )
        for blocks in zip(*(spool.blocks(_ROWS) for spool in spools.values()), strict=True):
            self._rows(dict(zip(spools, blocks, strict=True)))

    def _line(self, row: dict[str, Any]) -> None:
        self._out.file.write((encoding.text(row, sort_keys=False) + "\n").encode())

    def _release(self) -> None:
        self._pieces.close()


def _spread(columns: Columns) -> Columns:
    """Return columns of single values: one that has axes becomes "NAME/0", "NAME/1", ..."""
    spread: Columns = {}
    for name, array in columns.items():
        for place in np.ndindex(array.shape[1:]):
            spread["/".join([name, *map(str, place)])] = array[(slice(None), *place)]
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
        for name, value in sorted(encoding.key_texts(node[1], path)):
            yield from _flat(value, (*path, name))
    else:
        for index, value in enumerate(node[1]):
            yield from _flat(value, (*path, str(index)))


def _cells(array: Array) -> list[str]:
    values = encoding.array_to_json(array)
    if array.dtype.kind == "b":
        return ["true" if value else "false" for value in values]
    return [_quoted(value) if isinstance(value, str) else repr(value) for value in values]


def _quoted(text: str) -> str:
    return '"' + text.replace('"', '""') + '"' if _QUOTED.search(text) else text


def _line(cells: tuple[str, ...]) -> str:
    # a row of one empty cell would be an empty line, which readers skip
    return (",".join(cells) if cells != ("",) else '""') + "\n"
