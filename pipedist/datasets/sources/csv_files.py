"""Source `csv`: rows of comma-separated files with a header row."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pipedist.datasets.sources.base import Config, Reader, SourceError, sealed
from pipedist.datasets.sources.columns import (
    CellError,
    Column,
    check_types,
    column_of_cells,
    no_such_column,
)
from pipedist.datasets.sources.csv_table import column_cells
from pipedist.datasets.sources.paths import DataFile
from pipedist.datasets.sources.row_files import Chunk, RowFiles, RowSource, open_rows, shard_order
from pipedist.datasets.sources.row_scan import RowError, RowRules, lenient_rows
from pipedist.datasets.sources.unpack import Spool
from pipedist.program import Tree

_RULES = RowRules(quoted=True, keep_blank=False)


def open_csv(config: Config, folder: Path) -> RowSource:
    """Open csv files.

    Args:
        config: `path`, and `columns`: name -> type, the columns that are read.
        folder: what `path` is relative to.

    Raises:
        SourceError: no file matches, a column is not there or is there twice, a type is
            unknown, or a file is not csv.
    """
    columns: dict[str, str] = dict(config.get("columns") or {})
    if not columns:
        raise SourceError(
            "csv needs columns", key="columns", expected="name: type for each column to be read"
        )
    check_types(columns)

    def open_files(files: list[DataFile], spool: Spool) -> RowSource:
        rows = RowFiles(files, _RULES)
        try:
            starts, tables = [], []
            for number, file in enumerate(files):
                index = rows.index(number)
                if len(index) < 2:
                    raise SourceError(f"{file.shown}: the file is empty", key="path", expected="a header row")
                names = _header(rows, number, int(index[0]), int(index[1]))
                tables.append([len(names), [_position(names, name, file) for name in columns]])
                starts.append(index[1:])
        finally:
            rows.close()
        reader_config = {
            "kind": "csv",
            "files": [file.to_config() for file in files],
            "columns": [[name, kind] for name, kind in columns.items()],
            "tables": tables,
        }
        return RowSource(starts, reader_config, CsvReader(reader_config), spool)

    return open_rows(config, folder, open_files)


def _header(rows: RowFiles, file: int, start: int, stop: int) -> list[str]:
    try:
        _, fields = next(lenient_rows(iter([rows.read(file, start, stop)]), start))
    except RowError as error:
        raise SourceError(f"{rows.place(file, start)}: {error.message}", key="path") from error
    try:
        return [field.encode("latin-1").decode() for field in fields]
    except UnicodeDecodeError as error:
        raise SourceError(f"{rows.place(file, start)}: the header is not UTF-8 text", key="path") from error


def _position(names: list[str], name: str, file: DataFile) -> int:
    found = [at for at, each in enumerate(names) if each == name]
    if not found:
        raise no_such_column(name, names, file.shown)
    if len(found) > 1:
        raise SourceError(f"{file.shown} has {len(found)} columns named {name!r}", key="columns", name=name)
    return found[0]


class CsvReader(Reader):
    """Parses rows of csv files into typed columns.

    Args:
        config: `files`; `columns`: [name, type] of each; `tables`: for each file, its number of fields
            and the positions of the columns.
    """

    def __init__(self, config: Config) -> None:
        self._columns: dict[str, str] = dict(config["columns"])
        self._tables = config["tables"]
        self._rows = RowFiles([DataFile.from_config(file) for file in config["files"]], _RULES)

    def read(self, location: Tree) -> dict[str, Column]:
        """Return {column: array[n]} of the rows at `location`.

        Raises:
            SourceError: a cell is not of its column's type, or a row has too many or too few
                fields; the message begins with `file:row:column`, the column as its number.
        """
        chunks = list(self._rows.chunks(location)) or [Chunk(0, b"", 0)]
        parts = [self._parse(chunk) for chunk in chunks]
        order = shard_order(chunks)
        shard = {}
        for at, name in enumerate(self._columns):
            column = parts[0][at] if len(parts) == 1 else np.concatenate([part[at] for part in parts])
            shard[name] = sealed(column if order is None else column[order])
        return shard

    def _parse(self, chunk: Chunk) -> list[Column]:
        fields, positions = self._tables[chunk.file]
        try:
            cells = column_cells(chunk.data, chunk.rows, fields, positions)
        except RowError as error:
            raise SourceError(
                f"{self._rows.byte_place(chunk, error.offset)}: {error.message}", key="path"
            ) from error
        columns = []
        for column, position, (name, kind) in zip(cells, positions, self._columns.items(), strict=True):
            try:
                columns.append(column_of_cells(column, kind))
            except CellError as error:
                place = self._rows.row_place(chunk, error.row)
                raise SourceError(
                    f"{place}:{position + 1}: column {name!r}: {error.message}", key="columns", name=name
                ) from error
        return columns

    def close(self) -> None:
        """Close the files."""
        self._rows.close()
