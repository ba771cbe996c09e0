"""`Strategy.run` on real worker processes: arguments in, per-replica results out, errors with their cause."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pipedist
from pipedist.strategy import passes
from pipedist.values import PerReplica
from tests.strategy import functions

pytestmark = pytest.mark.asyncio


def parts(value: Any) -> list[Any]:
    assert type(value) is PerReplica
    return list(value.components)


async def test_each_replica_gets_its_component_and_a_copy_of_the_rest() -> None:
    async with pipedist.LocalCluster(workers=2) as cluster:
        strategy = pipedist.Strategy(cluster, replicas=3)
        x = PerReplica([np.arange(2), np.arange(3), np.arange(0)])
        result = await strategy.run(
            lambda a, *, b: {"sum": a["x"].sum() + b, "none": None, "shape": (a["x"].shape[0], a["y"])},
            args=[{"x": x, "y": 5}],
            kwargs={"b": PerReplica([10, 20, 30])},
        )
        assert parts(result["sum"]) == [11, 23, 30]
        assert result["none"] is None
        assert type(result["shape"]) is tuple
        assert [parts(leaf) for leaf in result["shape"]] == [[2, 3, 0], [5, 5, 5]]


async def test_one_replica_is_per_replica_too_and_one_device_is_plain() -> None:
    async with pipedist.LocalCluster(workers=1) as cluster:
        mirrored = await pipedist.Strategy(cluster).run(functions.double, args=(3,))
        plain = await pipedist.OneDeviceStrategy(cluster).run(functions.double, args=(3,))
        central = pipedist.CentralStorageStrategy(cluster, replicas=2)
        assert parts(mirrored) == [6]
        assert plain == 6
        assert parts((await central.run(functions.ids))[0]) == [0, 1]


async def test_async_functions_and_the_context() -> None:
    async with pipedist.LocalCluster(workers=2) as cluster:
        strategy = pipedist.Strategy(cluster, replicas=2)
        assert parts(await strategy.run(functions.double_later, args=(PerReplica([1, 2]),))) == [2, 4]
        replica, total = await strategy.run(functions.ids)
        assert (parts(replica), parts(total)) == ([0, 1], [2, 2])
        has, cross, number = await strategy.run(functions.where)
        assert (parts(has), parts(cross), parts(number)) == ([True, True], [False, False], [2, 2])
        captured = await strategy.run(lambda: strategy.num_replicas_in_sync)
        assert parts(captured) == [2, 2]


async def test_the_lowest_replicas_exception_is_the_cause() -> None:
    async with pipedist.LocalCluster(workers=2) as cluster:
        strategy = pipedist.Strategy(cluster, replicas=4)
        for failing, lowest in (((3, 1, 2), 1), ((0, 1, 2, 3), 0), ((3,), 3)):
            with pytest.raises(pipedist.CallError) as caught:
                await strategy.run(functions.fail_on, kwargs={"replicas": failing})
            assert repr(caught.value.__cause__) == repr(KeyError(f"replica {lowest}"))
            assert caught.value.replica == lowest
        assert parts(await strategy.run(functions.fail_on, kwargs={"replicas": ()})) == ["fine"] * 4


async def test_different_structures_show_both() -> None:
    async with pipedist.LocalCluster(workers=1) as cluster:
        strategy = pipedist.Strategy(cluster, replicas=2)
        with pytest.raises(ValueError, match=r"replica 0 has \[\*\], replica 1 has \[\*, \*\]"):
            await strategy.run(lambda ctx: [1] * (1 + ctx.replica_id_in_sync_group))


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        ({"fn": 3}, TypeError, "3 of type int can't be called"),
        ({"fn": None}, TypeError, "can't be called"),
        ({"fn": functions.double, "args": 3}, ValueError, r"expected a tuple: args=\(value,\)"),
        ({"fn": functions.double, "args": np.arange(3)}, ValueError, "expected a tuple"),
        ({"fn": functions.double, "kwargs": [1]}, TypeError, "expected a dict"),
        ({"fn": functions.double, "args": (PerReplica([1, 2, 3]),)}, ValueError, "3 components"),
        ({"fn": functions.double, "args": ({"a": [object()]},)}, TypeError, r"an object, at args/0/a/0"),
        ({"fn": functions.double, "kwargs": {"x": {1}}}, TypeError, "a set, at kwargs/x"),
    ],
)
async def test_bad_calls_do_not_affect_other_calls(
    call: dict[str, Any], error: type[Exception], match: str
) -> None:
    async with pipedist.LocalCluster(workers=1) as cluster:
        strategy = pipedist.Strategy(cluster, replicas=2)
        with pytest.raises(error, match=match):
            await strategy.run(**call)
        assert parts(await strategy.run(functions.double, args=(4,))) == [8, 8]


async def test_an_argument_that_cant_be_sent_ends_no_other_run_of_the_function(tmp_path: Path) -> None:
    async with pipedist.LocalCluster(workers=2) as cluster:
        strategy = pipedist.Strategy(cluster, replicas=1)
        waiting = asyncio.create_task(strategy.run(functions.wait_for, args=(str(tmp_path / "go"),)))
        await asyncio.sleep(0)
        with pytest.raises(TypeError, match="an object, at args/0"):
            await strategy.run(functions.wait_for, args=(object(),))
        (tmp_path / "go").touch()
        assert parts(await waiting) == ["found"]


async def test_many_runs_at_once_keep_their_arguments() -> None:
    async with pipedist.LocalCluster(workers=2) as cluster:
        strategy = pipedist.Strategy(cluster, replicas=2)
        results = await asyncio.gather(
            *(strategy.run(functions.double, args=(PerReplica([n, -n]),)) for n in range(100))
        )
        assert [parts(result) for result in results] == [[2 * n, -2 * n] for n in range(100)]


async def test_a_cancelled_run_leaves_the_strategy_usable() -> None:
    async with pipedist.LocalCluster(workers=1) as cluster:
        strategy = pipedist.Strategy(cluster, replicas=2)
        run = asyncio.create_task(strategy.run(functions.double, args=(1,)))
        await asyncio.sleep(0)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        assert parts(await strategy.run(functions.double, args=(2,))) == [4, 4]


async def test_a_cancelled_run_that_hangs_ends_with_its_worker(tmp_path: Path) -> None:
    async with pipedist.LocalCluster(workers=1) as cluster:
        strategy = pipedist.Strategy(cluster, replicas=2)
        with strategy.scope():
            v = pipedist.Variable(1.0, aggregation="sum")

        def hangs(folder: str) -> None:
            import threading

            v.assign_add(1.0)
            ctx: Any = pipedist.get_replica_context()
            if ctx.replica_id_in_sync_group == 0:
                with (Path(folder) / "attempts").open("a") as attempts:
                    attempts.write("x")
                (Path(folder) / "begun").touch()
            threading.Event().wait()

        run = asyncio.create_task(strategy.run(hangs, args=(str(tmp_path),)))
        await asyncio.to_thread(functions.wait_for, str(tmp_path / "begun"))
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        await cluster.restart(0)
        async with asyncio.timeout(60):
            assert parts(await strategy.run(lambda: float(v.value()))) == [1.0, 1.0]
        assert (tmp_path / "attempts").read_text() == "x"


async def test_nothing_waits_for_a_worker_that_hangs_in_what_is_over(tmp_path: Path) -> None:
    def hangs(begun: str) -> None:
        import threading

        Path(begun).write_bytes(b"")  # which waits for a reader
        threading.Event().wait()

    os.mkfifo(tmp_path / "begun")
    async with pipedist.LocalCluster(workers=2) as cluster:
        first = pipedist.Strategy(cluster, replicas=1)
        run = asyncio.create_task(first.run(hangs, args=(str(tmp_path / "begun"),)))
        await asyncio.to_thread((tmp_path / "begun").read_bytes)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        await first.aclose()
        second = pipedist.Strategy(cluster, replicas=2)
        async with asyncio.timeout(60):
            assert parts(await second.run(functions.double, args=(2,))) == [4, 4]


async def test_what_a_function_captured_is_what_it_captures_now() -> None:
    async with pipedist.LocalCluster(workers=1) as cluster:
        strategy = pipedist.Strategy(cluster, replicas=1)
        weight = 1

        def weighted(x: int) -> int:
            return x * weight

        assert parts(await strategy.run(weighted, args=(5,))) == [5]
        weight = 10
        assert parts(await strategy.run(weighted, args=(5,))) == [50]


async def test_the_number_of_open_passes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "PASSES_MAX", 3)
    async with pipedist.LocalCluster(workers=1) as cluster:
        opened: list[Any] = []
        closed: list[Any] = []
        original = cluster.coordinator.open_pass

        def open_pass(*args: Any, **kwargs: Any) -> Any:
            handle = original(*args, **kwargs)
            opened.append(handle)
            close = handle.close
            monkeypatch.setattr(handle, "close", lambda: (closed.append(handle), close()))
            return handle

        monkeypatch.setattr(cluster.coordinator, "open_pass", open_pass)
        async with pipedist.Strategy(cluster, replicas=1) as strategy:
            for number in range(6):
                assert parts(await strategy.run(lambda number=number: number)) == [number]
            assert len(opened) == 6
            assert closed == opened[:3]
        assert closed == opened


async def test_a_pass_in_use_is_not_dropped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(passes, "PASSES_MAX", 1)
    async with pipedist.LocalCluster(workers=2) as cluster:
        strategy = pipedist.Strategy(cluster, replicas=1)
        waiting = asyncio.create_task(strategy.run(functions.wait_for, args=(str(tmp_path / "go"),)))
        await asyncio.sleep(0)
        for number in range(3):
            assert parts(await strategy.run(functions.double, args=(number,))) == [2 * number]
        (tmp_path / "go").touch()
        assert parts(await waiting) == ["found"]


async def test_a_pass_that_failed_is_not_used_again() -> None:
    async with pipedist.LocalCluster(workers=1) as cluster:
        strategy = pipedist.Strategy(cluster, replicas=1)
        opened = []
        original = cluster.coordinator.open_pass
        cluster.coordinator.open_pass = lambda *a, **k: opened.append(original(*a, **k)) or opened[-1]
        assert parts(await strategy.run(functions.double, args=(1,))) == [2]
        opened[0].fail(OSError("torn down"))
        with pytest.raises(OSError, match="torn down"):
            await strategy.run(functions.double, args=(2,))
        assert parts(await strategy.run(functions.double, args=(3,))) == [6]


async def test_randomness_follows_the_seed_and_never_repeats() -> None:
    async def numbers(seed: int, workers: int) -> list[Any]:
        async with pipedist.LocalCluster(workers=workers) as cluster:
            strategy = pipedist.Strategy(cluster, replicas=3, seed=seed)
            return [number for _ in range(3) for number in parts(await strategy.run(functions.draw))]

    first = await numbers(7, 1)
    assert len(set(first)) == 9
    assert await numbers(7, 2) == first
    assert set(await numbers(8, 1)).isdisjoint(first)
    async with pipedist.LocalCluster(workers=1) as cluster:
        strategy = pipedist.Strategy(cluster, replicas=1)
        drawn = [parts(await strategy.run(lambda ctx, n=n: ctx.rng.random()))[0] for n in range(3)]
        assert len(set(drawn)) == 3, "each time another function of the same name"


async def test_a_run_on_a_closed_cluster_raises() -> None:
    async with pipedist.LocalCluster(workers=1) as cluster:
        strategy = pipedist.Strategy(cluster, replicas=1)
        await strategy.run(functions.double, args=(1,))
    for _ in range(2):
        with pytest.raises(pipedist.RunCancelled):
            await strategy.run(functions.double, args=(1,))


async def test_results_can_be_reduced_and_gathered() -> None:
    async with pipedist.LocalCluster(workers=2) as cluster:
        strategy = pipedist.Strategy(cluster, replicas=2)
        y = await strategy.run(functions.double, args=(PerReplica([np.arange(4), np.arange(2)]),))
        assert await strategy.reduce("sum", y, axis=0) == 14
        assert await strategy.reduce(pipedist.ReduceOp.MEAN, y, axis=0) == 14 / 6
        assert (await strategy.gather(y, axis=0)).tolist() == [0, 2, 4, 6, 0, 2]
        assert [part.tolist() for part in strategy.local_results(y)] == [[0, 2, 4, 6], [0, 2]]
        large = PerReplica([np.ones(200_000)] * 2)
        assert await strategy.reduce("sum", large, axis=0) == 400_000, "in a thread"
        with pytest.raises(TypeError, match="axis"):
            await strategy.reduce("sum", y)  # type: ignore[call-arg]


async def test_strategies_are_validated() -> None:
    with pytest.raises(TypeError, match="needs an open cluster"):
        pipedist.Strategy(3)  # type: ignore[arg-type]
    async with pipedist.LocalCluster(workers=1) as cluster:
        for replicas, error in ((0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError)):
            with pytest.raises(error, match="replicas"):
                pipedist.Strategy(cluster, replicas=replicas)  # type: ignore[arg-type]
        assert repr(pipedist.Strategy(cluster, 2)) == "<Strategy of 2 replicas>"
