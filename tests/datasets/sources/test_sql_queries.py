"""Rows of queries to SQLite and DuckDB, compared with what the databases return."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipedist.datasets.element import described
from pipedist.datasets.sources import Source, SourceError, open_source, sql_queries
from pipedist.testing import check_source
from tests.datasets.sources.reading import read_elsewhere
from tests.datasets.sources.test_reader_classes import ByIds

QUERY = "SELECT * FROM t ORDER BY id DESC"
ROWS = [(n, n / 4, f"t{n}" if n % 3 else None, bytes([n]), n if n % 2 else None) for n in range(30)]
SCHEMA = "id INTEGER, x DOUBLE, name VARCHAR, data BLOB, odd INTEGER"


def sqlite(path: Path, rows: Any = ROWS) -> None:
    database = sqlite3.connect(path)
    database.execute(f"CREATE TABLE t ({SCHEMA})")
    database.executemany("INSERT INTO t VALUES (?, ?, ?, ?, ?)", rows)
    database.commit()
    database.close()


def opened(folder: Path, url: str, query: str = QUERY) -> Source:
    return open_source("sql", {"url": url, "query": query}, folder=folder)


@pytest.mark.parametrize("engine", ["sqlite", "duckdb"])
def test_rows_are_read_by_ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    monkeypatch.setattr(sql_queries, "BLOCK_ROWS", 7)
    if engine == "sqlite":
        sqlite(tmp_path / "a.db")
    else:
        import duckdb  # takes long, and few workers of the suite run this test

        with duckdb.connect(tmp_path / "a.db") as database:
            database.execute(f"CREATE TABLE t ({SCHEMA})")
            database.executemany("INSERT INTO t VALUES (?, ?, ?, ?, ?)", ROWS)
    nulls = ", coalesce(odd, -1) AS odd" if engine == "duckdb" else ", odd"
    query = f"SELECT id, x, name, data{nulls} FROM t ORDER BY id DESC;"

    def make() -> Source:
        return opened(tmp_path, f"{engine}:///a.db", query)

    source = make()
    assert source.length == 30
    kinds = ("int32", "int32") if engine == "duckdb" else ("int64", "float64")
    assert described(source.element_spec) == (
        f"{{data: object, id: {kinds[0]}, name: str, odd: {kinds[1]}, x: float64}}"
    )
    backwards = ROWS[::-1]
    for ids in (range(30), range(5, 17), np.array([29, 0, 13, 13]), range(0)):
        shard = read_elsewhere(source, ids)
        want = [backwards[n] for n in np.asarray(ids, int)]
        assert shard["id"].tolist() == [row[0] for row in want]
        assert shard["x"].tolist() == [row[1] for row in want]
        assert shard["name"].tolist() == [row[2] or "" for row in want]
        assert shard["data"].tolist() == [row[3] for row in want]
        null = -1 if engine == "duckdb" else np.nan
        np.testing.assert_equal(shard["odd"], np.array([null if row[4] is None else row[4] for row in want]))
    check_source(ByIds(source), make=lambda: ByIds(make()))


def test_integers_beside_nulls_are_not_rounded(tmp_path: Path) -> None:
    sqlite(tmp_path / "a.db", [(1, 0, "", b"", None), (0, 0, "", b"", 2**53 + 1)])
    source = opened(tmp_path, "sqlite:///a.db")
    with pytest.raises(SourceError, match=r"row 1 of the query: 9007199254740993 does not fit float64"):
        source.read(range(2))
    source.close()


def test_wrong_queries_and_values_are_located(tmp_path: Path) -> None:
    sqlite(tmp_path / "a.db")
    with pytest.raises(SourceError, match=r"a\.db: no such column: idd") as caught:
        opened(tmp_path, "sqlite:///a.db", "SELECT idd FROM t ORDER BY id")
    assert caught.value.key == "query"
    with pytest.raises(SourceError, match=r"no file matches 'b\.db'") as caught:
        opened(tmp_path, "sqlite:///b.db")
    assert caught.value.key == "url"
    (tmp_path / "b.db").write_bytes(b"no database" * 100)
    for engine in ("sqlite", "duckdb"):
        with pytest.raises(SourceError, match=r"b\.db: "):
            opened(tmp_path, f"{engine}:///b.db")
    sqlite(tmp_path / "c.db", [(1, "x", "a", b"b", 1), (2, 2.5, b"\0", b"c", 2)])
    source = opened(tmp_path, "sqlite:///c.db", "SELECT name, x FROM t ORDER BY id")
    with pytest.raises(SourceError, match=r"c\.db: row 1 of the query: a BLOB in a column of text: cast it"):
        source.read(range(2))


def test_a_database_that_changes_is_an_error(tmp_path: Path) -> None:
    sqlite(tmp_path / "a.db")
    source = opened(tmp_path, "sqlite:///a.db")
    assert len(source.read(range(3))["id"]) == 3
    other = sqlite3.connect(tmp_path / "a.db")
    other.execute("DELETE FROM t WHERE id > 3")
    other.commit()
    source.close()
    with pytest.raises(SourceError, match=r"a\.db: the file has changed since the run began"):
        read_elsewhere(source, range(3))
    other.execute("PRAGMA journal_mode=WAL")
    other.execute("DELETE FROM t WHERE id > 2")
    other.commit()
    with pytest.raises(SourceError, match=r"a\.db-wal has changes that are not yet in the database"):
        opened(tmp_path, "sqlite:///a.db")
    other.close()
