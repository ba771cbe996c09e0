"""pipedist: a variable with aggregation sum, assigned in `Strategy.run`, a worker per replica."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np

import pipedist
from benchmarks import training_systems as systems


def train(weights: Any, target: float) -> None:
    """Make one step in one replica."""
    gradient = weights.value() - np.float32(target)
    gradient *= np.float32(systems.RATE)
    weights.assign_sub(gradient)


def cpu_s() -> float:
    """Return the CPU time of a worker."""
    return time.process_time()


async def run(parameters: int, steps: int) -> systems.Steps:
    """Bring up a cluster, and measure the steps."""
    async with pipedist.LocalCluster(workers=systems.REPLICAS) as cluster:
        await cluster.ready()
        strategy = pipedist.Strategy(cluster, replicas=systems.REPLICAS)
        with strategy.scope():
            weights = pipedist.Variable(np.zeros(parameters, np.float32), aggregation="sum")

        async def steps_of(first: int, last: int) -> None:
            for step in range(first, last):
                targets = [systems.target(step, replica) for replica in range(systems.REPLICAS)]
                await strategy.run(train, args=(weights, pipedist.PerReplica(targets)))

        async def used_s() -> float:
            return time.process_time() + float(sum(await strategy.run(cpu_s)))

        await steps_of(0, systems.WARM_STEPS)
        before = await used_s()
        began = time.perf_counter()
        await steps_of(systems.WARM_STEPS, systems.WARM_STEPS + steps)
        wall_s = time.perf_counter() - began
        used = await used_s() - before
        return systems.Steps(wall_s, used, float(weights.value()[-1]))


def main() -> None:
    """Measure."""
    systems.tell(asyncio.run(run(*systems.options())))


if __name__ == "__main__":
    main()
