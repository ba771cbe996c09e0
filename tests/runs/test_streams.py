"""Streams hold the valve; whoever leaves, leaves nothing behind; errors come out as themselves."""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import pipedist
from pipedist.scheduler import SchedulerLimits
from tests import preloaded
from tests.python_calls import PythonCalls
from tests.strategy.functions import wait_for

F = "tests.runs.functions"
SMALL = SchedulerLimits(steps_in_flight_max=20)


def document(n: int = 40, batch: int = 4, replicas: int = 2, **stages: Any) -> dict[str, Any]:
    stages = stages or {"y": {"run": f"{F}:double"}}
    return {
        "pipedist": 1,
        "name": "stream",
        "replicas": replicas,
        "dataset": {"range": n, "batch": batch},
        "stages": stages,
    }


TOTAL = document(t={"reduce": "sum", "of": "dataset", "axis": 0})


async def still_works(cluster: pipedist.LocalCluster) -> None:
    """The cluster serves others, and holds nothing of those that left."""
    async with pipedist.open(TOTAL, cluster=cluster) as run:
        assert (await run.results())["t"] == 780
    assert cluster.coordinator._passes.handles == {}
    assert not cluster.coordinator._log_sinks


async def standstill(run: pipedist.Run) -> int:
    """Return how many calls were done when the subscriber has all it is given, and nothing moves any more."""
    subscription = run._subscription
    assert subscription is not None
    while not subscription.is_full:  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0.01)
    before = -1
    while True:
        progress = run.progress()
        done = progress.passes[0].calls_done if progress is not None and progress.passes else 0
        if done == before:
            return done
        before = done
        await asyncio.sleep(0.25)  # the run may move on: what is tested is that it does not


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["steps", "as_completed"])
async def test_a_slow_subscriber_holds_the_valve(kind: str) -> None:
    async with asyncio.timeout(100), pipedist.LocalCluster(workers=2, limits=SMALL) as cluster:
        async with pipedist.open(document(n=4000, batch=2), cluster=cluster) as run:
            stream: AsyncIterator[Any] = getattr(run, kind)("y")
            seen = [await anext(stream)]
            done = await standstill(run)
            # 64 items wait for the subscriber, and 20 steps of 2 calls are in flight
            assert 64 <= done <= 2 * (64 + 20 + 2)
            seen += [item async for item in stream]
            result = await run.results()
        if kind == "steps":
            assert [s.index for s in seen] == list(range(2000))
            assert [s["y"][1].tolist() for s in seen] == [[4 * i + 2] for i in range(2000)]
        else:
            assert sorted((p.step, p.replica) for p in seen) == [(s, r) for s in range(2000) for r in (0, 1)]
        assert result.ledger == pipedist.Ledger(4000, 4000)
        await still_works(cluster)


@pytest.mark.asyncio
async def test_large_items_wait_in_smaller_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipedist.runs.subscription.ITEM_BYTES_MAX", 10_000)
    async with (
        asyncio.timeout(100),
        pipedist.LocalCluster(workers=1, limits=SMALL) as cluster,
        pipedist.open(document(n=100_000, batch=1000), cluster=cluster) as run,
    ):
        stream = run.steps("y")
        await anext(stream)
        await standstill(run)
        subscription = run._subscription
        assert subscription is not None
        # Two have that size; the bytes of a message count with its last step, after at most 20 in flight
        assert len(subscription._items) <= 2 + 20
        assert [s.index async for s in stream] == list(range(1, 100))


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["steps", "as_completed"])
async def test_a_wait_that_is_cancelled_loses_no_item(kind: str, tmp_path: Path) -> None:
    """As `asyncio.wait_for(anext(stream), ...)` does it, to look at other things meanwhile."""
    go = tmp_path / "go"

    def late(x: Any) -> Any:
        wait_for(str(go))
        return x

    spec = document(n=3, batch=1, y={"run": late})
    async with pipedist.LocalCluster(workers=1) as cluster, pipedist.open(spec, cluster=cluster) as run:
        stream = getattr(run, kind)("y")
        for _ in range(2):
            waiting = asyncio.create_task(anext(stream))
            await asyncio.sleep(0)
            with pytest.raises(RuntimeError, match="two tasks are waiting for one stream"):
                await anext(stream)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        go.touch()
        assert len([item async for item in stream]) == 3
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        await run.results()
    run.drain()  # there is nothing to stop any more


