"""Dask: bags for text, data frames for group-by."""

from __future__ import annotations

from collections import Counter
from typing import Any

import dask
import dask.bag as db
import dask.dataframe as dd
from distributed import Client, LocalCluster

BLOCK = "16MiB"


def words_of(lines: Any) -> list[Counter[str]]:
    counts: Counter[str] = Counter()
    for line in lines:
        counts.update(line.split())
    return [counts]


def bigrams_of(lines: Any) -> list[Counter[tuple[str, str]]]:
    counts: Counter[tuple[str, str]] = Counter()
    for line in lines:
        words = line.split()
        counts.update(zip(words, words[1:]))  # noqa: B905, RUF007
    return [counts]


def merged(parts: Any) -> Counter[Any]:
    total: Counter[Any] = Counter()
    for part in parts:
        total.update(part)
    return total


class Jobs:
    def __init__(self, workers: int) -> None:
        self._workers = workers

    def __enter__(self) -> Jobs:
        dask.config.set({"distributed.worker.memory.terminate": False, "dataframe.convert-string": True})
        self._cluster = LocalCluster(n_workers=self._workers, threads_per_worker=1, dashboard_address=None)
        self._client = Client(self._cluster)
        self._client.submit(len, "x").result()
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()
        self._cluster.close()

    def _counted(self, function: Any, path: str) -> tuple[int, float, float]:
        counters = db.read_text(path, blocksize=BLOCK).map_partitions(function)
        total = counters.reduction(merged, merged, split_every=4).compute()
        return len(total), sum(total.values()), max(total.values())

    def words(self, path: str) -> tuple[int, float, float]:
        return self._counted(words_of, path)

    def bigrams(self, path: str) -> tuple[int, float, float]:
        return self._counted(bigrams_of, path)

    def group(self, path: str) -> tuple[int, float, float]:
        frame = dd.read_parquet(path, split_row_groups=1)
        total = frame.groupby("key").value.sum(split_out=8 if "3000000" in path else 1).compute()
        return len(total), total.sum(), total.max()
