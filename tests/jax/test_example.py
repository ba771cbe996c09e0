"""The example runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_trains_as_numpy_does() -> None:
    assert "accuracy on held-out images: 0.97" in run(str(ROOT / "examples" / "jax_digits.py"))