@pytest.mark.asyncio
async def test_a_garbage_collected_stream_does_not_block_its_run(tmp_path: Path) -> None:
    last = str(tmp_path / "last")

    def tell_the_last(x: Any) -> Any:
        if x[-1] == 399:
            Path(last).touch()
        return x

    spec = document(n=400, batch=1, y={"run": tell_the_last})
    async with (
        pipedist.LocalCluster(workers=1, limits=SMALL) as cluster,
        pipedist.open(spec, cluster=cluster) as run,
    ):
        async for _ in run.steps("y"):
            break
        async with asyncio.timeout(60):
            while not Path(last).exists():  # noqa: ASYNC110, ASYNC240 - a worker makes it
                await asyncio.sleep(0.01)


@pytest.mark.asyncio
async def test_no_subscriber_never_holds_the_valve() -> None:
    """Neither one that left, nor one of another pass."""
    spec = document(
        n=2000,
        batch=2,
        y={"run": f"{F}:double"},
        t={"reduce": "sum", "of": "y", "axis": 0},
        z={"run": f"{F}:plus", "with": {"amount": "${stages.t}"}},
        u={"reduce": "sum", "of": "z", "axis": 0},
    )
    async with asyncio.timeout(100), pipedist.LocalCluster(workers=2, limits=SMALL) as cluster:
        async with pipedist.open(spec, cluster=cluster) as run:
            stream = run.steps("y")
            await anext(stream)
            result = await run.results()  # leaves the stream, though `stream` still exists
            assert result["u"] == 1999 * 1000 + 2000 * 2 * 1999 * 1000
            assert [s async for s in stream] == []
        async with pipedist.open(spec, cluster=cluster) as run:
            indices = [s.index async for s in run.steps("u")]
            assert indices == list(range(1000))


@pytest.mark.asyncio
async def test_a_reduce_and_a_gather_of_a_stream_are_that_steps_own() -> None:
    spec = document(
        n=9,
        batch=4,
        replicas=3,
        y={"run": f"{F}:double"},
        t={"reduce": "sum", "of": "y", "axis": 0},
        m={"reduce": f"{F}:larger", "of": "y"},
        g={"gather": 0, "of": "dataset"},
    )
    async with (
        asyncio.timeout(100),
        pipedist.LocalCluster(workers=2) as cluster,
        pipedist.open(spec, cluster=cluster) as run,
    ):
        steps = [s async for s in run.steps("y", "t", "m", "g")]
        assert [int(s["t"]) for s in steps] == [12, 44, 16]
        assert [s["m"].tolist() for s in steps] == [[4, 6], [12, 14], [16]]
        assert [s["g"].tolist() for s in steps] == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
        assert len(steps[2]["y"]) == 3
        assert [steps[2]["y"][i] for i in (1, 2)] == [None, None]
        assert [s.epoch for s in steps] == [0, 0, 0]
        with pytest.raises(KeyError):
            steps[0]["nope"]
        assert (await run.results())["t"] == 72


