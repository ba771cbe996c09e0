"""`pipedist.run` on an open cluster: from other threads, and where its wait would never end."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import pipedist
from tests.runs.test_runs import F, document


def on_loop_of(cluster_of: Callable[[pipedist.LocalCluster], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), pipedist.LocalCluster(workers=1) as cluster:
            await cluster_of(cluster)

    asyncio.run(main())


def summed(n: int = 20) -> dict[str, Any]:
    return document(n=n, y={"run": f"{F}:double"}, total={"reduce": "sum", "of": "y", "axis": 0})


def test_the_blocking_run_uses_an_open_cluster_from_other_threads() -> None:
    heard: list[int] = []

    async def check(cluster: pipedist.LocalCluster) -> None:
        def on_log(worker: str, line: Any) -> None:
            heard.append(threading.get_ident())

        def in_another_loop() -> Any:
            async def cell() -> Any:
                return pipedist.run(summed(), cluster=cluster)

            return asyncio.run(cell())

        prints = document(y={"run": f"{F}:prints"}, rows={"gather": 0, "of": "y"})
        prints_done = asyncio.to_thread(pipedist.run, prints, cluster=cluster, on_log=on_log)
        both = await asyncio.gather(prints_done, asyncio.to_thread(in_another_loop))
        assert both[1]["total"] == 380
        assert set(heard) == {threading.get_ident()}  # in the cluster's event loop
        with pytest.raises(pipedist.CallError):
            await asyncio.to_thread(pipedist.run, document(y={"run": f"{F}:fails_on_13"}), cluster=cluster)
        with pytest.raises(pipedist.UsageError, match="not both"):
            await asyncio.to_thread(pipedist.run, summed(), cluster=cluster, workers=1)

    on_loop_of(check)


def test_a_call_of_a_run_that_was_left_still_ends_after_its_timeout(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    y = {"run": f"{F}:hangs", "with": {"begun": str(begun)}, "timeout_s": 2.0}
    hang = document(y=y, rows={"gather": 0, "of": "y"})

    async def main() -> None:
        async with asyncio.timeout(60), pipedist.LocalCluster(workers=1) as cluster:
            os.mkfifo(begun)
            async with pipedist.open(hang, cluster=cluster) as run, asyncio.TaskGroup() as group:
                results = group.create_task(run.results())
                await asyncio.to_thread(begun.read_bytes)  # until the call runs
                results.cancel()
            async with pipedist.open(summed(), cluster=cluster) as run:
                assert (await run.results())["total"] == 380

    asyncio.run(main())


def test_an_open_cluster_is_refused_where_the_wait_would_never_end() -> None:
    kept: list[pipedist.LocalCluster] = []

    async def check(cluster: pipedist.LocalCluster) -> None:
        with pytest.raises(pipedist.UsageError, match=r"async with pipedist.open\(spec, cluster=cluster\)"):
            pipedist.run(summed(), cluster=cluster)
        strategy = pipedist.Strategy(cluster)
        assert (await strategy.run(abs, (-1,)))[0] == 1

        async def opened() -> None:
            async with pipedist.open(summed(), cluster=cluster):
                raise AssertionError("not refused")

        async def reused() -> None:
            await strategy.run(abs, (-1,))

        for use in (opened, reused, cluster.ready):
            with pytest.raises(pipedist.UsageError, match="another event loop"):
                await asyncio.to_thread(asyncio.run, use())
        kept.append(cluster)

    on_loop_of(check)
    with pytest.raises(pipedist.UsageError, match="inside `async with LocalCluster"):
        pipedist.run(summed(), cluster=kept[0])


def test_a_cluster_whose_loop_is_not_running_is_refused() -> None:
    loop = asyncio.new_event_loop()
    cluster = pipedist.LocalCluster(workers=1)
    loop.run_until_complete(cluster.__aenter__())
    try:
        with pytest.raises(pipedist.UsageError, match="which is not running"):
            pipedist.run(summed(), cluster=cluster)
    finally:
        loop.run_until_complete(cluster.__aexit__(None, None, None))
        loop.close()


def test_an_interrupt_ends_a_run_on_a_cluster_of_another_thread() -> None:
    """Ctrl-C comes to the main thread, which waits for the run; the cluster stays usable."""
    napping = threading.Event()
    ready: queue.Queue[pipedist.LocalCluster] = queue.Queue()
    over = threading.Event()

    async def serve(cluster: pipedist.LocalCluster) -> None:
        ready.put(cluster)
        await asyncio.to_thread(over.wait, 60)

    def interrupt() -> None:
        napping.wait(60)
        os.kill(os.getpid(), signal.SIGINT)

    with ThreadPoolExecutor(2) as threads:
        serving = threads.submit(on_loop_of, serve)
        cluster = ready.get(timeout=60)
        slow = document(n=10**6, batch=1, y={"run": f"{F}:prints"}, rows={"gather": 0, "of": "y"})
        try:
            threads.submit(interrupt)
            with pytest.raises(KeyboardInterrupt):
                pipedist.run(slow, cluster=cluster, on_log=lambda *_: napping.set())
            assert pipedist.run(summed(), cluster=cluster)["total"] == 380
        finally:
            napping.set()
            over.set()
        serving.result(60)


def test_a_run_ends_with_the_cluster_of_another_thread() -> None:
    async def check(cluster: pipedist.LocalCluster) -> None:
        napping = asyncio.Event()
        slow = document(n=10**6, batch=1, y={"run": f"{F}:prints"}, rows={"gather": 0, "of": "y"})
        waiting = asyncio.ensure_future(
            asyncio.to_thread(pipedist.run, slow, cluster=cluster, on_log=lambda *_: napping.set())
        )
        await napping.wait()
        await cluster.__aexit__(None, None, None)
        with pytest.raises(pipedist.RunCancelled):
            await waiting

    on_loop_of(check)
