"""A cluster whose process was killed, and the next one in the same folder."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import anyio
import pytest

import pipedist
from pipedist import lasting_cluster
from pipedist.lasting_cluster import POINTER, LastingCluster
from pipedist.launchers import lasting
from pipedist.worker import boot
from tests.launchers.processes import wait_gone
from tests.reattach.jobs import PATIENCE_S, ROOT, until

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs process descriptors: run it on Linux"),
]

_CLUSTER = """
import asyncio, sys
from pathlib import Path
from pipedist.lasting_cluster import LastingCluster

async def main(folder, workers, threads):
    async with LastingCluster(
        int(workers), folder=Path(folder), rejoin_s=60.0, threads_per_replica=int(threads)
    ) as cluster:
        await cluster.coordinator.wait_ready(cluster.workers)
        print("ready", flush=True)
        await asyncio.sleep(600)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture
def sockets(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder in which private directories are; empty at the end."""
    with TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)
        until(lambda: not list(Path(folder).iterdir()))


@contextmanager
def killed(folder: Path, workers: int, threads: int = 1) -> Iterator[dict[int, int]]:
    """Kill the process of a cluster; give the process ids of its supervisors, by slot."""
    command = [sys.executable, "-c", _CLUSTER, str(folder), str(workers), str(threads)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
        finally:
            process.kill()
    with meeting_of(folder) as place:
        pids = {number: holder.pid for number, holder in place.taken.items()}
    try:
        assert len(pids) == workers
        yield pids
    finally:
        for pid in pids.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextmanager
def meeting_of(folder: Path) -> Iterator[lasting.Meeting]:
    """Look at a place that nobody uses, without removing it."""
    import json

    from pipedist.launchers.meeting import Meeting

    document = json.loads((folder / POINTER).read_text())
    yield Meeting(Path(document["directory"]), document["socket"])


def taken(cluster: LastingCluster) -> dict[int, int]:
    assert cluster._place is not None
    return {number: holder.pid for number, holder in cluster._place.taken.items()}


async def until_it(condition: object) -> None:
    assert callable(condition)
    with anyio.fail_after(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - other processes bring it about
            await anyio.sleep(0.01)


@pytest.mark.parametrize("workers", [1, 2, 3])
async def test_slots_are_kept_filled_and_emptied(
    tmp_path: Path,
    sockets: Path,
    workers: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(lasting, "HAND_BACK_S", 0.0)
    monkeypatch.setattr(lasting_cluster, "GATHER_S", PATIENCE_S)
    with killed(tmp_path, 2) as stayed:
        async with LastingCluster(workers, folder=tmp_path, rejoin_s=60.0) as cluster:
            await cluster.gather()
            assert cluster.coordinator.workers_ready >= workers
            await until_it(lambda: len(taken(cluster)) == workers)
            now = taken(cluster)
            assert {n: pid for n, pid in now.items() if n in stayed} == {
                n: pid for n, pid in stayed.items() if n < workers
            }
            await until_it(lambda: cluster.coordinator.workers_ready == workers)
        assert not (tmp_path / POINTER).exists()
    assert ("(workers: 1): it hands back what it has finished" in capsys.readouterr().err) == (workers == 1)


async def test_workers_with_other_terms_are_replaced(
    tmp_path: Path, sockets: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lasting, "GRACE_S", PATIENCE_S)  # they are told once, however long they take
    with killed(tmp_path, 2) as stayed:
        async with LastingCluster(2, folder=tmp_path, rejoin_s=60.0, threads_per_replica=2) as cluster:
            await cluster.coordinator.wait_ready(2)
            assert not set(taken(cluster).values()) & set(stayed.values())
    assert capsys.readouterr().err.count("was started with other terms, and is replaced") == 2


async def test_a_worker_that_does_not_leave_is_killed(
    tmp_path: Path, sockets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that this process has not started."""
    monkeypatch.setattr(lasting, "GRACE_S", 0.2)
    with killed(tmp_path, 1) as stayed:
        async with LastingCluster(2, folder=tmp_path, rejoin_s=60.0) as cluster:
            await cluster.coordinator.wait_ready(2)
            pids = taken(cluster).values()
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
        assert set(stayed.values()) < set(pids)
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
        assert not (tmp_path / POINTER).exists()


async def test_nobody_is_put_into_a_slot_when_the_cluster_is_closed(tmp_path: Path, sockets: Path) -> None:
    async with LastingCluster(1, folder=tmp_path, rejoin_s=60.0) as cluster:
        await cluster.coordinator.wait_ready(1)
        assert cluster._keeper is not None
        cluster._keeper.rest()
        os.kill(taken(cluster)[0], signal.SIGKILL)
        await until_it(lambda: not taken(cluster))
        await anyio.sleep(5 * lasting._LOOK_S)
        assert not taken(cluster)


async def test_workers_that_cannot_live_fail_the_cluster(
    tmp_path: Path, sockets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(boot, "command", lambda *_: [sys.executable, "-c", "raise SystemExit(3)"])
    async with LastingCluster(2, folder=tmp_path, rejoin_s=60.0) as cluster:
        with pytest.raises(pipedist.WorkersLost, match="no worker lives for 10 s, 5 in a row"):
            await cluster.coordinator.wait_ready(1)


async def test_the_run_is_left_while_workers_begin(tmp_path: Path, sockets: Path) -> None:
    async with LastingCluster(2, folder=tmp_path, rejoin_s=60.0):
        pass
    assert not (tmp_path / POINTER).exists()


async def test_nobody_is_there_and_nobody_is_waited_for(tmp_path: Path, sockets: Path) -> None:
    async with LastingCluster(1, folder=tmp_path, rejoin_s=60.0) as cluster:
        await cluster.gather()
        await cluster.coordinator.wait_ready(1)


async def test_leaving_that_is_cancelled_kills_them(
    tmp_path: Path, sockets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """asyncio's own cancellation, as of `asyncio.timeout`, knows nothing of anyio's shields."""
    ends = asyncio.Event()
    end_all = lasting.LastingWorkers._end_all

    async def ending(workers: lasting.LastingWorkers) -> None:
        ends.set()
        await end_all(workers)

    monkeypatch.setattr(lasting.LastingWorkers, "_end_all", ending)

    async def work() -> None:
        async with LastingCluster(1, folder=tmp_path, rejoin_s=60.0) as cluster:
            await cluster.coordinator.wait_ready(1)
            pids.update(taken(cluster))
            os.kill(pids[0], signal.SIGSTOP)

    pids: dict[int, int] = {}
    task = asyncio.ensure_future(work())
    await ends.wait()
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert wait_gone(pids.values()) == []
