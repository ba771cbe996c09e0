"""Each command of docs/contributing/reliability.md exists, and selects tests."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = [
    line
    for line in (ROOT / "docs" / "contributing" / "reliability.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith(("| fault |", "| what |"))
]
COMMANDS = sorted({found for row in ROWS for found in re.findall(r"`((?:pytest|make) [^`]*)`", row)})


def test_every_row_has_a_command() -> None:
    assert len(ROWS) > 30
    assert [row for row in ROWS if not re.search(r"`(pytest|make) ", row)] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_selects_tests(command: str) -> None:
    program, *words = shlex.split(command)
    if program == "make":
        assert f"\n{words[0]}: " in (ROOT / "Makefile").read_text()
        return
    selected = words[words.index("-k") + 1].split(" or ") if "-k" in words else []
    places = [ROOT / word for word in words if word.startswith("tests/")]
    text = ""
    for place in places:
        assert place.exists(), place
        files = [place] if place.suffix else sorted(place.rglob("test_*.py"))
        text += "".join(f"{file.stem}\n{file.read_text()}" for file in files)
    for word in selected:
        assert re.search(rf"def test_\w*{word}", text, re.IGNORECASE), (
            f"no test of {places} is called {word!r}"
        )
