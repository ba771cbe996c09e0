"""Ray Data: decode on processors, infer on one simulated GPU; prints the seconds.

python -m benchmarks.peers.ray_overlap STEPS DECODE_S INFER_S
"""

from __future__ import annotations

import sys
import time

import numpy as np
import ray
import ray.data

from benchmarks.functions import decode, infer

ROWS = 8
"""Rows of a decode; an inference has twice as many."""

BLOCKS = 24
"""Of 12 to 256 blocks, this number took the shortest time for 128 steps."""


class Infer:
    """An actor, which keeps the GPU."""

    def __init__(self, s: float) -> None:
        self._s = s

    def __call__(self, block: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"v": infer(block["v"], self._s)}


def run(steps: int, decode_s: float, infer_s: float) -> float:
    """Execute the stages, and return the seconds."""
    begin = time.monotonic()
    rows = ray.data.range(2 * ROWS * steps, override_num_blocks=BLOCKS)
    rows = rows.map_batches(lambda b: {"v": decode(b["id"], decode_s)}, batch_size=ROWS, num_cpus=1)
    rows = rows.map_batches(
        Infer, fn_constructor_args=(infer_s,), batch_size=2 * ROWS, num_gpus=1, num_cpus=0, concurrency=1
    )
    total = sum(int(b["v"].sum()) for b in rows.iter_batches(batch_size=None, batch_format="numpy"))
    expected = int(np.arange(2 * ROWS * steps).sum()) * 2 + 2 * ROWS * steps
    if total != expected:
        raise ValueError(f"the sum is {total}, expected {expected}")
    return time.monotonic() - begin


def main() -> None:
    steps, decode_s, infer_s = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
    ray.init(num_cpus=3, num_gpus=1, logging_level="ERROR")
    ray.data.DataContext.get_current().enable_progress_bars = False
    run(2, decode_s, infer_s)
    print(run(steps, decode_s, infer_s))


if __name__ == "__main__":
    main()