@pytest.mark.asyncio
async def test_invalid_streams_are_refused(tmp_path: Path) -> None:
    spec = document(
        y={"run": f"{F}:double"},
        t={"reduce": "sum", "of": "y", "axis": 0},
        z={"run": f"{F}:plus", "with": {"amount": "${stages.t}"}},
    )
    async with asyncio.timeout(100), pipedist.LocalCluster(workers=1) as cluster:
        for wrong, names, text in (
            ("steps", (), "at least one stage"),
            ("steps", ("nope",), "no stage 'nope' to stream; available: y, t, z"),
            ("steps", ("y", "z"), "belong to different passes"),
            ("as_completed", ("t",), "no value per replica"),
        ):
            async with pipedist.open(spec, cluster=cluster) as run:
                with pytest.raises(pipedist.UsageError, match=text):
                    await anext(getattr(run, wrong)(*names))
        async with pipedist.open(spec, cluster=cluster) as run:
            await run.results()
            with pytest.raises(pipedist.UsageError, match="has already begun"):
                await anext(run.steps("y"))
        filed = {**TOTAL, "outputs": {"t": "t.json"}}
        async with pipedist.open(filed, cluster=cluster, output=tmp_path / "o") as run:
            await run.results()
        async with pipedist.open(filed, cluster=cluster, output=tmp_path / "o", resume=True) as run:
            with pytest.raises(pipedist.UsageError, match="is finished, so there is nothing to stream"):
                await anext(run.steps("t"))
            result = await run.results()
            assert result.notice
            assert run.id == result.run_id


@pytest.mark.asyncio
async def test_what_is_raised_inside_comes_out_as_itself() -> None:
    class Mine(BaseException):
        pass

    async with asyncio.timeout(100), pipedist.LocalCluster(workers=2) as cluster:
        for error in (
            ValueError("mine"),
            KeyboardInterrupt(),
            SystemExit(3),
            Mine(),
            ExceptionGroup("g", [OSError()]),
        ):
            with pytest.raises(type(error)) as caught:  # noqa: PT012
                async with pipedist.open(document(n=100_000), cluster=cluster) as run:
                    await anext(run.steps("y"))
                    raise error
            assert caught.value is error
            await still_works(cluster)
    for error in (ValueError("mine"), KeyboardInterrupt(), Mine()):
        with pytest.raises(type(error)) as caught:
            async with pipedist.LocalCluster(workers=1):
                raise error
        assert caught.value is error


@pytest.mark.asyncio
async def test_cancellation_from_outside() -> None:
    async with asyncio.timeout(100), pipedist.LocalCluster(workers=2) as cluster:
        endless = document(n=10_000_000, batch=1, y={"run": f"{F}:napping"})

        with anyio.move_on_after(0.3) as scope:
            async with pipedist.open(endless, cluster=cluster) as run:
                await run.results()
        assert scope.cancelled_caught
        await still_works(cluster)

        with pytest.raises(TimeoutError):  # noqa: PT012
            async with asyncio.timeout(0.3), pipedist.open(endless, cluster=cluster) as run:
                async for _ in run.steps("y"):
                    pass
        await still_works(cluster)

        async def work() -> None:
            async with pipedist.open(endless, cluster=cluster) as run:
                await run.results()

        task = asyncio.ensure_future(work())
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await still_works(cluster)

        with anyio.CancelScope() as scope:
            async with pipedist.open(endless, cluster=cluster) as run:
                await anext(run.as_completed("y"))
                scope.cancel()
                await run.results()
        assert scope.cancelled_caught
        await still_works(cluster)
    with anyio.move_on_after(0.2) as scope:
        async with pipedist.LocalCluster(workers=1):
            await anyio.sleep_forever()
    assert scope.cancelled_caught


@pytest.mark.asyncio
async def test_a_run_that_was_left_before_it_began_raises() -> None:
    async with pipedist.LocalCluster(workers=1) as cluster:
        run = pipedist.open(TOTAL, cluster=cluster)
        async with run:
            with pytest.raises(pipedist.UsageError, match="a run can be entered only once"):
                await run.__aenter__()
        for late in (run.results(), anext(run.steps("t"))):
            with pytest.raises(pipedist.RunCancelled, match="left before the run ended"):
                await late
        with pytest.raises(pipedist.UsageError, match="a run can be entered only once"):
            await run.__aenter__()
        await still_works(cluster)


