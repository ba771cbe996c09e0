"""Iterations until nothing changes: k-means on Fisher's irises, checked against scikit-learn."""

import numpy as np
from sklearn.cluster import KMeans
from sklearn.datasets import load_iris

import pipedist


def assign(rows, centroids):
    """Return the sum of each cluster's rows, and how many there are."""
    distances = ((rows[:, None] - centroids) ** 2).sum(axis=2)
    members = np.eye(len(centroids))[distances.argmin(axis=1)]
    return {"sum": members.T @ rows, "rows": members.sum(axis=0)}


rows = load_iris().data
start = rows[::50]
stages = {
    "assigned": {"run": assign, "with": {"centroids": "${state.centroids}"}},
    "clusters": {"reduce": "sum", "of": "assigned", "axis": None, "per": "epoch"},
    "centroids": {
        "update": lambda old, clusters: clusters["sum"] / clusters["rows"][:, None],
        "of": "clusters",
        "init": start,
        "until": np.array_equal,  # of the old and the new centroids
    },
}
dataset = {"arrays": rows, "batch": 64, "epochs": 100}
result = pipedist.run({"pipedist": 1, "replicas": 4, "dataset": dataset, "stages": stages}, workers=2)
peer = KMeans(3, init=start, n_init=1, algorithm="lloyd", tol=0).fit(rows)
difference = np.abs(result["centroids"] - peer.cluster_centers_).max()
print(
    f"{result.ledger.elements // len(rows)} iterations, within {difference:.0e} of scikit-learn's centroids"
)
