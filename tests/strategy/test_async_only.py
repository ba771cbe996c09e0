"""Where `async` is forgotten, the error says where it belongs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

import pipedist
from tests.strategy import functions as fn

SPEC = {
    "pipedist": 1,
    "dataset": {"range": 4, "batch": 4},
    "stages": {"total": {"reduce": "sum", "of": "dataset", "axis": 0}},
}


def unmade(cls: type[Any]) -> Any:
    """Return an object of a class, of which only the methods are of interest."""
    return cls.__new__(cls)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: pipedist.LocalCluster(workers=1), "LocalCluster"),
        (lambda: pipedist.open(SPEC, workers=1), "Run"),
        (lambda: unmade(pipedist.ConnectCluster), "ConnectCluster"),
        (lambda: unmade(pipedist.RayCluster), "RayCluster"),
        (lambda: unmade(pipedist.DaskCluster), "DaskCluster"),
        (lambda: unmade(pipedist.ClusterCoordinator), "ClusterCoordinator"),
    ],
)
def test_what_is_opened_with_async_with(make: Callable[[], Any], name: str) -> None:
    with pytest.raises(TypeError, match=f"{name} is opened with `async with`"), make():
        pass
    with pytest.raises(TypeError, match="async with"), ExitStack() as stack:
        stack.enter_context(make())


@pytest.mark.asyncio
async def test_a_missing_await_is_reported_where_the_coroutine_is_used() -> None:
    async with pipedist.LocalCluster(workers=1) as cluster:
        strategy = pipedist.Strategy(cluster, replicas=2)
        y = strategy.run(fn.double, args=(1,))
        for use in (
            lambda: strategy.reduce("sum", y, axis=None),
            lambda: strategy.gather(y, axis=0),
            lambda: strategy.run(fn.double, args=({"x": y},)),
        ):
            with pytest.raises(TypeError, match=r"coroutine.*`await` it first"):
                await use()
        with pytest.raises(TypeError, match=r"coroutine.*`await` it first"):
            strategy.local_results(y)
        await y


@pytest.mark.asyncio
async def test_what_is_read_with_async_for() -> None:
    async with pipedist.LocalCluster(workers=1) as cluster:
        strategy = pipedist.Strategy(cluster, replicas=2)
        with pytest.raises(TypeError, match="Strategy is opened with `async with`"), strategy:  # type: ignore[attr-defined]
            pass
        dataset = strategy.distribute_dataset(pipedist.Dataset.range(8).batch(4))
        with pytest.raises(TypeError, match="DistributedDataset is read with `async for`"):
            list(dataset)  # type: ignore[call-overload]
        steps = aiter(dataset)
        with pytest.raises(TypeError, match="DistributedIterator is read with `async for`"):
            list(steps)  # type: ignore[call-overload]
        await steps.aclose()
        runs = strategy.run_steps(fn.double, dataset)
        with pytest.raises(TypeError, match="StepRuns is read with `async for`"):
            list(runs)  # type: ignore[call-overload]
        await runs.aclose()
