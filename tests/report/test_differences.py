"""Differences of two runs: their texts, in all formats of outputs, with the step and element of the first one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from msgspec.structs import replace

import pipedist
from pipedist.cli.app import app
from pipedist.report import differences as of_runs
from pipedist.report.file_differences import Differences, compare_files, compare_trees

ENDINGS = ("npy", "npz", "csv", "jsonl", "parquet", "json")
LENGTH, BATCH, REPLICAS = 50, 8, 2


def value(x: np.ndarray, bad: int, fails: bool) -> dict[str, Any]:
    if fails and (x == bad).any():
        raise ValueError(f"{bad} is bad")
    return {"id": x, "y": x / 2 + (x == bad)}


def halves(x: np.ndarray, bad: int) -> np.ndarray:
    return x / 2 + (x == bad)


def wide(x: np.ndarray, bad: int) -> np.ndarray:
    return np.outer(halves(x, bad), np.ones(200))


def spec(bad: int, *, fails: bool = False, workers: int = 1) -> dict[str, Any]:
    name = f"{__name__}:"
    return {
        "pipedist": 1,
        "name": "job",
        "replicas": REPLICAS,
        "cluster": {"workers": workers},
        "dataset": {"range": LENGTH, "batch": BATCH, "shuffle": True, "epochs": 2},
        "stages": {
            "values": {"run": name + "value", "with": {"bad": bad, "fails": fails}},
            "wide": {"run": name + "wide", "with": {"bad": bad}},
            "large": {"gather": 0, "of": "wide"},  # it has a file, but no output
            "array": {"run": name + "halves", "with": {"bad": bad}},
            **{e: {"gather": 0, "of": "array" if e == "npy" else "values"} for e in ENDINGS},
            "sums": {"reduce": "sum", "of": "array", "axis": 0, "per": "step"},
        },
        "outputs": {e: f"{e}.{e}" for e in ENDINGS},
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs: "a"; "same" of another number of workers; "b" with another element 17; "failed"."""
    folder = tmp_path_factory.mktemp("runs")
    pipedist.run(spec(-1), output=folder / "a")
    pipedist.run(spec(-1, workers=2), output=folder / "same")
    pipedist.run(spec(17), output=folder / "b")
    with pytest.raises(pipedist.CallError):
        pipedist.run(spec(17, fails=True), output=folder / "failed")
    return {name: folder / name for name in ("a", "same", "b", "failed")}


def test_a_run_does_not_differ_from_itself(runs: dict[str, Path]) -> None:
    for path in runs.values():
        found = of_runs.compare(path, path)
        assert found["same"]
        assert not any(found[section] for section in ("spec", "inputs", "code", "versions", "no_effect"))
    assert [entry["file"] for entry in of_runs.compare(runs["a"], runs["a"])["results"]] == [
        "", *(f"{each}.{each}" for each in ENDINGS), ""
    ]  # fmt: skip


