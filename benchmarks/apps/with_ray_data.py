"""Ray Data."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import ray.data

from benchmarks.adapter import WORKERS
from benchmarks.apps.functions import Network, ask_batch, count_words, histogram


class Classify:
    def __init__(self) -> None:
        self.network = Network()

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"label": self.network(batch["data"])}


def onnx(data: Path) -> Any:
    rows = ray.data.read_numpy(sorted(map(str, data.glob("*.npy"))))
    labels = rows.map_batches(Classify, batch_size=64, concurrency=WORKERS, num_cpus=0.5)
    return [row["label"] for row in labels.take_all()]


def images(data: Path) -> Any:
    files = ray.data.read_binary_files(sorted(map(str, data.glob("*.jpg"))))
    partial = files.map_batches(
        lambda batch: {"sums": np.stack([sum(histogram(x) for x in batch["bytes"])])}, batch_size=32
    )
    return sum(row["sums"] for row in partial.take_all())


def words(data: Path) -> Any:
    def count(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        found = count_words(batch["text"])
        return {"word": np.array(list(found)), "count": np.array(list(found.values()))}

    lines = ray.data.read_text(sorted(map(str, data.glob("*.txt"))))
    counts: Counter[str] = Counter()
    for batch in lines.map_batches(count, batch_size=20_000).iter_batches(batch_size=None):
        counts.update(dict(zip(batch["word"], batch["count"].tolist(), strict=True)))
    return counts


def http(url: str, count: int) -> Any:
    numbers = ray.data.range(count, override_num_blocks=8)
    answers = numbers.map_batches(
        lambda batch: {"answer": np.array(ask_batch(url, batch["id"]))}, batch_size=None
    )
    return [row["answer"] for row in answers.take_all()]
