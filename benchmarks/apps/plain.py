"""One process, no framework."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.apps.functions import AT_ONCE, ask_all, count_words_of_file, histogram_of_file, labels_of_file


def onnx(data: Path) -> Any:
    return np.concatenate([labels_of_file(path) for path in sorted(data.glob("*.npy"))])


def images(data: Path) -> Any:
    return sum(histogram_of_file(path) for path in sorted(data.glob("*.jpg")))


def words(data: Path) -> Any:
    counts: Counter[str] = Counter()
    for path in sorted(data.glob("*.txt")):
        counts.update(count_words_of_file(path))
    return counts


def http(url: str, count: int) -> Any:
    return asyncio.run(ask_all(url, range(count), AT_ONCE))
