"""Every key of every shipped spec, misspelled: an error at the key which names the right one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pipedist.errors import SpecError
from pipedist.spec import load
from pipedist.spec.diagnostics import Path as KeyPath
from pipedist.spec.diagnostics import Place
from pipedist.spec.yaml_text import read_yaml
from tests.spec.golden import ROOT

ENVIRONMENT = {"MODEL_URL": "http://127.0.0.1:8000"}  # variables that shipped specs read
SHIPPED = [*sorted((ROOT / "specs").glob("*.yaml")), *sorted((ROOT / "examples").glob("**/*.yaml"))]


def of_the_language(path: KeyPath) -> bool:
    """Whether the key is a word of the language, not a name of the user's."""
    if (
        path[0] in ("params", "outputs")
        or "with" in path[:-1]
        or "columns" in path[:-1]
        or "init" in path[:-1]
    ):
        return False
    return not (path[0] in ("datasets", "stages") and len(path) == 2)


def keys() -> Iterator[tuple[Path, KeyPath, Place]]:
    for spec in SHIPPED:
        document, _ = read_yaml(spec.read_bytes(), spec.name)
        for path, place in document.keys.items():
            if of_the_language(path) and len(str(path[-1])) > 1:
                yield spec, path, place


def misspellings(word: str) -> set[str]:
    swapped = word[:-2] + word[-1] + word[-2]
    return {word + word[-1], swapped, word[0] + word} - {word}


@pytest.mark.parametrize(
    ("spec", "path", "place"),
    [pytest.param(*k, id=f"{k[0].stem}:{'.'.join(map(str, k[1]))}") for k in keys()],
)
def test_a_misspelled_key(spec: Path, path: KeyPath, place: Place, tmp_path: Path) -> None:
    word = str(path[-1])
    for wrong in misspellings(word):
        lines = spec.read_text().splitlines(keepends=True)
        line = lines[place.line - 1]
        at = place.column - 1
        assert line[at : at + len(word)] == word
        lines[place.line - 1] = line[:at] + wrong + line[at + len(word) :]
        copy = tmp_path / "spec.yaml"
        copy.write_text("".join(lines))
        with pytest.raises(SpecError) as caught:
            load(copy, env=ENVIRONMENT)
        problem = next(p for p in caught.value.problems if p.message == f"unknown key `{wrong}`")
        assert problem.where == f"{copy}:{place.line}:{place.column}"
        assert problem.nearest == word
        assert len(caught.value.problems) == 1, "one misspelled key is one problem"


def test_there_are_shipped_specs() -> None:
    assert len(SHIPPED) >= 5
    for spec in SHIPPED:
        load(spec, env=ENVIRONMENT)
