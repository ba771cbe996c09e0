"""Sinks that are classes of the user, or of another package."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft7Validator

import pipedist
from pipedist.core.plugins import registered
from pipedist.errors import OutputError, PlanError, SpecError
from pipedist.spec import load
from pipedist.spec.schema import json_schema
from tests.core.test_plugins import install

WRITERS = "tests.outputs.sample_writers"


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(tmp_path))
    registered.cache_clear()
    install(tmp_path, "lines", f"lines = {WRITERS}:Lines", group="pipedist.sinks")
    importlib.invalidate_caches()
    yield
    registered.cache_clear()


def rows(shard: Any) -> Any:
    return {"n": shard, "s": np.array([f"s{n}" for n in shard])}


def spec(output: Any) -> dict[str, Any]:
    return {
        "pipedist": 1,
        "dataset": {"range": 7, "batch": 3},
        "stages": {"rows": {"run": rows}, "all": {"gather": 0, "of": "rows"}},
        "outputs": {"all": output},
    }


@pytest.mark.parametrize(
    "output",
    [
        {"lines": {"path": "deep/rows.lines", "separator": ","}},
        pytest.param(
            {"sink": {"path": "deep/rows.lines", "class": f"{WRITERS}:Lines", "with": {"separator": ","}}},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_class_writes_the_rows(tmp_path: Path, output: Any) -> None:
    result = pipedist.run(spec(output), workers=1, output=tmp_path / "out")
    assert result["all"] == tmp_path / "out/deep/rows.lines"
    assert result["all"].read_text() == "".join(f"{n},s{n}\n" for n in range(7))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [".pipedist", "deep"]


@pytest.mark.slow
def test_errors_of_a_class_name_it_and_leave_nothing(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"outputs\.all \(a\.lines\): .*Lines raised ValueError: no 4"):
        pipedist.run(spec({"lines": {"path": "a.lines", "fail_at": 4}}), workers=1, output=tmp_path / "out")
    with pytest.raises(OutputError, match="Nothing wrote nothing to the path"):
        pipedist.run(
            spec({"sink": {"path": "a", "class": f"{WRITERS}:Nothing"}}), workers=1, output=tmp_path / "two"
        )
    assert [path.name for path in (tmp_path / "two").iterdir()] == [".pipedist"]


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ({"lines": {"path": "a", "seperator": ","}}, "unknown key `seperator`"),
        ({"lines": {"path": "a", "separator": 3}}, "`separator` must be a text, got 3"),
        ({"lines": {"separator": ","}}, "`path` is missing"),
        ({"sqlite": {"path": "a.db"}}, r"'a.db' does not end in \.sqlite"),
        ({"parquet": {"path": "a.parquet", "partition": "x"}}, "unknown key `partition`"),
        (
            {"parquet": {"path": "a.parquet", "rows_per_file": 0}},
            "`rows_per_file` must be a positive whole number",
        ),
        ("thumbs/{}.png", "has no name of a column in braces"),
        ("../{k}.png", "outside the output folder"),
    ],
)
def test_outputs_that_are_wrong_are_errors_of_the_spec(output: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        load(spec(output))


@pytest.mark.parametrize(
    ("class_", "message"),
    [
        (f"{WRITERS}:Line", "has no `Line`|Line"),
        ("builtins:int", "has no method append and no close"),
        (f"{WRITERS}:Nothing", "can't be called as"),
    ],
)
def test_classes_that_are_no_sinks_are_errors_of_the_plan(tmp_path: Path, class_: str, message: str) -> None:
    output = {"sink": {"path": "a", "class": class_, "with": {"x": 1}}}
    with pytest.raises(PlanError, match=message):
        pipedist.run(spec(output), workers=1, output=tmp_path / "out")


def test_the_schema_has_the_keys_of_all_sinks() -> None:
    whole = json_schema()
    Draft7Validator.check_schema(whole)
    for output, is_valid in [
        ({"lines": {"path": "a", "separator": ","}}, True),
        ({"lines": {"separator": ","}}, False),
        ({"parquet": {"path": "a.parquet", "partition_by": "x"}}, True),
        ({"parquet": {"path": "a.parquet", "partition": "x"}}, False),
        ({"part": {"sqlite": {"path": "a.sqlite"}}, "other": "b.npy"}, True),
        ("thumbs/{k}.png", True),
    ]:
        document = {**spec(output), "stages": {"all": {"gather": 0, "of": "dataset"}}}
        assert Draft7Validator(whole).is_valid(document) == is_valid, output
