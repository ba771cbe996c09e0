"""The kinds of strategies: names, numbers of replicas, devices, communication options."""

from __future__ import annotations

import asyncio
import gc
import os
from collections import namedtuple
from typing import Any

import numpy as np
import pytest

import pipedist
from pipedist.values import Mirrored, PerReplica

pytestmark = pytest.mark.asyncio


class NoWorkers:
    """Stands for a cluster where nothing is run."""

    coordinator: Any = None
    workers = 3


@pytest.mark.parametrize(
    ("name", "options", "kind", "replicas"),
    [
        ("mirrored", {}, pipedist.MirroredStrategy, 3),
        ("mirrored", {"replicas": 2}, pipedist.MirroredStrategy, 2),
        ("mirrored", {"devices": ["cuda:0", "cuda:1"]}, pipedist.MirroredStrategy, 2),
        ("multi_worker_mirrored", {}, pipedist.MultiWorkerMirroredStrategy, 3),
        (
            "multi_worker_mirrored",
            {"workers": 2, "replicas_per_worker": 2},
            pipedist.MultiWorkerMirroredStrategy,
            4,
        ),
        ("central_storage", {"replicas": 5}, pipedist.CentralStorageStrategy, 5),
        ("one_device", {"device": "cpu:0"}, pipedist.OneDeviceStrategy, 1),
    ],
)
async def test_a_strategy_has_a_name(name: str, options: Any, kind: type, replicas: int) -> None:
    strategy = pipedist.strategy_of(name, NoWorkers(), **options)
    assert type(strategy) is kind
    assert strategy.num_replicas_in_sync == replicas
    assert len(strategy.devices) == replicas
    assert strategy.cluster_resolver is None


@pytest.mark.parametrize(
    ("cluster", "accelerators", "workers", "replicas"),
    [
        ({"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"], "evaluator": ["e:1"]}, {}, 3, 3),
        ({"worker": ["b:1", "c:1"]}, {"GPU": 4}, 2, 8),
        ({}, {}, 3, 3),
    ],
)
async def test_a_resolver_determines_the_number_of_workers_and_replicas(
    cluster: dict[str, list[str]], accelerators: dict[str, int], workers: int, replicas: int
) -> None:
    resolver = pipedist.SimpleClusterResolver(pipedist.ClusterSpec(cluster), num_accelerators=accelerators)
    strategy = pipedist.MultiWorkerMirroredStrategy(NoWorkers(), cluster_resolver=resolver)
    assert (strategy.workers, strategy.num_replicas_in_sync) == (workers, replicas)
    assert strategy.cluster_resolver is resolver
    told = pipedist.MultiWorkerMirroredStrategy(
        NoWorkers(), 1, replicas_per_worker=2, cluster_resolver=resolver
    )
    assert told.num_replicas_in_sync == 2
    with pytest.raises(TypeError, match="ClusterResolver"):
        pipedist.MultiWorkerMirroredStrategy(NoWorkers(), cluster_resolver="slurm")  # type: ignore[arg-type]


async def test_names_and_numbers_are_checked() -> None:
    with pytest.raises(ValueError, match=r"no strategy 'mirored'.*did you mean 'mirrored'"):
        pipedist.strategy_of("mirored", NoWorkers())
    with pytest.raises(TypeError, match="unexpected keyword"):
        pipedist.strategy_of("mirrored", NoWorkers(), colour="red")
    with pytest.raises(ValueError, match="replicas"):
        pipedist.MirroredStrategy(NoWorkers(), 0)
    with pytest.raises(ValueError, match="workers"):
        pipedist.MultiWorkerMirroredStrategy(NoWorkers(), 0)
    with pytest.raises(TypeError, match="communication_options"):
        pipedist.Strategy(NoWorkers(), 1, communication_options={"timeout_s": 3})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="mirrored replicas share one host"):
        pipedist.MirroredStrategy(pipedist.ConnectCluster(key_file="keys.json"))


