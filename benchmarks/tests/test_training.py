"""The training with many parameters measures what it says, in a tiny size; no time is looked at."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import training_systems as systems
from benchmarks.collectives import SYSTEMS, is_installed
from benchmarks.training import measure, steps_of


def test_it_measures_a_training() -> None:
    measured = measure(1_000, 5)
    assert measured.wall_s > 0
    assert 10e6 < measured.peak_bytes < 1e9
    assert measured.disk_bytes > 4_000


@pytest.mark.parametrize("module", ["pipedist_variable", "torch_gloo"])
def test_the_steps_of_all_systems_have_one_result(module: str) -> None:
    if module == "torch_gloo" and not is_installed(SYSTEMS["gloo"]):
        pytest.skip("torch is not installed: make bench-torch")
    taken, command_s = steps_of(module, 300_000, 3)
    assert 0 < taken.wall_s < command_s
    assert taken.cpu_s > 0
    weight = np.float32(0)
    for step in range(systems.WARM_STEPS + 3):
        parts = [(weight - np.float32(systems.target(step, r))) * np.float32(systems.RATE) for r in range(2)]
        weight -= parts[0] + parts[1]
    assert taken.parameter == weight
