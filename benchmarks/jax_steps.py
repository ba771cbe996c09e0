"""Measure what `steps_per_run` saves: steps of 64 KiB batches on CPU devices, with 1, 8 and 64 steps per dispatch.

The step is that of W8: each replica returns the mean of its part of the batch. Run it with `make bench-jax`.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

import pipedist

BATCH_BYTES = 64 << 10
ROUNDS = 7


def part(x: Any) -> Any:
    return x.mean()


async def measure(cluster: pipedist.LocalCluster, replicas: int, steps_per_run: int, steps: int) -> float:
    """Return seconds per step."""
    strategy = pipedist.TPUStrategy(cluster, platform="cpu", replicas=replicas, steps_per_run=steps_per_run)
    batch = np.arange(BATCH_BYTES // 4, dtype=np.float32).reshape(replicas, -1)
    value = strategy.distribute_values_from_function(lambda context: batch[context.replica_id_in_sync_group])

    async def batches(count: int) -> AsyncIterator[Any]:
        for _ in range(count):
            yield value

    async for _ in strategy.run_steps(part, batches(2 * steps_per_run)):
        pass  # compiles it
    began = perf_counter()
    means = [each async for each in strategy.run_steps(part, batches(steps))]
    seconds = perf_counter() - began
    assert len(means) == steps
    assert np.isclose(np.mean(list(means[-1])), batch.mean())
    return seconds / steps


async def main(replicas: int, steps: int) -> None:
    async with pipedist.LocalCluster(workers=1) as cluster:
        print(
            f"| steps_per_run | us per step, {replicas} CPU devices, best of {ROUNDS} | median |\n|---:|---:|---:|"
        )
        sizes = (1, 8, 64)
        rounds = [  # interleaved: other load on the machine affects all sizes
            [await measure(cluster, replicas, size, steps) for size in sizes] for _ in range(ROUNDS)
        ]
        for size, *times in zip(sizes, *rounds, strict=True):
            print(f"| {size} | {min(times) * 1e6:,.0f} | {median(times) * 1e6:,.0f} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--steps", type=int, default=1024)
    options = parser.parse_args()
    asyncio.run(main(options.replicas, options.steps))
