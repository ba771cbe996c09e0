"""Run one job of one system, and print its time and memory as JSON: SYSTEM JOB PATH WORKERS."""

from __future__ import annotations

import importlib
import json
import re
import sys
import time
from pathlib import Path

import psutil


def peak_mb() -> int:
    """Return the largest resident memory of this process so far, without its children."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) // 1024


def cpu_s() -> float:
    """Return the processor time of this process and of the workers that it has."""
    me = psutil.Process()
    return sum(sum(each.cpu_times()[:2]) for each in [me, *me.children(recursive=True)])


def main() -> None:
    system, job, path, workers = sys.argv[1:]
    module = importlib.import_module(f"benchmarks.keyed_systems.{system}_jobs")
    with module.Jobs(int(workers)) as jobs:
        spent, began = cpu_s(), time.perf_counter()
        keys, total, largest = getattr(jobs, job)(path)
        seconds, spent = time.perf_counter() - began, cpu_s() - spent
    answer = {"keys": int(keys), "total": round(float(total), 3), "largest": round(float(largest), 3)}
    print(json.dumps({"seconds": seconds, "cpu_s": spent, "peak_mb": peak_mb(), "answer": answer}))


if __name__ == "__main__":
    main()