@pytest.mark.asyncio
async def test_a_run_in_a_generator_that_is_left_early_ends_and_its_reader_goes_on() -> None:
    """asyncio closes such a generator in another task."""

    async def steps(cluster: pipedist.LocalCluster) -> AsyncGenerator[object, None]:
        async with pipedist.open(document(n=1_000_000), cluster=cluster) as run:
            async for step in run.steps("y"):
                yield step

    async with asyncio.timeout(100), pipedist.LocalCluster(workers=1) as cluster:
        items = steps(cluster)
        await anext(items)
        with pytest.raises(pipedist.UsageError, match=r"another task.*aclosing"):
            await asyncio.create_task(items.aclose())
        await still_works(cluster)
        assert not {"run stream", "end of stream"} & {task.get_name() for task in asyncio.all_tasks()}


@pytest.mark.asyncio
async def test_a_run_whose_folder_was_removed_can_not_be_resumed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    async with asyncio.timeout(100), pipedist.open(document(n=100_000), workers=1, output=out) as run:
        waiting = asyncio.ensure_future(run.results())
        while not run.resumable:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)
        shutil.rmtree(out)
        assert not run.resumable
        waiting.cancel()


@pytest.mark.asyncio
async def test_who_waits_in_another_task_hears_that_the_run_was_left() -> None:
    async with asyncio.timeout(100), pipedist.LocalCluster(workers=1) as cluster:
        async with pipedist.open(document(n=1_000_000), cluster=cluster) as run:
            waiting = asyncio.ensure_future(run.results())
            await asyncio.sleep(0.05)
        with pytest.raises(pipedist.RunCancelled, match="left"):
            await waiting
        async with pipedist.open(document(n=1_000_000), cluster=cluster) as run:
            waiting = asyncio.ensure_future(run.results())
            await asyncio.sleep(0.05)
            run.cancel()
            with pytest.raises(pipedist.RunCancelled, match="cancelled"):
                await waiting
        async with pipedist.open(document(n=1_000_000), cluster=cluster) as run:
            stream = run.steps("y")
            await anext(stream)
            run.drain()
            with pytest.raises(pipedist.RunDrained):
                async for _ in stream:
                    pass
            ledger = run.ledger()
            assert ledger.elements == ledger.committed + ledger.lost
            assert ledger.committed > 0
            with pytest.raises(pipedist.RunDrained):
                await run.results()
        await still_works(cluster)


@pytest.mark.asyncio
async def test_earlier_steps_are_yielded_before_the_error() -> None:
    spec = document(y={"run": f"{F}:fails_on_13"}, out={"gather": 0, "of": "y"})
    async with asyncio.timeout(100), pipedist.LocalCluster(workers=2) as cluster:
        async with pipedist.open(spec, cluster=cluster) as run:
            seen = []
            with pytest.raises(pipedist.CallError, match="thirteen"):  # noqa: PT012
                async for step in run.steps("y"):
                    seen.append(step.index)
            assert seen == [0, 1, 2]
            with pytest.raises(pipedist.CallError):
                await run.results()
            ledger = run.ledger()
            assert ledger.committed == 12
            assert ledger.elements == 12 + ledger.lost
        await still_works(cluster)


@pytest.mark.asyncio
async def test_without_a_log_function_lines_go_to_stderr_once(capsys: pytest.CaptureFixture[str]) -> None:
    spec = {
        "pipedist": 1,
        "dataset": {"range": 2, "batch": 1},
        "stages": {"y": {"run": f"{F}:prints"}, "n": {"gather": 0, "of": "y"}},
    }
    async with pipedist.LocalCluster(workers=1) as cluster:
        async with pipedist.open(spec, cluster=cluster) as one, pipedist.open(spec, cluster=cluster) as two:
            await one.results()
            await two.results()
        lines = capsys.readouterr().err.splitlines()  # a call's are there before its result
    assert sorted(set(lines)) == ["[y 0 0 w0] seen 0", "[y 1 0 w0] seen 1"]
    assert len(lines) == 4


