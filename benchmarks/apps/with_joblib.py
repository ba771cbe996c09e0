"""joblib.Parallel, one task per file or batch."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from joblib import Parallel, delayed

from benchmarks.adapter import WORKERS
from benchmarks.apps.functions import ask_batch, count_words_of_file, histogram_of_file, labels_of_file


def onnx(data: Path) -> Any:
    files = sorted(data.glob("*.npy"))
    return np.concatenate(Parallel(n_jobs=WORKERS)(delayed(labels_of_file)(path) for path in files))


def images(data: Path) -> Any:
    files = sorted(data.glob("*.jpg"))
    return sum(Parallel(n_jobs=WORKERS)(delayed(histogram_of_file)(path) for path in files))


def words(data: Path) -> Any:
    files = sorted(data.glob("*.txt"))
    counts: Counter[str] = Counter()
    for each in Parallel(n_jobs=WORKERS)(delayed(count_words_of_file)(path) for path in files):
        counts.update(each)
    return counts


def http(url: str, count: int) -> Any:
    batches = np.array_split(np.arange(count), 8)
    answers = Parallel(n_jobs=WORKERS)(delayed(ask_batch)(url, batch) for batch in batches)
    return [answer for batch in answers for answer in batch]
