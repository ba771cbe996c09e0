"""Trees of variables, and the file in which a strategy saves its variables."""

from __future__ import annotations

import gc
import os
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import pytest_asyncio

import pipedist
from pipedist.strategy.variables import read, write
from pipedist.values import PerReplica

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[pipedist.LocalCluster]:
    async with pipedist.LocalCluster(workers=2) as cluster:
        yield cluster


def dense(offset: float = 0.0) -> dict[str, Any]:
    return {
        "kernel": np.arange(6.0).reshape(3, 2) + offset,
        "layers": [np.full(2, offset), np.float32(offset)],
    }


def same(one: Any, other: Any) -> bool:
    return bool(np.array_equal(one["kernel"], other["kernel"])) and all(
        np.array_equal(a, b) and np.asarray(a).dtype == np.asarray(b).dtype
        for a, b in zip(one["layers"], other["layers"], strict=True)
    )


def variables(strategy: pipedist.Strategy, start: float = 1.0, **options: Any) -> Any:
    with strategy.scope():
        return pipedist.Variable(dense(start), name="dense", aggregation="sum", **options)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("how", ["captured", "argument"])
async def test_a_dict_of_arrays_is_read_and_assigned_as_one(
    cluster: pipedist.LocalCluster, how: str, is_async: bool
) -> None:
    strategy = pipedist.Strategy(cluster, replicas=2)
    w = variables(strategy)
    assert same(w.value(), dense(1.0))
    assert w["kernel"].name == "dense/kernel"
    assert [leaf.name for leaf in w["layers"]] == ["dense/layers/0", "dense/layers/1"]

    def step(x: Any, given: Any = None) -> Any:
        tree = given or w
        tree.assign_add({"kernel": x * tree["kernel"], "layers": [x * np.ones(2), np.float32(0)]})
        return tree.value()["kernel"].sum()

    async def step_async(x: Any, given: Any = None) -> Any:
        tree = given or w
        new = await tree.assign_add({"kernel": x * tree["kernel"], "layers": [x * np.ones(2), np.float32(0)]})
        return new["kernel"].sum()

    args = (PerReplica([1.0, 2.0]), *([w] if how == "argument" else []))
    sums = await strategy.run(step_async if is_async else step, args=args)
    assert [float(part) for part in sums] == [4 * 21.0] * 2
    expected = {"kernel": 4 * dense(1.0)["kernel"], "layers": [np.full(2, 4.0), np.float32(1)]}
    assert same(w.numpy(), expected)
    w.assign(dense(7.0))
    assert same(w.value(), dense(7.0))


async def test_a_metric_is_a_tree_of_on_read_variables(cluster: pipedist.LocalCluster) -> None:
    strategy = pipedist.Strategy(cluster, replicas=2)
    with strategy.scope():
        start = {"sum": 0.0, "rows": 0}
        loss = pipedist.Variable(start, synchronization="on_read", aggregation="sum")

    def step(x: Any) -> None:
        loss.assign_add({"sum": x.sum(), "rows": len(x)})

    await strategy.run(step, args=(PerReplica([np.ones(3), np.full(2, 4.0)]),))
    assert loss.value() == {"sum": 11, "rows": 5}
    assert await strategy.reduce("max", loss, axis=None) == {"sum": 8, "rows": 3}
    assert strategy.local_results(loss) == ({"sum": 3, "rows": 3}, {"sum": 8, "rows": 2})
    loss.assign({"sum": 0.0, "rows": 0})
    assert loss.value() == start


async def test_an_assignment_of_another_tree_changes_nothing(cluster: pipedist.LocalCluster) -> None:
    w = variables(pipedist.Strategy(cluster, replicas=2))
    with pytest.raises(
        ValueError, match=r"operand lacks 'layers/0', 'layers/1'\. Give .* tree.value\(\), or .*assign"
    ):
        w.assign({"kernel": np.zeros((3, 2))})
    with pytest.raises(ValueError, match=r"lacks 'kernel', .* and has, without a variable, 'a single value'"):
        w.assign_add(1.0)
    with pytest.raises(ValueError, match="dense/layers/0"):
        w.assign({"kernel": np.zeros((3, 2)), "layers": [np.zeros(3), np.float32(0)]})
    assert same(w.value(), dense(1.0))
    with pytest.raises(ValueError, match="no array"):
        pipedist.Variable({})


