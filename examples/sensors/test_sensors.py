"""Both specs under faults: pytest examples/sensors (the first test fails, with the reason)."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.pipedist_faults(crash=0.02, slow=0.1, workers=3, seed=7)
@pytest.mark.parametrize("spec", ["wrong.yaml", "right.yaml"])
def test_outliers(pipedist_faults, spec: str) -> None:
    with pipedist_faults() as simulated:
        assert simulated.run(str(HERE / spec))["outliers"] > 0
