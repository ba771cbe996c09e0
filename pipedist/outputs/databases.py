"""Tables in SQLite and DuckDB, filled exactly once.

Rows go to a table beside the final one, and each transaction that adds rows also records their number, by run:

    _pipedist_progress: "table", run, "rows", complete

The last transaction replaces the table by the new one, so a reader sees the rows of one complete pass. A resumed run
skips the rows that its record counts: rows come in the same order each time. A table that pipedist did not write is
neither replaced nor changed.

With a relative path, the database is a file of the output folder, made anew by each run. With an absolute one it is
kept, and may have other tables; the output folder then has a receipt, `{database, table, rows}`.

| NumPy | SQLite | DuckDB |
|---|---|---|
| integers, booleans | INTEGER | its integer types, BOOLEAN |
| floats | REAL; NaN is NULL | FLOAT, DOUBLE |
| text, bytes | TEXT, BLOB | VARCHAR, BLOB |
| dates | TEXT, as in ISO 8601 | DATE, TIMESTAMP |
| further axes, lists, dicts | an error | lists, STRUCT |
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from pipedist.core.files import AtomicPath, replace_file
from pipedist.errors import OutputError
from pipedist.outputs import encoding
from pipedist.outputs.arrow_files import TableSink
from pipedist.outputs.row_files import RowSink
from pipedist.outputs.sink import Target, imported
from pipedist.outputs.spool import Array

COMMIT_ROWS = 2**16  # rows of a transaction, unless fewer come

LOCK_S_MAX = 10.0  # how long a statement of SQLite waits for another process that writes

PROGRESS = "_pipedist_progress"

_TYPES = {"b": "INTEGER", "i": "INTEGER", "u": "INTEGER", "f": "REAL", "U": "TEXT", "S": "BLOB", "M": "TEXT"}


class _Database(Protocol):
    """The part of DB-API connections that both databases have."""

    def execute(self, statement: str, parameters: Sequence[Any] = ..., /) -> Any: ...

    def close(self) -> None: ...


def quoted(name: str) -> str:
    """Return an identifier of SQL."""
    return '"' + name.replace('"', '""') + '"'


class Table:
    """The table of one output, which is filled beside the final one.

    Args:
        connection: in autocommit mode.
        run: the id of the run; rows of another run are discarded.
    """

    def __init__(self, connection: _Database, name: str, run: str, label: str) -> None:
        self._connection = connection
        self._name = name
        self._run = run
        self._label = label
        self.filling = quoted(f"_pipedist_new_{name}")
        self.rows = 0  # rows that are committed
        self._is_complete = False
        execute = connection.execute
        execute(
            f"CREATE TABLE IF NOT EXISTS {PROGRESS} "
            '("table" TEXT PRIMARY KEY, run TEXT, "rows" BIGINT, complete INTEGER)'
        )
        found = execute(f'SELECT run, "rows", complete FROM {PROGRESS} WHERE "table" = ?', [name]).fetchone()
        if found is None and self._exists(name):
            raise OutputError(
                f"{label}: the database has a table {name!r} that pipedist did not write. Choose another name "
                "with `table`, or drop it."
            )
        if found is not None and found[0] == run:
            self.rows, self._is_complete = int(found[1]), bool(found[2])
        else:
            with self._transaction():
                execute(f"DROP TABLE IF EXISTS {self.filling}")
                execute(f'DELETE FROM {PROGRESS} WHERE "table" = ?', [name])
                execute(f"INSERT INTO {PROGRESS} VALUES (?, ?, 0, 0)", [name, run])
        self.has_columns = self._is_complete or self._exists(f"_pipedist_new_{name}")

    def create(self, columns: str) -> None:
        self._connection.execute(f"CREATE TABLE {self.filling} {columns}")
        self.has_columns = True

    def commit(self, insert: Callable[[], object], rows: int) -> None:
        """Insert rows and record their number, both or neither."""
        with self._transaction():
            insert()
            self._connection.execute(
                f'UPDATE {PROGRESS} SET "rows" = ? WHERE "table" = ?', [self.rows + rows, self._name]
            )
        self.rows += rows

    def finish(self) -> None:
        """Replace the final table."""
        if self._is_complete:
            return
        if not self.has_columns:
            raise OutputError(f"{self._label}: no call was made, so the table has no columns")
        with self._transaction():
            self._connection.execute(f"DROP TABLE IF EXISTS {quoted(self._name)}")
            self._connection.execute(f"ALTER TABLE {self.filling} RENAME TO {quoted(self._name)}")
            self._connection.execute(f'UPDATE {PROGRESS} SET complete = 1 WHERE "table" = ?', [self._name])
        self._is_complete = True

    def _exists(self, name: str) -> bool:
        try:
            self._connection.execute(f"SELECT 1 FROM {quoted(name)} LIMIT 0")
        except Exception as error:
            if "no such table" in str(error) or "does not exist" in str(error):
                return False
            raise
        return True

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN TRANSACTION")
        try:
            yield
        except BaseException:
            with contextlib.suppress(Exception):  # on a full disk, SQLite has ended the transaction by itself
                self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")


def _place(target: Target, out: AtomicPath) -> tuple[Path, bool]:
    """Return the path of the database, and whether it is outside the output folder."""
    database = target.options.get("database")
    return (out.written, False) if database is None else (Path(database), True)


def _receipt(out: AtomicPath, database: Path, table: str, rows: int) -> None:
    value: dict[str, encoding.Json] = {"database": str(database), "table": table, "rows": rows}
    replace_file(out.written, encoding.text(value, sort_keys=False).encode() + b"\n")


class SqliteSink(RowSink):
    """`.sqlite`: a table of an SQLite database."""

    _writes = AtomicPath
    _out: AtomicPath

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._database, self._is_outside = _place(target, self._out)
        self._name: str = target.options.get("table") or target.name
        self._skip = self._taken = 0
        self._waiting: list[tuple[Any, ...]] = []
        self._insert = ""
        self._connection: sqlite3.Connection | None = None
        with self._errors():
            self._connection = sqlite3.connect(
                self._database, isolation_level=None, check_same_thread=False, timeout=LOCK_S_MAX
            )
            if not self._is_outside:  # the file is made durable as a whole
                self._connection.execute("PRAGMA synchronous = OFF")
            self._filled = Table(self._connection, self._name, target.run, self.label)
        self._skip = self._filled.rows

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OverflowError) as error:
            raise OutputError(f"{self.label}: SQLite can't write table {self._name!r}: {error}") from error

    def _rows(self, columns: dict[str, Array]) -> None:
        with self._errors():
            if not self._insert:
                self._begin(columns)
            rows = len(next(iter(columns.values())))
            first = min(rows, max(0, self._skip - self._taken))  # rows that an earlier process committed
            self._taken += rows
            cells = [_cells(array[first:], name, self.label) for name, array in columns.items()]
            self._waiting += zip(*cells, strict=True)
            if len(self._waiting) >= COMMIT_ROWS:
                self._commit()

    def _begin(self, columns: dict[str, Array]) -> None:
        if not columns:
            raise OutputError(f"{self.label}: the value has no columns")
        for name, array in columns.items():
            if array.dtype.kind not in _TYPES and array.dtype.kind != "O":
                raise OutputError(
                    f"{self.label}: SQLite has no type for column {name!r} of dtype {array.dtype}"
                )
        if not self._filled.has_columns:
            types = (f"{quoted(name)} {_TYPES.get(array.dtype.kind, '')}" for name, array in columns.items())
            self._filled.create(f"({', '.join(types)})")
        self._insert = f"INSERT INTO {self._filled.filling} VALUES ({', '.join('?' * len(columns))})"

    def _commit(self) -> None:
        waiting, self._waiting = self._waiting, []
        connection = self._connection
        assert connection is not None  # `_release` comes last
        self._filled.commit(lambda: connection.executemany(self._insert, waiting), len(waiting))

    def _complete(self) -> None:
        with self._errors():
            if self._waiting:
                self._commit()
            self._filled.finish()
            self._release()
        if self._is_outside:
            _receipt(self._out, self._database, self._name, self._filled.rows)

    def _release(self) -> None:
        super()._release()
        if self._connection is not None:
            self._connection.close()


def _cells(array: Array, name: str, label: str) -> list[Any]:
    if array.dtype.kind == "M":
        return [_plain(each) for each in array]
    cells: list[Any] = array.tolist()
    if array.dtype.kind == "O":
        plain = [_plain(each) for each in cells]
        for each in plain:
            if not isinstance(each, str | bytes | int | float | None):
                raise OutputError(
                    f"{label}: column {name!r} has a {type(each).__qualname__}, and a cell of SQLite holds one "
                    "number or text. Write DuckDB or .parquet."
                )
        return plain
    return cells


def _plain(cell: Any) -> Any:
    if isinstance(cell, np.datetime64):
        return None if np.isnat(cell) else str(cell)
    return cell.item() if isinstance(cell, np.generic) else cell


class DuckdbSink(TableSink):
    """`.duckdb`: a table of a DuckDB database."""

    extra = "duckdb"
    what = "DuckDB"
    _writes = AtomicPath
    _out: AtomicPath

    def __init__(self, target: Target) -> None:
        duckdb = imported("duckdb", target.label, ".duckdb", "duckdb")
        super().__init__(target)
        self._database, self._is_outside = _place(target, self._out)
        self._name: str = target.options.get("table") or target.name
        self._error: type[Exception] = duckdb.Error
        self._connection: Any = None
        self._taken = 0
        with self._errors():
            self._connection = duckdb.connect(str(self._database))
            self._filled = Table(self._connection, self._name, target.run, self.label)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except self._error as error:
            raise OutputError(f"{self.label}: DuckDB can't write table {self._name!r}: {error}") from error

    def _begin(self, schema: Any) -> None:
        super()._begin(schema)
        if schema.names and not self._filled.has_columns:
            with self._errors():
                self._connection.register("_pipedist_rows", schema.empty_table())
                self._filled.create("AS SELECT * FROM _pipedist_rows")

    def _write(self, table: Any) -> None:
        start = self._taken
        self._taken += table.num_rows
        if self._taken <= self._filled.rows:  # an earlier process committed it: groups have the same ends
            return
        assert start == self._filled.rows, "a transaction has whole groups"

        def insert() -> None:
            self._connection.register("_pipedist_rows", table)
            self._connection.execute(f"INSERT INTO {self._filled.filling} SELECT * FROM _pipedist_rows")

        with self._errors():
            self._filled.commit(insert, table.num_rows)

    def _end(self) -> None:
        with self._errors():
            self._filled.finish()
            self._connection.unregister("_pipedist_rows")
            self._connection.close()
        if self._is_outside:
            _receipt(self._out, self._database, self._name, self._filled.rows)

    def _release(self) -> None:
        super()._release()
        if self._connection is not None:
            self._connection.close()
