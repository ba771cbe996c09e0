"""Functions that fork: their copies report nothing, execute nothing, meet nobody, and do not stay."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import pipedist
from tests.cluster.launchers.processes import wait_gone

F = "tests.runs.fork_functions"


@pytest.mark.parametrize("how", ["returns", "raises"])
@pytest.mark.parametrize(
    ("run", "workers"),
    [
        ("plain", 2),
        ("later", 2),
        ("together", 1),  # its other replica is a thread, which the copy has not
        ("together", 2),
        ("together_later", 1),
        ("together_later", 2),
        ("merges", 1),
        ("merges", 2),
    ],
)
def test_a_copy_ends_where_it_leaves_the_function(tmp_path: Path, run: str, workers: int, how: str) -> None:
    stage = {"run": f"{F}:{run}", "with": {"folder": str(tmp_path), "how": how}, "on_error": "quarantine"}
    if run.startswith(("together", "merges")):
        stage["collectives"] = True
    results = pipedist.run(
        {
            "pipedist": 1,
            "replicas": 2,
            "dataset": {"range": 40, "batch": 8},
            "stages": {"y": {**stage, "timeout_s": 60}, "out": {"gather": 0, "of": "y"}},
        },
        workers=workers,
    )
    np.testing.assert_array_equal(results["out"], np.arange(40) * 2)
    assert results.ledger.committed == 40
    assert wait_gone([int((tmp_path / "copy").read_text())]) == []
