"""A million calls: memory and descriptors of driver, fork server and workers do not grow with their number.

    python -m tests.acceptance.soak [--calls 1000000]

Compared are call 100,000 (a tenth) and the last one, of one run that is streamed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time

import pipedist
from tests.acceptance.watch import MIB, descriptors, rss_bytes
from tests.cluster.launchers.processes import children_of

CALLS = 1_000_000
GROWTH_BYTES_MAX = 5 * MIB
STREAM_S_MAX = 3600.0


class Wrong(Exception):
    """Memory or descriptors grew."""


def held(cluster: pipedist.LocalCluster) -> dict[str, tuple[int, int]]:
    """Return memory and descriptors of all processes, by role."""
    pids = {"driver": os.getpid(), **cluster.pids}
    for pid, name in children_of(os.getpid()).items():
        if name == "pipedist-fork":
            pids[name] = pid
    return {role: (rss_bytes(pid), descriptors(pid)) for role, pid in pids.items()}


async def soak(calls: int, workers: int = 2) -> tuple[dict[str, tuple[int, int]], dict[str, tuple[int, int]]]:
    """Run calls; return the usage after a tenth of them, and at the end."""
    spec = {
        "pipedist": 1,
        "dataset": {"range": calls, "batch": 1},
        "stages": {
            "y": {"run": "tests.acceptance.functions:quick"},
            "total": {"reduce": "sum", "of": "y", "axis": 0},
        },
    }
    early: dict[str, tuple[int, int]] = {}
    late = early
    async with pipedist.LocalCluster(workers=workers) as cluster:
        await cluster.ready()
        async with asyncio.timeout(STREAM_S_MAX), pipedist.open(spec, cluster=cluster) as run:
            async for step in run.steps("y"):
                if step.index + 1 == calls // 10:
                    early = held(cluster)
                elif step.index + 1 == calls:
                    late = held(cluster)
            result = await run.results()
    if int(result["total"]) != calls * (calls - 1) // 2:
        raise Wrong(f"the sum is {result['total']}")
    return early, late


def check(early: dict[str, tuple[int, int]], late: dict[str, tuple[int, int]]) -> None:
    """Compare.

    Raises:
        Wrong: memory or descriptors have grown; the text describes it.
    """
    for role, (memory, open_) in late.items():
        growth = memory - early[role][0]
        if growth >= GROWTH_BYTES_MAX:
            raise Wrong(f"the memory of {role} has grown by {growth / MIB:.1f} MiB")
        if open_ > early[role][1]:
            raise Wrong(f"the descriptors of {role} have grown from {early[role][1]} to {open_}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.acceptance.soak", description=__doc__)
    parser.add_argument("--calls", type=int, default=CALLS)
    told = parser.parse_args()
    begin = time.monotonic()
    early, late = asyncio.run(soak(told.calls))
    print(f"{told.calls} calls in {time.monotonic() - begin:.0f} s")
    for role, (memory, open_) in late.items():
        growth = (memory - early[role][0]) / MIB
        since = f"since call {told.calls // 10}"
        print(f"{role:14} {memory / MIB:6.1f} MiB, {growth:+.1f} MiB {since}; {open_} descriptors")
    try:
        check(early, late)
    except Wrong as wrong:
        print(f"WRONG: {wrong}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
