"""What tests of engines share: a run that takes a while, and what may not be left behind."""

from __future__ import annotations

import functools
import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pipedist

F = "tests.engines.functions"
PATIENCE_S = 60.0


def document(run: str, **with_: object) -> dict[str, Any]:
    """60 steps of two replicas: float sums, whose last bits would tell of another order."""
    return {
        "pipedist": 1,
        "replicas": 2,
        "dataset": {"range": 600, "batch": 10},
        "stages": {
            "roots": {"run": f"{F}:{run}", "with": with_},
            "total": {"reduce": "sum", "of": "roots", "axis": 0},
            "all": {"gather": 0, "of": "roots"},
        },
    }


def digest(result: pipedist.Result) -> str:
    """What the values are, to the last bit."""
    return hashlib.sha256(result["total"].tobytes() + result["all"].tobytes()).hexdigest()


@functools.cache
def undisturbed() -> str:
    return digest(pipedist.run(document("roots"), workers=1))


def wait_until(condition: Callable[[], bool], within_s: float = PATIENCE_S) -> bool:
    """Look until something outside this process is so; bounded, where no event tells."""
    end = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def steps_begun(folder: Path) -> int:
    return len({path.name.split("-")[0] for path in folder.iterdir()})


def processes_with(mark: str) -> dict[int, str]:
    """Return the living processes whose environment has a mark, whoever their parent is now."""
    found = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            if mark.encode() in Path("/proc", entry, "environ").read_bytes():
                found[int(entry)] = Path("/proc", entry, "cmdline").read_text().replace("\0", " ")[:120]
        except OSError:
            continue  # it ended meanwhile, or is somebody else's
    return found
