"""dask.distributed, one task per file or batch; words with dask.bag."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dask.bag
import numpy as np
from distributed import get_client

from benchmarks.apps.functions import WORD, ask_batch, histogram_of_file, labels_of_file


def onnx(data: Path) -> Any:
    client = get_client()
    return np.concatenate(client.gather(client.map(labels_of_file, sorted(data.glob("*.npy")), pure=False)))


def images(data: Path) -> Any:
    client = get_client()
    return sum(client.gather(client.map(histogram_of_file, sorted(data.glob("*.jpg")), pure=False)))


def words(data: Path) -> Any:
    lines = dask.bag.read_text(str(data / "*.txt"))
    return dict(lines.map(WORD.findall).flatten().frequencies().compute())


def http(url: str, count: int) -> Any:
    client = get_client()
    batches = np.array_split(np.arange(count), 8)
    answers = client.gather(client.map(lambda batch: ask_batch(url, batch), batches, pure=False))
    return [answer for batch in answers for answer in batch]
