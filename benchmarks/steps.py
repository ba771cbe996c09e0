"""Steps of a training loop (W8) in each way that a strategy has, beside the hand-written blocking ZeroMQ loop.

`run` waits for each step and its reduction, `compile` binds both, `run_steps` keeps steps ahead of their results. The
ways alternate on one cluster; printed are steps per second, the CPU time of the driver process and of both workers,
and the ratio to the ZeroMQ loop of the same rounds (medians).

    python -m benchmarks.steps [--rounds N] [--steps N]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import numpy as np
import psutil

import pipedist
from benchmarks import functions
from benchmarks.adapter import WORKERS
from benchmarks.peers.zmq_blocking import ZmqBlocking
from benchmarks.sizes import FULL

Way = Callable[[pipedist.Strategy, int], Awaitable[None]]


def parts(step: int) -> list[np.ndarray]:
    return np.split(np.full(FULL.step_elements, step, np.float32), WORKERS)


def check(step: int, mean: float) -> None:
    if mean != step:
        raise AssertionError(f"step {step} has the mean {mean}")


async def run(strategy: pipedist.Strategy, steps: int) -> None:
    for step in range(steps):
        means = await strategy.run(functions.mean, args=(pipedist.PerReplica(parts(step)),))
        check(step, float(await strategy.reduce("mean", means, axis=None)))


async def compiled(strategy: pipedist.Strategy, steps: int) -> None:
    mean = strategy.compile(functions.mean, reduce="mean")
    for step in range(steps):
        check(step, float(await mean(pipedist.PerReplica(parts(step)))))


async def run_steps(strategy: pipedist.Strategy, steps: int) -> None:
    async def inputs() -> AsyncIterator[pipedist.PerReplica]:
        for step in range(steps):
            yield pipedist.PerReplica(parts(step))

    step = 0
    async for means in strategy.run_steps(functions.mean, inputs()):
        check(step, float(await strategy.reduce("mean", means, axis=None)))
        step += 1


WAYS: dict[str, Way] = {"run": run, "compile": compiled, "run_steps": run_steps}


def by_hand(peer: ZmqBlocking, steps: int) -> None:
    for step in range(steps):
        check(step, sum(peer.step(functions.mean, parts(step))) / WORKERS)


class Meter:
    """The time and CPU time per step of one way, in microseconds."""

    def __init__(self, pids: list[int]) -> None:
        self._processes = [psutil.Process(pid) for pid in pids]
        self.wall: list[float] = []
        self.driver: list[float] = []
        self.workers: list[float] = []

    def _now(self) -> tuple[float, float, float]:
        workers = sum(sum(process.cpu_times()[:2]) for process in self._processes)
        return time.perf_counter(), time.process_time(), workers

    async def add(self, steps: int, work: Callable[[], Awaitable[None]]) -> None:
        before = self._now()
        await work()
        wall, driver, workers = (
            (now - then) / steps * 1e6 for now, then in zip(self._now(), before, strict=True)
        )
        self.wall.append(wall)
        self.driver.append(driver)
        self.workers.append(workers)

    def line(self, name: str, than: Meter) -> str:
        wall, driver, workers = map(statistics.median, (self.wall, self.driver, self.workers))
        ratio = statistics.median(than.wall) / wall
        return f"{name:10} {1e6 / wall:8,.0f} steps/s  {ratio:5.2f} of zmq  CPU us: {driver:5.0f} + {workers:5.0f}"


async def measure(rounds: int, steps: int) -> list[str]:
    """Return a line per way."""
    peer = ZmqBlocking()
    peer.start()
    try:
        async with pipedist.LocalCluster(workers=WORKERS) as cluster:
            await cluster.ready()
            hand = Meter([process.pid for process in peer._processes])
            meters = {name: Meter(list(cluster.pids.values())) for name in WAYS}

            async def manually() -> None:
                by_hand(peer, steps)  # nothing else runs meanwhile

            for _ in range(rounds):
                await hand.add(steps, manually)
                for name, way in WAYS.items():
                    async with pipedist.Strategy(cluster, replicas=WORKERS) as strategy:
                        await way(strategy, 20)  # loads the function
                        await meters[name].add(steps, lambda way=way, own=strategy: way(own, steps))
            return [hand.line("zmq", hand), *[meter.line(name, hand) for name, meter in meters.items()]]
    finally:
        peer.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1_000)
    options = parser.parse_args()
    print("\n".join(asyncio.run(measure(options.rounds, options.steps))))


if __name__ == "__main__":
    main()
