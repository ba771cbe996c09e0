"""DuckDB: SQL, in this process."""

from __future__ import annotations

import duckdb


class Jobs:
    def __init__(self, workers: int) -> None:
        self._db = duckdb.connect()
        self._db.execute(f"SET threads = {workers}")

    def __enter__(self) -> Jobs:
        return self

    def __exit__(self, *_: object) -> None:
        self._db.close()

    def _counted(self, query: str) -> tuple[int, float, float]:
        values = self._db.execute(query).fetchnumpy()["n"]
        return len(values), values.sum(), values.max()

    def _lines(self, path: str) -> str:
        read = f"read_csv('{path}', columns={{'line': 'VARCHAR'}}, header=false, delim='\x01', quote='', escape='')"
        return f"(SELECT string_split(line, ' ') AS w FROM {read})"

    def words(self, path: str) -> tuple[int, float, float]:
        return self._counted(
            f"SELECT word, count(*) AS n FROM (SELECT unnest(w) AS word FROM {self._lines(path)}) GROUP BY word"
        )

    def bigrams(self, path: str) -> tuple[int, float, float]:
        pairs = f"SELECT unnest(w[:-2]) AS a, unnest(w[2:]) AS b FROM {self._lines(path)}"
        return self._counted(f"SELECT a, b, count(*) AS n FROM ({pairs}) GROUP BY a, b")

    def group(self, path: str) -> tuple[int, float, float]:
        return self._counted(f"SELECT key, sum(value) AS n FROM '{path}' GROUP BY key")
