from __future__ import annotations

import re

import pytest

from tests.spec import golden


@pytest.mark.parametrize("name", golden.names())
def test_every_invalid_spec_gives_exactly_its_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(golden.ROOT)
    expected = (golden.INVALID / f"{name}.txt").read_text()
    assert golden.error_of(golden.INVALID / f"{name}.yaml") == expected, "see tests/spec/golden.py"


@pytest.mark.parametrize("name", golden.names())
def test_every_problem_has_line_and_column_and_plain_words(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(golden.ROOT)
    text = golden.error_of(golden.INVALID / f"{name}.yaml")
    heads = [line for line in text.splitlines() if not line.startswith("    ")]
    assert heads
    for head in heads:
        assert re.match(rf"specs/invalid/{name}\.yaml:\d+:\d+: \S", head), head
    for jargon in (
        "Input should",
        "pydantic",
        "Extra inputs",
        "Field required",
        "type=",
        "ruamel",
        "<unicode",
    ):
        assert jargon not in text


def test_there_are_many_kinds_of_mistakes_and_no_stray_file() -> None:
    folder = golden.ROOT / golden.INVALID
    assert len(golden.names()) >= 60
    assert sorted(path.stem for path in folder.glob("*.txt")) == golden.names()
