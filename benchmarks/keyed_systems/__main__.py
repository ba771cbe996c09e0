"""Run one job of one system, and print its time and memory as JSON: SYSTEM JOB PATH WORKERS."""

from __future__ import annotations

import importlib
import json
import re
import sys
import time
from pathlib import Path


def peak_mb() -> int:
    """Return the largest resident memory of this process so far, without its children."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) // 1024


def main() -> None:
    system, job, path, workers = sys.argv[1:]
    module = importlib.import_module(f"benchmarks.keyed_systems.{system}_jobs")
    with module.Jobs(int(workers)) as jobs:
        began = time.perf_counter()
        keys, total, largest = getattr(jobs, job)(path)
        seconds = time.perf_counter() - began
    answer = {"keys": int(keys), "total": round(float(total), 3), "largest": round(float(largest), 3)}
    print(json.dumps({"seconds": seconds, "peak_mb": peak_mb(), "answer": answer}))


if __name__ == "__main__":
    main()
