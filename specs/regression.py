"""The functions of regression.yaml: least squares by gradient descent."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def samples(rows: int, seed: int) -> dict[str, Floats]:
    """Return x[rows, 3] and y[rows], where y is x times (1, -2, 0.5) and a little noise."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 3))
    return {"x": x, "y": x @ np.array([1.0, -2.0, 0.5]) + 0.01 * rng.normal(size=rows)}


def zeros(columns: int) -> Floats:
    """Return the first weights."""
    return np.zeros(columns)


def gradients(shard: dict[str, Floats], weights: Floats) -> Floats:
    """Return the gradient of each row's squared error: float64[n, 3]."""
    residual = shard["x"] @ weights - shard["y"]
    return 2.0 * residual[:, None] * shard["x"]


def descend(weights: Floats, gradient: Floats, rate: float) -> Floats:
    """Return the weights after one step of gradient descent."""
    return weights - rate * gradient


def converged(old: Floats, new: Floats) -> bool:
    """Return whether an update hardly moved the weights."""
    return bool(np.max(np.abs(new - old)) < 1e-6)


def squared_errors(shard: dict[str, Floats], weights: Floats) -> Floats:
    """Return the squared error of each row: float64[n]."""
    return (shard["x"] @ weights - shard["y"]) ** 2