async def test_a_tree_of_variables_is_no_array_and_says_what_to_use(cluster: pipedist.LocalCluster) -> None:
    w: Any = variables(pipedist.Strategy(cluster, replicas=2))
    with pytest.raises(TypeError, match=r"VariableTree .*is no array.*tree.value\(\)"):
        np.asarray(w)
    for compute in (lambda: w * 2, lambda: 2 - w, lambda: np.ones(2) * w, lambda: w + w, lambda: -w):
        with pytest.raises(TypeError, match=r"VariableTree .*has no arithmetic.*tree.value\(\)"):
            compute()


async def test_a_parameter_server_has_trees_too(cluster: pipedist.LocalCluster, tmp_path: Path) -> None:
    strategy = pipedist.ParameterServerStrategy(cluster, pipedist.FixedShardsPartitioner(2))
    w = variables(strategy)
    assert isinstance(w["kernel"], pipedist.ShardedVariable)
    async with pipedist.ClusterCoordinator(strategy) as coordinator:
        await coordinator.schedule(lambda: w.assign_add(dense(0.0)))
        await coordinator.join()
    await strategy.save(tmp_path / "w.npz")
    assert np.array_equal(w["kernel"], 2 * np.arange(6.0).reshape(3, 2) + 1)
    w.assign(dense(3.0))
    await strategy.restore(tmp_path / "w.npz")
    assert np.array_equal(w["kernel"], 2 * np.arange(6.0).reshape(3, 2) + 1)


# -- save and restore ----------------------------------------------------------------------------------


async def test_restored_variables_have_the_same_bits(cluster: pipedist.LocalCluster, tmp_path: Path) -> None:
    """On_read variables too, replica by replica: training goes on as if it had not been interrupted."""
    path = tmp_path / "state.npz"

    def made() -> tuple[pipedist.Strategy, Any, Any, Any]:
        strategy = pipedist.Strategy(cluster, replicas=2)
        with strategy.scope():
            half = pipedist.Variable(np.ones(2, ml_dtypes.bfloat16), name="half", aggregation="sum")
            seen = pipedist.Variable(np.float32(0), name="seen", synchronization="on_read", aggregation="sum")
        return strategy, variables(strategy, 0.1), half, seen

    def step(w: Any, half: Any, seen: Any, x: Any) -> None:
        seen.assign_add(np.float32(x))
        half.assign_add(np.full(2, x, ml_dtypes.bfloat16))
        w.assign_add({"kernel": x * w["kernel"], "layers": [x * np.ones(2), np.float32(x)]})

    strategy, *own = made()
    await strategy.run(step, args=(*own, PerReplica([0.1, 0.7])))
    await strategy.save(path)
    bits = [
        np.array(leaf).tobytes()
        for leaf in (own[0]["kernel"], *own[0]["layers"], own[1], *own[2].local_values)
    ]
    await strategy.run(step, args=(*own, PerReplica([0.2, 0.3])))
    other, *others = made()
    await other.restore(path)
    assert [
        np.array(leaf).tobytes()
        for leaf in (others[0]["kernel"], *others[0]["layers"], others[1], *others[2].local_values)
    ] == bits
    assert len({float(copy) for copy in others[2].local_values}) == 2
    await other.run(step, args=(*others, PerReplica([0.2, 0.3])))
    assert same(others[0].value(), own[0].value())
    with np.load(path) as saved:  # documented: one array for each name, a row per replica if on_read
        assert sorted(saved) == ["dense/kernel", "dense/layers/0", "dense/layers/1", "half", "seen"]
        assert saved["seen"].shape == (2,)
    first = path.read_bytes()
    await strategy.restore(path)
    await strategy.save(path)
    assert path.read_bytes() == first


