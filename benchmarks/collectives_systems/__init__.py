"""The systems of the collectives benchmark: each module is run as a process of its own.

    python -m benchmarks.collectives_systems.NAME REPLICAS [--smoke]

It prints one line, `MEASURED {"4096": seconds, ...}`.
"""

from __future__ import annotations

import argparse
import json

from benchmarks.collectives_loop import FULL, SMOKE, Size

MARK = "MEASURED "


def options() -> tuple[int, tuple[Size, ...]]:
    """Return the number of replicas and the sizes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("replicas", type=int)
    parser.add_argument("--smoke", action="store_true")
    given = parser.parse_args()
    return given.replicas, SMOKE if given.smoke else FULL


def tell(found: dict[int, float]) -> None:
    """Print what was measured."""
    print(MARK + json.dumps(found), flush=True)
