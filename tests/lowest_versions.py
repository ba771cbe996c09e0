"""Print the lowest versions that pyproject.toml allows of what users install, as constraints for pip."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

EXTRAS = ("parquet", "fsspec", "live")  # of which the tests that make test-lowest runs need some
_BOUND = re.compile(r"(?P<name>[\w.-]+)(\[[\w,-]+\])?\s*>=\s*(?P<version>[\w.]+)")


def constraints(pyproject: Path) -> list[str]:
    """Return `NAME==VERSION` for each dependency of the package and of some extras."""
    project = tomllib.loads(pyproject.read_text())["project"]
    extras = project["optional-dependencies"]
    required = [*project["dependencies"], *(each for extra in EXTRAS for each in extras[extra])]
    found = [_BOUND.match(each) for each in required]
    assert all(found), "each dependency has a lower bound"
    return [f"{match['name']}=={match['version']}" for match in found if match]


if __name__ == "__main__":
    print("\n".join(constraints(Path(__file__).parents[1] / "pyproject.toml")))
