from __future__ import annotations

import pytest

from pipedist.outputs import check_output


@pytest.mark.parametrize(
    ("path", "verb", "per", "op_or_axis"),
    [
        ("a.json", "reduce", "run", "sum"),
        ("sub/a.npz", "gather", "step", 1),
        ("a.csv", "gather", "run", 0),
        ("a.csv", "gather", "run", -1),
        ("a.parquet", "reduce", "epoch", "mean"),
        ("a.jsonl", "update", "run", None),
        ("..a.json", "reduce", "run", "sum"),
    ],
)
def test_what_fits(path: str, verb: str, per: str, op_or_axis: str | int | None) -> None:
    assert check_output(path, verb, per, op_or_axis) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("path", "verb", "per", "op_or_axis", "word"),
    [
        ("a.txt", "reduce", "run", "sum", ".parquet"),
        ("a", "reduce", "run", "sum", "'nothing'"),
        ("a.csv", "gather", "run", 1, "2 dimensions"),
        ("a.parquet", "gather", "step", 0, "many rows"),
        ("/etc/a.json", "reduce", "run", "sum", "below"),
        ("../a.json", "reduce", "run", "sum", "below"),
        ("a/../../b.json", "reduce", "run", "sum", "below"),
        (".pipedist/run.json", "reduce", "run", "sum", "belongs"),
        ("./.pipedist/run.json", "reduce", "run", "sum", "belongs"),
        ("", "reduce", "run", "sum", "file"),
        (".", "reduce", "run", "sum", "file"),
        ("a.json/", "reduce", "run", "sum", "file"),
        ("a\0.json", "reduce", "run", "sum", "file"),
    ],
)
def test_what_does_not_fit(path: str, verb: str, per: str, op_or_axis: str | int | None, word: str) -> None:
    problem = check_output(path, verb, per, op_or_axis)  # type: ignore[arg-type]
    assert problem is not None
    assert word in problem
    assert not problem.endswith(".")
    assert "\n" not in problem


def test_missing_pyarrow_is_a_problem_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipedist.outputs.formats._installed", lambda module: False)
    assert "pipedist[parquet]" in (check_output("a.parquet", "reduce", "run", "sum") or "")