@pytest.mark.parametrize(
    ("devices", "error", "text"),
    [
        (["cpu:0"], ValueError, "1 devices for 2 replicas"),
        (["cpu:0", "gpu 1"], ValueError, "'gpu 1' is not a device"),
        (["cpu:0", ""], ValueError, "'' is not a device"),
        ("cuda:0", TypeError, "expected a list"),
        ([0, 1], TypeError, "expected a str"),
        ([], ValueError, "is empty"),
    ],
)
async def test_devices_are_checked(devices: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        pipedist.Strategy(NoWorkers(), replicas=2, devices=devices)


async def test_a_function_knows_its_device() -> None:
    def where() -> Any:
        ctx = pipedist.get_replica_context()
        return ctx.device if ctx else None

    async with pipedist.LocalCluster(workers=2) as cluster:
        strategy = pipedist.MirroredStrategy(cluster, devices=["cpu:0", "cuda:3", "tpu:1"])
        assert strategy.devices == ("cpu:0", "cuda:3", "tpu:1")
        assert tuple(await strategy.run(where)) == ("cpu:0", "cuda:0", "tpu:1")  # the one that it sees
        plain = pipedist.MirroredStrategy(cluster)
        assert plain.num_replicas_in_sync == 2
        assert tuple(await plain.run(where)) == plain.devices == ("cpu", "cpu")


async def test_the_options_of_the_strategy_reach_its_collectives() -> None:
    options = pipedist.CommunicationOptions(timeout_s=0.2, implementation="transport")  # type: ignore[arg-type]

    def lonely() -> Any:
        import threading

        ctx: Any = pipedist.get_replica_context()
        if ctx.replica_id_in_sync_group == 1:
            threading.Event().wait(60)
        return ctx.all_reduce("sum", 1)

    async with pipedist.LocalCluster(workers=2, limits=pipedist_limits(deaths_max=1)) as cluster:
        await cluster.ready()
        strategy = pipedist.Strategy(cluster, replicas=2, communication_options=options)
        assert strategy.communication_options is options
        with pytest.raises(
            pipedist.CallError, match=r"has waited 0\.2 s.*implementation=transport"
        ) as caught:
            await strategy.run(lonely)
        assert caught.value.replica == 1


def pipedist_limits(**limits: Any) -> Any:
    from pipedist.scheduler import SchedulerLimits

    return SchedulerLimits(**limits)


async def test_each_logical_worker_has_a_pipeline_of_its_own() -> None:
    strategy = pipedist.MultiWorkerMirroredStrategy(NoWorkers(), 2, replicas_per_worker=2)
    assert strategy.workers == 2
    dataset = pipedist.Dataset.range(8).batch(8)
    steps = [step async for step in strategy.distribute_dataset(dataset)]
    assert [[part.tolist() for part in step] for step in steps] == [[[0, 1], [4, 5], [2, 3], [6, 7]]]
    contexts = []

    def make(context: Any) -> pipedist.Dataset:
        contexts.append(
            (context.num_input_pipelines, context.input_pipeline_id, context.num_replicas_in_sync)
        )
        return dataset

    strategy.distribute_datasets_from_function(make)
    assert contexts == [(2, 0, 4), (2, 1, 4)]


async def test_values_for_every_replica() -> None:
    strategy = pipedist.Strategy(NoWorkers(), replicas=3)
    value = strategy.broadcast({"a": 1, "b": [np.arange(2)]})
    assert type(value["a"]) is Mirrored
    assert list(value["a"]) == [1, 1, 1]
    with pytest.raises(ValueError, match="has one already"):
        strategy.broadcast(PerReplica([1, 2, 3]))
    reduced = await strategy.reduce_to("mean", PerReplica([1.0, 2.0, 3.0]))
    assert type(reduced) is Mirrored
    assert list(reduced) == [2.0] * 3
    first, second = await strategy.batch_reduce_to(
        "sum", [PerReplica([1, 2, 3]), {"x": PerReplica([1.0, 2.0, 3.0])}]
    )
    assert (list(first), list(second["x"])) == ([6] * 3, [6.0] * 3)
    with pytest.raises(TypeError, match="leaf '1'"):
        await strategy.batch_reduce_to("sum", [PerReplica([1, 2, 3]), PerReplica(["a", "b", "c"])])
    one = pipedist.OneDeviceStrategy(NoWorkers())
    assert one.broadcast(3) == 3
    assert await one.reduce_to("sum", 3) == 3


async def test_central_storage_keeps_one_copy() -> None:
    async with pipedist.LocalCluster(workers=2) as cluster:
        strategy = pipedist.CentralStorageStrategy(cluster, replicas=2)
        with strategy.scope():
            v = pipedist.Variable(100.0, synchronization="on_read", aggregation="sum")

        def add(x: Any) -> Any:
            return v.assign_add(x)

        assert list(await strategy.run(add, args=(PerReplica([10.0, 20.0]),))) == [130.0] * 2
        assert v.numpy() == 130
        assert strategy.local_results(v) == (130,)
        assert strategy.local_results([v]) == ([130], [130])

        def inside() -> Any:
            return pipedist.get_replica_context().merge_call(lambda inside: len(inside.local_results(v)))

        assert list(await strategy.run(inside)) == [1, 1]
        assert v.synchronization is pipedist.VariableSynchronization.ON_READ


async def test_one_replica_takes_no_values_of_several() -> None:
    both = pipedist.PerReplica([np.ones(2), np.ones(2)])
    for strategy in (pipedist.OneDeviceStrategy(NoWorkers()), pipedist.get_strategy()):
        with pytest.raises(ValueError, match="2 components, but there are 1 replicas"):
            await strategy.reduce("sum", {"loss": both}, axis=None)
        with pytest.raises(ValueError, match="2 components, but there are 1 replicas"):
            await strategy.gather(both, axis=0)
        assert (await strategy.reduce("sum", pipedist.PerReplica([np.ones(2)]), axis=0)) == 2


async def test_one_device_has_plain_values() -> None:
    async with pipedist.LocalCluster(workers=1) as cluster:
        strategy = pipedist.OneDeviceStrategy(cluster)
        with strategy.scope():
            v = pipedist.Variable(1.0, name="v")
        assert await strategy.run(lambda x: v.assign_add(x), args=(2.0,)) == 3
        assert await strategy.update(v, lambda copy, x: copy.assign(x), args=(7.0,)) == 7
        assert strategy.local_results(v) == (7.0,)


async def test_a_cluster_keeps_nothing_of_strategies_that_are_gone() -> None:
    async def use(cluster: pipedist.LocalCluster, number: int) -> pipedist.Strategy:
        strategy = pipedist.Strategy(cluster, replicas=2)
        with strategy.scope():
            total = pipedist.Variable(0, aggregation="sum")
        await strategy.run(lambda: total.assign_add(number))
        assert total.numpy() == 2 * number
        assert list(await strategy.run(lambda x: x, args=(number,))) == [number] * 2
        return strategy

    async with pipedist.LocalCluster(workers=1) as cluster:
        for number in range(3):
            await use(cluster, number)
        assert cluster.coordinator._passes.handles
        gc.collect()
        await asyncio.sleep(0)
        assert not cluster.coordinator._passes.handles
        assert not cluster.coordinator.states._spaces
        assert not any(peer.held for peer in cluster.coordinator._pool)
        last = await use(cluster, 5)
    errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: errors.append(context))
    del last  # there is no cluster any more
    gc.collect()
    await asyncio.sleep(0)
    assert errors == []


@pytest.mark.parametrize("collective", [False, True])
async def test_a_result_of_an_unknown_class_fails_its_call_only(
    collective: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    local = namedtuple("local", "a")  # a class that no module has

    def step(is_local: bool, ctx: Any) -> Any:
        found = ctx.all_reduce("sum", 1) if collective else os.getpid()
        return local(found) if is_local else found

    async with pipedist.LocalCluster(workers=1) as cluster:
        strategy = pipedist.Strategy(cluster, replicas=3)
        before = await strategy.run(os.getpid)
        for _ in range(3):
            await strategy.run(step, args=(False,))
            with pytest.raises(pipedist.CallError, match="top level of a module") as caught:
                await strategy.run(step, args=(True,))
            assert isinstance(caught.value.__cause__, TypeError)
        assert list(await strategy.run(os.getpid)) == list(before)
    assert "protocol" not in capfd.readouterr().err
