"""The function of pi.yaml."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

import pipedist


def inside_circle(
    draws: NDArray[np.int64], points: int, ctx: pipedist.ReplicaContext
) -> NDArray[np.float64]:
    """Return, for each draw, 4 times the part of random points of a square that lie in its circle."""
    x = ctx.rng.random((2, len(draws), points))
    return 4.0 * np.mean(x[0] ** 2 + x[1] ** 2 < 1.0, axis=1)
