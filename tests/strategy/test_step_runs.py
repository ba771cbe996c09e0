"""run_steps: results in order, some steps ahead of them."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pipedist
from tests.strategy.functions import wait_for

pytestmark = pytest.mark.asyncio


def square(x: Any) -> Any:
    return x * x


def add(a: Any, b: Any) -> Any:
    return a + b


async def test_results_come_in_the_order_of_steps() -> None:
    async with pipedist.LocalCluster(workers=2) as cluster:
        strategy = pipedist.Strategy(cluster, replicas=2)
        dataset = strategy.distribute_dataset(pipedist.Dataset.range(40).batch(4))
        results = [step async for step in strategy.run_steps(square, dataset)]
        expected = np.arange(40) ** 2
        assert np.concatenate([part for step in results for part in step]).tolist() == expected.tolist()
        again = [step async for step in strategy.run_steps(square, dataset, ahead=1)]
        assert [[p.tolist() for p in step] for step in again] == [
            [p.tolist() for p in step] for step in results
        ]


class Counted:
    """Pairs of numbers, and how many of them were read."""

    def __init__(self, count: int, fails_at: int | None = None) -> None:
        self.read = 0
        self._count = count
        self._fails_at = fails_at

    async def __aiter__(self) -> AsyncIterator[Any]:
        for number in range(self._count):
            if number == self._fails_at:
                raise OSError("unreadable")
            self.read += 1
            yield number, 10 * number


async def test_no_more_than_some_steps_are_read_ahead() -> None:
    async with pipedist.LocalCluster(workers=1) as cluster:
        strategy = pipedist.Strategy(cluster, replicas=1)
        steps = Counted(10)
        async with strategy.run_steps(lambda a, b: a + b, steps, ahead=3) as results:
            assert steps.read == 0
            assert list(await anext(results)) == [0]
            assert steps.read == 3
            assert list(await anext(results)) == [11]
            assert steps.read == 4
        with pytest.raises(StopAsyncIteration):
            await anext(results)
        assert list(await strategy.run(square, args=(3,))) == [9]


async def refilled() -> AsyncIterator[Any]:
    memory = np.zeros(2000)
    for number in range(6):
        memory[:] = number
        yield memory, pipedist.PerReplica([{"x": memory}, {"x": memory[:1]}])


async def test_steps_that_share_one_memory_are_as_they_were_when_read() -> None:
    async with pipedist.LocalCluster(workers=2) as cluster:
        strategy = pipedist.Strategy(cluster, replicas=2)
        with strategy.scope():
            v = pipedist.Variable(0.0, aggregation="mean")

        def waits_its_turn(a: Any, b: Any) -> Any:
            return v.assign(v * 0 + a[0] + b["x"][0])

        for fn in (lambda a, b: a[0] + b["x"][0], waits_its_turn):
            got = [[float(part) for part in step] async for step in strategy.run_steps(fn, refilled())]
            assert got == [[2.0 * number] * 2 for number in range(6)]


async def test_an_error_comes_when_it_is_its_steps_turn() -> None:
    def fail_at_3(a: int, b: int) -> int:
        if a == 3:
            raise KeyError(a)
        return a

    async with pipedist.LocalCluster(workers=2) as cluster:
        strategy = pipedist.Strategy(cluster, replicas=2)
        for steps, error in ((Counted(9), pipedist.CallError), (Counted(9, fails_at=2), OSError)):
            results = strategy.run_steps(fail_at_3, steps)
            for number in range(3 if error is pipedist.CallError else 2):
                assert list(await anext(results)) == [number] * 2
            with pytest.raises(error):
                await anext(results)


async def test_steps_that_use_variables_follow_each_other() -> None:
    async with pipedist.LocalCluster(workers=2) as cluster:
        strategy = pipedist.Strategy(cluster, replicas=2)
        with strategy.scope():
            v = pipedist.Variable(0, aggregation="sum")

        def step(a: int, b: int) -> Any:
            return v.assign(v + a)

        values = [int(result[0]) async for result in strategy.run_steps(step, Counted(5))]
        expected, value = [], 0
        for number in range(5):
            value = 2 * (value + number)
            expected.append(value)
        assert values == expected
        assert v.numpy() == value


async def test_several_tasks_share_the_results() -> None:
    results = []

    async def take(runs: Any) -> None:
        async for result in runs:
            results.append(int(result[0]))

    async with pipedist.LocalCluster(workers=1) as cluster:
        strategy = pipedist.Strategy(cluster, replicas=1)
        runs = strategy.run_steps(lambda a, b: b, Counted(30), ahead=4)
        await asyncio.gather(take(runs), take(runs), take(runs))
    assert results == list(range(0, 300, 10))


async def test_a_waiting_reader_gets_its_result_while_others_close(tmp_path: Path) -> None:
    async def steps() -> AsyncIterator[Any]:
        yield str(tmp_path / "go")

    async with pipedist.LocalCluster(workers=1) as cluster:
        runs = pipedist.Strategy(cluster, replicas=1).run_steps(wait_for, steps(), ahead=1)
        waiting = asyncio.create_task(anext(runs))
        for _ in range(20):  # of the loop's turns, in which it has begun the step
            await asyncio.sleep(0)
        await runs.aclose()
        (tmp_path / "go").touch()
        assert list(await waiting) == ["found"]


async def test_a_step_whose_results_do_not_fit_together_ends_no_other_run(tmp_path: Path) -> None:
    def step(go: str, fits: bool) -> Any:
        wait_for(go)
        second = pipedist.get_replica_context().replica_id_in_sync_group == 1
        return ["found"] if second and not fits else "found"

    async def steps() -> AsyncIterator[Any]:
        yield str(first), False

    first, second = tmp_path / "first", tmp_path / "second"
    async with pipedist.LocalCluster(workers=1) as cluster:
        strategy = pipedist.Strategy(cluster, replicas=2)
        misfit = asyncio.create_task(anext(strategy.run_steps(step, steps())))
        await asyncio.sleep(0)
        waiting = asyncio.create_task(strategy.run(step, args=(str(second), True)))
        await asyncio.sleep(0)
        first.touch()
        with pytest.raises(ValueError, match="different structures"):
            await misfit
        second.touch()
        assert list(await waiting) == ["found"] * 2


async def test_what_makes_no_sense_is_refused() -> None:
    async with pipedist.LocalCluster(workers=1) as cluster:
        strategy = pipedist.Strategy(cluster, replicas=1)
        with pytest.raises(TypeError, match="needs an async iterable"):
            strategy.run_steps(square, [1, 2])  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="run needs a function"):
            strategy.run_steps(3, Counted(1))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="ahead"):
            strategy.run_steps(square, Counted(1), ahead=0)


async def test_an_abandoned_iterator_uses_its_function_no_longer() -> None:
    async with pipedist.LocalCluster(workers=1) as cluster:
        strategy = pipedist.Strategy(cluster, replicas=1)
        results = strategy.run_steps(square, Counted(10), ahead=3)
        with pytest.raises(pipedist.CallError):
            await anext(results)  # takes one argument
        results = strategy.run_steps(add, Counted(10), ahead=3)
        assert list(await anext(results)) == [0]
        del results
        await strategy.run(add, args=(1, 2))  # the steps before it are over
        gc.collect()
        assert strategy._passes is not None
        assert [entry.users for entry in strategy._passes._open.values()] == [0, 0]
