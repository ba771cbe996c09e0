"""The systems of the training benchmark: each module is run as a process of its own.

    python -m benchmarks.training_systems.NAME PARAMETERS STEPS

Two replicas, each with a gradient of float32; the sum of both is subtracted from the parameters:

    gradient = (parameters - target) * RATE;  parameters -= all_reduce(gradient)

A process prints one line, `MEASURED {...}`, with the fields of `Steps`.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass

MARK = "MEASURED "
REPLICAS = 2
RATE = 0.125
WARM_STEPS = 5


@dataclass(frozen=True)
class Steps:
    """What some steps took, after the first ones.

    Args:
        wall_s: all of them.
        cpu_s: of all processes together, threads included.
        parameter: the last one, at the end: equal in all systems.
    """

    wall_s: float
    cpu_s: float
    parameter: float


def target(step: int, replica: int) -> float:
    """Return what the gradient of a replica pulls the parameters to."""
    return float(step % 7 + 3 * replica)


def options() -> tuple[int, int]:
    """Return the numbers of parameters and of steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("parameters", type=int)
    parser.add_argument("steps", type=int)
    given = parser.parse_args()
    return given.parameters, given.steps


def tell(steps: Steps) -> None:
    """Print what was measured."""
    print(MARK + json.dumps(asdict(steps)), flush=True)
