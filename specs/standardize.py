"""The functions of standardize.yaml."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def measurements(rows: int, columns: int) -> NDArray[np.float64]:
    """Return rows of normally distributed numbers, column k with mean k and deviation k + 1."""
    rng = np.random.default_rng(0)
    index = np.arange(columns)
    return rng.normal(index, index + 1.0, (rows, columns))


def squared_deviation(rows: NDArray[np.float64], mean: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the squared distance of each number from the mean of its column."""
    return (rows - mean) ** 2
