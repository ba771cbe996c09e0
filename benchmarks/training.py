"""A training with many parameters: wall time, peak memory of a process, and bytes on disk.

Each of 100 steps reads the state, reduces two gradients of the same size, and updates the state. Neither the
gradients nor the earlier states may stay.

    python -m benchmarks.training [--parameters N] [--steps N]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

WALL_S_MAX = 5.0
PEAK_BYTES_MAX = 300_000_000
DISK_BYTES_MAX = 50_000_000

MODULE = """
import numpy as np


def zeros(count):
    return np.zeros(count, np.float32)


def gradient(x, weights):
    return weights - np.float32(x.mean())


def descend(weights, gradient, rate):
    return weights - np.float32(rate) * gradient
"""

SPEC = """
pipedist: 1
replicas: 2
dataset: {{range: {elements}, batch: 16}}
stages:
  gradients: {{run: "model:gradient", with: {{weights: "${{state.weights}}"}}}}
  gradient: {{reduce: mean, of: gradients, axis: null, per: step}}
  weights:
    update: model:descend
    of: gradient
    init: {{function: "model:zeros", with: {{count: {parameters}}}}}
    with: {{rate: 0.1}}
outputs: {{weights: weights.npy}}
"""


@dataclass(frozen=True)
class Measured:
    """What one run took.

    Args:
        wall_s: from the start of the command to the end of its process.
        peak_bytes: resident memory of the largest of its processes, at its highest.
        disk_bytes: of all files in the run folder, after the end.
    """

    wall_s: float
    peak_bytes: int
    disk_bytes: int


def measure(parameters: int, steps: int) -> Measured:
    """Run the training as a command, and check its result."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "model.py").write_text(MODULE)
        (folder / "spec.yaml").write_text(SPEC.format(elements=16 * steps, parameters=parameters))
        command = [sys.executable, "-m", "pipedist", "run", "spec.yaml", "--workers", "2", "--output", "out"]
        begin = time.monotonic()
        process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)
        try:
            _, status, usage = os.wait4(process.pid, 0)  # the usage is also that of its workers
            process.returncode = os.waitstatus_to_exitcode(status)
        finally:
            process.kill()  # if the wait was interrupted
        wall_s = time.monotonic() - begin
        assert process.returncode == 0, "the run failed"
        expected = np.float32(0)
        for step in range(steps):
            means = np.float32(16 * step + 3.5), np.float32(16 * step + 11.5)
            mean = ((expected - means[0]) + (expected - means[1])) / np.float32(2)
            expected -= np.float32(0.1) * mean
        weights = np.load(folder / "out/weights.npy")
        assert weights.shape == (parameters,)
        assert (weights == expected).all()
        files = [path for path in (folder / "out").rglob("*") if path.is_file()]
        return Measured(wall_s, 1024 * usage.ru_maxrss, sum(path.stat().st_size for path in files))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--parameters", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    measured = measure(options.parameters, options.steps)
    for text, value, limit, unit in (
        ("wall time", measured.wall_s, WALL_S_MAX, "s"),
        ("peak memory of a process", measured.peak_bytes / 1e6, PEAK_BYTES_MAX / 1e6, "MB"),
        ("disk", measured.disk_bytes / 1e6, DISK_BYTES_MAX / 1e6, "MB"),
    ):
        print(f"{text}: {value:,.1f} {unit}, goal {limit:g} {unit}: {'yes' if value < limit else 'no'}")


if __name__ == "__main__":
    main()
