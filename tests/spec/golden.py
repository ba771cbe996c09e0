"""The exact error of every spec in specs/invalid.

After a change of wording: `python tests/spec/golden.py` writes the error texts anew, and
`git diff specs/invalid` is read line by line before it is committed: would a stranger know
what to do next? A new mistake is a new NAME.yaml there, and the same command.
"""

from __future__ import annotations

import os
from pathlib import Path

from pipedist.errors import SpecError
from pipedist.spec import load

ROOT = Path(__file__).parents[2]
INVALID = Path("specs/invalid")


def error_of(path: Path) -> str:
    """Return the error of the spec at `path`, which is relative to the project's root."""
    try:
        load(path, env={})
    except SpecError as error:
        return f"{error}\n"
    raise AssertionError(f"{path} has no mistake")


def names() -> list[str]:
    return sorted(path.stem for path in (ROOT / INVALID).glob("*.yaml"))


if __name__ == "__main__":
    os.chdir(ROOT)
    for name in names():
        (INVALID / f"{name}.txt").write_text(error_of(INVALID / f"{name}.yaml"))
