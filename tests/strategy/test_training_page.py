"""The program in docs/how-to/training-loop.md, in more ways than tests/docs runs it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "training-loop.md").read_text()
TRANSCRIPT = re.compile(r"```console\n(.*?)```", re.S)


def commands() -> list[tuple[list[str], str]]:
    """Return the arguments of each command of the page, and its output."""
    found = []
    for part in TRANSCRIPT.findall(PAGE)[0].split("$ python ")[1:]:
        words, _, output = part.partition("\n")
        found.append((words.split(), output))
    return found


def run(folder: Path, *arguments: str) -> str:
    (folder / "train.py").write_text("\n\n".join(re.findall(r"```python[^\n]*\n(.*?)```", PAGE, re.S)))
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_page_prints_its_transcript_and_continues_with_the_same_bits(tmp_path: Path) -> None:
    for arguments, expected in commands():
        assert run(tmp_path, *arguments) == expected
    (tmp_path / "whole").mkdir()
    assert run(tmp_path / "whole", "train.py", "adam", "4") == "".join(output for _, output in commands())
    assert (tmp_path / "whole/train.npz").read_bytes() == (tmp_path / "train.npz").read_bytes()


@pytest.mark.slow
def test_momentum_trains_too(tmp_path: Path) -> None:
    accuracy = float(run(tmp_path, "train.py", "momentum", "2").split()[-1])
    assert accuracy > 0.8


@pytest.mark.parametrize("name", ["Momentum", "Adam"])
def test_an_optimizer_has_few_lines(name: str) -> None:
    (code,) = re.findall(rf"class {name}:\n(?:    .*\n|\n(?=    ))*", PAGE)
    assert len([line for line in code.splitlines() if line]) <= 16
