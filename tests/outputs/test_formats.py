from __future__ import annotations

import pytest

from pipedist.outputs import missing_package
from pipedist.outputs.run_record import path_problem


@pytest.mark.parametrize("path", ["a.json", "sub/a.npz", "./a.csv", "..a.json"])
def test_a_path_below_the_folder(path: str) -> None:
    assert path_problem(path) is None


@pytest.mark.parametrize(
    ("path", "word"),
    [
        ("/etc/a.json", "below"),
        ("../a.json", "below"),
        ("a/../../b.json", "below"),
        (".pipedist/run.json", "belongs"),
        ("./.pipedist/run.json", "belongs"),
        ("", "file"),
        (".", "file"),
        ("a.json/", "file"),
        ("a\0.json", "file"),
    ],
)
def test_another_path(path: str, word: str) -> None:
    problem = path_problem(path)
    assert problem is not None
    assert word in problem
    assert not problem.endswith(".")
    assert "\n" not in problem


def test_missing_pyarrow_is_a_problem_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda module: None)
    assert "pipedist[parquet]" in (missing_package("parquet") or "")
    assert missing_package("json") is None
