"""Source `sql`: rows of a query to SQLite or DuckDB, read by ranges.

The query has an ORDER BY, because its rows are numbered. A range is read with LIMIT and OFFSET, in blocks of
`BLOCK_ROWS`, of which a reader caches those that it read last. Each process opens the database for reading only.
"""

from __future__ import annotations

import abc
import os
import sqlite3
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import numpy as np

from pipedist.core import ragged
from pipedist.core.types import Tree
from pipedist.datasets.element import ArraySpec
from pipedist.datasets.sources.arrow_columns import OWN_TYPE, numpy_column, readable
from pipedist.datasets.sources.base import (
    Config,
    ElementReader,
    ReaderSource,
    RowLayout,
    SourceError,
    imported,
    index_of,
    rows_of,
    sealed,
)
from pipedist.datasets.sources.columns import CellError, Column, joined
from pipedist.datasets.sources.paths import DataFile, OpenFiles, expand

BLOCK_ROWS = 8192
BLOCKS_BYTES_MAX = 256 << 20  # limit of the blocks that a reader caches; the last one is always cached
_WALS = ("-wal", ".wal")  # changes that a database has not yet written to its main file


class Database(abc.ABC):
    """An open database, and a query to it."""

    errors: tuple[type[Exception], ...]  # that queries raise

    def __init__(self, database: Any, query: str) -> None:
        self._database = database
        self._query = f"({query})"

    @abc.abstractmethod
    def columns(self) -> dict[str, str]:
        """Return the names of the query's columns, and the type of each: that of a NumPy array, or "bytes"."""

    def count(self) -> int:
        """Return the number of rows."""
        (count,) = self._database.execute(f"SELECT count(*) FROM {self._query}").fetchone()
        return int(count)

    @abc.abstractmethod
    def rows(self, lo: int, hi: int, columns: dict[str, str]) -> dict[str, Column]:
        """Return rows [lo, hi) as columns of the types; CellError has a row from 0."""

    def close(self) -> None:
        self._database.close()


class SqliteDatabase(Database):
    """A database of SQLite, in the standard library.

    Its columns have no types, so each value has one of its own: those of all rows decide.
    """

    errors = (sqlite3.Error, UnicodeDecodeError)

    def __init__(self, path: str, query: str) -> None:
        opened = sqlite3.connect(f"file:{quote(path)}?mode=ro", uri=True, check_same_thread=False)
        super().__init__(opened, query)

    def columns(self) -> dict[str, str]:
        cursor = self._database.execute(f"SELECT * FROM {self._query} LIMIT 0")
        names = [each[0] for each in cursor.description]
        kinds = ("integer", "real", "text", "blob", "null")
        sums = ", ".join(f"total(typeof({_quoted(name)}) = '{kind}')" for name in names for kind in kinds)
        found = self._database.execute(f"SELECT {sums} FROM {self._query}").fetchone()
        columns = {}
        for place, name in enumerate(names):
            there = {kind for kind, count in zip(kinds, found[place * len(kinds) :], strict=False) if count}
            columns[name] = _sqlite_type(there)
        return columns

    def rows(self, lo: int, hi: int, columns: dict[str, str]) -> dict[str, Column]:
        text = f"SELECT * FROM {self._query} LIMIT ? OFFSET ?"
        found = self._database.execute(text, (hi - lo, lo)).fetchall()
        values: Sequence[Sequence[Any]] = list(zip(*found, strict=True)) or [()] * len(columns)
        return {
            name: _sqlite_column(column, kind)
            for column, (name, kind) in zip(values, columns.items(), strict=True)
        }


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _sqlite_type(kinds: set[str]) -> str:
    if kinds <= {"integer"} and kinds:
        return "int64"
    if kinds <= {"integer", "real", "null"} and kinds - {"null"}:
        return "float64"
    if kinds <= {"blob", "null"} and "blob" in kinds:
        return "bytes"
    return "str"


def _sqlite_column(values: Sequence[Any], kind: str) -> Column:
    if kind == "bytes":
        return ragged.objects([b"" if value is None else bytes(value) for value in values])
    if kind == "str":
        for row, value in enumerate(values):
            if isinstance(value, bytes):
                raise CellError(row, "a BLOB in a column of text: cast it in the query")
        return ragged.of_texts(["" if value is None else str(value) for value in values])
    wanted = int if kind == "int64" else float
    for row, value in enumerate(values):
        if not isinstance(value, int | float if wanted is float else int) and not (
            value is None and wanted is float
        ):
            raise CellError(row, f"{value!r} is not of type {kind}: cast it in the query")
        if wanted is float and isinstance(value, int) and float(value) != value:
            raise CellError(
                row, f"{value!r} does not fit {kind}, the type of its column: cast it in the query"
            )
    return np.array([float("nan") if value is None else value for value in values], kind)


