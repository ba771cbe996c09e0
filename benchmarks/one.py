"""Measures one system in one workload, once, in this process: `python -m benchmarks.one pool W1`.

Prints one line: MARK and a JSON object with `value` (null where there is none) and `detail`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.sizes import FULL, SMOKE
from benchmarks.systems import SYSTEMS
from benchmarks.workloads import WORKLOADS, Workload

MARK = "MEASURED "


def measure(system: str, workload: Workload, *, smoke: bool, data: Path) -> dict[str, Any]:
    """Return what came out: value, detail, and what is the matter if there is no value."""
    sizes = SMOKE if smoke else FULL
    try:
        adapter = SYSTEMS[system].make()
        if workload.starts:
            adapter.start()
        try:
            measured = workload.measure(adapter, sizes, data)
        finally:
            if workload.starts:
                adapter.stop()
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        return {"value": None, "outcome": text[:500], "detail": {}}
    return {
        "value": measured.value,
        "outcome": "",
        "detail": dict(measured.detail),
        "settings": dict(adapter.settings),
    }


def main() -> None:
    """Be the process of one measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--data", type=Path, default=Path())
    options = parser.parse_args()
    workload = WORKLOADS[options.workload]
    result = measure(options.system, workload, smoke=options.smoke, data=options.data)
    print(MARK + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
