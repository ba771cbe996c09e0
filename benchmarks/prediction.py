"""Predicted and real times of five specs: from a sample of their calls, from a run on one worker, from the run itself.

    python -m benchmarks.prediction --rounds 3 --seconds 3 --sample 20

In each round a spec is predicted, and directly afterwards executed on two workers and on one. Printed is the median
ratio of the rounds, with their range, and the share of the cores that other processes took during the real run. A
ratio of 1.00 is exact; the goal is 0.75 to 1.25. Calls that spin need a core for each worker and the driver: if others
take much of the cores, their ratios say little.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import psutil

import pipedist
from pipedist.cluster.base import usable_cores
from pipedist.plan import compile_plan
from pipedist.runs.prediction import costs_of_run, forecast, sampled_costs
from pipedist.spec import load

SPIN_S = 0.02  # of processor time
SLEEP_S = 0.1


def spins(x: np.ndarray) -> np.ndarray:
    end = time.thread_time() + SPIN_S
    while time.thread_time() < end:
        pass
    return x


def sleeps(x: np.ndarray) -> np.ndarray:
    time.sleep(SLEEP_S)
    return x


def uneven(x: np.ndarray) -> np.ndarray:
    # 0.2 to 3.8 times the mean, and independent of the order of the elements
    time.sleep(SLEEP_S * (0.2 + 3.6 * (int(x[0]) * 2654435761 % 2**32 / 2**32) ** 2.5))
    return x


def small(x: np.ndarray) -> np.ndarray:
    return x


async def waits(x: np.ndarray) -> np.ndarray:
    await asyncio.sleep(3 * SLEEP_S)
    return x


# on one worker; calls that wait do so in up to 32 at a time
CALLS_PER_S = {
    "spins": 1 / SPIN_S,
    "sleeps": 1 / SLEEP_S,
    "uneven": 0.8 / SLEEP_S,
    "small": 10_000,
    "waits": 32 / (3 * SLEEP_S),
}


def spec(name: str, seconds: float) -> dict[str, Any]:
    """Return a spec whose calls take about `seconds` on one worker."""
    return {
        "pipedist": 1,
        "name": name,
        "replicas": 2,
        "dataset": {"range": 4 * round(CALLS_PER_S[name] * seconds), "batch": 8},
        "stages": {
            "y": {"run": f"benchmarks.prediction:{name}"},
            "total": {"reduce": "sum", "of": "y", "axis": 0},
        },
        "outputs": {"total": "total.json"},
    }


def observed(document: dict[str, Any], workers: int, folder: Path) -> tuple[float, float]:
    """Return the time of a run, and the share of this machine's cores that other processes took meanwhile."""
    before, began = machine_cpu_s(), time.monotonic()
    own = own_cpu_s()
    seconds = pipedist.run(document, workers=workers, output=folder).timings["total"]
    capacity = (time.monotonic() - began) * usable_cores()
    return seconds, max(0.0, machine_cpu_s() - before - own_cpu_s() + own) / capacity


def machine_cpu_s() -> float:
    """Return the processor time of all processes of this machine."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))


def own_cpu_s() -> float:
    """Return the processor time of this process and of its children that have ended."""
    return sum(os.times()[:4])


def one_round(
    name: str, document: dict[str, Any], sample: int, folder: Path
) -> Iterator[tuple[str, int, float, float, float, str]]:
    """Yield each prediction of a spec: its source, the workers, both times, the load, and the bottleneck.

    The predictions are made directly before the runs: a load that changes slowly meets both alike. A prediction from
    the run itself shows how well the model describes it, also if the load changes.
    """
    plan = compile_plan(load(document), workers=1)
    try:
        costs = {"sample": anyio.run(sampled_costs, plan, sample)}
        pipedist.run(document, workers=1, output=folder / "before")
        costs["run"] = costs_of_run(plan, folder / "before")
        for workers in (2, 1):
            real_s, load_share = observed(document, workers, folder / f"{workers}")
            costs["itself"] = costs_of_run(plan, folder / f"{workers}")
            for source, each in costs.items():
                expected = forecast(each, workers)
                yield source, workers, expected.seconds, real_s, load_share, expected.bottleneck
    finally:
        plan.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=3.0, help="of work of each spec on one worker")
    parser.add_argument("--sample", type=int, default=20, help="calls of a sample")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--specs", nargs="*", choices=list(CALLS_PER_S), default=list(CALLS_PER_S))
    args = parser.parse_args()
    print(
        f"{'spec':8} {'from':7} {'workers':>7} {'predicted':>10} {'real':>8} {'ratio':>6} {'range':>13} {'others':>7}"
        "  limited by"
    )
    medians: list[float] = []
    loads: list[float] = []
    for name in args.specs:
        found: dict[tuple[str, int], list[tuple[float, float, float, str]]] = {}
        for _ in range(args.rounds):
            with tempfile.TemporaryDirectory() as folder:
                rows = one_round(name, spec(name, args.seconds), args.sample, Path(folder))
                for source, workers, *row in rows:
                    found.setdefault((source, workers), []).append((row[0], row[1], row[2], row[3]))
        for (source, workers), tries in found.items():
            ratios = [expected_s / real_s for expected_s, real_s, _, _ in tries]
            expected_s, real_s, others, bottleneck = sorted(tries, key=lambda one: one[0] / one[1])[
                len(tries) // 2
            ]
            medians.append(ratio := statistics.median(ratios))
            loads.append(others)
            spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
            print(
                f"{name:8} {source:7} {workers:7} {expected_s:9.2f}s {real_s:7.2f}s {ratio:6.2f} {spread:>13} "
                f"{others:7.0%}  {bottleneck}",
                flush=True,
            )
    print(
        f"{sum(0.75 <= ratio <= 1.25 for ratio in medians)} of {len(medians)} predictions (medians of {args.rounds}) "
        f"are within 25%; other processes took {statistics.mean(loads):.0%} of the cores meanwhile"
    )


if __name__ == "__main__":
    main()
