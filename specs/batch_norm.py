"""The function of batch_norm.yaml: every step is normalised by the moments of all of its rows."""

from __future__ import annotations

import numpy as np


def normalized(rows: np.ndarray, ctx) -> np.ndarray:
    """Return the rows with mean 0 and deviation 1 over the whole step, whichever replica has them."""
    x = np.sqrt(rows)
    sums = ctx.all_reduce("sum", {"rows": len(x), "x": x.sum(), "xx": (x * x).sum()})
    mean = sums["x"] / sums["rows"]
    return (x - mean) / np.sqrt(sums["xx"] / sums["rows"] - mean**2)
