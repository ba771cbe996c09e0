"""What the measurements of a run cost: short calls (W1) and a training's steps (W8), with and without a recorder.

Both kinds of short runs alternate on one cluster, in the orders AB BA, so that a load that changes slowly meets both
alike. Compared is the CPU time of the driver process and of its workers. Printed are the ratio of the sums, with the
interval that holds 90 percent of such ratios of resampled pairs, and the median of the pairs.

    python -m benchmarks.measured [--pairs N]
"""

from __future__ import annotations

import argparse
import contextlib
import gc
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

CALLS = 100_000
STEPS = 300
RESAMPLED = 2_000


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
    """Return the CPU time of this process and of others, to the nanosecond: ticks are 10 ms."""
    spent_ns = 0
    for pid in pids:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/schedstat") as file:
                spent_ns += int(file.read().split()[0])
    return time.process_time() + spent_ns * 1e-9


async def measure(name: str, spec: dict[str, Any], pairs: int) -> None:
    async with pipedist.LocalCluster(workers=2) as cluster:

        async def once(pids: list[int]) -> float:
            gc.collect()
            began = cpu_s(pids)
            async with pipedist.open(spec, cluster=cluster) as run:
                await run.results()
            return cpu_s(pids) - began

        await once([])
        await cluster.ready()
        pids = list(descendants(os.getpid()))
        found = []
        for pair in range(pairs):
            spent = {}
            for measured in (pair % 2 == 0, pair % 2 == 1):
                with contextlib.nullcontext() if measured else without_recorder():
                    spent[measured] = await once(pids)
            found.append((spent[True], spent[False]))
    given, rest = np.array(found).T
    picked = np.random.default_rng(0).integers(0, pairs, (RESAMPLED, pairs))
    low, high = np.quantile(given[picked].sum(axis=1) / rest[picked].sum(axis=1), [0.05, 0.95])
    ratio, middle = given.sum() / rest.sum(), statistics.median(given / rest)
    print(
        f"{name}: {ratio - 1:+.1%} CPU time with measurements ({low - 1:+.1%} to {high - 1:+.1%}; median of "
        f"{pairs} pairs {middle - 1:+.1%}); {1e3 * rest.mean():.0f} ms without"
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
    parser.add_argument("--pairs", type=int, default=30)
    pairs = parser.parse_args().pairs
    anyio.run(measure, f"W1, {CALLS:,} calls", calls(), pairs)
    anyio.run(measure, f"W8, {STEPS:,} steps", steps(), pairs)


if __name__ == "__main__":
    main()
