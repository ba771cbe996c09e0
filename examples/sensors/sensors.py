"""Counts readings far above the mean; `Outliers` has a bug that no single run shows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def readings(shard: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return one reading for each element: most near 20, few near 40."""
    return np.where(shard % 17 == 0, 40.0, 20.0) + 7 * np.sin(shard * 0.1)


class Outliers:
    """Flags readings that are far above the mean of all that were SEEN SO FAR.

    That is the bug: what an instance has seen depends on which calls its worker happened to get. On one
    worker every run gives the same, so that nobody notices.
    """

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0

    def __call__(self, shard: NDArray[np.float64]) -> NDArray[np.int64]:
        self.count += len(shard)
        self.total += float(shard.sum())
        return (shard > 1.2 * self.total / max(1, self.count)).astype(np.int64)


def outliers(shard: NDArray[np.float64], mean: NDArray[np.float64]) -> NDArray[np.int64]:
    """Flag readings that are far above the mean of all: the same whoever executes it."""
    return (shard > 1.2 * mean).astype(np.int64)
