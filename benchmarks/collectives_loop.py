"""The loop that every system's replicas run: all_reduce of float32 vectors, timed inside.

No import of pipedist or of a peer: what is measured is handed in.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

Size = tuple[int, int]
"""Bytes of the vector, and how often it is reduced in one run."""

FULL: tuple[Size, ...] = ((4 << 10, 2000), (1 << 20, 200), (64 << 20, 8))
SMOKE: tuple[Size, ...] = ((4 << 10, 20), (1 << 20, 5))
RUNS = 5


class WrongResult(Exception):
    """A system computed something else."""


def measure(
    sizes: Sequence[Size],
    replicas: int,
    make: Callable[[int, float], Any],
    reduce: Callable[[Any], Any],
    barrier: Callable[[], Any],
) -> dict[int, float]:
    """Return seconds per all_reduce by bytes: the median of RUNS runs.

    Args:
        sizes: what is measured.
        replicas: how many take part.
        make: makes a float32 vector of so many elements, filled with a value.
        reduce: the system's SUM; returns the result.
        barrier: waits for all.
    """
    found = {}
    for bytes_, repeats in sizes:
        ones = make(bytes_ // 4, 1.0)
        for _ in range(3):
            result = reduce(ones)
        if not (float(result[0]) == float(result[-1]) == replicas and len(result) == bytes_ // 4):
            raise WrongResult(f"{bytes_} bytes: {result[:3]}")
        zeros = make(bytes_ // 4, 0.0)  # sums of zeros stay what they are, also in place
        runs = []
        for _ in range(RUNS):
            barrier()
            began = time.perf_counter()
            for _ in range(repeats):
                result = reduce(zeros)
            barrier()
            runs.append((time.perf_counter() - began) / repeats)
        found[bytes_] = statistics.median(runs)
    return found
