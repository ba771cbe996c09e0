"""Functions of the specs of tests of sinks."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def rows(shard: NDArray[np.int64]) -> dict[str, Any]:
    return {
        "n": shard,
        "x": np.where(shard % 5 == 0, np.nan, shard / 2),
        "s": np.array([f"name {n}" for n in shard]),
        "day": np.datetime64("2024-01-01", "D") + shard,
        "group": np.array([f"g/{n % 3}" for n in shard]),
        "even": shard % 2 == 0,
    }


def arrays(shard: NDArray[np.int64]) -> dict[str, Any]:
    return {"a": {"m": np.outer(shard, [1.0, 2.0, 3.0]), "s": np.array([f"t{n}" for n in shard])}, "k": shard}


def images(shard: NDArray[np.int64]) -> dict[str, Any]:
    pixels = np.broadcast_to(shard.astype(np.uint8)[:, None, None, None], (len(shard), 4, 5, 3))
    return {"name": np.array([f"{n % 2}/i{n}" for n in shard]), "pixels": pixels}
