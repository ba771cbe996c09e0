"""Workers die in every way while a job runs: its files have the bytes of an undisturbed run.

    python -m tests.acceptance.worker_chaos [--seconds 60] [--every 2] [--seed 0]

At intervals, if the job has progressed, a random worker is killed (SIGKILL), or stopped (SIGSTOP) and sometimes
continued; also, every 41st call ends its own process, by a segmentation fault or `os._exit`. No process, file or
shared memory may remain.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any

import pipedist
from tests.acceptance.watch import descriptors, shared_memory
from tests.cluster.launchers.processes import children_of, wait_gone

WORKERS = 3
PAUSE_S = 0.02
RUN_S_MAX = 600.0
STEPS_BETWEEN = 3
"""Steps between two deaths: a call under which `deaths_max` workers die fails."""

F = "tests.acceptance.functions"


class Wrong(Exception):
    """The death of a worker changed something that it must not change."""


def spec(steps: int, run: str, **more: Any) -> dict[str, Any]:
    return {
        "pipedist": 1,
        "name": "chaos",
        "replicas": 2,
        "seed": 7,
        "dataset": {"range": 8 * steps - 3, "batch": 8, "shuffle": True},
        "stages": {
            "y": {"run": f"{F}:{run}", "with": more},
            "total": {"reduce": "sum", "of": "y", "axis": 0},
            "each": {"reduce": "mean", "of": "y", "axis": 0, "per": "step"},
            "folded": {"reduce": f"{F}:fold", "of": "y"},
            "rows": {"gather": 0, "of": "y"},
        },
        "outputs": {"total": "total.json", "each": "each.jsonl", "folded": "folded.npy", "rows": "rows.npy"},
    }


def digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.iterdir() if path.is_file())
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


class Progress:
    """The number of steps that a job has completed."""

    steps = 0


async def output(
    document: dict[str, Any], cluster: pipedist.LocalCluster, folder: Path, progress: Progress
) -> dict[str, str]:
    async with asyncio.timeout(RUN_S_MAX), pipedist.open(document, cluster=cluster, output=folder) as run:
        async for _ in run.steps("y"):
            progress.steps += 1
        result = await run.results()
    elements = result.ledger.elements
    if result.ledger != pipedist.Ledger(elements, elements):
        raise Wrong(f"the ledger is {result.ledger}")
    return digests(folder)


@contextlib.asynccontextmanager
async def disturbed(
    cluster: pipedist.LocalCluster, random: Random, every_s: float, progress: Progress
) -> AsyncIterator[Counter[str]]:
    """Kill and stop workers of a cluster while the block runs; yield the counts."""
    done: Counter[str] = Counter()

    async def disturb() -> None:
        while True:
            enough = progress.steps + STEPS_BETWEEN
            await asyncio.sleep(every_s)
            while progress.steps < enough:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            # Only joined workers: if too many die before they join, the run fails.
            joined = sorted({peer.worker for peer in cluster.coordinator._pool} & {*cluster.pids})
            if not joined:
                continue
            worker = random.choice(joined)
            what = random.choice(("SIGKILL", "SIGKILL", "SIGSTOP", "SIGSTOP, SIGCONT"))
            done[what] += 1
            if what == "SIGKILL":
                cluster.kill(worker)
                continue
            with contextlib.suppress(pipedist.errors.UsageError):  # it has just ended by itself
                cluster.pause(worker)
                if what != "SIGSTOP":
                    await asyncio.sleep(every_s / 4)
                    cluster.resume(worker)

    task = asyncio.create_task(disturb())
    try:
        yield done
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def chaos(seconds: float, every_s: float, seed: int, folder: Path) -> str:
    """Run a job twice, the second time with workers that die; return a summary.

    Raises:
        Wrong: other bytes, or something that was left behind.
    """
    steps = max(20, round(seconds * WORKERS / PAUSE_S / 2 / 2))  # half of the time is lost to deaths
    shared, open_ = shared_memory(), descriptors()
    async with pipedist.LocalCluster(workers=WORKERS) as cluster:
        want = await output(spec(steps, "floats"), cluster, folder / "straight", Progress())
    (folder / "deaths").mkdir()
    harmful = spec(steps, "fragile", folder=str(folder / "deaths"), pause_s=PAUSE_S, every=41)
    begin = time.monotonic()
    async with pipedist.LocalCluster(workers=WORKERS) as cluster:
        await cluster.ready()
        progress = Progress()
        async with disturbed(cluster, Random(seed), every_s, progress) as done:
            found = await output(harmful, cluster, folder / "chaos", progress)
        server = [pid for pid, name in children_of(os.getpid()).items() if name == "pipedist-fork"]
        pids = [*server, *cluster.pids.values()]
    took_s = time.monotonic() - begin
    if found != want:
        raise Wrong(f"seed {seed}: {sorted(name for name in want if want[name] != found.get(name))} differ")
    done["segmentation fault or exit"] = len(list((folder / "deaths").iterdir()))
    if not done["segmentation fault or exit"] or not sum(done.values()):
        raise Wrong("nothing has died")
    if left := wait_gone(pids):
        raise Wrong(f"processes are left: {left}")
    if descriptors() > open_:
        raise Wrong(f"descriptors have grown from {open_} to {descriptors()}")
    if more := shared_memory() - shared:
        raise Wrong(f"in /dev/shm: {more}")
    deaths = ", ".join(f"{count} x {what}" for what, count in sorted(done.items()))
    return (
        f"{2 * steps} calls in {took_s:.0f} s: {deaths}; the same SHA-256 of {len(want)} files, nothing left"
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.acceptance.worker_chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--every", type=float, default=2.0, help="seconds")
    parser.add_argument("--seed", type=int, default=0)
    told = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory(prefix="pipedist-chaos-") as folder:
            print(asyncio.run(chaos(told.seconds, told.every, told.seed, Path(folder))), flush=True)
    except Wrong as wrong:
        print(f"WRONG: {wrong}", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
