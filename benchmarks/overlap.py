"""Decode on processors, infer on a GPU: how much of the two the engine overlaps.

One of four workers owns a GPU, which is simulated: a call sleeps. The decodes of a step take three workers as long as
the inference takes the fourth, which is the hardest case. The bound is the best that any schedule can reach: the
larger of the GPU's work, and of all work on all workers. It is compared with the time of the same run:

    make bench-overlap
    make bench-overlap ARGS="--steps 64"
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from msgspec import Struct

import pipedist
from benchmarks.functions import decode, infer
from benchmarks.systems import PEER_PYTHON
from pipedist.core import gpus
from pipedist.errors import PipedistError

WORKERS = 4
DECODE_S = 0.060
INFER_S = 0.040
ROWS = 8
"""Elements of a decode; an inference has the rows of two."""


class Row(Struct, frozen=True):
    """One measurement: seconds, and the bound."""

    name: str
    took_s: float
    bound_s: float

    @property
    def share(self) -> float:
        return self.bound_s / self.took_s


def spec_of(steps: int, *, together: bool, decode_s: float, infer_s: float) -> dict[str, Any]:
    """Return a spec; `together`: both stages are one call, on the worker with the GPU."""
    gpu = {"gpus": 1}
    return {
        "pipedist": 1,
        "dataset": {"range": 2 * ROWS * steps, "batch": ROWS},
        "stages": {
            "decoded": {"run": decode, "with": {"s": decode_s}, "resources": gpu if together else None},
            "inferred": {
                "run": infer,
                "of": "decoded",
                "with": {"s": infer_s / 2 if together else infer_s},
                "batch": None if together else 2 * ROWS,
                "resources": gpu,
            },
            "total": {"reduce": "sum", "of": "inferred", "axis": 0},
        },
    }


@contextmanager
def simulated_gpu() -> Iterator[None]:
    """Let this process see one GPU."""
    found = gpus.found
    gpus.found = lambda: gpus.VisibleGpus(("0",), "simulated")
    try:
        yield
    finally:
        gpus.found = found


async def measure(steps: int, *, decode_s: float = DECODE_S, infer_s: float = INFER_S) -> list[Row]:
    """Measure both ways, after a small run that starts everything."""
    bound_s = steps * max(infer_s, (2 * decode_s + infer_s) / WORKERS)
    rows = []
    with simulated_gpu():
        async with pipedist.LocalCluster(workers=WORKERS, gpus_per_worker=1) as cluster:
            for name, together in (("streamed", False), ("one call on the GPU's worker", True)):
                for count in (2, steps):
                    begin = time.monotonic()
                    spec = spec_of(count, together=together, decode_s=decode_s, infer_s=infer_s)
                    async with pipedist.open(spec, cluster=cluster) as run:
                        result = await run.results()
                    took_s = time.monotonic() - begin
                    expected = np.arange(2 * ROWS * count).sum() * 2 + 2 * ROWS * count
                    if result["total"] != expected:
                        raise PipedistError(f"{name}: the sum is {result['total']}, expected {expected}")
                rows.append(Row(name, took_s, bound_s))
    return rows


def measure_ray(steps: int) -> list[Row]:
    """Measure the same with Ray Data, if it is installed (`make bench-peers`)."""
    if not PEER_PYTHON.exists():
        return []
    command = [
        str(PEER_PYTHON),
        "-m",
        "benchmarks.peers.ray_overlap",
        str(steps),
        str(DECODE_S),
        str(INFER_S),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        print(f"Ray Data is not measured: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
        return []
    bound_s = steps * max(INFER_S, (2 * DECODE_S + INFER_S) / WORKERS)
    return [Row("ray.data map_batches", float(done.stdout.split()[-1]), bound_s)]


def table(rows: list[Row]) -> str:
    """Return the rows as a Markdown table."""
    lines = ["| | seconds | bound | share of the bound |", "|---|---:|---:|---:|"]
    lines += [f"| {row.name} | {row.took_s:.2f} | {row.bound_s:.2f} | {row.share:.2f} |" for row in rows]
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=128, help="inferences that are measured")
    options = parser.parse_args()
    print(table([*asyncio.run(measure(options.steps)), *measure_ray(options.steps)]))


if __name__ == "__main__":
    main()