class DuckDatabase(Database):
    """A database of DuckDB, whose columns have the types of Arrow."""

    def __init__(self, path: str, query: str) -> None:
        duckdb = imported("duckdb", "sql", "duckdb")
        self._arrow = imported("pyarrow", "sql", "duckdb")
        imported("pyarrow.compute", "sql", "duckdb")
        self.errors = (duckdb.Error,)
        super().__init__(duckdb.connect(path, read_only=True, config={"threads": 1}), query)

    def _table(self, text: str) -> Any:
        return self._database.sql(text).to_arrow_table()

    def columns(self) -> dict[str, str]:
        empty = self._table(f"SELECT * FROM {self._query} LIMIT 0")
        columns = {}
        for field in empty.schema:
            if not readable(self._arrow, field.type, OWN_TYPE):
                raise SourceError(
                    f"column {field.name!r} of the query is {field.type}, which can't be read",
                    key="query",
                    expected=f"a cast in the query, as in CAST({field.name} AS DOUBLE)",
                )
            columns[field.name] = OWN_TYPE
        return columns

    def rows(self, lo: int, hi: int, columns: dict[str, str]) -> dict[str, Column]:
        table = self._table(f"SELECT * FROM {self._query} LIMIT {hi - lo} OFFSET {lo}")
        return {name: numpy_column(self._arrow, table.column(name), kind) for name, kind in columns.items()}


class SqlReader(ElementReader):
    """Reads rows of a query, block by block."""

    def __init__(self, config: Config) -> None:
        (self._file,) = msgspec.convert(config["files"], list[DataFile])
        self._watched = OpenFiles([self._file])
        self._columns: dict[str, str] = dict(config["columns"])
        self._length: int = config["length"]
        self._layout = RowLayout([BLOCK_ROWS] * (self._length // BLOCK_ROWS) + [self._length % BLOCK_ROWS])
        self._database = _connect(config["url"], self._file, config["query"])
        self._blocks: OrderedDict[int, tuple[dict[str, Column], int]] = OrderedDict()

    @property
    def element_spec(self) -> Tree:  # type: ignore[override]
        empty = self.read(range(0))
        return {name: ArraySpec(column.dtype, column.shape[1:]) for name, column in empty.items()}

    def __len__(self) -> int:
        return self._length

    def read(self, location: Tree) -> dict[str, Column]:
        """Return {column: array[n]} of the rows with the ids `location`."""
        rows = rows_of(location, self._length)
        pieces, order = self._layout.pieces(rows)
        if not pieces:
            return joined([self._rows(0, 0)], None)
        found = [
            {name: column[index_of(chosen)] for name, column in self._block(block).items()}
            for block, chosen in pieces
        ]
        return joined(found, order)

    def _block(self, block: int) -> dict[str, Column]:
        if block not in self._blocks:
            lo = block * BLOCK_ROWS
            columns = self._rows(lo, min(lo + BLOCK_ROWS, self._length))
            self._blocks[block] = columns, sum(map(ragged.size_bytes, columns.values()))
            while len(self._blocks) > 1 and sum(size for _, size in self._blocks.values()) > BLOCKS_BYTES_MAX:
                self._blocks.popitem(last=False)
        self._blocks.move_to_end(block)
        return self._blocks[block][0]

    def _rows(self, lo: int, hi: int) -> dict[str, Column]:
        what = f"{self._file.label}: rows {lo} to {hi - 1} of the query"
        try:
            columns = self._database.rows(lo, hi, self._columns)
        except CellError as error:
            raise SourceError(
                f"{self._file.label}: row {lo + error.row} of the query: {error.message}", key="query"
            ) from error
        except self._database.errors as error:
            raise SourceError(f"{what} can't be read: {error}", key="query") from error
        self._watched.check(0)
        if any(len(column) != hi - lo for column in columns.values()):
            raise SourceError(f"{what} are fewer now: the data has changed since the run began", key="query")
        return {name: sealed(column) for name, column in columns.items()}

    def close(self) -> None:
        self._blocks.clear()
        self._database.close()
        self._watched.close()


def _connect(url: str, file: DataFile, query: str) -> Any:
    connect = DuckDatabase if url.startswith("duckdb:") else SqliteDatabase
    file.check()
    try:
        return connect(file.path, query)
    except SourceError:
        raise
    except Exception as error:  # a damaged file: duckdb.Error, which may not be imported
        raise SourceError(f"{file.label}: can't be opened: {error}", key="url") from error


def open_sql(config: Config, folder: Path) -> ReaderSource:
    """Open a query: `url` is sqlite:///PATH or duckdb:///PATH."""
    url, query = config["url"], config["query"].strip().rstrip(";")
    try:
        (file,) = expand(url.partition(":///")[2], folder)
    except SourceError as error:
        raise SourceError(str(error), key="url") from error
    for ending in _WALS:
        if os.path.exists(file.path + ending) and os.path.getsize(file.path + ending):
            raise SourceError(
                f"{file.label}: {file.label + ending} has changes that are not yet in the database",
                key="url",
                expected="a database that no process writes: close it, or run a checkpoint",
            )
    database = _connect(url, file, query)
    try:
        columns, length = database.columns(), database.count()
    except database.errors as error:
        raise SourceError(f"{file.label}: {str(error).strip()}", key="query") from error
    finally:
        database.close()
    settings = {
        "kind": "sql",
        "url": url,
        "query": query,
        "files": msgspec.to_builtins([file]),
        "columns": [[name, kind] for name, kind in columns.items()],
        "length": length,
    }
    return ReaderSource(length, settings, SqlReader(settings))
