"""What the measurements of a run cost: short calls (W1) and a training's steps (W8), with and without a recorder.

Both kinds of runs alternate on one cluster, and a pair is compared: the CPU time of the driver process and of its
workers. The median ratio of the pairs is printed, with its quartiles.

    python -m benchmarks.measured [--pairs N]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import anyio
import numpy as np

import pipedist
from pipedist.coordinator import Coordinator, PassHandle

CALLS = 200_000
STEPS = 1_000


def inc(x: np.ndarray) -> np.ndarray:
    return x + 1


def shift(x: np.ndarray, amount: float) -> np.ndarray:
    return x + amount


def add(state: float, total: np.ndarray) -> float:
    return state + float(np.mean(total))


def calls() -> dict[str, Any]:
    """Return a spec of short calls, one element each."""
    stages = {"y": {"run": inc}, "rows": {"gather": 0, "of": "y"}}
    return {"pipedist": 1, "name": "w1", "dataset": {"range": CALLS, "batch": 1}, "stages": stages}


def steps() -> dict[str, Any]:
    """Return a spec whose steps wait for each other."""
    stages = {
        "y": {"run": shift, "with": {"amount": "${state.w}"}},
        "sums": {"reduce": "sum", "of": "y", "axis": 0, "per": "step"},
        "w": {"update": add, "of": "sums", "init": 0.0},
    }
    return {
        "pipedist": 1,
        "name": "w8",
        "replicas": 2,
        "dataset": {"range": 2 * STEPS, "batch": 2},
        "stages": stages,
    }


@contextmanager
def without_recorder() -> Iterator[None]:
    open_pass = Coordinator.open_pass

    def unmeasured(*args: Any, record: object = None, **how: Any) -> PassHandle:
        return open_pass(*args, **how)

    with mock.patch.object(Coordinator, "open_pass", unmeasured):
        yield


def cpu_s(pids: list[int]) -> float:
    """Return the CPU time of this process and of others."""
    ticks = 0
    for pid in pids:
        with open(f"/proc/{pid}/stat") as file:
            ticks += sum(map(int, file.read().rpartition(")")[2].split()[11:13]))
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


async def measure(name: str, spec: dict[str, Any], pairs: int) -> None:
    async with pipedist.LocalCluster(workers=2) as cluster:
        pids = sorted(int(pid) for pid in descendants(os.getpid()))

        async def once() -> float:
            began = cpu_s(pids)
            async with pipedist.open(spec, cluster=cluster) as run:
                await run.results()
            return cpu_s(pids) - began

        await once()
        ratios = []
        for pair in range(pairs):
            found = {}
            for measured in (pair % 2 == 0, pair % 2 == 1):
                if measured:
                    found[True] = await once()
                else:
                    with without_recorder():
                        found[False] = await once()
            ratios.append(found[True] / found[False])
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(
        f"{name}: {middle - 1:+.1%} CPU time with measurements (quartiles {low - 1:+.1%} and {high - 1:+.1%})"
    )


def descendants(pid: int) -> Iterator[int]:
    """Yield the processes below a process."""
    for task in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{task}/children") as file:
            for child in map(int, file.read().split()):
                yield child
                yield from descendants(child)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=10)
    pairs = parser.parse_args().pairs
    anyio.run(measure, f"W1, {CALLS:,} calls", calls(), pairs)
    anyio.run(measure, f"W8, {STEPS:,} steps", steps(), pairs)


if __name__ == "__main__":
    main()
