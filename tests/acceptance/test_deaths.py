"""Workers that die at chosen points, or at random: the bits are those of an undisturbed run, no remains.

The whole: make chaos-workers, make chaos-signals, make soak.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

import pipedist
from pipedist.scheduler import SchedulerLimits
from tests.acceptance import detection, signal_chaos, soak, worker_chaos
from tests.acceptance.watch import descriptors
from tests.cluster.launchers.processes import wait_gone

F = "tests.acceptance.functions"


def spec(run: str, **more: Any) -> dict[str, Any]:
    return {
        "pipedist": 1,
        "replicas": 2,
        "seed": 1,
        "dataset": {"range": 100, "batch": 10},
        "stages": {
            "y": {"run": f"{F}:{run}", "with": more},
            "total": {"reduce": "sum", "of": "y", "axis": 0},
            "rows": {"gather": 0, "of": "y"},
        },
    }


async def bits(cluster: pipedist.LocalCluster, document: dict[str, Any]) -> tuple[bytes, bytes]:
    async with asyncio.timeout(60), pipedist.open(document, cluster=cluster) as run:
        result = await run.results()
    assert result.ledger == pipedist.Ledger(100, 100)
    return result["total"].tobytes(), result["rows"].tobytes()


@pytest.mark.asyncio
@pytest.mark.parametrize("shared_memory", [True, False], ids=["shared memory", "frames"])
async def test_a_worker_that_is_killed_at_a_point(shared_memory: bool, tmp_path: Path) -> None:
    async with pipedist.LocalCluster(workers=2, shared_memory=shared_memory) as cluster:
        await cluster.ready()
        want = await bits(cluster, spec("floats"))
        open_ = descriptors()
        for point in ("before receive", "after compute", "mid-send"):
            before = set(cluster.pids.values())
            folder = tmp_path / point
            folder.mkdir()
            found = await bits(cluster, spec("trapped", folder=str(folder), point=point))
            assert found == want, point
            async with asyncio.timeout(60):  # the run may be over before it is known, or has happened
                while not (killed := before - set(cluster.pids.values())):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            await cluster.ready()
            assert wait_gone(killed) == []
        async with asyncio.timeout(60):
            while descriptors() > open_:  # noqa: ASYNC110 - those of the dead have a grace of a second
                await asyncio.sleep(0.05)


def test_random_deaths(tmp_path: Path) -> None:
    told = asyncio.run(worker_chaos.chaos(4.0, 0.4, 1, tmp_path))
    assert "the same SHA-256 of 4 files" in told


@pytest.mark.slow
def test_signals_at_seeded_times(tmp_path: Path) -> None:
    told = signal_chaos.chaos(range(1000, 1004), tmp_path)
    assert told.total() == 4


def test_many_calls() -> None:
    early, late = asyncio.run(soak.soak(20_000))
    assert set(late) == {"driver", "w0", "w1", "pipedist-fork"}
    soak.check(early, late)


def test_growth_is_reported() -> None:
    early = {"driver": (10 * 2**20, 10)}
    with pytest.raises(soak.Wrong, match=r"memory of driver has grown by 5\.0 MiB"):
        soak.check(early, {"driver": (15 * 2**20, 10)})
    with pytest.raises(soak.Wrong, match="from 10 to 11"):
        soak.check(early, {"driver": (11 * 2**20, 11)})


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_worker_that_holds_its_interpreter_is_alive() -> None:
    """Longer than some heartbeats: its supervisor sends them. All cases: make detection."""
    assert await detection.starved(hold_s=3.0) > 3.0


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_worker_that_wakes_after_its_eviction_is_fenced(tmp_path: Path) -> None:
    """Its host was stopped, with queued calls: they are reassigned, and its late results do not count."""
    document = {**spec("floats", pause_s=0.02), "code": str(detection.ROOT)}
    async with pipedist.LocalCluster(workers=1) as cluster:
        want = await bits(cluster, spec("floats"))
    limits = SchedulerLimits(
        heartbeat_timeout_s=1.5, deaths_max=1000
    )  # on a busy machine it is given up more than once
    async with detection.dialled_in(tmp_path, limits) as (remote, supervisor):
        (first,) = remote.coordinator._pool
        async with asyncio.timeout(60), pipedist.open(document, cluster=remote) as run:
            stream = run.steps("y")
            await anext(stream)  # more are queued at the worker
            os.killpg(supervisor.pid, signal.SIGSTOP)
            await detection.until(lambda: remote.coordinator.workers_ready == 0)
            os.killpg(supervisor.pid, signal.SIGCONT)
            async for _ in stream:
                pass
            result = await run.results()
        await detection.until(lambda: remote.coordinator.workers_ready == 1)
        (second,) = remote.coordinator._pool
        assert second.worker == first.worker
        assert second.incarnation > first.incarnation
        assert (result["total"].tobytes(), result["rows"].tobytes()) == want
        assert result.ledger == pipedist.Ledger(100, 100)
