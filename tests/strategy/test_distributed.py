"""Distributed datasets: steps, ends, misuse, and what is left behind."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator
from typing import Any

import anyio
import numpy as np
import pytest

import pipedist
from pipedist.datasets.element import ArraySpec
from pipedist.datasets.input import InputContext, InputOptions
from pipedist.datasets.logical import Dataset
from pipedist.strategy import DistributedDataset, get_strategy
from pipedist.values import PerReplica

pytestmark = pytest.mark.asyncio


class NoWorkers:
    """Stands for a cluster where nothing is run."""

    coordinator: Any = None


def mirrored(replicas: int) -> pipedist.Strategy:
    return pipedist.Strategy(NoWorkers(), replicas=replicas)


def lists(step: Any) -> list[Any]:
    assert type(step) is PerReplica
    return [None if part is None else part.tolist() for part in step]


async def steps(dataset: DistributedDataset) -> list[Any]:
    return [lists(step) async for step in dataset]


def readers_left() -> list[threading.Thread]:
    """Threads that read ahead for nobody, and do not end."""

    def there() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "pipedist-read-ahead"]

    gc.collect()
    for thread in there():
        thread.join(60)
    return there()


async def test_the_documented_example() -> None:
    dataset = mirrored(3).distribute_dataset(Dataset.range(9).batch(4))
    assert (
        await steps(dataset)
        == await steps(dataset)
        == [[[0, 1], [2, 3], []], [[4, 5], [6, 7], []], [[8], [], []]]
    )
    assert dataset.cardinality() == 3
    assert list(dataset.element_spec) == [ArraySpec(np.int64, [None])] * 3
    assert readers_left() == []


async def test_empty_parts_keep_dtype_and_trailing_shape() -> None:
    rows = {"a": np.zeros((1, 2, 3), np.float16), "b": np.array(["x"])}
    dataset = mirrored(2).distribute_dataset(Dataset.from_tensor_slices(rows).batch(4))
    async for step in dataset:
        empty = step["a"][1], step["b"][1]
        assert [(part.shape, part.dtype.kind) for part in empty] == [((0, 2, 3), "f"), ((0,), "U")]
        assert step["a"][1].dtype == np.float16


async def test_three_ways_to_the_end() -> None:
    dataset = mirrored(2).distribute_dataset(Dataset.range(2).batch(2))
    for _ in range(2):
        iterator = aiter(dataset)
        assert lists(await anext(iterator)) == [[0], [1]]
        for _ in range(2):
            with pytest.raises(StopAsyncIteration):
                await anext(iterator)
            with pytest.raises(pipedist.OutOfRangeError, match="no more steps"):
                await iterator.get_next()
            optional = await iterator.get_next_as_optional()
            assert optional.has_value() is False
            with pytest.raises(ValueError, match="has_value"):
                optional.get_value()
    optional = await aiter(dataset).get_next_as_optional()
    assert optional.has_value() is True
    assert lists(optional.get_value()) == [[0], [1]]


async def test_identity_strategies_hand_elements_through() -> None:
    for strategy in (pipedist.OneDeviceStrategy(NoWorkers()), get_strategy()):
        dataset = strategy.distribute_dataset(Dataset.range(3).enumerate())
        assert [step async for step in dataset] == [(0, 0), (1, 1), (2, 2)]
        assert dataset.element_spec == (ArraySpec(np.int64), ArraySpec(np.int64))
        made = strategy.distribute_datasets_from_function(lambda context: Dataset.range(2).batch(2))
        assert [step.tolist() async for step in made] == [[0, 1]]


async def test_an_error_of_the_source_comes_in_its_place() -> None:
    def source() -> Iterator[int]:
        yield from range(4)
        raise OSError("disk gone")

    dataset = mirrored(2).distribute_dataset(Dataset.from_generator(source, ArraySpec(int)).batch(2))
    iterator = aiter(dataset)
    assert lists(await anext(iterator)) == [[0], [1]]
    assert lists(await anext(iterator)) == [[2], [3]]
    with pytest.raises(OSError, match="disk gone"):
        await anext(iterator)


async def test_cancelling_a_wait_loses_no_step() -> None:
    gate = threading.Event()

    def slow(x: Any) -> Any:
        assert gate.wait(60)
        return x

    dataset = mirrored(2).distribute_dataset(Dataset.range(4).batch(2).map(slow))
    before = threading.active_count()
    async with aiter(dataset) as iterator:
        for _ in range(5):
            with anyio.move_on_after(0.02) as given_up:
                await anext(iterator)
            assert given_up.cancelled_caught
        assert threading.active_count() <= before + 1  # the one that reads: none for each wait
        gate.set()
        assert [lists(step) async for step in iterator] == [[[0], [1]], [[2], [3]]]


async def test_concurrent_readers_share_the_steps_in_order() -> None:
    async with aiter(mirrored(1).distribute_dataset(Dataset.range(20).batch(1))) as iterator:
        found = await asyncio.gather(*(anext(iterator) for _ in range(20)))
    assert [lists(step) for step in found] == [[[n]] for n in range(20)]


@pytest.mark.parametrize("buffer", [1, 3])
async def test_the_loop_goes_on_while_a_bounded_number_is_read_ahead(buffer: int) -> None:
    read: list[int] = []
    produced = threading.Semaphore(0)

    def note(x: Any) -> Any:
        read.append(int(x[0]))
        produced.release()
        return x

    endless = Dataset.range(100).batch(1).repeat().map(note)
    dataset = mirrored(1).distribute_dataset(endless, InputOptions(per_replica_buffer_size=buffer))
    read.clear()
    async with aiter(dataset) as iterator:
        await anext(iterator)
        for _ in range(buffer + 1):
            assert await asyncio.to_thread(produced.acquire, timeout=60)
        assert not await asyncio.to_thread(produced.acquire, timeout=0.05)
        assert read == list(range(buffer + 1))


async def test_leaving_early_leaves_no_thread() -> None:
    dataset = mirrored(2).distribute_dataset(Dataset.range(4).repeat().batch(2))
    async for _ in dataset:
        break
    async with aiter(dataset) as iterator:
        await anext(iterator)
    with pytest.raises(StopAsyncIteration):
        await anext(iterator)
    assert readers_left() == []


class TestInputFunctions:
    async def test_consecutive_elements_go_to_consecutive_replicas(self) -> None:
        contexts: list[InputContext] = []

        def make(context: InputContext) -> Dataset:
            contexts.append(context)
            return Dataset.range(7).batch(context.get_per_replica_batch_size(4))

        dataset = mirrored(2).distribute_datasets_from_function(make)
        assert contexts == [InputContext(1, 0, 2)]
        assert await steps(dataset) == [[[0, 1], [2, 3]], [[4, 5], [6]]]
        assert dataset.cardinality() == 2

    async def test_the_last_step_is_delivered(self) -> None:
        drop = mirrored(3).distribute_datasets_from_function(lambda _: Dataset.range(8).batch(2, True))
        assert await steps(drop) == [[[0, 1], [2, 3], [4, 5]], [[6, 7], [], []]]
        assert drop.cardinality() == 2
        scalars = mirrored(2).distribute_datasets_from_function(lambda _: Dataset.range(3))
        assert await steps(scalars) == [[0, 1], [2, None]]

    async def test_every_replica_can_be_a_pipeline(self) -> None:
        dataset = mirrored(2).distribute_datasets_from_function(
            lambda c: Dataset.range(5).shard(c.num_input_pipelines, c.input_pipeline_id).batch(1),
            InputOptions(replication_mode="PER_REPLICA"),  # type: ignore[arg-type]
        )
        assert await steps(dataset) == [[[0], [1]], [[2], [3]], [[4], []]]
        assert dataset.cardinality() == 3

    async def test_unequal_structures_show_both(self) -> None:
        dataset = mirrored(2).distribute_datasets_from_function(
            lambda _: Dataset.from_generator(lambda: [1, (1, 2)], ArraySpec(int))
        )
        with pytest.raises(ValueError, match="different structures"):
            await steps(dataset)

    @pytest.mark.parametrize("made", [None, [1], np.arange(3), 3])
    async def test_what_is_no_dataset_is_refused(self, made: Any) -> None:
        with pytest.raises(TypeError, match=r"expected a pipedist\.Dataset"):
            mirrored(2).distribute_datasets_from_function(lambda _: made)

    async def test_its_errors_come_through(self) -> None:
        with pytest.raises(ZeroDivisionError):
            mirrored(2).distribute_datasets_from_function(lambda _: 1 // 0)  # type: ignore[arg-type, return-value]
        with pytest.raises(TypeError, match="positional"):
            mirrored(2).distribute_datasets_from_function(lambda: Dataset.range(3))  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="needs a function"):
            mirrored(2).distribute_datasets_from_function(Dataset.range(3))  # type: ignore[arg-type]


class TestValuesAndArrays:
    async def test_values_from_a_function(self) -> None:
        value = mirrored(2).distribute_values_from_function(
            lambda c: {"id": c.replica_id_in_sync_group, "n": c.num_replicas_in_sync, "none": None}
        )
        assert list(value["id"]) == [0, 1]
        assert list(value["n"]) == [2, 2]
        assert value["none"] is None
        assert get_strategy().distribute_values_from_function(lambda c: (c.replica_id_in_sync_group,)) == (0,)  # type: ignore[union-attr]

    async def test_numpy_datasets(self) -> None:
        strategy = mirrored(2)
        arrays = strategy.make_numpy_dataset({"x": np.arange(5.0)}).batch(4)
        found = [lists(step["x"]) async for step in strategy.distribute_dataset(arrays)]
        assert found == [[[0, 1], [2, 3]], [[4], []]]
        with pytest.raises(TypeError, match="expected NumPy arrays"):
            strategy.make_numpy_dataset([1, 2, 3])


@pytest.mark.parametrize(
    ("what", "error", "match"),
    [
        (None, ValueError, "got None"),
        ([1, 2], TypeError, r"needs a pipedist\.Dataset"),
        (mirrored(1).distribute_dataset(Dataset.range(2).batch(1)), TypeError, "DistributedDataset"),
        (Dataset.range(2), ValueError, r"add \.batch"),
    ],
)
async def test_what_can_not_be_distributed(what: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        mirrored(2).distribute_dataset(what)


async def test_bad_options() -> None:
    dataset = Dataset.range(2).batch(1)
    with pytest.raises(TypeError, match=r"expected a pipedist\.InputOptions"):
        mirrored(2).distribute_dataset(dataset, {"per_replica_buffer_size": 2})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="PER_REPLICA is for"):
        mirrored(2).distribute_dataset(dataset, InputOptions(replication_mode="PER_REPLICA"))  # type: ignore[arg-type]


async def test_a_distributed_dataset_is_no_dataset() -> None:
    dataset: Any = mirrored(2).distribute_dataset(Dataset.range(4).batch(2))
    for use in (len, next, iter, anext, lambda d: d[0]):
        with pytest.raises(TypeError):
            use(dataset)
    with pytest.raises(AttributeError):
        dataset.map(abs)


async def test_replica_functions_can_not_feed_all_replicas() -> None:
    dataset = Dataset.range(4).batch(2)
    async with pipedist.LocalCluster(workers=1) as cluster:
        strategy = pipedist.Strategy(cluster, replicas=2)
        distributed = strategy.distribute_dataset(dataset)
        iterator = aiter(distributed)
        for captured in (distributed, iterator):
            with pytest.raises(ValueError, match=r"inside a replica function: take the step outside"):
                await strategy.run(lambda captured=captured: repr(captured))
        await iterator.aclose()
    default = get_strategy()
    for misuse in (
        lambda: default.distribute_dataset(dataset),  # type: ignore[union-attr]
        lambda: default.distribute_datasets_from_function(lambda _: dataset),  # type: ignore[union-attr]
        lambda: default.distribute_values_from_function(lambda _: 1),  # type: ignore[union-attr]
        lambda: aiter(distributed),
        iterator.get_next,
    ):
        with pytest.raises(pipedist.CallError) as caught:
            await default.run(misuse)  # type: ignore[union-attr]
        assert isinstance(caught.value.__cause__, ValueError)
