"""pipedist as its users have it: `ctx.all_reduce` in a replica function of `Strategy.run`.

`PIPEDIST_BENCHMARK_WORKERS` says how many worker processes share the replicas; without it, a worker each.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import numpy as np

import pipedist
from benchmarks import collectives_systems as systems
from benchmarks.collectives_loop import Size, measure


def loop(sizes: tuple[Size, ...], *, ctx: Any) -> dict[str, float]:
    """Be one replica."""

    def make(elements: int, value: float) -> Any:
        return np.full(elements, value, np.float32)

    found = measure(
        sizes, ctx.num_replicas_in_sync, make, lambda vector: ctx.all_reduce("sum", vector), ctx.barrier
    )
    return {str(bytes_): seconds for bytes_, seconds in found.items()}


def process(*, ctx: Any) -> int:
    """Return where a replica runs."""
    return os.getpid()


async def run(replicas: int, workers: int, sizes: tuple[Size, ...]) -> dict[int, float]:
    """Bring up a cluster and return what replica 0 has measured."""
    async with pipedist.LocalCluster(workers=workers) as cluster:
        await cluster.ready()  # a gang takes the workers that are there
        strategy = pipedist.Strategy(cluster, replicas=replicas)
        if len(set(await strategy.run(process))) != workers:
            raise RuntimeError(f"the replicas do not spread over {workers} workers")
        results = await strategy.run(loop, args=(sizes,))
    return {int(bytes_): float(values[0]) for bytes_, values in results.items()}


def main() -> None:
    """Measure."""
    replicas, sizes = systems.options()
    workers = int(os.environ.get("PIPEDIST_BENCHMARK_WORKERS", replicas))
    systems.tell(asyncio.run(run(replicas, workers, sizes)))


if __name__ == "__main__":
    main()