async def test_a_file_that_does_not_fit_is_refused_with_every_difference(
    cluster: pipedist.LocalCluster, tmp_path: Path
) -> None:
    path = tmp_path / "state.npz"
    np.savez(path, w=np.zeros(3), b=np.zeros(2, np.float32), r=np.zeros(3))
    strategy = pipedist.Strategy(cluster, replicas=2)
    with strategy.scope():
        w = pipedist.Variable(np.ones(3), name="w")
        kept = [
            pipedist.Variable(np.zeros(2), name="b"),
            pipedist.Variable(0.0, name="r", synchronization="on_read"),
            pipedist.Variable(0.0, name="missing"),
        ]
    with pytest.raises(ValueError, match="does not fit") as caught:
        await strategy.restore(path)
    assert str(caught.value).splitlines()[1:] == [
        "  variable 'b' (float64[2]): the file has float32[2]",
        "  variable 'r' (float64[]), on_read, needs float64[2]: the file has float64[3]; "
        "the first axis is the replicas: use as many as saved it",
        "  variable 'missing' (float64[]): the file has no such name, but b, r, w",
    ]
    assert np.array_equal(w, np.ones(3)), "all or nothing"
    del kept, caught  # the traceback has references too
    gc.collect()
    await strategy.restore(path)  # names without a variable are left alone; dropped variables do not count
    assert np.array_equal(w, np.zeros(3))
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match="can't be read"):
        await strategy.restore(path)
    with pytest.raises(FileNotFoundError):
        await strategy.restore(tmp_path / "none")


async def test_a_damaged_file_is_a_value_error_whichever_bit_flipped(tmp_path: Path) -> None:
    path = tmp_path / "w.npz"
    write(path, {"w": np.arange(2.0)})
    whole = path.read_bytes()
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with suppress(ValueError):
            found, _ = read(path, ["w"])
            assert all(np.array_equal(value, np.arange(2.0)) for value in found.values()), bit


@pytest.mark.parametrize("method", [8, 12, 14])  # deflate, bzip2, lzma
async def test_a_file_with_a_wrong_compression_is_a_value_error(tmp_path: Path, method: int) -> None:
    path = tmp_path / "w.npz"
    write(path, {"w": np.arange(5_000.0)})
    damaged = bytearray(path.read_bytes())
    damaged[damaged.rindex(b"PK\1\2") + 10] = method
    damaged[damaged.index(b"PK\3\4") + 8] = method
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match="can't be read as a file of"):
        read(path, ["w"])


async def test_names_must_differ_and_a_failed_save_keeps_the_file(
    cluster: pipedist.LocalCluster, tmp_path: Path
) -> None:
    path = tmp_path / "state.npz"
    path.write_bytes(b"earlier")
    strategy = pipedist.Strategy(cluster, replicas=2)
    with strategy.scope():
        both = [pipedist.Variable(0.0), pipedist.Variable(1.0)]
    with pytest.raises(ValueError, match="2 variables have the name 'variable'"):
        await strategy.save(path)
    assert path.read_bytes() == b"earlier"
    del both[1]
    with pytest.raises(OSError, match="none"):
        await strategy.save(tmp_path / "none/state.npz")
    await strategy.save(os.fspath(path))
    assert os.listdir(tmp_path) == ["state.npz"]


async def test_a_variable_that_a_run_uses_is_not_restored(
    cluster: pipedist.LocalCluster, tmp_path: Path
) -> None:
    strategy = pipedist.Strategy(cluster, replicas=2)
    w = variables(strategy)
    await strategy.save(tmp_path / "w")
    w.assign(dense(9.0))
    w["layers"][1]._users += 1
    with pytest.raises(RuntimeError, match="Await the run first"):
        await strategy.restore(tmp_path / "w")
    assert same(w.value(), dense(9.0)), "all or nothing"
