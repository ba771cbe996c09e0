"""The functions that workers execute; those of the peers and of pipedist do the same work.

Peers call them with one element; pipedist gives a shard, which is an array of one element.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

BATCH_POOL = 16
"""Distinct batches that `batches` yields in turn."""


def inc(x: Any) -> Any:
    """W1, W6: as little work as a call can have."""
    return x + 1


def total(x: np.ndarray) -> float:
    """W2: reads every byte of a batch, gives a number back."""
    return float(x.sum())


def double(x: np.ndarray) -> np.ndarray:
    """W3: reads every byte of a batch, gives as many back."""
    return x * 2


def mean(x: np.ndarray) -> float:
    """W8: one replica's part of a synchronous step."""
    return float(x.mean())


def burn(seed: int) -> float:
    """W7: about 50 ms of NumPy and Python in one thread."""
    x = np.random.default_rng(seed).random((160, 160))
    for _ in range(140):
        x = np.tanh(x @ x / 160 + 0.1)
    return float(x.sum())


def burn_shard(shard: np.ndarray) -> np.ndarray:
    """`burn` of a shard of one element: float64[1]."""
    return np.array([burn(int(shard[0]))])


def nap(i: int) -> tuple[int, int]:
    """W9: 20 ms, and the process that it was in."""
    time.sleep(0.02)
    return i * i, os.getpid()


def nap_shard(shard: np.ndarray) -> np.ndarray:
    """`nap` of a shard of one element: int64[1, 2]."""
    return np.array([nap(int(shard[0]))])


def batches(count: int, elements: int) -> Iterator[np.ndarray]:
    """MEM: `count` batches of `elements` float32, made where they are read."""
    pool = [np.full(elements, k, np.float32) for k in range(BATCH_POOL)]
    for i in range(count):
        yield pool[i % BATCH_POOL]


def decode(x: np.ndarray, s: float) -> np.ndarray:
    """Simulate a decode that takes `s` seconds."""
    time.sleep(s)
    return x * 2


def infer(x: np.ndarray, s: float) -> np.ndarray:
    """Simulate an inference that takes `s` seconds of a GPU."""
    time.sleep(s)
    return x + 1
