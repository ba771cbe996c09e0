"""ClusterCoordinator on real worker processes: turns, results, errors, per-worker datasets."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest

import pipedist
from pipedist.datasets.input import InputContext
from tests.strategy import closure_functions as functions

pytestmark = pytest.mark.asyncio


def parameter_server(
    cluster: pipedist.LocalCluster, of_workers: int | None = None, **options: Any
) -> pipedist.ClusterCoordinator:
    strategy = pipedist.ParameterServerStrategy(cluster, workers=of_workers)
    return pipedist.ClusterCoordinator(strategy, **options)


async def test_closures_return_futures() -> None:
    async with pipedist.LocalCluster(workers=2) as cluster, parameter_server(cluster) as coordinator:
        assert coordinator.done()
        await coordinator.join()  # nothing to wait for
        one = await coordinator.schedule(functions.increment, args=(0,))
        two = await coordinator.schedule(lambda a, *, b: a + b, [one], {"b": one})
        four = await coordinator.schedule(functions.double_later, kwargs={"x": two})
        who = await coordinator.schedule(functions.step_and_replicas)
        tree = await coordinator.fetch({"a": [one, two], "b": (four, 7), "c": None})
        assert tree == {"a": [1, 2], "b": (4, 7), "c": None}
        assert (await who, await who.fetch()) == ((0, 1), (0, 1))
        assert who.done
        assert repr(one).endswith("increment: done>")
        assert coordinator.done()
        assert coordinator.strategy.num_replicas_in_sync == 1


async def test_arguments_are_as_they_were_when_scheduled(tmp_path: Path) -> None:
    async with pipedist.LocalCluster(workers=1) as cluster, parameter_server(cluster) as coordinator:
        await coordinator.schedule(functions.wait_for, (str(tmp_path / "go"),))
        buffer, nested = np.zeros(3), {"x": [1]}
        values = []
        for i in range(3):
            buffer[:] = i
            nested["x"][0] = i
            values.append(await coordinator.schedule(lambda a, b: (a.sum(), b["x"][0]), (buffer, nested)))
        buffer[:] = 99
        (tmp_path / "go").touch()
        assert await coordinator.fetch(values) == [(0, 0), (3, 1), (6, 2)]


async def test_a_worker_that_dies_costs_nothing_and_counts_once(tmp_path: Path) -> None:
    async with pipedist.LocalCluster(workers=2) as cluster:
        strategy = pipedist.ParameterServerStrategy(cluster)
        total = strategy.create_variable(0.0)
        async with pipedist.ClusterCoordinator(strategy) as coordinator:
            values = []
            for i in range(6):
                if i == 2:
                    args = (total, 100.0, str(tmp_path / "died"))
                    values.append(await coordinator.schedule(functions.add_and_die_once, args))
                values.append(await coordinator.schedule(functions.add, (total, 1.0)))
            assert len(await coordinator.fetch(values)) == 7
            assert (tmp_path / "died").exists()
            assert total.numpy() == 106.0


async def test_the_first_error_in_order_of_scheduling_surfaces_once(tmp_path: Path) -> None:
    async with pipedist.LocalCluster(workers=2) as cluster:
        strategy = pipedist.ParameterServerStrategy(cluster)
        total = strategy.create_variable(0.0)
        coordinator = pipedist.ClusterCoordinator(strategy)
        marker = str(tmp_path / "later one failed")
        good = await coordinator.schedule(functions.add, (total, 1.0))
        first = await coordinator.schedule(functions.fail_after, (marker, "first"))
        between = await coordinator.schedule(functions.add, (total, 10.0))
        second = await coordinator.schedule(functions.touch_and_fail, (marker, "second"))
        with pytest.raises(pipedist.CallError, match="first") as raised:
            await coordinator.join()
        assert type(raised.value.__cause__) is ValueError
        await coordinator.join()
        assert coordinator.done()
        assert await good == 1.0
        assert total.numpy() == 1.0
        for _ in range(2):
            with pytest.raises(pipedist.CallError, match="first"):
                await first
        for cancelled in (between, second):
            with pytest.raises(pipedist.ClosureCancelled) as dropped:
                await coordinator.fetch(cancelled)
            assert dropped.value.__cause__ is raised.value
        assert await (await coordinator.schedule(functions.add, (total, 2.0))) == 3.0


async def test_an_error_surfaces_at_the_next_schedule() -> None:
    async with pipedist.LocalCluster(workers=1) as cluster:
        coordinator = parameter_server(cluster)
        failed = await coordinator.schedule(functions.fail, ("bad",))
        with pytest.raises(pipedist.CallError):
            await failed
        with pytest.raises(pipedist.CallError, match="bad"):
            await coordinator.schedule(functions.increment, (1,))
        assert await (await coordinator.schedule(functions.increment, (1,))) == 2
        await coordinator.join()


async def test_leaving_the_coordinator_joins() -> None:
    async with pipedist.LocalCluster(workers=1) as cluster:
        with pytest.raises(pipedist.CallError, match="unseen"):
            async with parameter_server(cluster) as coordinator:
                await coordinator.schedule(functions.fail, ("unseen",))
        with pytest.raises(pipedist.UsageError, match="closed"):
            await coordinator.schedule(functions.increment, (1,))


async def test_an_error_that_leaves_the_coordinator_is_not_replaced() -> None:
    async with pipedist.LocalCluster(workers=1) as cluster:
        values = []

        async def leave() -> None:
            async with parameter_server(cluster) as coordinator:
                values.append(await coordinator.schedule(functions.fail, ("unseen",)))
                raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            await leave()
        with pytest.raises(pipedist.ClosureCancelled, match="closed"):
            await values[0]


async def test_what_needs_a_failed_result_fails_with_it() -> None:
    async with pipedist.LocalCluster(workers=1) as cluster:
        coordinator = parameter_server(cluster)
        failed = await coordinator.schedule(functions.fail, ("root",))
        with pytest.raises(pipedist.CallError):
            await coordinator.join()
        dependent = await coordinator.schedule(functions.increment, (failed,))
        with pytest.raises(pipedist.CallError, match="root"):
            await dependent
        with pytest.raises(pipedist.CallError, match="root"):
            await coordinator.join()


async def test_schedule_waits_while_the_queue_is_full(tmp_path: Path) -> None:
    async with (
        pipedist.LocalCluster(workers=1) as cluster,
        parameter_server(cluster, closures_max=2) as coordinator,
    ):
        go = tmp_path / "go"
        for _ in range(2):
            await coordinator.schedule(functions.wait_for, (str(go),))
        scheduled: list[pipedist.RemoteValue] = []

        async def third() -> None:
            scheduled.append(await coordinator.schedule(functions.increment, (1,)))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(third)
            for _ in range(20):
                await anyio.lowlevel.checkpoint()
            assert not scheduled
            go.touch()
        assert await scheduled[0] == 2


async def test_closures_that_are_pending_when_the_cluster_is_closed(tmp_path: Path) -> None:
    async with pipedist.LocalCluster(workers=1) as cluster:
        coordinator = parameter_server(cluster)
        values = [
            await coordinator.schedule(functions.wait_for, (str(tmp_path / "never"),)) for _ in range(2)
        ]
    with pytest.raises(pipedist.RunCancelled):
        await values[0]
    with pytest.raises(pipedist.ClosureCancelled):
        await values[1]


async def test_results_that_cant_be_sent_are_the_closures_error() -> None:
    async with pipedist.LocalCluster(workers=1) as cluster:
        coordinator = parameter_server(cluster)
        await coordinator.schedule(lambda: {1, 2})
        with pytest.raises(pipedist.CallError, match="set"):
            await coordinator.join()
        await coordinator.schedule(functions.increment, ({1, 2},))
        with pytest.raises(pipedist.CallError, match="set"):
            await coordinator.join()


async def test_misuse_raises_immediately() -> None:
    async with pipedist.LocalCluster(workers=1) as cluster:
        coordinator = parameter_server(cluster)
        schedule = coordinator.schedule
        other = parameter_server(cluster)
        foreign = await other.schedule(functions.increment, (1,))
        with pytest.raises(TypeError, match="3 of type int can't be called"):
            await schedule(3)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="expected a tuple"):
            await schedule(functions.increment, 3)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="expected a dict"):
            await schedule(functions.increment, (), 3)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="belongs to another coordinator"):
            await schedule(functions.increment, (foreign,))
        with pytest.raises(ValueError, match="as an argument"):
            await schedule(lambda: foreign)
        with pytest.raises(TypeError, match="needs a pipedist"):
            pipedist.ClusterCoordinator(pipedist.OneDeviceStrategy(cluster))  # type: ignore[arg-type]
        with pytest.raises(pipedist.UsageError, match="already"):
            pipedist.ClusterCoordinator(coordinator.strategy)
        with pytest.raises(ValueError, match="staleness is -1"):
            parameter_server(cluster, staleness=-1)
        with pytest.raises(TypeError, match="closures_max"):
            parameter_server(cluster, closures_max=1.5)
        assert coordinator.done()
        await other.join()


# -- per-worker datasets -----------------------------------------------------------------------


async def test_logical_workers_take_turns_and_each_has_its_own_iterator() -> None:
    async with pipedist.LocalCluster(workers=2) as cluster:
        strategy = pipedist.ParameterServerStrategy(cluster, workers=3)
        async with pipedist.ClusterCoordinator(strategy) as coordinator:

            def shard(context: InputContext) -> pipedist.Dataset:
                return pipedist.Dataset.range(100).shard(
                    context.num_input_pipelines, context.input_pipeline_id
                )

            whole = coordinator.create_per_worker_dataset(pipedist.Dataset.range(100).batch(2))
            iterator = iter(whole)
            divided = iter(coordinator.create_per_worker_dataset(shard))
            values = []
            for i in range(6):
                values.append(await coordinator.schedule(lambda a, b, c: (a, b, c), (iterator, i, iterator)))
                await coordinator.schedule(functions.increment, (i,))  # takes no turn
            again = await coordinator.schedule(lambda a: a, (iter(whole),))
            dealt = [await coordinator.schedule(functions.increment, (divided,)) for _ in range(6)]
            fetched = await coordinator.fetch(values)
            assert [a.tolist() for a, _, _ in fetched] == [[0, 1]] * 3 + [[2, 3]] * 3
            assert all((a == c).all() for a, _, c in fetched)
            assert (await again).tolist() == [0, 1]
            assert sorted(await coordinator.fetch(dealt)) == [1, 2, 3, 4, 5, 6]
            assert whole.element_spec.dtype == np.int64


@pytest.mark.parametrize("ends", ["cancelled", "closed"])
async def test_a_closure_that_is_not_scheduled_takes_no_turn_and_no_element(ends: str) -> None:
    readable = threading.Event()

    def dataset_fn(context: InputContext) -> pipedist.Dataset:
        def elements() -> Iterator[int]:
            readable.wait(60)
            yield from range(10 * context.input_pipeline_id, 10 * context.input_pipeline_id + 2)

        return pipedist.Dataset.from_generator(elements)

    async with pipedist.LocalCluster(workers=1) as cluster:
        coordinator = parameter_server(cluster, of_workers=2)
        first = iter(coordinator.create_per_worker_dataset(pipedist.Dataset.range(2)))
        iterator = iter(coordinator.create_per_worker_dataset(dataset_fn))
        waiting = asyncio.create_task(coordinator.schedule(lambda a, b: (a, b), (first, iterator)))
        for _ in range(20):  # of the loop's turns, in which it has come to wait for its element
            await asyncio.sleep(0)
        if ends == "closed":
            await coordinator.aclose()
            readable.set()
            with pytest.raises(pipedist.UsageError, match="this coordinator is closed"):
                await waiting
            return
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        readable.set()
        values = [await coordinator.schedule(lambda a, b: (a, b), (first, iterator)) for _ in range(4)]
        assert await coordinator.fetch(values) == [(0, 0), (0, 10), (1, 1), (1, 11)]


async def test_join_fails_if_another_task_closes_the_coordinator(tmp_path: Path) -> None:
    async with pipedist.LocalCluster(workers=1) as cluster:
        coordinator = parameter_server(cluster)
        await coordinator.schedule(functions.wait_for, (str(tmp_path / "go"),))
        joins = [asyncio.create_task(coordinator.join()) for _ in range(2)]
        for _ in range(3):  # of the loop's turns, in which they have come to wait
            await asyncio.sleep(0)
        await coordinator.aclose()
        for each in joins:
            with pytest.raises(pipedist.ClosureCancelled, match="wait_for was cancelled: the coord"):
                await each
        (tmp_path / "go").touch()


async def test_the_end_of_a_per_worker_dataset_is_the_closures_error(tmp_path: Path) -> None:
    async with pipedist.LocalCluster(workers=1) as cluster:
        strategy = pipedist.ParameterServerStrategy(cluster)
        coordinator = pipedist.ClusterCoordinator(strategy)

        def dataset_fn() -> Any:
            return strategy.distribute_dataset(pipedist.Dataset.range(2))

        iterator = iter(coordinator.create_per_worker_dataset(dataset_fn))
        marker = str(tmp_path / "died")
        first = await coordinator.schedule(functions.die_once, (marker, iterator))
        second = await coordinator.schedule(functions.increment, (iterator,))
        third = await coordinator.schedule(functions.increment, (iterator,))
        with pytest.raises(pipedist.OutOfRangeError, match="worker 0"):
            await coordinator.join()
        assert (await first, await second) == (0, 2)
        with pytest.raises(pipedist.OutOfRangeError):
            await third


async def test_per_worker_datasets_are_for_closures_only() -> None:
    async with pipedist.LocalCluster(workers=1) as cluster:
        strategy = pipedist.ParameterServerStrategy(cluster)
        async with pipedist.ClusterCoordinator(strategy) as coordinator:
            distributed = strategy.distribute_dataset(pipedist.Dataset.range(2).batch(1))
            with pytest.raises(ValueError, match="create_per_worker_dataset"):
                aiter(distributed)
            contexts = []

            def dataset_fn(context: InputContext) -> pipedist.Dataset:
                contexts.append(context)
                return pipedist.Dataset.range(3)

            made = coordinator.create_per_worker_dataset(
                functools.partial(strategy.distribute_datasets_from_function, dataset_fn)
            )
            assert contexts == [InputContext(1, 0, 1)]
            with pytest.raises(RuntimeError, match="as an argument"):
                next(iter(made))
            with pytest.raises(TypeError, match="as an argument"):
                await coordinator.schedule(functions.increment, (made,))
            iterator = iter(made)
            with pytest.raises(ValueError, match="as an argument"):
                await coordinator.schedule(lambda: iterator)
            for wrong in ([1, 2], None, lambda: [1], lambda: None):
                with pytest.raises(ValueError, match="Dataset"):
                    coordinator.create_per_worker_dataset(wrong)  # type: ignore[arg-type]
            with pytest.raises(ZeroDivisionError):
                coordinator.create_per_worker_dataset(lambda: 1 // 0)  # type: ignore[arg-type,return-value]
