"""Workers kept by a real Dask: a LocalCluster of processes, one of which is killed."""

from __future__ import annotations

import importlib.util
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

import pipedist
from pipedist.errors import UsageError, WorkersLost
from tests.engines.placing import (
    check_the_commands,
    document,
    processes_with,
    run_that_fails,
    run_that_loses,
    steps_begun,
    undisturbed,
    wait_until,
)

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(240),
    pytest.mark.skipif(
        importlib.util.find_spec("distributed") is None,
        reason="Dask is not installed here: make test-engines",
    ),
    pytest.mark.filterwarnings("default"),  # Dask's own
]


@asynccontextmanager
async def dask_of(workers: int) -> AsyncIterator[Any]:
    """A Dask scheduler, and workers that are processes with nannies."""
    from distributed import LocalCluster

    cluster = LocalCluster(
        n_workers=workers,
        threads_per_worker=1,
        memory_limit=0,
        dashboard_address=None,
        asynchronous=True,
    )
    async with cluster:
        yield cluster


SCHEDULER = """
import sys
from distributed import LocalCluster

if __name__ == "__main__":
    settings = dict(threads_per_worker=1, memory_limit=0, dashboard_address=None)
    with LocalCluster(n_workers=2, **settings) as dask:
        print(dask.scheduler_address, flush=True)
        sys.stdin.read()
"""


@contextmanager
def dask_in_another_process(folder: Path) -> Iterator[tuple[str, int]]:
    """A Dask with two workers: the address and the process id of its scheduler."""
    file = folder / "dask_scheduler.py"  # a file: Dask's processes import it
    file.write_text(SCHEDULER)
    with subprocess.Popen(
        [sys.executable, file],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            address = process.stdout.readline().strip()
            assert address, "it did not start"
            yield address, process.pid
        finally:
            process.stdin.close()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def ours_with(mark: str) -> dict[int, str]:
    """The supervisors and workers whose environment has a mark."""
    return {pid: line for pid, line in processes_with(mark).items() if "pipedist" in line}


def pid_of(worker: Any) -> int:
    """Kill the process that a nanny restarts."""
    return int(worker.process.pid)


@pytest.mark.asyncio
async def test_a_worker_killed_in_mid_run_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = secrets.token_hex(8)
    monkeypatch.setenv("PIPEDIST_TEST_MARK", mark)
    async with dask_of(2) as dask:
        async with pipedist.DaskCluster(2, address=dask.scheduler_address) as cluster:
            await cluster.ready()

            async def lose() -> None:
                os.kill(pid_of(dask.workers[0]), signal.SIGKILL)

            found = await run_that_loses(cluster, tmp_path, lose)
            await cluster.ready(2)  # its nanny has started it again, and it has the plugin
            await run_that_fails(cluster)
        assert ours_with(mark) == {}, "the Dask stays, nothing of ours does"
    assert found == await anyio.to_thread.run_sync(undisturbed)


@pytest.mark.asyncio
async def test_a_dask_worker_that_joins_later_keeps_one_too() -> None:
    async with dask_of(1) as dask, pipedist.DaskCluster(1, address=dask.scheduler_address) as cluster:
        await cluster.ready(1)
        dask.scale(2)
        await cluster.ready(2)


@pytest.mark.asyncio
async def test_a_run_ends_when_all_workers_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their supervisors leave by themselves: without that news, the run would wait for ever."""
    monkeypatch.setattr("pipedist.cluster.launchers.supervisor_process.STARTS_MAX", 1)
    async with pipedist.DaskCluster(2, address="local") as cluster:
        await cluster.ready()
        spec = document("dies_always")
        with pytest.raises(WorkersLost, match=r"placed on 2 Dask workers have left.*signal 9"):
            async with pipedist.open(spec, cluster=cluster) as run:
                await run.results()


async def ended_by_sigkill(pid: int) -> None:
    """Kill a process; when this returns its ports are free."""
    ended = os.pidfd_open(pid)
    try:
        os.kill(pid, signal.SIGKILL)
        with anyio.fail_after(60):
            await anyio.wait_readable(ended)
    finally:
        os.close(ended)


@pytest.mark.asyncio
@pytest.mark.parametrize("comes_back", [False, True])
async def test_a_run_ends_when_the_scheduler_has_ended(comes_back: bool, tmp_path: Path) -> None:
    """With it go its workers: without that news, the run would wait for ever."""
    from distributed import Scheduler

    place_s = 60 if comes_back else 5  # how long Dask's client dials for the next one
    (tmp_path / "begun").mkdir()
    spec = document("slow_roots", begun=str(tmp_path / "begun"))
    with dask_in_another_process(tmp_path) as (address, dask):
        async with AsyncExitStack() as stack:
            cluster = await stack.enter_async_context(
                pipedist.DaskCluster(2, address=address, place_s=place_s)
            )
            await cluster.ready()
            run = await stack.enter_async_context(pipedist.open(spec, cluster=cluster))
            await ended_by_sigkill(dask)
            if comes_back:
                port = int(address.rpartition(":")[2])
                await stack.enter_async_context(Scheduler(port=port, dashboard_address=":0"))
            ended = "is another one" if comes_back else "has ended"
            with pytest.raises(WorkersLost, match=f"Dask's scheduler {ended}"):
                await run.results()


@pytest.mark.asyncio
async def test_an_address_without_dask_is_reported() -> None:
    with pytest.raises(UsageError, match=r"can't reach a Dask scheduler at tcp://127\.0\.0\.1:1"):
        async with pipedist.DaskCluster(1, address="tcp://127.0.0.1:1", place_s=1):
            pass


@pytest.mark.asyncio
async def test_a_dask_without_workers_is_reported() -> None:
    async with dask_of(0) as dask:
        with pytest.raises(UsageError, match=r"no worker within 0.2 s"):
            async with pipedist.DaskCluster(1, address=dask.scheduler_address, place_s=0.2):
                pass


def test_the_example_and_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = secrets.token_hex(8)
    monkeypatch.setenv("PIPEDIST_TEST_MARK", mark)
    words = ("--cluster", "dask:local", "--workers", "2")
    check_the_commands(tmp_path, "dask_cluster.py", "launcher dask at local", *words)
    assert wait_until(lambda: not processes_with(mark)), processes_with(mark)


def test_a_killed_driver_leaves_no_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = secrets.token_hex(8)
    monkeypatch.setenv("PIPEDIST_TEST_MARK", mark)
    begun = tmp_path / "begun"
    begun.mkdir()
    with dask_in_another_process(tmp_path) as (address, _):
        script = (
            "import pipedist\n"
            "from tests.engines.placing import document\n"
            f"pipedist.run(document('slow_roots', begun={str(begun)!r}), cluster='dask:{address}')\n"
        )
        with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT) as driver:
            try:
                assert wait_until(lambda: steps_begun(begun) > 5)
            finally:
                driver.kill()
        assert wait_until(lambda: not supervised_with(mark)), "Dask stays, our workers do not"


def supervised_with(mark: str) -> set[int]:
    """The supervisors and worker processes whose environment has a mark."""
    return {pid for pid, line in processes_with(mark).items() if " -P -c " in line}