def test_the_number_of_workers_has_no_effect(runs: dict[str, Path]) -> None:
    found = of_runs.compare(runs["a"], runs["same"])
    assert found["same"]
    assert found["no_effect"] == ["workers: 1 in A, 2 in B"]


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_changed_element_is_found_at_its_step(runs: dict[str, Path], ending: str) -> None:
    found = of_runs.compare(runs["a"], runs["b"])
    assert found["spec"] == [
        "stages.values.with.bad: -1 in A, 17 in B",
        "stages.wide.with.bad: -1 in A, 17 in B",
        "stages.array.with.bad: -1 in A, 17 in B",
    ]
    entry = next(each for each in found["results"] if each["stage"] == ending)
    row = int(np.flatnonzero(np.load(runs["a"] / "npy.npy") == 8.5)[0])
    assert (entry["rows"], entry["differing"], entry["max_abs"]) == ([2 * LENGTH] * 2, 2, 1.0)
    assert entry["max_rel"] == pytest.approx(1 / 9.5)
    assert entry["first"]["row"] == row
    assert entry["first"]["element"] == 17, "of the first epoch"
    assert entry["first"]["step"] == row // BATCH
    size = -(-min(BATCH, LENGTH - row // BATCH * BATCH) // REPLICAS)
    assert entry["first"]["replica"] == row % BATCH // size
    assert (float(entry["first"]["a"].strip("'")), float(entry["first"]["b"].strip("'"))) == (8.5, 9.5)


def test_the_contract_gives_the_element_of_each_row(runs: dict[str, Path]) -> None:
    there, here = (of_runs.ComparedRun.of(runs[name]) for name in ("a", "b"))
    values = np.load(runs["a"] / "npy.npy")
    order = of_runs._order(there, here, "npy")
    assert order is not None
    assert order.lengths == (len(values), len(values))
    for row, half in enumerate(values):
        place = order.of(row)
        epoch, element = divmod(place["element"], LENGTH)
        assert (epoch, element) == (row // LENGTH, 2 * half)
        assert place["step"] == epoch * -(-LENGTH // BATCH) + row % LENGTH // BATCH
    assert of_runs._order(there, here, "sums") is None, "its rows are not elements"


GOLDEN = """\
A: FOLDER/a (run ID, finished)
B: FOLDER/b (run ID, finished)
spec
  stages.values.with.bad: -1 in A, 17 in B
  stages.wide.with.bad: -1 in A, 17 in B
  stages.array.with.bad: -1 in A, 17 in B
results
  large: 2 of 100 rows differ, max abs 1, max rel 0.105
    first at row 16 (step 2, replica 0, element 17), [0]: 8.5 in A, 9.5 in B
  npy (npy.npy): 2 of 100 rows differ, max abs 1, max rel 0.105
    first at row 16 (step 2, replica 0, element 17): 8.5 in A, 9.5 in B
  npz (npz.npz): 2 of 100 rows differ, max abs 1, max rel 0.105
    first at row 16 (step 2, replica 0, element 17), y: 8.5 in A, 9.5 in B
  csv (csv.csv): 2 of 100 rows differ, max abs 1, max rel 0.105
    first at row 16 (step 2, replica 0, element 17), y: '8.5' in A, '9.5' in B
  jsonl (jsonl.jsonl): 2 of 100 rows differ, max abs 1, max rel 0.105
    first at row 16 (step 2, replica 0, element 17), y: 8.5 in A, 9.5 in B
  parquet (parquet.parquet): 2 of 100 rows differ, max abs 1, max rel 0.105
    first at row 16 (step 2, replica 0, element 17), y: 8.5 in A, 9.5 in B
  json (json.json): 2 of 100 rows differ, max abs 1, max rel 0.105
    first at row 16 (step 2, replica 0, element 17), y: 8.5 in A, 9.5 in B
  sums: 2 of 14 rows differ, max abs 1, max rel 0.0114
    first at row 2 (step 2): 114.0 in A, 115.0 in B
The runs differ.
"""

FAILED = """\
A: FOLDER/a (run ID, finished)
B: FOLDER/failed (run ID, failed)
B has failed, so it has no results
"""


def test_the_text_of_typical_differences(runs: dict[str, Path]) -> None:
    def printed(a: str, b: str) -> tuple[int, str]:
        outcome = CliRunner().invoke(app, ["diff", str(runs[a]), str(runs[b])])
        text = re.sub("run [0-9a-f]{16}", "run ID", outcome.output.replace(str(runs["a"].parent), "FOLDER"))
        return outcome.exit_code, text

    assert printed("a", "b") == (1, GOLDEN)
    code, text = printed("a", "failed")
    assert code == 1
    assert text.startswith(FAILED)
    assert "  state: 'finished' in A, 'failed' in B\n" in text
    assert "  npy: B has no value\n" in text
    assert printed("a", "same")[0] == 0


def checked(x: np.ndarray, rejects: list[int], shift: int) -> dict[str, Any]:
    if np.isin(x, rejects).any():
        raise ValueError("a bad element")
    return {"id": x, "y": x / 2 + (x == shift) / 4}


def halves_of(x: dict[str, np.ndarray]) -> np.ndarray:
    return x["y"]


def quarantined_spec(rejects: list[int], shift: int) -> dict[str, Any]:
    name = f"{__name__}:"
    stage = {"run": name + "checked", "with": {"rejects": rejects, "shift": shift}, "on_error": "quarantine"}
    return spec(-1) | {
        "stages": {
            "values": stage,
            "array": {"run": name + "halves_of", "of": "values"},
            **{e: {"gather": 0, "of": "array" if e == "npy" else "values"} for e in ENDINGS},
            "kept": {"gather": 0, "of": "array"},
        },
    }


@pytest.fixture(scope="module")
def quarantined(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two runs: both lack element 3, A also 17 and 23, B also 40; element 11 has another value in B."""
    folder = tmp_path_factory.mktemp("quarantined")
    pipedist.run(quarantined_spec([3, 17, 23], -1), output=folder / "a")
    pipedist.run(quarantined_spec([3, 40], 11), output=folder / "b")
    return folder / "a", folder / "b"


@pytest.mark.parametrize("stage", [*ENDINGS, "kept"])
def test_rows_are_compared_by_element(
    quarantined: tuple[Path, Path], stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipedist.report.file_differences.BLOCK_BYTES", 64)
    found = of_runs.compare(*quarantined)
    entry = next(each for each in found["results"] if each["stage"] == stage)
    assert not entry["same"]
    assert (entry["rows"], entry["differing"], entry["max_abs"]) == ([94, 96], 2, 0.25)
    assert {name: each["rows"] for name, each in entry["only"].items()} == {"a": 2, "b": 4}
    assert {*entry["only"]["a"]["elements"]} == {40, LENGTH + 40}
    assert {*entry["only"]["b"]["elements"]} == {17, 23, LENGTH + 17, LENGTH + 23}
    first = entry["first"]
    assert first["element"] == 11
    files = [np.load(path / "npy.npy") for path in quarantined]
    rows = [int(np.flatnonzero(values == y)[0]) for values, y in zip(files, (5.5, 5.75), strict=True)]
    assert [first["row"], first["row_b"]] == rows
    [line, _] = of_runs._of_entry(entry)
    assert ": 94 rows in A, 96 in B, 2 rows only in A (elements " in line
    assert ", 2 of 92 rows differ, max abs 0.25," in line


def test_rows_of_other_data_or_of_very_many_elements_are_not_compared_by_element(
    quarantined: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    there, here = map(of_runs.ComparedRun.of, quarantined)
    assert of_runs._order(there, here, "csv") is not None
    plan = {"datasets": {"dataset": {"elements_per_epoch": LENGTH + 1}}}
    longer = replace(here, about={**here.about, "plan": plan})
    assert of_runs._order(there, longer, "csv") is None
    monkeypatch.setattr(of_runs, "POSITIONS_MAX", LENGTH)
    assert of_runs._order(there, here, "csv") is None


def test_other_quarantined_elements_are_named(quarantined: tuple[Path, Path]) -> None:
    entry = of_runs.compare(*quarantined)["results"][-1]
    assert (entry["file"], entry["same"], entry["differing"]) == ("quarantine.jsonl", False, 0)
    assert {*entry["only"]["a"]["elements"]} == {17, 23, LENGTH + 17, LENGTH + 23}
    assert {*entry["only"]["b"]["elements"]} == {40, LENGTH + 40}


def test_quarantined_elements_in_another_order_are_compared_by_line(
    quarantined: tuple[Path, Path], tmp_path: Path
) -> None:
    import shutil

    copy = shutil.copytree(quarantined[0], tmp_path / "copy")
    lines = (copy / "quarantine.jsonl").read_text().splitlines()
    (copy / "quarantine.jsonl").write_text("\n".join(reversed(lines)) + "\n")
    entry = of_runs.compare(quarantined[0], copy)["results"][-1]
    assert (entry["same"], entry["differing"], "only" in entry) == (False, 6, False)


def test_a_quarantine_that_is_no_json_is_reported(quarantined: tuple[Path, Path], tmp_path: Path) -> None:
    import shutil

    copy = shutil.copytree(quarantined[0], tmp_path / "copy")
    (copy / "quarantine.jsonl").write_text("{")
    assert of_runs.compare(quarantined[0], copy)["results"][-1]["problem"].startswith("can't be compared: ")


def test_a_restored_row_is_the_only_difference(quarantined: tuple[Path, Path], tmp_path: Path) -> None:
    pipedist.run(
        quarantined_spec([17, 23], -1) | {"dataset": {"range": LENGTH, "batch": BATCH}}, output=tmp_path / "a"
    )
    pipedist.run(
        quarantined_spec([17], -1) | {"dataset": {"range": LENGTH, "batch": BATCH}}, output=tmp_path / "b"
    )
    found = of_runs.compare(tmp_path / "a", tmp_path / "b")
    assert not found["same"]
    [line] = of_runs._of_entry(next(each for each in found["results"] if each["stage"] == "csv"))
    assert line == "  csv (csv.csv): 48 rows in A, 49 in B, 1 row only in B (element 23)"
    [line] = of_runs._of_entry(found["results"][-1])
    assert line == "  quarantine.jsonl: 2 rows in A, 1 in B, 1 row only in A (element 23)"


def test_the_json_document(runs: dict[str, Path]) -> None:
    outcome = CliRunner().invoke(app, ["diff", "--json", str(runs["a"]), str(runs["b"])])
    assert json.loads(outcome.output) == of_runs.compare(runs["a"], runs["b"])


def test_a_folder_without_a_run(runs: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(pipedist.UsageError, match="there is no run in"):
        of_runs.compare(runs["a"], tmp_path / "other")


def test_a_missing_output_and_journal(runs: dict[str, Path], tmp_path: Path) -> None:
    import shutil

    copy = shutil.copytree(runs["a"], tmp_path / "copy")
    (copy / "csv.csv").unlink()
    shutil.rmtree(copy / ".pipedist/journal")
    found = of_runs.compare(runs["a"], copy)
    assert [e["problem"] for e in found["results"] if not e["same"]] == ["B has no csv.csv"]
    again = of_runs.compare(copy, copy)
    assert [e["problem"] for e in again["results"] if not e["same"]] == [
        "A has no csv.csv and B has no csv.csv"
    ]
    assert found["notes"] == [
        "the journal of B is missing, or of another version, so specs, inputs and code are not compared"
    ]


# -- files --------------------------------------------------------------------------------------------

Pair = Callable[[Any, Any], Differences]


@pytest.fixture
def arrays(tmp_path: Path) -> Pair:
    def compare(a: Any, b: Any) -> Differences:
        np.save(tmp_path / "a.npy", a)
        np.save(tmp_path / "b.npy", b)
        return compare_files(tmp_path / "a.npy", tmp_path / "b.npy")

    return compare


@pytest.fixture
def texts(tmp_path: Path) -> Callable[[str, str, str], Differences]:
    def compare(ending: str, a: str, b: str) -> Differences:
        paths = [tmp_path / f"{name}{ending}" for name in "ab"]
        for path, text in zip(paths, (a, b), strict=True):
            path.write_text(text)
        return compare_files(*paths)

    return compare


def test_nan_equals_nan_and_infinities_differ(arrays: Pair) -> None:
    assert arrays([1.0, np.nan, np.inf], [1.0, np.nan, np.inf]).is_empty
    found = arrays([np.nan, np.nan, 1.0], [np.nan, 1.0, 1.5])
    assert (found.row, found.first, found.differing) == (1, ("nan", "1.0"), 2)
    assert (found.nan, found.max_abs, found.max_rel) == (1, 0.5, 0.5 / 1.5)
    found = arrays([1.0, 2.0], [np.inf, np.nan])
    assert (found.nan, found.max_abs, found.max_rel) == (1, np.inf, np.inf)
    found = arrays([1, 2], [np.nan, 2.0])
    assert (found.nan, found.max_abs, found.differing) == (1, 0.0, 1)


def test_the_text_of_a_number_that_is_nan_in_one_run() -> None:
    found = Differences(rows=(9, 9), differing=3, nan=1, max_abs=0.5, max_rel=0.25)
    [line] = of_runs._of_entry(of_runs._entry("y", "y.npy", "", found))
    assert (
        line == "  y (y.npy): 3 of 9 rows differ, 1 number is NaN in one run only, max abs 0.5, max rel 0.25"
    )


def test_zeros_of_other_signs_differ_in_bytes(arrays: Pair) -> None:
    found = arrays([0.0], [-0.0])
    assert found.problem == "the values are equal, but not the bytes, such as the signs of zeros"


def test_large_integers_are_compared_exactly(arrays: Pair) -> None:
    found = arrays(np.array([2**62, -(2**63)]), np.array([2**62 + 1, 2**63 - 1]))
    assert (found.differing, found.max_abs) == (2, float(2**64 - 1))


def test_dtypes_and_shapes(arrays: Pair) -> None:
    found = arrays(np.array([1, 2]), np.array([1.0, 2.5]))
    assert (found.problem, found.differing, found.max_abs) == ("dtype int64 in A, float64 in B", 1, 0.5)
    assert arrays(np.zeros((2, 3)), np.zeros((2, 4))).problem == (
        "shape [2, 3] in A, [2, 4] in B, which are not compared"
    )
    assert arrays(["a"], [1]).problem == "dtype <U1 in A, int64 in B, which are not compared"
    assert arrays(np.zeros(3), np.zeros(5)).rows == (3, 5)
    found = arrays(np.zeros((2, 3)), np.array([[0, 0, 0], [0, 4.0, 0]]))
    assert (found.row, found.path, found.differing) == (1, "[1]", 1)
    assert arrays(np.float64(1), np.float64(3)).max_abs == 2


def test_blocks_of_a_large_array(arrays: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipedist.report.file_differences.BLOCK_BYTES", 64)
    a = np.arange(300.0).reshape(100, 3)
    b = a.copy()
    b[[40, 77], 1] += [1, 3]
    found = arrays(a, b)
    assert (found.row, found.path, found.differing, found.max_abs) == (40, "[1]", 2, 3.0)


def test_columns_rows_and_texts(texts: Callable[[str, str, str], Differences]) -> None:
    found = texts(".csv", "a,b\n1,x\n2,y\n", "a,b\n1,x\n2,z\n3,z\n")
    assert (found.rows, found.differing, found.path, found.first) == ((2, 3), 1, "b", ("'y'", "'z'"))
    found = texts(".csv", "a\n1\n", "b\n1\n")
    assert found.problem == "columns differ: ['a'] in A, ['b'] in B"
    found = texts(".jsonl", '{"a": [1, 2]}\n', '{"a": [1, 2.5]}\n')
    assert (found.path, found.first, found.max_abs) == ("a[1]", ("2", "2.5"), 0.5)
    assert texts(".json", "{", "[").problem.startswith("can't be compared: ")
    assert texts(".bin", "a", "b").problem == "their bytes differ"


def test_nan_in_text(texts: Callable[[str, str, str], Differences]) -> None:
    found = texts(".csv", "a,b\n1,nan\nnan,2\n", "a,b\n1,4\nnan,2.5\n")
    assert (found.nan, found.differing, found.max_abs) == (1, 2, 0.5)
    found = texts(".json", '["NaN", 1.0]', '[2.0, "NaN"]')
    assert (found.nan, found.max_abs) == (2, 0.0)


def test_trees() -> None:
    assert compare_trees({"a": [1, {"b": 2}]}, {"a": [1, {"b": 2}]}).is_empty
    found = compare_trees({"a": {"b": 2}}, {"a": {"c": 2}})
    assert (found.path, found.first) == ("a/b", ("2", "nothing"))
    assert compare_trees([1, 2], [1, 2, 3]).rows == (2, 3)
