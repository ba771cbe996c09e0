"""Measure how soon a dead, stopped, silent or hanging worker is detected.

    python -m tests.acceptance.detection [crash | stop | silent | hang | starved ...] [--times 10]

Local workers are seen by the fork server, those that dialled in by their supervisors (`pipedist worker`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pipedist
from pipedist.scheduler import SchedulerLimits
from tests.cluster.launchers.processes import children_of

KINDS = ("crash", "stop", "silent", "hang", "starved")
PATIENCE_S = 60.0
HOLD_S = 20.0
TIMEOUT_S = 1.0
F = "tests.acceptance.functions"
ROOT = Path(__file__).parents[2]
BAR_S = {"crash": 0.1, "stop": 17.0, "silent": 17.0, "hang": 1.0}
"""The limits: crash 100 ms; stop and silence 3 heartbeats + 1 s; hang 1 s beyond `timeout_s`."""


@contextlib.asynccontextmanager
async def dialled_in(
    folder: Path, limits: SchedulerLimits | None = None
) -> AsyncIterator[tuple[pipedist.ConnectCluster, subprocess.Popen[bytes]]]:
    """A cluster with one worker of another host, and its supervisor."""
    key_file = folder / "cluster.key"
    with contextlib.redirect_stderr(io.StringIO()):
        cluster = await pipedist.ConnectCluster(key_file=key_file, limits=limits).__aenter__()
    command = [sys.executable, "-m", "pipedist", "worker", "--connect", cluster.coordinator.endpoint]
    supervisor = subprocess.Popen(  # noqa: ASYNC220 - it takes no time
        [*command, "--key-file", str(key_file)], stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        await until(lambda: cluster.coordinator.workers_ready == 1)
        yield cluster, supervisor
    finally:
        os.killpg(supervisor.pid, signal.SIGCONT)
        await cluster.__aexit__(None, None, None)
        os.killpg(supervisor.pid, signal.SIGKILL)
        supervisor.wait()


async def until(condition: Callable[[], bool]) -> float:
    """Wait until a condition holds; return the seconds that it took."""
    begin = time.monotonic()
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - there is no notification
            await asyncio.sleep(0.001)
    return time.monotonic() - begin


async def lost(cluster: pipedist.LocalCluster | pipedist.ConnectCluster, kill: Callable[[], None]) -> float:
    """Apply a fault to the only worker; return the seconds until it was detected."""
    assert cluster.coordinator.workers_ready == 1
    kill()
    return await until(lambda: cluster.coordinator.workers_ready == 0)


async def local(number: signal.Signals) -> float:
    async with pipedist.LocalCluster(workers=1) as cluster:
        await cluster.ready()
        return await lost(cluster, lambda: os.kill(cluster.pids["w0"], number))


async def remote(number: signal.Signals, *, also_supervisor: bool = False) -> float:
    with tempfile.TemporaryDirectory() as folder:
        async with dialled_in(Path(folder)) as (cluster, supervisor):
            (child,) = children_of(supervisor.pid)
            pids = (supervisor.pid, child) if also_supervisor else (child,)
            return await lost(cluster, lambda: [os.kill(pid, number) for pid in pids] and None)


def spec(run: str, **more: object) -> dict[str, object]:
    return {
        "pipedist": 1,
        "code": str(ROOT),
        "dataset": {"range": 4, "batch": 2},
        "stages": {
            "y": {"run": f"{F}:{run}", **more},
            "total": {"reduce": "sum", "of": "y", "axis": 0},
        },
    }


async def hang() -> float:
    """Return the seconds by which a call exceeded its timeout, with a blocked interpreter."""
    with tempfile.TemporaryDirectory() as folder:
        document = spec("hangs", timeout_s=TIMEOUT_S, retries=1, **{"with": {"folder": folder}})
        async with pipedist.LocalCluster(workers=1) as cluster:
            await cluster.ready()
            async with asyncio.timeout(PATIENCE_S), pipedist.open(document, cluster=cluster) as run:
                results = asyncio.ensure_future(run.results())
                await until(Path(folder, "began").exists)
                await until(lambda: cluster.coordinator.workers_ready == 0)
                ended = time.monotonic()
                assert (await results)["total"] == 6
        began = float(Path(folder, "began").read_text())  # noqa: ASYNC240
        return ended - began - TIMEOUT_S


async def starved(hold_s: float = HOLD_S) -> float:
    """Return the seconds for which a worker held its interpreter's lock and was not lost.

    Raises:
        AssertionError: it was lost.
    """
    with tempfile.TemporaryDirectory() as folder:
        async with dialled_in(Path(folder)) as (cluster, supervisor):
            before = children_of(supervisor.pid)
            document = spec("holds_the_interpreter", **{"with": {"hold_s": hold_s / 2}})
            begin = time.monotonic()
            async with asyncio.timeout(PATIENCE_S), pipedist.open(document, cluster=cluster) as run:
                assert (await run.results())["total"] == 6
            assert children_of(supervisor.pid) == before, "its process is another one"
            return time.monotonic() - begin


async def measure(kinds: Sequence[str], times: int) -> bool:
    """Print a line for each kind; return whether all are within the limits."""
    within = True
    cases: dict[str, list[tuple[str, Callable[[], object], int]]] = {
        "crash": [
            ("local", lambda: local(signal.SIGKILL), times),
            ("dialled in", lambda: remote(signal.SIGKILL), max(1, times // 2)),
        ],
        "stop": [
            ("local", lambda: local(signal.SIGSTOP), 1),
            ("dialled in", lambda: remote(signal.SIGSTOP), 1),
        ],
        "silent": [("dialled in", lambda: remote(signal.SIGSTOP, also_supervisor=True), 1)],
        "hang": [("local, beyond its timeout_s", hang, max(1, times // 3))],
    }
    for kind in kinds:
        for what, case, count in cases.get(kind, []):
            took = sorted([await case() for _ in range(count)])  # type: ignore[misc]
            ok = took[-1] <= BAR_S[kind]
            within &= ok
            print(
                f"{kind:8} {what:28} median {took[len(took) // 2]:7.3f} s, "
                f"worst of {count} {took[-1]:7.3f} s, bar {BAR_S[kind]:g} s{'' if ok else '  BEYOND'}",
                flush=True,
            )
        if kind == "starved":
            print(f"starved  held its lock for {await starved():.1f} s, and was alive", flush=True)
    return within


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.acceptance.detection", description=__doc__)
    parser.add_argument("kinds", nargs="*", help=", ".join(KINDS))
    parser.add_argument("--times", type=int, default=10)
    told = parser.parse_args()
    if unknown := set(told.kinds) - set(KINDS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    return 0 if asyncio.run(measure(told.kinds or KINDS, told.times)) else 1


if __name__ == "__main__":
    sys.exit(main())
