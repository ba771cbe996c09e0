"""Calls that take far longer than others, in real processes: a run does not wait for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pipedist

F = "tests.runs.functions"


def document(run: str, *, n: int = 12, cluster: dict[str, Any] | None = None, **with_: Any) -> dict[str, Any]:
    return {
        "pipedist": 1,
        "cluster": cluster or {},
        "dataset": {"range": n, "batch": 1},
        "stages": {
            "y": {"run": f"{F}:{run}", "with": with_},
            "out": {"gather": 0, "of": "y"},
        },
    }


def test_a_run_does_not_wait_for_a_call_that_is_slow_once(tmp_path: Path) -> None:
    result = pipedist.run(document("slow_the_first_time", folder=str(tmp_path)), workers=2)
    assert result["out"].tolist() == list(range(12))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "begun"]
    assert result.ledger.to_json() == {"elements": 12, "committed": 12, "quarantined": 0, "lost": 0}
    assert result.timings["total"] < 300.0, "the first attempt takes ten minutes"


def test_the_one_that_lost_is_out_of_the_way_until_it_is_back(tmp_path: Path) -> None:
    """The worker of the slow call never comes back: the other one does all the rest."""
    result = pipedist.run(document("slow_the_first_time", n=400, folder=str(tmp_path)), workers=2)
    assert result["out"].tolist() == list(range(400))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "begun"]


def test_a_second_attempt_whose_worker_dies_is_followed_by_another(tmp_path: Path) -> None:
    result = pipedist.run(document("slow_then_deadly", folder=str(tmp_path)), workers=2)
    assert result["out"].tolist() == list(range(12))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deadly", "slow", "well"]
    assert result.ledger.to_json() == {"elements": 12, "committed": 12, "quarantined": 0, "lost": 0}
    assert result.timings["total"] < 300.0, "the first attempt takes ten minutes"
