"""The same bytes for 1, 2, 4 and 8 workers and for 20 shuffled schedules; NaN, infinities and -0.0 too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pipedist
from pipedist.testing import Faults, SpecSimulation

SPEC: dict[str, Any] = {
    "pipedist": 1,
    "replicas": 3,
    "seed": 11,
    "dataset": {"range": 211, "batch": 12, "epochs": 2, "shuffle": True},
    "stages": {
        "y": {"run": "tests.acceptance.functions:floats"},
        "sum": {"reduce": "sum", "of": "y", "axis": 0},
        "mean": {"reduce": "mean", "of": "y", "axis": 0, "per": "epoch"},
        "largest": {"reduce": "max", "of": "y", "axis": 0},
        "product": {"reduce": "prod", "of": "y", "axis": 0, "per": "step"},
        "folded": {"reduce": "tests.acceptance.functions:fold", "of": "y"},
        "rows": {"gather": 0, "of": "y"},
    },
}
SCHEDULES = 20


def bits(result: pipedist.Result) -> dict[str, bytes]:
    assert result.ledger == pipedist.Ledger(422, 422)
    return {name: np.asarray(result[name]).tobytes() for name in sorted(result)}


@pytest.fixture(scope="module")
def want() -> dict[str, bytes]:
    result = pipedist.run(SPEC, workers=1)
    assert np.isnan(result["sum"]).any()
    assert np.isinf(result["largest"]).any()
    return bits(result)


@pytest.mark.parametrize("workers", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_real_workers(workers: int, want: dict[str, bytes]) -> None:
    assert bits(pipedist.run(SPEC, workers=workers)) == want


@pytest.mark.parametrize(
    "workers", [2, *(pytest.param(workers, marks=pytest.mark.slow) for workers in (1, 4, 8))]
)
def test_shuffled_schedules(workers: int, want: dict[str, bytes]) -> None:
    """Messages are late, reordered and repeated, calls are slow, workers crash."""
    faults = Faults.parse("delay=0.3,reorder=0.3,slow=0.2,duplicate=0.01,crash=0.01")
    simulation = SpecSimulation(SPEC, workers=workers, faults=faults)
    happened = 0
    for seed in range(SCHEDULES):
        played = simulation.check(seed)
        assert played.result is not None
        assert bits(played.result) == want, f"seed {seed}"
        happened += played.counts.total()
    assert happened > SCHEDULES
