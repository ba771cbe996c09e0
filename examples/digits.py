"""Training from Python: handwritten digits on 4 replicas, with the accuracy on held-out images."""

import numpy as np
from sklearn.datasets import load_digits

import pipedist


def probabilities(x, w):
    scores = np.exp(x["pixels"] @ w)
    return scores / scores.sum(axis=1, keepdims=True)


def gradients(x, w):
    wrong = probabilities(x, w) - np.eye(10)[x["label"]]
    return {"sum": x["pixels"].T @ wrong, "rows": len(wrong)}


def correct(x, w):
    return (probabilities(x, w).argmax(axis=1) == x["label"]).astype(float)


data, held_out = load_digits(), np.random.default_rng(0).random(1797) < 0.2
rows = {"train": ~held_out, "held_out": held_out}
arrays = {name: {"pixels": data.data[of] / 16, "label": data.target[of]} for name, of in rows.items()}
stages = {
    "gradients": {"run": gradients, "of": "train", "with": {"w": "${state.w}"}},
    "sums": {"reduce": "sum", "of": "gradients", "axis": None, "per": "step"},
    "w": {"update": lambda w, g: w - g["sum"] / g["rows"], "of": "sums", "init": np.zeros((64, 10))},
    "correct": {"run": correct, "of": "held_out", "with": {"w": "${state.w}"}},
    "accuracy": {"reduce": "mean", "of": "correct", "axis": 0, "per": "epoch"},
}
datasets = {name: {"arrays": rows, "batch": 100} for name, rows in arrays.items()}
datasets["train"] |= {"epochs": 20, "shuffle": True}
result = pipedist.run({"pipedist": 1, "replicas": 4, "datasets": datasets, "stages": stages})
print("accuracy by epoch:", *(f"{value:.3f}" for value in result["accuracy"]))
