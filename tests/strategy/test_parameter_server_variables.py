"""Variables of a parameter server: what closures read, and what becomes of what they assign."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pipedist
from pipedist.strategy.parameter_server import ParameterVariable
from pipedist.strategy.partitioners import shard_sizes
from tests.strategy import closure_functions as functions


def scalar(strategy: pipedist.ParameterServerStrategy, value: float = 0.0) -> ParameterVariable:
    made = strategy.create_variable(value)
    assert isinstance(made, ParameterVariable)
    return made


@pytest.mark.asyncio
async def test_closures_read_and_assign_what_they_capture_or_take() -> None:
    async with pipedist.LocalCluster(workers=2) as cluster:
        strategy = pipedist.ParameterServerStrategy(cluster)
        x = scalar(strategy, 1.0)
        counts = strategy.create_variable([0, 0], dtype="int32", name="counts")
        async with pipedist.ClusterCoordinator(strategy) as coordinator:

            def step(y: Any) -> Any:
                before = x.numpy()
                x.assign(5.0)
                x.assign_add(2.0)
                y["of"][0].assign_sub([1, 2])
                return {
                    "before": before,
                    "x": x,
                    "sum": x + 1.0,
                    "counts": y["of"][0],
                    "name": y["of"][0].name,
                }

            result = await (await coordinator.schedule(step, ({"of": [counts]},)))
            assert (result["before"], result["x"], result["sum"], result["name"]) == (1.0, 7.0, 8.0, "counts")
            assert result["counts"].tolist() == [-1, -2]
            assert result["counts"].dtype == np.int32
            assert (x.numpy(), counts.numpy().tolist()) == (7.0, [-1, -2])
            assert await (await coordinator.schedule(functions.add_later, (x, 1.0))) == 8.0
            assert x.numpy() == 8.0


@pytest.mark.asyncio
async def test_in_the_scope_a_variable_is_the_parameter_servers() -> None:
    async with pipedist.LocalCluster(workers=1) as cluster:
        strategy = pipedist.ParameterServerStrategy(cluster, pipedist.FixedShardsPartitioner(2))
        with strategy.scope():
            number: Any = pipedist.Variable(1.0, name="number")
            table: Any = pipedist.Variable(np.ones(4), name="table")
        assert type(number) is ParameterVariable
        assert type(table) is pipedist.ShardedVariable
        async with pipedist.ClusterCoordinator(strategy) as coordinator:
            await (await coordinator.schedule(lambda: number.assign_add(table.value().sum())))
        assert number + 1 == 6.0
        reduced = await strategy.reduce("mean", {"n": number, "t": table}, axis=None)
        assert (reduced["n"], reduced["t"].tolist()) == (5.0, [1.0] * 4)
        assert (await strategy.gather(table, axis=0)).tolist() == [1.0] * 4
        assert await strategy.run(lambda x: x + 1, args=(2,)) == 3
        assert type(pipedist.Variable(1.0)) is pipedist.Variable


@pytest.mark.asyncio
async def test_a_closure_that_fails_assigns_nothing() -> None:
    async with pipedist.LocalCluster(workers=1) as cluster:
        strategy = pipedist.ParameterServerStrategy(cluster)
        a, b = scalar(strategy), strategy.create_variable(100, dtype="int8")
        coordinator = pipedist.ClusterCoordinator(strategy)

        def assign_and_fail() -> None:
            a.assign_add(1.0)
            raise ValueError("no")

        await coordinator.schedule(assign_and_fail)
        with pytest.raises(pipedist.CallError):
            await coordinator.join()
        assert a.numpy() == 0.0

        def both(delta: int) -> None:
            a.assign_add(1.0)
            b.assign_add(delta)

        with pytest.raises(pipedist.CallError) as wide:
            await (await coordinator.schedule(both, (28,)))
        assert type(wide.value.__cause__) is OverflowError
        with pytest.raises(pipedist.CallError):
            await coordinator.join()
        # Each of the two fits by itself: the sum does not, when the second one's turn has come.
        first, second = [await coordinator.schedule(both, (20,)) for _ in range(2)]
        with pytest.raises(OverflowError, match="int8"):
            await coordinator.join()
        assert (await first, a.numpy(), b.numpy()) == (None, 1.0, 120)
        with pytest.raises(OverflowError):
            await second


def simulated(xs: list[float], staleness: int) -> tuple[list[float], float]:
    """What the documented rule gives, worked out one closure after the other."""
    versions, read = [1.0], []
    for k, x in enumerate(xs):
        old = versions[max(0, k - staleness)]
        read.append(old)
        versions.append(versions[-1] - (0.3 * old - x))
    return read, versions[-1]


@pytest.mark.asyncio
@pytest.mark.parametrize(("workers", "staleness"), [(1, 3), (3, 3), (3, 0), (2, 8)])
async def test_values_follow_from_the_program_alone(tmp_path: Path, workers: int, staleness: int) -> None:
    xs = [0.1 * i for i in range(12)]
    async with pipedist.LocalCluster(workers=workers) as cluster:
        strategy = pipedist.ParameterServerStrategy(cluster)
        variable = scalar(strategy, 1.0)
        async with pipedist.ClusterCoordinator(strategy, staleness=staleness) as coordinator:
            values = []
            for i, x in enumerate(xs):
                if i == 4 and workers > 1 and staleness > 0:  # the next one is executed before it
                    marker = str(tmp_path / "later")
                    values.append(await coordinator.schedule(functions.mix_after, (variable, x, marker)))
                elif i == 5:
                    marker = str(tmp_path / "later")
                    values.append(await coordinator.schedule(functions.mix_and_touch, (variable, x, marker)))
                else:
                    values.append(await coordinator.schedule(functions.mix, (variable, x)))
            read = await coordinator.fetch(values)
        assert (read, float(variable)) == simulated(xs, staleness)


@pytest.mark.asyncio
async def test_a_closure_sees_what_the_program_has_seen() -> None:
    xs = [0.1 * i for i in range(6)]
    async with pipedist.LocalCluster(workers=2) as cluster:
        strategy = pipedist.ParameterServerStrategy(cluster)
        variable = scalar(strategy, 1.0)
        async with pipedist.ClusterCoordinator(strategy) as coordinator:
            read = [await (await coordinator.schedule(functions.mix, (variable, x))) for x in xs]
            assert (read, float(variable)) == simulated(xs, 0)
            variable.assign(1.0)
            values = []
            for x in xs:
                values.append(await coordinator.schedule(functions.mix, (variable, x)))
                await coordinator.join()
            assert (await coordinator.fetch(values), float(variable)) == simulated(xs, 0)


@pytest.mark.asyncio
async def test_versions_that_cannot_be_read_are_dropped() -> None:
    async with pipedist.LocalCluster(workers=1) as cluster:
        strategy = pipedist.ParameterServerStrategy(cluster)
        variable = scalar(strategy)
        async with pipedist.ClusterCoordinator(strategy, staleness=2) as coordinator:
            for _ in range(40):
                await coordinator.schedule(functions.add, (variable, 1.0))
            await coordinator.join()
            assert len(variable._versions) <= 4
            for _ in range(5):
                variable.assign_add(1.0)
            assert len(variable._versions) <= 4
            assert variable.numpy() == 45.0


@pytest.mark.asyncio
async def test_a_function_updates_a_variable_outside_of_closures() -> None:
    async with pipedist.LocalCluster(workers=1) as cluster:
        strategy: Any = pipedist.ParameterServerStrategy(cluster, pipedist.FixedShardsPartitioner(2))
        variable = strategy.create_variable(1.0, name="v")
        sharded = strategy.create_variable(np.zeros(4))
        async with pipedist.ClusterCoordinator(strategy) as coordinator:
            await coordinator.schedule(functions.add, (variable, 1.0))
            await coordinator.join()
            assert await strategy.update(variable, lambda copy, by: copy.assign_add(by), args=(3.0,)) == 5.0
            assert await strategy.update(variable, lambda copy: copy.value() + 1) == 6.0
            for part in sharded.variables:
                by = {"by": np.ones(2)}
                await strategy.update(part, lambda copy, *, by: copy.assign_add(by), kwargs=by)
            assert (float(variable), sharded.numpy().tolist()) == (5.0, [1.0] * 4)
            with pytest.raises(TypeError, match="update each of its `variables`"):
                await strategy.update(sharded, lambda copy: copy.assign(0.0))
            with pytest.raises(TypeError, match=r"needs a pipedist\.Variable"):
                await strategy.update(3.0, lambda copy: copy.assign(0.0))


@pytest.mark.asyncio
async def test_variables_stay_with_their_strategy() -> None:
    async with pipedist.LocalCluster(workers=1) as cluster:
        mine, other = pipedist.ParameterServerStrategy(cluster), pipedist.ParameterServerStrategy(cluster)
        foreign = other.create_variable(0.0)
        async with pipedist.ClusterCoordinator(mine) as coordinator:
            with pytest.raises(ValueError, match="belongs to another strategy"):
                await coordinator.schedule(functions.add, (foreign, 1.0))
            with pytest.raises(ValueError, match="belongs to another strategy"):
                await coordinator.schedule(lambda: foreign.assign_add(1.0))
            with pytest.raises(ValueError, match="belongs to another strategy"):
                await mine.update(foreign, lambda copy: copy.assign_add(1.0))
            with pytest.raises(ValueError, match="only closures"):
                await pipedist.OneDeviceStrategy(cluster).run(lambda: foreign.assign_add(1.0))

            def keep(variable: Any, kept: list[Any] = []) -> float:  # noqa: B006 - on purpose
                kept.append(variable)
                return float(kept[0])

            variable = mine.create_variable(1.0)
            another = mine.create_variable(2.0)
            assert await (await coordinator.schedule(keep, (variable,))) == 1.0
            with pytest.raises(pipedist.CallError, match="outside of its closure"):
                await (await coordinator.schedule(keep, (another,)))
            with pytest.raises(pipedist.CallError):
                await coordinator.join()


# -- shards ------------------------------------------------------------------------------------


class Cluster:
    """As much of a cluster as variables need: they are in this process."""

    coordinator = None
    workers = 2


def strategy_with(partitioner: Any, **options: Any) -> pipedist.ParameterServerStrategy:
    return pipedist.ParameterServerStrategy(Cluster(), partitioner, **options)  # type: ignore[arg-type]


def test_shards_are_rows_front_loaded_and_dealt_in_turn() -> None:
    strategy = strategy_with(pipedist.FixedShardsPartitioner(3), parameter_servers=2)
    value = np.arange(20.0).reshape(10, 2)
    variable = strategy.create_variable(value, name="table")
    assert isinstance(variable, pipedist.ShardedVariable)
    assert [v.name for v in variable.variables] == ["table/part_0", "table/part_1", "table/part_2"]
    assert [v.shape for v in variable.variables] == [(4, 2), (3, 2), (3, 2)]
    assert [v.parameter_server for v in variable.variables] == [0, 1, 0]  # type: ignore[attr-defined]
    assert (variable.shape, variable.dtype, variable.name) == ((10, 2), np.float64, "table")
    assert np.array_equal(variable, value)
    variable.assign_add(value)
    variable.assign_sub(np.ones((10, 2)))
    assert np.array_equal(variable.numpy(), 2 * value - 1)
    variable.assign([[1, 2]] * 10)
    assert (variable @ np.ones(2)).tolist() == [3.0] * 10
    for wrong in (np.ones((9, 2)), np.ones((10, 2), "float32"), 1.0):
        with pytest.raises(ValueError, match="table"):
            variable.assign(wrong)
    next_one = strategy.create_variable(0.0)
    assert isinstance(next_one, ParameterVariable)
    assert next_one.parameter_server == 1


@given(st.data(), st.integers(1, 12), st.integers(1, 5))
def test_rows_are_found_in_their_shards(data: st.DataObject, rows: int, shards: int) -> None:
    strategy = strategy_with(pipedist.FixedShardsPartitioner(shards))
    value = np.arange(3 * rows).reshape(rows, 3)
    variable = strategy.create_variable(value)
    indices = data.draw(st.lists(st.integers(-rows, rows - 1), max_size=6))
    array = np.array(indices, dtype=np.int64)
    assert np.array_equal(variable[array], value[array])
    assert np.array_equal(variable[array.reshape(1, -1)], value[array.reshape(1, -1)])
    for index in indices:
        assert np.array_equal(variable[index], value[index])
    lo, hi = data.draw(st.tuples(st.integers(-rows, rows), st.integers(-rows, rows)))
    assert np.array_equal(variable[lo:hi], value[lo:hi])
    assert np.array_equal(variable[lo:hi, 1], value[lo:hi, 1])
    assert np.array_equal(variable[value[:, 0] > 4], value[value[:, 0] > 4])
    assert [row.tolist() for row in variable] == value.tolist()
    with pytest.raises(IndexError):
        variable[rows]


@pytest.mark.parametrize("shape", [(), (1,), (1, 5), (0, 3)])
def test_what_cant_be_cut_is_one_variable(shape: tuple[int, ...]) -> None:
    variable = strategy_with(pipedist.FixedShardsPartitioner(4)).create_variable(np.ones(shape))
    assert isinstance(variable, ParameterVariable)
    assert variable.shape == shape


@pytest.mark.parametrize("answer", [None, 2, [], [0, 1], [2, 2], [1, 2], [2], [2.0, 1], [True, 1], (2, 1, 1)])
def test_partitioners_answers_are_checked(answer: Any) -> None:
    with pytest.raises(ValueError, match="variable_partitioner returned"):
        strategy_with(lambda shape, dtype: answer).create_variable(np.ones((4, 4)))
    with pytest.raises(TypeError, match="expected a partitioner"):
        strategy_with(3)


def test_a_partitioner_of_ones_own_may_ask_for_more_than_there_is() -> None:
    seen = []

    def partitioner(shape: tuple[int, ...], dtype: np.dtype) -> list[int]:
        seen.append((shape, dtype))
        return [9, 1]

    variable = strategy_with(partitioner).create_variable(np.ones((4, 2), "float32"))
    assert isinstance(variable, pipedist.ShardedVariable)
    assert [v.shape[0] for v in variable.variables] == shard_sizes(4, 4)
    assert seen == [((4, 2), np.float32)]


@pytest.mark.asyncio
async def test_sharded_variables_in_closures() -> None:
    async with pipedist.LocalCluster(workers=2) as cluster:
        strategy = pipedist.ParameterServerStrategy(cluster, pipedist.FixedShardsPartitioner(3))
        table = strategy.create_variable(np.arange(10.0), name="table")
        async with pipedist.ClusterCoordinator(strategy) as coordinator:

            def step(taken: Any) -> Any:
                rows = taken[np.array([9, 0, 4])]
                table.assign_add(np.ones(10))
                taken.variables[0].assign_sub(np.ones(4))
                return rows, taken, len(taken.variables)

            rows, after, shards = await (await coordinator.schedule(step, (table,)))
            assert (rows.tolist(), shards) == ([9.0, 0.0, 4.0], 3)
            expected = np.arange(10.0) + np.repeat([0.0, 1.0], [4, 6])
            assert np.array_equal(after, expected)
            assert np.array_equal(table, expected)
