"""`Strategy.compile`: the values and errors of `run`, then `reduce`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import pipedist
from tests.strategy import functions

pytestmark = pytest.mark.asyncio(loop_scope="module")

REPLICAS = 3


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[pipedist.LocalCluster]:
    async with pipedist.LocalCluster(workers=2) as cluster:
        await cluster.ready()
        yield cluster


def rows(ctx: pipedist.ReplicaContext) -> Any:
    count = (5, 0, 3)[ctx.replica_id_in_sync_group]  # also none
    return {"x": ctx.rng.random((count, 2)).astype(np.float32), "n": np.arange(count)}


def scalars(ctx: pipedist.ReplicaContext) -> Any:
    return float(ctx.rng.random())


def nothing() -> None:
    return None


def too_large() -> Any:
    return np.full(4, 100, np.uint8)


def text_in_one_replica(ctx: pipedist.ReplicaContext) -> Any:
    return {"a": np.ones(2), "b": np.array(["x"]) if ctx.replica_id_in_sync_group == 1 else np.ones(1)}


def other_structure(ctx: pipedist.ReplicaContext) -> Any:
    return [np.ones(2)] * (1 + ctx.replica_id_in_sync_group // 2)


def other_dtype(ctx: pipedist.ReplicaContext) -> Any:
    return np.ones(2, np.float32 if ctx.replica_id_in_sync_group else np.float64)


def unsendable() -> Any:
    return {"a": [object()]}


def raises() -> Any:
    raise KeyError("no")


async def outcome(call: Callable[[], Any]) -> list[str]:
    """Return what a call gives, with all bits, or its error."""
    try:
        leaves, structure = pipedist.core.trees.flatten(await call())
    except Exception as error:
        return [type(error).__name__, str(error).partition("Traceback")[0].replace("w1", "w0")]
    return [f"{np.asarray(leaf).dtype} {np.asarray(leaf).tobytes()!r}" for leaf in leaves] + [str(structure)]


@pytest.mark.parametrize("axis", [None, 0, (0, 1)])
@pytest.mark.parametrize("op", ["sum", "mean", "max"])
async def test_it_gives_what_run_and_reduce_give(cluster: pipedist.LocalCluster, op: str, axis: Any) -> None:
    for fn in (
        rows, scalars, nothing, too_large, text_in_one_replica, other_structure, other_dtype, unsendable, raises
    ):  # fmt: skip
        found = []
        for compiled in (True, False):
            async with pipedist.Strategy(cluster, replicas=REPLICAS, seed=2) as strategy:
                step = strategy.compile(fn, reduce=op, axis=axis)

                async def general(strategy: pipedist.Strategy = strategy, fn: Any = fn) -> Any:
                    return await strategy.reduce(op, await strategy.run(fn), axis)

                found.append([await outcome(step if compiled else general) for _ in range(3)])
        assert found[0] == found[1], fn


async def test_rows_do_not_travel(cluster: pipedist.LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    coordinator = cluster.coordinator
    handle = coordinator._scheduler.handle

    def see(event: Any, now: float) -> Any:
        sizes.extend(size for _, _, size in getattr(event, "reports", ()))
        return handle(event, now)

    monkeypatch.setattr(coordinator._scheduler, "handle", see)
    async with pipedist.Strategy(cluster, replicas=2) as strategy:
        step = strategy.compile(functions.double, reduce="sum", axis=0)
        for _ in range(3):
            assert await step(np.ones(50_000)) == 200_000
    assert sizes
    assert max(sizes) < 5_000


async def test_a_step_with_variables_assigns_them(cluster: pipedist.LocalCluster) -> None:
    async with pipedist.Strategy(cluster, replicas=2) as strategy:
        with strategy.scope():
            w = pipedist.Variable(np.zeros(3), aggregation="sum")

        def update(x: Any) -> Any:
            w.assign_add(x)
            return x

        step = strategy.compile(update, reduce="mean", axis=0)
        for number in range(1, 4):
            assert await step(np.ones(3)) == 1.0
            assert w.numpy().tolist() == [2.0 * number] * 3


async def test_without_a_reduction_it_is_run(cluster: pipedist.LocalCluster) -> None:
    for strategy in (pipedist.Strategy(cluster, replicas=2), pipedist.get_strategy()):
        step = strategy.compile(functions.double)
        assert list(strategy.local_results(await step(x=4))) == [8] * strategy.num_replicas_in_sync
    assert await pipedist.get_strategy().compile(functions.double, reduce="sum")(3) == 6
    assert (
        await pipedist.OneDeviceStrategy(cluster).compile(functions.double, reduce="sum", axis=0)(np.ones(2))
        == 4
    )


async def test_wrong_arguments_are_errors_at_once() -> None:
    strategy = pipedist.get_strategy()
    with pytest.raises(TypeError, match="can't be called"):
        strategy.compile(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="there is no reduction"):
        strategy.compile(functions.double, axis=0)
    with pytest.raises(ValueError, match="median"):
        strategy.compile(functions.double, reduce="median")
