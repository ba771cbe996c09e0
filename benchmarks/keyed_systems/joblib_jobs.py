"""joblib: a Counter or a pandas group-by for each part of the file, merged in the caller."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
from joblib import Parallel, delayed

PART_BYTES = 16 * 2**20


def parts_of(path: str) -> list[tuple[int, int]]:
    """Return offsets and lengths of parts that end with a line."""
    size, starts = Path(path).stat().st_size, [0]
    with open(path, "rb") as file:
        while starts[-1] + PART_BYTES < size:
            file.seek(starts[-1] + PART_BYTES)
            file.readline()
            starts.append(file.tell())
    return [(a, b - a) for a, b in zip(starts, [*starts[1:], size], strict=True) if b > a]


def text_of(path: str, start: int, length: int) -> str:
    with open(path, "rb") as file:
        file.seek(start)
        return file.read(length).decode()


def words_of(path: str, start: int, length: int) -> Counter[str]:
    return Counter(text_of(path, start, length).split())


def bigrams_of(path: str, start: int, length: int) -> Counter[tuple[str, str]]:
    counts: Counter[tuple[str, str]] = Counter()
    for line in text_of(path, start, length).split("\n"):
        words = line.split()
        counts.update(zip(words, words[1:]))  # noqa: B905, RUF007
    return counts


def sums_of(path: str, group: int) -> pd.Series:
    return pq.ParquetFile(path).read_row_group(group).to_pandas().groupby("key").value.sum()


class Jobs:
    def __init__(self, workers: int) -> None:
        self._parallel = Parallel(n_jobs=workers, return_as="generator_unordered")

    def __enter__(self) -> Jobs:
        self._parallel.__enter__()
        list(self._parallel(delayed(len)("x") for _ in range(4)))
        return self

    def __exit__(self, *error: Any) -> None:
        self._parallel.__exit__(*error)

    def _counted(self, function: Any, path: str) -> tuple[int, float, float]:
        total: Counter[Any] = Counter()
        for counts in self._parallel(delayed(function)(path, *part) for part in parts_of(path)):
            total.update(counts)
        return len(total), sum(total.values()), max(total.values())

    def words(self, path: str) -> tuple[int, float, float]:
        return self._counted(words_of, path)

    def bigrams(self, path: str) -> tuple[int, float, float]:
        return self._counted(bigrams_of, path)

    def group(self, path: str) -> tuple[int, float, float]:
        groups = range(pq.ParquetFile(path).num_row_groups)
        parts = list(self._parallel(delayed(sums_of)(path, group) for group in groups))
        total = pd.concat(parts).groupby(level=0).sum()
        return len(total), total.sum(), total.max()
