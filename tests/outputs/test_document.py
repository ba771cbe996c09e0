from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipedist.errors import CallError, OutputError, WorkersLost
from pipedist.outputs import run_document, store_large

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


def test_large_values_are_in_files_and_the_document_refers_to_them(tmp_path: Path) -> None:
    """Small ones stay inline; arrays are in .npy and .npz, by step they are stacked, everything else is JSON."""
    array = np.arange(20_000, dtype=np.float32)
    values = {
        "small": ("run", np.zeros(1_000)),
        "array": ("run", array),
        "tree": ("run", {"w": array, "b": np.float32(1)}),
        "each": ("step", [array, array + 1]),
        "ragged": ("step", [array, array[:-1]]),
        "some": ("epoch", [None, {"w": array}]),
        "counts": ("run", {str(number): number for number in range(10_000)}),
        "text": ("run", "x" * 70_000),
    }
    folder = tmp_path / "values"
    found = store_large(
        {name: value for name, (_, value) in values.items()}, folder, {n: p for n, (p, _) in values.items()}
    )

    def reference(name: str, **what: object) -> dict[str, object]:
        return {"file": str(folder / name), **what}

    assert found == {
        "array": reference("array.npy", dtype="float32", shape=[20_000]),
        "tree": reference("tree.npz", dtype={"b": "float32", "w": "float32"}, shape={"b": [], "w": [20_000]}),
        "each": reference("each.npy", dtype="float32", shape=[2, 20_000]),
        "ragged": reference("ragged.json"),
        "some": reference("some.json"),
        "counts": reference("counts.json"),
        "text": reference("text.json"),
    }
    np.testing.assert_array_equal(np.load(folder / "each.npy"), [array, array + 1])
    assert {path.name for path in folder.iterdir()} == {Path(each["file"]).name for each in found.values()}
    document = run_document(
        run_id="r1",
        name="x",
        results={name: value for name, (_, value) in values.items()},
        files={},
        stored=found,
        ledger=LEDGER,
        timings={},
    )
    results = document["results"]
    assert {name: value for name, value in results.items() if name != "small"} == found
    assert results["small"] == [0.0] * 1_000
    assert not store_large({"small": 1}, tmp_path / "none", {"small": "run"})
    assert not (tmp_path / "none").exists()


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
