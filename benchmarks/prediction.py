"""Predicted and real times of five specs: from a sample of their calls, from a run on one worker, from the run itself.

    python -m benchmarks.prediction --seconds 4 --sample 20

Each spec is predicted, and then executed on one and on two workers. A ratio of 1.00 is exact; the goal is 0.75 to
1.25. Calls that spin need a core for each worker and the driver: on a loaded machine their ratios say little.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import numpy as np

import pipedist
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


def ratios(name: str, document: dict[str, Any], sample: int, folder: Path) -> Iterator[tuple[str, float]]:
    """Yield a line and its ratio for each prediction of a spec, on one and two workers.

    A prediction from the run itself shows how well the model describes it, also on a machine whose load changes.
    """
    plan = compile_plan(load(document), workers=1)
    try:
        costs = {"sample": anyio.run(sampled_costs, plan, sample)}
        pipedist.run(document, workers=1, output=folder / "before")
        costs["run"] = costs_of_run(plan, folder / "before")
        for workers in (1, 2):
            real_s = pipedist.run(document, workers=workers, output=folder / f"{workers}").timings["total"]
            costs["itself"] = costs_of_run(plan, folder / f"{workers}")
            for source, each in costs.items():
                expected = forecast(each, workers)
                ratio = expected.seconds / real_s
                times = f"{expected.seconds:9.2f}s {real_s:7.2f}s {ratio:6.2f}"
                yield f"{name:8} {source:7} {workers:7} {times}  {expected.bottleneck}", ratio
    finally:
        plan.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=4.0, help="of work of each spec on one worker")
    parser.add_argument("--sample", type=int, default=20, help="calls of a sample")
    parser.add_argument("--specs", nargs="*", choices=list(CALLS_PER_S), default=list(CALLS_PER_S))
    args = parser.parse_args()
    print(f"{'spec':8} {'from':7} {'workers':>7} {'predicted':>10} {'real':>8} {'ratio':>6}  limited by")
    found: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in args.specs:
            for line, ratio in ratios(name, spec(name, args.seconds), args.sample, Path(folder) / name):
                print(line, flush=True)
                found.append(ratio)
    print(f"{sum(0.75 <= ratio <= 1.25 for ratio in found)} of {len(found)} predictions are within 25 %")


if __name__ == "__main__":
    main()