@pytest.mark.asyncio
async def test_a_log_function_that_raises_ends_its_own_run_only() -> None:
    def broken(worker: str, line: Any) -> None:
        raise RuntimeError("no disk for logs")

    spec = document(y={"run": f"{F}:prints"})
    heard: list[str] = []
    async with asyncio.timeout(100), pipedist.LocalCluster(workers=1) as cluster:
        async with (
            pipedist.open(spec, cluster=cluster, on_log=broken) as bad,
            pipedist.open(spec, cluster=cluster, on_log=lambda _w, line: heard.append(line.text)) as good,
        ):
            ends = await asyncio.gather(bad.results(), good.results(), return_exceptions=True)
        assert isinstance(ends[0], RuntimeError)
        assert isinstance(ends[1], pipedist.Result)
        assert len(heard) >= 20
        await still_works(cluster)


def test_a_log_function_that_exits_leaves_no_process(tmp_path: Path) -> None:
    script = tmp_path / "exits.py"
    script.write_text(
        textwrap.dedent("""
        import os, sys
        import pipedist
        def speak(x):
            print("a line")
            return x
        def leave(worker, line):
            sys.exit("left")
        spec = {"pipedist": 1, "dataset": {"range": 40, "batch": 4}, "stages": {"y": {"run": speak}}}
        try:
            pipedist.run(spec, workers=2, on_log=leave)
        except SystemExit as error:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                print(error, "without children")
            else:
                print("a child is left", pid)
        """)
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=100)
    assert (done.stdout, done.returncode) == ("left without children\n", 0), done.stderr


@pytest.mark.asyncio
async def test_a_dataset_that_blocks_does_not_hold_who_leaves() -> None:
    reading, free = threading.Event(), threading.Event()

    def rows() -> Any:
        yield np.arange(2)
        reading.set()
        free.wait(100)
        yield np.arange(2)

    spec = {
        "pipedist": 1,
        "dataset": {"function": {"call": rows}, "batch": 1},
        "stages": {"t": {"reduce": "sum", "of": "dataset", "axis": 0}},
    }
    try:
        async with asyncio.timeout(60), pipedist.LocalCluster(workers=1) as cluster:
            async with pipedist.open(spec, cluster=cluster) as run:
                waiting = asyncio.ensure_future(run.results())
                await asyncio.to_thread(reading.wait, 60)
            with pytest.raises(pipedist.RunCancelled):
                await waiting
            await still_works(cluster)
    finally:
        free.set()


def test_ctrl_c_in_a_notebook_ends_the_run(tmp_path: Path) -> None:
    """`run` inside a running loop works in a thread, which must not go on without its caller."""
    script = tmp_path / "notebook.py"
    script.write_text(
        textwrap.dedent("""
        import asyncio, pipedist, time
        def nap(x):
            print("napping", flush=True)
            time.sleep(0.05)
            return x
        def hear(worker, line):
            print(line.text, flush=True)
        async def cell():
            spec = {"dataset": {"range": 100000, "batch": 1}, "stages": {"y": {"run": nap}}}
            pipedist.run({"pipedist": 1, **spec}, workers=1, on_log=hear)
        try:
            asyncio.new_event_loop().run_until_complete(cell())  # as a notebook's kernel does
        except KeyboardInterrupt:
            print("interrupted")
        """)
    )
    process = preloaded.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process, process.stdout as out:
        assert out.readline() == "napping\n"
        process.send_signal(signal.SIGINT)
        rest = out.read().split()
        process.wait(60)
    assert rest[-1] == "interrupted"
    assert process.returncode == 0


@pytest.mark.asyncio
async def test_a_streamed_result_costs_few_python_calls() -> None:
    steps = 3000
    async with (
        pipedist.LocalCluster(workers=1) as cluster,
        pipedist.open(document(steps, batch=1, replicas=1), cluster=cluster) as run,
    ):
        with PythonCalls() as counted:
            received = [step.index async for step in run.steps("y")]
    assert received == list(range(steps))
    assert counted.made < 20 * steps
