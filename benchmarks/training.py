"""A training with many parameters, as a spec and with a variable, beside torch gloo.

As a spec: each of 100 steps reads the state, reduces two gradients of the same size, and updates the state. Neither
the gradients nor the earlier states may stay: the wall time of the command, the peak memory of a process, and the
bytes on disk have limits. With a variable: `benchmarks.training_systems`, with 1,000 and N parameters. All systems
of a round run one after the other, in another order in each round, and a goal is judged by the median of the ratios
within a round. torch comes with `make bench-torch`.

    python -m benchmarks.training [--parameters N] [--steps N] [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.collectives import SYSTEMS, is_installed
from benchmarks.systems import HOME, PEER_PYTHON
from benchmarks.training_systems import MARK, REPLICAS, Steps

TIMEOUT_S = 180.0
FASTER_MIN = 1.5  # how much faster the steps of a variable are to be than those of torch gloo
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


TIMED = """
import os, subprocess, sys
process = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
_, status, usage = os.wait4(process.pid, 0)
process.returncode = os.waitstatus_to_exitcode(status)
print(process.returncode, usage.ru_maxrss)
"""
"""Prints exit code and peak KiB of a command and its workers. A process begins with the peak of its parent, so the
parent must be small."""


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
        timed = [sys.executable, "-c", TIMED, *command]
        done = subprocess.run(timed, cwd=folder, stdout=subprocess.PIPE, text=True, check=True)
        wall_s = time.monotonic() - begin
        code, peak_kib = map(int, done.stdout.split())
        assert code == 0, "the run failed"
        expected = np.float32(0)
        for step in range(steps):
            means = np.float32(16 * step + 3.5), np.float32(16 * step + 11.5)
            mean = ((expected - means[0]) + (expected - means[1])) / np.float32(2)
            expected -= np.float32(0.1) * mean
        weights = np.load(folder / "out/weights.npy")
        assert weights.shape == (parameters,)
        assert (weights == expected).all()
        files = [path for path in (folder / "out").rglob("*") if path.is_file()]
        return Measured(wall_s, 1024 * peak_kib, sum(path.stat().st_size for path in files))


def steps_of(module: str, parameters: int, steps: int) -> tuple[Steps, float]:
    """Run a system; return what its steps took, and the wall time of its command."""
    python = sys.executable if module.startswith("pipedist") else str(PEER_PYTHON)
    command = [python, "-m", f"benchmarks.training_systems.{module}", str(parameters), str(steps)]
    env = {**os.environ, "PYTHONPATH": str(HOME.parent), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    began = time.monotonic()
    done = subprocess.run(
        command, env=env, cwd=HOME.parent, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    wall_s = time.monotonic() - began
    line = next((line for line in done.stdout.splitlines() if line.startswith(MARK)), "")
    if done.returncode or not line:
        raise RuntimeError(f"{module}: exit code {done.returncode}\n{done.stderr}")
    return Steps(**json.loads(line.removeprefix(MARK))), wall_s


def compare(parameters: int, steps: int, rounds: int) -> list[str]:
    """Measure the steps of all systems that are installed; return lines of a Markdown table."""
    modules = ["pipedist_variable", *(["torch_gloo"] if is_installed(SYSTEMS["gloo"]) else [])]
    found: dict[str, list[tuple[Steps, float]]] = {module: [] for module in modules}
    for round_ in range(rounds):
        turn = round_ % len(modules)
        for module in (*modules[turn:], *modules[:turn]):
            found[module].append(steps_of(module, parameters, steps))
    if len({taken.parameter for runs in found.values() for taken, _ in runs}) != 1:
        raise RuntimeError(f"the systems have different parameters after {steps} steps: {found}")
    lines = []
    for module, runs in found.items():
        wall_s = statistics.median(taken.wall_s for taken, _ in runs)
        cpu_s = statistics.median(taken.cpu_s for taken, _ in runs)
        command_s = statistics.median(command_s for _, command_s in runs)
        line = f"| {module} | {parameters:,} | {steps / wall_s:,.0f} | {1e3 * cpu_s / steps:.2f} | {command_s:.1f} |"
        if module == modules[0] and len(modules) > 1:
            pairs = zip(*found.values(), strict=True)
            line += f" {statistics.median(peer[0].wall_s / own[0].wall_s for own, peer in pairs):.2f} |"
        else:
            line += " |"
        lines.append(line)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--parameters", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    measured = measure(options.parameters, options.steps)
    for text, value, limit, unit in (
        ("wall time", measured.wall_s, WALL_S_MAX, "s"),
        ("peak memory of a process", measured.peak_bytes / 1e6, PEAK_BYTES_MAX / 1e6, "MB"),
        ("disk", measured.disk_bytes / 1e6, DISK_BYTES_MAX / 1e6, "MB"),
    ):
        print(f"{text}: {value:,.1f} {unit}, goal {limit:g} {unit}: {'yes' if value < limit else 'no'}")
    print(
        f"\n{REPLICAS} replicas: the goal is {FASTER_MIN:g} times the steps per second of torch gloo\n\n"
        "| system | parameters | steps/s | CPU ms per step | command, s | steps/s by those of torch gloo |\n"
        "|---|---|---|---|---|---|"
    )
    for parameters in (1_000, options.parameters):
        print("\n".join(compare(parameters, options.steps, options.rounds)), flush=True)


if __name__ == "__main__":
    main()
