"""The functions of digits.yaml: a small neural network for handwritten digits, in NumPy.

The data are the 1,797 images of scikit-learn's `load_digits`, 8 x 8 pixels each.
"""

from __future__ import annotations

import numpy as np


def images(part: str) -> dict[str, np.ndarray]:
    """Return pixels[n, 64] in [0, 1] and label[n]: of five images, one is held out, whichever."""
    from sklearn.datasets import load_digits  # only where the data are made

    data = load_digits()
    held_out = np.random.default_rng(0).random(len(data.target)) < 0.2
    rows = held_out if part == "held_out" else ~held_out
    return {"pixels": data.data[rows] / 16.0, "label": data.target[rows]}


def random(hidden: int, seed: int) -> dict[str, np.ndarray]:
    """Return the first weights: 64 pixels, one hidden layer, 10 digits."""
    rng = np.random.default_rng(seed)
    return {
        "w1": rng.normal(size=(64, hidden)) / 8.0,
        "b1": np.zeros(hidden),
        "w2": rng.normal(size=(hidden, 10)) / np.sqrt(hidden),
        "b2": np.zeros(10),
    }


def forward(pixels: np.ndarray, weights: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the hidden layer, float64[n, hidden], and the probability of each digit, float64[n, 10]."""
    hidden = np.tanh(pixels @ weights["w1"] + weights["b1"])
    scores = hidden @ weights["w2"] + weights["b2"]
    scores = np.exp(scores - scores.max(axis=1, keepdims=True))
    return hidden, scores / scores.sum(axis=1, keepdims=True)


def gradients(shard: dict[str, np.ndarray], weights: dict[str, np.ndarray]) -> dict[str, object]:
    """Return sums over the shard's rows: of the gradients and of the loss, and how many rows."""
    hidden, p = forward(shard["pixels"], weights)
    rows = np.arange(len(p))
    loss = -np.log(p[rows, shard["label"]]).sum()
    p[rows, shard["label"]] -= 1.0
    inner = (p @ weights["w2"].T) * (1.0 - hidden**2)
    return {
        "w1": shard["pixels"].T @ inner,
        "b1": inner.sum(axis=0),
        "w2": hidden.T @ p,
        "b2": p.sum(axis=0),
        "loss": loss,
        "rows": len(p),
    }


def descend(weights: dict[str, np.ndarray], sums: dict[str, object], rate: float) -> dict[str, np.ndarray]:
    """Return the weights after one step of gradient descent on the mean loss of the global batch."""
    return {name: value - rate * sums[name] / sums["rows"] for name, value in weights.items()}


def correct(shard: dict[str, np.ndarray], weights: dict[str, np.ndarray]) -> np.ndarray:
    """Return 1.0 for each image that is recognised, 0.0 for the others."""
    return (forward(shard["pixels"], weights)[1].argmax(axis=1) == shard["label"]).astype(np.float64)
