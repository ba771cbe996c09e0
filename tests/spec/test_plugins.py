"""Keys of sources that other packages register: in specs, plans and the schema."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from jsonschema import Draft7Validator

from pipedist.core.plugins import registered
from pipedist.errors import SpecError
from pipedist.plan.compiler import compile_plan
from pipedist.plan.view import as_text
from pipedist.spec import load
from pipedist.spec.schema import json_schema
from tests.core.test_plugins import install

READERS = "tests.datasets.sources.sample_readers"


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install a package that registers two sources."""
    monkeypatch.syspath_prepend(str(tmp_path))
    registered.cache_clear()
    install(
        tmp_path, "scans", f"squares = {READERS}:Squares", "gone = not_there:Reader", "csv = not_there:Csv"
    )
    yield
    registered.cache_clear()


def written(folder: Path, dataset: str) -> Path:
    path = folder / "s.yaml"
    path.write_text(
        f"pipedist: 1\nparams: {{n: 7}}\ndataset: {{{dataset}, batch: 4}}\n"
        "stages: {all: {gather: 0, of: dataset}}\n"
    )
    return path


def test_the_key_of_a_plugin_is_short_for_its_class(tmp_path: Path) -> None:
    spec = load(written(tmp_path, 'squares: {count: "${params.n}", broken: [1, 2]}'))
    assert spec.datasets["dataset"].kind == "source"
    plan = compile_plan(spec, workers=1)
    assert f"dataset: source {READERS}:Squares, 7 elements" in as_text(plan)
    plan.close()


def test_the_schema_describes_the_arguments() -> None:
    whole = json_schema()
    schema = whole["definitions"]["DatasetSpec"]["properties"]["squares"]
    assert schema["description"] == "Reads numbers and their squares."
    assert schema["properties"]["count"]["description"] == "how many. Expected: an integer."
    assert schema["required"] == ["count"]
    assert "can't be used" in whole["definitions"]["DatasetSpec"]["properties"]["gone"]["description"]
    document = {
        "pipedist": 1,
        "dataset": {"squares": {"count": 3}, "batch": 1},
        "stages": {"a": {"gather": 0, "of": "d"}},
    }
    Draft7Validator.check_schema(whole)
    assert Draft7Validator(whole).is_valid(document)
    document["dataset"] = {"squares": {"count": "x"}, "batch": 1}
    assert not Draft7Validator(whole).is_valid(document)


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ("squares: {count: x}", "3:28: `count` must be an integer, got 'x'"),
        ("squares: {}", "3:11: `count` is missing"),
        (
            "squares: {count: 3, brokn: []}",
            "3:31: unknown key `brokn`\n.*\n.*\n.*count, broken or version\n.*'broken'",
        ),
        ("squares: 3", "3:20: `squares` must be a mapping, got 3"),
        ("gone: {}", r"3:11: `gone` of scans 1\.0 can't be used: .*no module 'not_there'"),
        ("sqares: {count: 3}", "unknown key `sqares`(.*\n)*.*did you mean 'squares'"),
        ("csv: {}", "`path` is missing"),
    ],
)
def test_problems_are_at_the_key_of_the_plugin(tmp_path: Path, dataset: str, message: str) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        load(written(tmp_path, dataset))
    assert "source" not in caught.value.problems[0].message
