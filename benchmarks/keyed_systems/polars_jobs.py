"""Polars: its streaming engine, in this process."""

from __future__ import annotations

import os

os.environ.setdefault("POLARS_MAX_THREADS", "2")

import polars as pl


class Jobs:
    def __init__(self, workers: int) -> None:
        assert workers == pl.thread_pool_size()

    def __enter__(self) -> Jobs:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def _lines(self, path: str) -> pl.LazyFrame:
        lines = pl.scan_csv(path, has_header=False, new_columns=["line"], separator="\x01", quote_char=None)
        return lines.select(pl.col("line").str.split(" "))

    def _counted(self, found: pl.LazyFrame) -> tuple[int, float, float]:
        total = found.collect(engine="streaming")
        return len(total), total["n"].sum(), total["n"].max()  # type: ignore[return-value]

    def words(self, path: str) -> tuple[int, float, float]:
        return self._counted(self._lines(path).explode("line").group_by("line").agg(n=pl.len()))

    def bigrams(self, path: str) -> tuple[int, float, float]:
        line = pl.col("line").list
        pairs = self._lines(path).select(a=line.head(line.len() - 1), b=line.slice(1))
        return self._counted(pairs.explode("a", "b").group_by("a", "b").agg(n=pl.len()))

    def group(self, path: str) -> tuple[int, float, float]:
        return self._counted(pl.scan_parquet(path).group_by("key").agg(n=pl.col("value").sum()))
