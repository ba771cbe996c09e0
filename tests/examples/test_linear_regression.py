"""The training example learns the numbers that its data was made with."""

from __future__ import annotations

import sys
from pathlib import Path

from tests import preloaded

EXAMPLE = Path(__file__).parents[2] / "examples" / "linear_regression.py"


def test_it_learns() -> None:
    done = preloaded.run(
        [sys.executable, str(EXAMPLE)], check=True, timeout=60, capture_output=True, text=True
    )
    *epochs, result = done.stdout.splitlines()
    losses = [float(line.split(": ")[1]) for line in epochs]
    assert len(losses) == 5
    assert losses == sorted(losses, reverse=True)
    assert result == "w = [ 1.  -2.   0.5] b = 0.25"
    assert done.stderr == ""
