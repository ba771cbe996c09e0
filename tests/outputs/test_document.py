from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipedist.errors import CallError, OutputError, WorkersLost
from pipedist.outputs import run_document

LEDGER = {"elements": 4, "committed": 4, "quarantined": 0, "lost": 0}


def test_a_finished_run() -> None:
    document = run_document(
        run_id="r1",
        name="x",
        results={"late": np.float32(0.1), "rows": np.zeros(10**6), "steps": [1, float("nan")]},
        files={"rows": Path("out/rows.npz")},
        ledger=LEDGER,
        timings={"total": 0.5},
    )
    assert document == {
        "format": 1,
        "run": "r1",
        "name": "x",
        "results": {"late": 0.1, "rows": {"file": str(Path.cwd() / "out/rows.npz")}, "steps": [1, "NaN"]},
        "ledger": LEDGER,
        "timings": {"total": 0.5},
    }


@pytest.mark.parametrize(
    ("cause", "expected"),
    [
        ("ValueError: bad: row", ("ValueError", "bad: row")),
        ("pkg.errors.Strange: two\nlines", ("pkg.errors.Strange", "two\nlines")),
        ("KeyError", ("KeyError", "")),
        ("worker w0 died", ("CallError", "worker w0 died")),
    ],
)
def test_a_failed_call_is_reported_with_the_functions_error(cause: str, expected: tuple[str, str]) -> None:
    error = CallError(stage="f", step=3, replica=1, worker="w0", attempts=1, cause=cause)
    document = run_document(
        run_id="r", name="x", results={}, files={}, ledger=LEDGER, timings={}, error=error
    )
    assert document["error"] == {
        "class": expected[0],
        "message": expected[1],
        "stage": "f",
        "step": 3,
        "replica": 1,
    }


def test_other_errors_and_quarantined_elements() -> None:
    document = run_document(
        run_id="r",
        name="x",
        results={},
        files={},
        ledger=LEDGER,
        timings={},
        error=WorkersLost("no worker comes up"),
        quarantined=[{"element": np.int64(17), "stage": "f", "cause": "ValueError: bad"}],
    )
    assert document["error"] == {
        "class": "WorkersLost",
        "message": "no worker comes up",
        "stage": None,
        "step": None,
        "replica": None,
    }
    assert document["quarantined"] == [{"element": 17, "stage": "f", "cause": "ValueError: bad"}]


def test_a_result_without_json_is_named() -> None:
    with pytest.raises(OutputError, match="'late/a'"):
        run_document(
            run_id="r", name="x", results={"late": {"a": object()}}, files={}, ledger=LEDGER, timings={}
        )
