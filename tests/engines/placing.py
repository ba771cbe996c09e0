"""Shared by tests of engines: a run that takes a while, and checks for leftovers."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest

import pipedist
from pipedist.cluster.engine_clusters import EngineCluster

F = "tests.engines.functions"
PATIENCE_S = 60.0
ROOT = Path(__file__).parents[2]


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
    """The expected values, to the last bit."""
    return hashlib.sha256(result["total"].tobytes() + result["all"].tobytes()).hexdigest()


@functools.cache
def undisturbed() -> str:
    return digest(pipedist.run(document("roots"), workers=1))


async def run_that_loses(cluster: EngineCluster, begun: Path, lose: Callable[[], Awaitable[None]]) -> str:
    """Execute a run during which `lose` removes workers; return its values."""
    async with pipedist.open(document("slow_roots", begun=str(begun)), cluster=cluster) as run:
        results = asyncio.create_task(run.results())
        assert await anyio.to_thread.run_sync(wait_until, lambda: steps_begun(begun) > 10)
        await lose()
        found = digest(await results)
        assert run.ledger().lost == 0
    return found


async def run_that_fails(cluster: EngineCluster) -> None:
    """Execute a run whose function raises; the caller checks for leftovers."""
    with pytest.raises(pipedist.CallError):
        async with pipedist.open(document("raises"), cluster=cluster) as run:
            await run.results()


def check_the_commands(folder: Path, example: str, where: str, *words: str) -> None:
    """Run an example, and `plan` and `run` of a spec with these words behind it.

    Args:
        folder: empty; the example's current one.
        where: what `plan` says about where the workers come from.
    """

    def said(*command: str | Path) -> str:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=folder)
        assert done.returncode == 0, done.stderr
        return done.stdout

    printed = said(sys.executable, ROOT / "examples" / example)
    assert printed == "mean of sqrt over 1,000,000 elements: 666.666166\n"
    spec = folder / "sum.yaml"
    spec.write_text(
        "pipedist: 1\ndataset: {range: 10, batch: 2}\nstages: {t: {reduce: sum, of: dataset, axis: 0}}\n"
    )
    pipedist_ = (sys.executable, "-m", "pipedist")
    assert where in said(*pipedist_, "plan", spec, *words)
    assert '"t": 45' in said(*pipedist_, "run", "--json", spec, *words)


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
    """Return the living processes whose environment has a mark, whatever their parent is now."""
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
