"""Which strategy is current, and what the default one does."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import pipedist
from pipedist.strategy import DefaultStrategy, get_strategy, has_strategy, in_cross_replica_context
from pipedist.values import PerReplica
from pipedist.worker import context
from tests.strategy import functions

pytestmark = pytest.mark.asyncio


class NoWorkers:
    """Stands for a cluster where nothing is run."""

    coordinator: Any = None


async def test_a_scope_makes_its_strategy_current() -> None:
    strategy = pipedist.Strategy(NoWorkers(), replicas=2)
    assert (has_strategy(), in_cross_replica_context()) == (False, False)
    assert isinstance(get_strategy(), DefaultStrategy)
    with strategy.scope() as current:
        assert current is strategy
        with strategy.scope():
            assert get_strategy() is strategy
        assert (get_strategy(), has_strategy(), in_cross_replica_context()) == (strategy, True, True)

        async def child() -> Any:
            return get_strategy()

        assert await asyncio.create_task(child()) is strategy
        with (
            pytest.raises(RuntimeError, match="inside the scope of another strategy"),
            get_strategy_of(1).scope(),
        ):
            pass
    assert not has_strategy()


def get_strategy_of(replicas: int) -> pipedist.Strategy:
    return pipedist.Strategy(NoWorkers(), replicas=replicas)


async def test_tasks_have_scopes_of_their_own() -> None:
    first, second = get_strategy_of(1), get_strategy_of(2)
    both = asyncio.Barrier(2)

    async def inside(strategy: pipedist.Strategy) -> bool:
        with strategy.scope():
            await both.wait()
            return get_strategy() is strategy

    assert await asyncio.gather(inside(first), inside(second)) == [True, True]


async def test_replica_functions_see_their_side_of_the_strategy() -> None:
    strategy = get_strategy_of(3)
    replica = context.ReplicaContext(
        replica_id_in_sync_group=1, num_replicas_in_sync=3, step=0, epoch=0, stage="s", elements=None, seed=0
    )
    token = context.current.set(replica)
    try:
        assert functions.where() == (True, False, 3)
        with pytest.raises(RuntimeError, match=r"Strategy\.run requires cross-replica context"):
            await strategy.run(functions.double, args=(1,))
        with pytest.raises(RuntimeError, match=r"Strategy\.gather requires cross-replica context"):
            await strategy.gather(PerReplica([1, 2, 3]), axis=0)
        with pytest.raises(RuntimeError, match=r"Strategy\.reduce requires cross-replica context"):
            await strategy.reduce("sum", PerReplica([1, 2, 3]), axis=None)
        with pytest.raises(RuntimeError, match="scope requires"), strategy.scope():
            pass
        with pytest.raises(ValueError, match="distributing a dataset inside a replica function"):
            strategy.distribute_dataset(pipedist.Dataset.range(4).batch(2))
    finally:
        context.current.reset(token)


class TestDefaultStrategy:
    async def test_it_runs_here_and_values_stay_plain(self) -> None:
        default = get_strategy()
        assert isinstance(default, DefaultStrategy)
        marker = object()
        assert await default.run(lambda: {"x": marker}) == {"x": marker}
        assert await default.run(functions.double_later, args=(2,)) == 4
        assert await default.run(functions.ids) == (0, 1)
        assert await default.run(functions.where) == (False, False, 1)
        assert await default.run(max, args=(1, 2)) == 2

    async def test_a_collective_that_is_not_awaited_is_an_error(self) -> None:
        async def step(ctx: Any) -> int:
            await ctx.barrier()
            ctx.all_reduce("sum", 1)
            return 0

        with pytest.raises(
            pipedist.CallError, match=r"all_reduce, at test_context\.py:\d+ in .*, was not awaited"
        ):
            await get_strategy().run(step)

    async def test_its_arguments_are_read_only(self) -> None:
        default = get_strategy()
        assert isinstance(default, DefaultStrategy)
        x = np.arange(3)

        def write(x: Any) -> None:
            x[0] = 9

        with pytest.raises(pipedist.CallError, match="read-only") as caught:
            await default.run(write, args=(x,))
        assert type(caught.value.__cause__) is ValueError
        assert x[0] == 0
        assert pipedist.get_replica_context() is None

    async def test_combining_is_the_one_replicas_own(self) -> None:
        default = get_strategy()
        assert isinstance(default, DefaultStrategy)
        x = np.arange(4)
        assert await default.gather(x, axis=3) is x
        assert await default.reduce("sum", x, axis=0) == 6
        assert (await default.reduce("sum", x, axis=None)).tolist() == [0, 1, 2, 3]
        assert default.local_results(3) == (3,)
        assert default.num_replicas_in_sync == 1

    async def test_assignments_in_its_functions_return_the_new_value(self) -> None:
        v = pipedist.Variable(1.0, aggregation="sum")
        tree = pipedist.Variable({"a": 1.0})

        def step() -> tuple[float, float]:
            return float(v.assign_add(2)), float(tree.assign({"a": 5.0})["a"])

        async def later() -> tuple[float, float]:
            return float(await v.assign_sub(1)), float((await tree.assign_add({"a": 1.0}))["a"])

        assert await get_strategy().run(step) == (3, 5)
        assert await get_strategy().run(later) == (2, 6)
        assert v.assign(4.0) is None
