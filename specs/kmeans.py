"""The functions of kmeans.yaml: Lloyd's iterations on Fisher's irises."""

from __future__ import annotations

import numpy as np


def irises() -> np.ndarray:
    """Return the measurements of 150 flowers: float64[150, 4], centimetres."""
    from sklearn.datasets import load_iris  # only where the data are made

    return load_iris().data


def start(clusters: int) -> np.ndarray:
    """Return the first centroids: flowers at even distances."""
    rows = irises()
    return rows[:: len(rows) // clusters][:clusters]


def assign(rows: np.ndarray, centroids: np.ndarray) -> dict[str, object]:
    """Return, of each cluster, the sum of its rows and their number; and the distances squared, summed."""
    distances = ((rows[:, None, :] - centroids[None, :, :]) ** 2).sum(axis=2)
    members = np.eye(len(centroids))[distances.argmin(axis=1)]
    return {"sum": members.T @ rows, "count": members.sum(axis=0), "inertia": distances.min(axis=1).sum()}


def move(centroids: np.ndarray, clusters: dict[str, np.ndarray]) -> np.ndarray:
    """Return the means of the clusters; one without rows stays where it is."""
    count = clusters["count"][:, None]
    return np.where(count > 0, clusters["sum"] / np.maximum(count, 1), centroids)


def settled(old: np.ndarray, new: np.ndarray) -> bool:
    """Return whether no centroid has moved."""
    return np.array_equal(old, new)
