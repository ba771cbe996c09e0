"""Both specs under faults: pytest examples/sensors (the first test fails, and says why)."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.pipedist_faults(crash=0.02, slow=0.1, workers=3, seed=7)
@pytest.mark.parametrize("spec", ["wrong.yaml", "right.yaml"])
def test_outliers(faults, spec: str) -> None:
    with faults() as simulated:
        assert simulated.run(str(HERE / spec))["outliers"] > 0
