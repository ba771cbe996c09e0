"""Real processes: pause, resume, restart, cut."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from functools import partial

import pytest

import pipedist
from pipedist.cluster.launchers.local import LocalLauncher
from pipedist.errors import UsageError
from pipedist.testing import LocalCluster
from tests.cluster.launchers.processes import state_of

SPEC = {
    "pipedist": 1,
    "replicas": 2,
    "dataset": {"range": 40, "batch": 4},
    "stages": {"total": {"reduce": "sum", "of": "dataset", "axis": 0}},
}


async def total(cluster: LocalCluster) -> int:
    async with pipedist.open(SPEC, cluster=cluster) as run:
        return int((await run.results())["total"])


async def becomes(pid: int, *, stopped: bool) -> None:
    """Wait until the kernel has stopped or continued a process."""
    async with asyncio.timeout(60):
        while (state_of(pid) == "T") != stopped:  # noqa: ASYNC110 - there is no notification
            await asyncio.sleep(0.002)


@pytest.mark.asyncio
async def test_a_worker_is_stopped_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    patient = partial(LocalLauncher, stopped_s_max=60.0)  # however long this process is kept waiting
    monkeypatch.setattr("pipedist.cluster.launchers.local.LocalLauncher", patient)
    async with LocalCluster(workers=1) as cluster:
        await cluster.ready()
        pid = cluster.pids["w0"]
        cluster.pause(0)
        await becomes(pid, stopped=True)
        cluster.resume("w0")
        await becomes(pid, stopped=False)
        assert await total(cluster) == 780
        assert cluster.pids["w0"] == pid


@pytest.mark.asyncio
async def test_a_stopped_worker_costs_only_time() -> None:
    async with LocalCluster(workers=2) as cluster:
        await cluster.ready()
        cluster.pause("w1")
        assert await total(cluster) == 780


@pytest.mark.asyncio
async def test_restart_waits_for_the_next_one() -> None:
    async with LocalCluster(workers=2) as cluster:
        await cluster.ready()
        before = cluster.pids["w1"]
        await cluster.restart(1)
        assert cluster.pids["w1"] != before
        assert cluster.coordinator.workers_ready == 2


@pytest.mark.asyncio
async def test_a_lost_connection_costs_its_worker() -> None:
    async with LocalCluster(workers=2) as cluster:
        await cluster.ready()
        cluster.cut(0)
        assert cluster.coordinator.workers_ready == 1
        await cluster.ready()
        assert await total(cluster) == 780


@pytest.mark.asyncio
async def test_of_no_such_worker() -> None:
    async with LocalCluster(workers=1) as cluster:
        await cluster.ready()
        with pytest.raises(UsageError, match="'w7' is not alive: w0"):
            cluster.pause(7)
        with pytest.raises(UsageError, match="'w7' has joined"):
            cluster.cut(7)
        with pytest.raises(UsageError, match="'w7' was started here"):
            await cluster.restart(7)


FEW_DESCRIPTORS = """
import asyncio, resource
from pipedist import LocalCluster, errors

async def opened(workers, soft, hard):
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    async with LocalCluster(workers=workers) as cluster:
        await cluster.ready()

asyncio.run(opened(6, 40, 200))
try:
    asyncio.run(opened(17, 40, 200))
except errors.UsageError as error:
    print(error)
"""


def test_more_workers_than_the_soft_limit_of_open_files_allows() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FEW_DESCRIPTORS], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "17 workers need about 202 open files, and the limit of this process is 200" in done.stdout
