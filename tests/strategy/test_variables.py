"""Variables on real workers: what steps make of them, and that nothing else does."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pipedist
from pipedist.coordinator.worker_pool import WorkerPool
from pipedist.protocol import messages as msg
from pipedist.values import Mirrored, PerReplica
from tests.strategy import functions

pytestmark = pytest.mark.asyncio

ROWS = np.random.default_rng(5).normal(size=(4, 3, 64)).astype(np.float32)
"""Of 4 replicas; numbers whose sum depends on the order of adding."""

TURNS = 20
"""Of the loop, in which a run has been sent, if it need not wait."""


async def train(cluster: pipedist.LocalCluster, *, kill_at: str = "") -> list[bytes]:
    """Return the bits of everything that a few steps have made of some variables."""
    strategy = pipedist.Strategy(cluster, replicas=4)
    with strategy.scope():
        w = pipedist.Variable(np.zeros(64, np.float32), name="w", aggregation="sum")
        mean = pipedist.Variable(np.zeros(64, np.float32), name="mean", aggregation="mean")
        first = pipedist.Variable(0, name="first", aggregation="only_first_replica")
        seen = pipedist.Variable(np.float32(0), name="seen", synchronization="on_read", aggregation="sum")

    def step(number: int, x: Any, seen: Any) -> Any:
        ctx = pipedist.get_replica_context()
        if kill_at and number == 2 and ctx.replica_id_in_sync_group == 3 and not os.path.exists(kill_at):
            w.assign_add(x.sum(axis=0))
            Path(kill_at).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        w.assign_add(x.sum(axis=0))
        mean.assign((x * w).mean(axis=0))
        first.assign_add(number + ctx.replica_id_in_sync_group)
        seen.assign_add(x.sum())
        return w.value().sum() + mean[0]

    bits = []
    for number in range(4):
        result = await strategy.run(step, args=(number, PerReplica(ROWS + np.float32(number)), seen))
        bits += [np.asarray(part).tobytes() for part in result]
    assert first.numpy() == 0 + 1 + 2 + 3
    for variable in (w, mean, first, seen):
        bits += [copy.tobytes() for copy in variable.local_values]
        bits.append(variable.numpy().tobytes())
    assert len(set(map(bytes, [copy.tobytes() for copy in seen.local_values]))) == 4
    return bits


async def test_the_bits_depend_on_no_number_of_workers() -> None:
    found = []
    for workers in (1, 2, 4):
        async with pipedist.LocalCluster(workers=workers) as cluster:
            await cluster.ready()
            found.append(await train(cluster))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_worker_that_is_killed_in_mid_step_changes_nothing(workers: int, tmp_path: Path) -> None:
    async with pipedist.LocalCluster(workers=workers) as cluster:
        await cluster.ready()
        expected = await train(cluster)
        assert await train(cluster, kill_at=str(tmp_path / "killed")) == expected
    assert (tmp_path / "killed").exists()


LARGE = 270_001
"""Elements of a variable that all_reduce updates in its own pass (at least 1 MiB), not a multiple of its pieces."""


async def train_large(cluster: pipedist.LocalCluster, replicas: int, *, kill_at: str = "") -> None:
    """Check the bits of large variables after each step."""
    strategy = pipedist.Strategy(cluster, replicas=replicas)
    kinds = [
        ("sum", np.float32),
        ("mean", np.float32),
        ("mean", np.float64),
        ("sum", np.int32),
        ("only_first_replica", np.float32),
    ]
    with strategy.scope():
        variables = [
            pipedist.Variable(np.ones((LARGE, 1), dtype), name=f"{op} {dtype.__name__}", aggregation=op)
            for op, dtype in kinds
        ]

    def step(number: int, operands: Any, all_variables: Any) -> Any:
        seen = []
        for variable, operand in zip(all_variables, operands, strict=True):
            before = variable.value()
            given = operand[:, None].copy()
            if number == 1 and "float" in variable.name:
                with np.errstate(over="raise"):  # not updated in the same pass
                    new = variable.assign_sub(given)
            else:
                new = variable.assign_sub(given) if number % 2 else variable.assign_add(given)
            given[:] = 0
            assert new is variable.value() or np.array_equal(new, variable.value(), equal_nan=True)
            assert not new.flags.writeable
            assert before is not new
            seen.append(float(before[7, 0]))
            if kill_at and number == 2 and not os.path.exists(kill_at):
                ctx = pipedist.get_replica_context()
                if ctx.replica_id_in_sync_group == replicas - 1:
                    Path(kill_at).touch()
                    os.kill(os.getpid(), signal.SIGKILL)
        return seen

    random = np.random.default_rng(11)
    expected = [variable.numpy() for variable in variables]
    kept: list[tuple[np.ndarray, bytes]] = []
    for number in range(4):
        rows = random.normal(scale=1e3, size=(replicas, LARGE))
        if number == 2:
            rows[0, 5:9] = np.nan, np.inf, -np.inf, -0.0
        with np.errstate(invalid="ignore"):
            operands = [
                [
                    np.nan_to_num(row, posinf=9, neginf=9).astype(dtype)
                    if dtype is np.int32
                    else row.astype(dtype)
                    for row in rows
                ]
                for _, dtype in kinds
            ]
        given = [PerReplica(each) for each in operands]
        await strategy.run(step, args=(number, given, variables))
        for place, (op, _) in enumerate(kinds):
            if op == "only_first_replica":
                operand = operands[place][0]
            else:
                operand = pipedist.values.reduce(op, given[place], None, replicas)
            change = np.subtract if number % 2 else np.add
            with np.errstate(invalid="ignore"):
                expected[place] = change(expected[place], operand[:, None])
            assert variables[place].value().tobytes() == expected[place].tobytes(), (number, kinds[place])
            kept.append((variables[place].value(), expected[place].tobytes()))
    assert all(value.tobytes() == bits for value, bits in kept), "a value that was read never changes"


@pytest.mark.parametrize("workers", [1, 2, 3])
async def test_large_variables_have_the_bits_of_reduce_and_of_numpy(workers: int, tmp_path: Path) -> None:
    async with pipedist.LocalCluster(workers=workers) as cluster:
        await cluster.ready()
        await train_large(cluster, 4, kill_at=str(tmp_path / "killed"))
    assert (tmp_path / "killed").exists()


async def test_large_variables_without_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPEDIST_SHARED_MEMORY", "0")
    async with pipedist.LocalCluster(workers=2) as cluster:
        await cluster.ready()
        await train_large(cluster, 2)


@pytest.mark.slow
async def test_large_variables_on_8_workers() -> None:
    async with pipedist.LocalCluster(workers=8) as cluster:
        await cluster.ready()
        await train_large(cluster, 8)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[msg.Message]:
    """States that are sent to workers, and dropped there."""
    found: list[msg.Message] = []
    send = WorkerPool.send

    def noting(self: WorkerPool, worker: str, message: msg.Message, payload: Any = ()) -> None:
        if isinstance(message, msg.StateVersion | msg.DropState):
            found.append(message)
        send(self, worker, message, payload)

    monkeypatch.setattr(WorkerPool, "send", noting)
    return found


async def test_a_version_travels_once_to_a_worker_and_what_it_made_not_at_all(
    sent: list[msg.Message],
) -> None:
    async with pipedist.LocalCluster(workers=2) as cluster:
        await cluster.ready()
        strategy = pipedist.Strategy(cluster, replicas=2)
        with strategy.scope():
            w = pipedist.Variable(np.zeros(1000), name="w", aggregation="sum")

        def read(w: Any) -> Any:
            return w[0]

        def add() -> None:
            w.assign_add(np.ones(1000))

        for _ in range(3):
            await strategy.run(read, args=(w,))
        assert len(sent) == 2
        for _ in range(5):
            await strategy.run(add)
        await strategy.run(read, args=(w,))
        assert len(sent) == 2
        assert w[0] == 10
        w.assign(np.zeros(1000))
        w.assign(np.ones(1000))
        for _ in range(2):
            assert list(await strategy.run(read, args=(w,))) == [1, 1]
        assert [message.version for message in sent if isinstance(message, msg.StateVersion)] == [0, 0, 7, 7]


async def test_assignments_of_a_failed_step_are_never_read(sent: list[msg.Message]) -> None:
    async with pipedist.LocalCluster(workers=2) as cluster:
        await cluster.ready()
        strategy = pipedist.Strategy(cluster, replicas=2)
        with strategy.scope():
            w = pipedist.Variable(5.0, aggregation="sum")
            m = pipedist.Variable(5.0, synchronization="on_read", aggregation="sum")

        def step(fails: bool) -> Any:
            before = w.value(), m.value()
            w.assign_add(1.0)
            m.assign_add(1.0)
            if fails and pipedist.get_replica_context().replica_id_in_sync_group == 1:
                raise KeyError("no")
            return before

        for fails, value, copies in (
            (True, 5, (5, 5)),
            (False, 7, (6, 6)),
            (True, 7, (6, 6)),
            (False, 9, (7, 7)),
        ):
            if fails:
                with pytest.raises(pipedist.CallError, match="'no'"):
                    await strategy.run(step, args=(True,))
            else:
                assert [list(part) for part in await strategy.run(step, args=(False,))] == [
                    [value - 2] * 2,
                    [copies[0] - 1] * 2,
                ]
            assert w.numpy() == value
            assert m.local_values == copies


async def test_replicas_that_assign_different_variables_raise() -> None:
    async with pipedist.LocalCluster(workers=2) as cluster:
        strategy = pipedist.Strategy(cluster, replicas=2)
        with strategy.scope():
            v = pipedist.Variable(1.0, name="v", aggregation="sum")
            w = pipedist.Variable(1.0, name="w", aggregation="sum")

        def step(ctx: pipedist.ReplicaContext) -> Any:
            return (w if ctx.replica_id_in_sync_group else v).assign_add(1.0)

        with pytest.raises(pipedist.CallError) as caught:
            await strategy.run(step)
        assert type(caught.value.__cause__) is pipedist.CollectiveMismatchError
        told = str(caught.value.__cause__)
        for part in (
            "assign_add of variable 'v'",
            "assign_add of variable 'w'",
            "test_variables.py:",
            "in test_",
        ):
            assert part in told
        assert (v.numpy(), w.numpy()) == (1, 1)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("aggregation", ["sum", "only_first_replica"])
async def test_replicas_that_assign_different_variables_of_one_name_raise(
    workers: int, aggregation: str
) -> None:
    async with pipedist.LocalCluster(workers=workers) as cluster:
        await cluster.ready()
        strategy = pipedist.Strategy(cluster, replicas=2)
        with strategy.scope():
            pair = [pipedist.Variable(np.zeros(2), aggregation=aggregation) for _ in range(2)]

        def step(one: Any, other: Any) -> None:
            ctx = pipedist.get_replica_context()
            (other if ctx.replica_id_in_sync_group else one).assign_add(np.ones(2))

        with pytest.raises(pipedist.CallError) as error:
            await strategy.run(step, args=tuple(pair))
        assert isinstance(error.value.__cause__, pipedist.CollectiveMismatchError)
        assert "different variables of the same name" in str(error.value.__cause__)
        assert not pair[0].numpy().any()


async def test_a_step_whose_results_do_not_fit_together_assigns_nothing() -> None:
    async with pipedist.LocalCluster(workers=2) as cluster:
        strategy = pipedist.Strategy(cluster, replicas=2)
        with strategy.scope():
            v = pipedist.Variable(1, aggregation="sum")

        def step(differs: bool) -> Any:
            replica = functions.ids(pipedist.get_replica_context())[0]  # type: ignore[arg-type]
            new = v.assign_add(1)
            return [new] * (1 + replica * differs)

        with pytest.raises(ValueError, match="different structures"):
            await strategy.run(step, args=(True,))
        assert v.numpy() == 1
        assert list((await strategy.run(step, args=(False,)))[0]) == [3, 3]
        assert v.numpy() == 3


async def test_a_variable_is_captured_or_an_argument() -> None:
    async with pipedist.LocalCluster(workers=2) as cluster:
        strategy = pipedist.Strategy(cluster, replicas=2)
        with strategy.scope():
            v = pipedist.Variable([1.0, 2.0], name="v", aggregation="sum")

        def step(pair: Any, *, w: Any) -> Any:
            pair["v"].assign_add(w + v)
            return {
                "v": v,
                "same": w.value().tolist() == v.value().tolist(),
                "name": w.name,
                "shape": w.shape,
            }

        result = await strategy.run(step, args=({"v": v},), kwargs={"w": v})
        assert [part.tolist() for part in result["v"]] == [[5, 10]] * 2
        assert v.numpy().tolist() == [5, 10]
        assert list(result["same"]) == [True] * 2
        assert list(result["name"]) == ["v"] * 2
        assert v.numpy().flags.writeable
        assert not v.value().flags.writeable


async def test_they_work_in_async_functions_and_in_merge_calls() -> None:
    async with pipedist.LocalCluster(workers=2) as cluster:
        strategy = pipedist.Strategy(cluster, replicas=3)
        with strategy.scope():
            v = pipedist.Variable(1.0, name="v", aggregation="mean")
            m = pipedist.Variable(0, name="m", synchronization="on_read", aggregation="sum")

        async def step() -> Any:
            replica = pipedist.get_replica_context().replica_id_in_sync_group
            await m.assign(10 * replica)
            return await v.assign_add(float(replica)), m.value()

        added, own = await strategy.run(step)
        assert list(added) == [2.0] * 3
        assert list(own) == [0, 10, 20]

        def merged(gradient: Any) -> Any:
            def apply(inside: Any, gradient: Any, v: Any) -> Any:
                mean = inside.reduce("mean", gradient, axis=None)
                inside.update(v, lambda copy, g: copy.assign_sub(g), args=(mean,))
                total = m.value()
                own = inside.local_results({"m": m, "v": v}), inside.reduce("max", [m], axis=None)
                m.assign(100)
                return total, inside.local_results(gradient)[2], own

            total, last, own = pipedist.get_replica_context().merge_call(apply, args=(gradient, v))
            return int(total), float(last), float(v.value()), int(m.value()), own

        *results, own = await strategy.run(merged, args=(PerReplica([3.0, 6.0, 9.0]),))
        assert [list(part) for part in results] == [[30] * 3, [9] * 3, [-4] * 3, [34, 33, 33]]
        local, [largest] = own
        assert [(int(each["m"][0]), float(each["v"][0])) for each in local] == [(0, -4), (10, -4), (20, -4)]
        assert list(largest) == [20] * 3
        assert v.numpy() == -4
        assert m.local_values == (34, 33, 33)


async def test_an_unfit_assignment_raises_with_the_right_form() -> None:
    async with pipedist.LocalCluster(workers=1) as cluster:
        strategy = pipedist.Strategy(cluster, replicas=2)
        with strategy.scope():
            w = pipedist.Variable(np.zeros(2, np.float32), name="w", aggregation="sum")

        def step(ctx: Any) -> None:
            rows = ctx.all_reduce("sum", 3)
            w.assign_sub(np.ones(2, np.float32) / rows)

        with pytest.raises(
            pipedist.CallError, match=r"np\.asarray\(value, 'float32'\)\. A float32 array and a NumPy integer"
        ):
            await strategy.run(step)
        with pytest.raises(TypeError, match=r"write `w\.assign_add\(x\)`"):
            w += 1
        with pytest.raises(ValueError, match=r"cast it first, as in np\.asarray\(value, 'float32'\)$"):
            w.assign(np.zeros(2, np.int64))


async def test_what_an_async_function_forgets_to_await_fails_it_and_is_not_lost_in_silence(
    capfd: pytest.CaptureFixture[str],
) -> None:
    async with pipedist.LocalCluster(workers=2) as cluster:
        strategy = pipedist.Strategy(cluster, replicas=2)
        with strategy.scope():
            v = pipedist.Variable(1.0, name="v", aggregation="mean")
            m = pipedist.Variable(0, name="m", synchronization="on_read", aggregation="sum")

        async def assigns() -> None:
            v.assign_add(1.0)

        async def merges(ctx: Any) -> None:
            ctx.merge_call(len)

        async def returns(ctx: Any) -> Any:
            return ctx.all_reduce("sum", 1)

        for fn, what in ((assigns, "assign_add of variable 'v'"), (merges, "len"), (returns, "all_reduce")):
            with pytest.raises(
                pipedist.CallError, match=rf"{what}, at test_variables\.py:\d+ in .*, was not awaited"
            ):
                await strategy.run(fn)

        async def of_its_own(ctx: Any) -> int:
            m.assign_add(2)  # nobody else takes part: it is made
            task = asyncio.create_task(m.assign_add(3))
            return int(await task) + int(await ctx.all_reduce("sum", 1))

        assert list(await strategy.run(of_its_own)) == [7, 7]
        assert (v.numpy(), m.numpy()) == (1.0, 10)
    assert "m.assign_add" not in capfd.readouterr().err


async def test_a_reduced_gradient_updates_in_a_merge_call() -> None:
    async with pipedist.LocalCluster(workers=2) as cluster:
        strategy = pipedist.Strategy(cluster, replicas=3)
        with strategy.scope():
            w = pipedist.Variable(np.zeros(2), name="w")

        def descend(merged: Any, w: Any, gradient: Any) -> None:
            merged.update(w, lambda copy, by: copy.assign_sub(by["w"]), args=(gradient,))

        def step(reduced: bool, ctx: Any) -> None:
            own = {"w": np.array([ctx.replica_id_in_sync_group, np.nan])}
            ctx.merge_call(descend, args=(w, ctx.all_reduce("sum", own) if reduced else own))

        await strategy.run(step, args=(True,))
        np.testing.assert_array_equal(w, [-3, np.nan])
        with pytest.raises(pipedist.CallError, match=r"components differ.*strategy\.reduce\('sum'"):
            await strategy.run(step, args=(False,))


async def test_updates_outside() -> None:
    async with pipedist.LocalCluster(workers=1) as cluster:
        strategy = pipedist.Strategy(cluster, replicas=2)
        with strategy.scope():
            v = pipedist.Variable([1.0, 2.0], aggregation="sum")
            m = pipedist.Variable(1.0, synchronization="on_read", aggregation="sum")

        def add(copy: Any, value: Any) -> Any:
            return copy.assign_add(value)

        result = await strategy.update(v, add, args=(np.ones(2),))
        assert type(result) is Mirrored
        assert [part.tolist() for part in result] == [[2, 3]] * 2
        with pytest.raises(ValueError, match="would become different ones"):
            await strategy.update(v, add, args=(PerReplica([np.ones(2), np.zeros(2)]),))
        reduced = await strategy.reduce_to("sum", PerReplica([np.ones(2)] * 2))
        await strategy.update(v, add, args=(reduced,))
        assert v.numpy().tolist() == [4, 5]
        await strategy.update(m, add, args=(PerReplica([1.0, 2.0]),))
        assert m.local_values == (2, 3)
        with pytest.raises(TypeError, match=r"needs a pipedist\.Variable"):
            await strategy.update(np.ones(2), add)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="needs a function"):
            await strategy.update(v, 3)  # type: ignore[arg-type]
        assert await strategy.reduce("sum", m, axis=None) == 5
        assert (await strategy.gather(v, axis=0)).tolist() == [4, 5, 4, 5]
        assert [part.tolist() for part in strategy.local_results(v)] == [[4, 5]] * 2
        assert [type(part) for part in strategy.broadcast({"v": v})["v"]] == [np.ndarray] * 2
        with pytest.raises(ValueError, match="has one already"):
            strategy.broadcast(m)


async def test_runs_that_use_variables_are_done_in_the_order_of_their_calls() -> None:
    async with pipedist.LocalCluster(workers=2) as cluster:
        strategy = pipedist.Strategy(cluster, replicas=2)
        with strategy.scope():
            v = pipedist.Variable(1, aggregation="sum")

        def double_and_add(number: int) -> int:
            v.assign(v + number)
            return int(v.value())

        tasks = [asyncio.create_task(strategy.run(double_and_add, args=(n,))) for n in range(6)]
        free = asyncio.create_task(strategy.run(functions.double, args=(4,)))
        value, expected = 1, []
        for number in range(6):
            value = 2 * (value + number)
            expected.append([value, value])
        assert [list(await task) for task in tasks] == expected
        assert v.numpy() == value
        assert list(await free) == [8, 8]


async def test_a_variable_is_not_changed_under_a_run(tmp_path: Path) -> None:
    async with pipedist.LocalCluster(workers=1) as cluster:
        strategy = pipedist.Strategy(cluster, replicas=1)
        with strategy.scope():
            v = pipedist.Variable(1.0)

        def slow(file: str) -> None:
            functions.wait_for(file)
            v.assign(5.0)

        run = asyncio.create_task(strategy.run(slow, args=(str(tmp_path / "go"),)))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="a run that uses it is not finished"):
            v.assign(2.0)
        assert v.numpy() == 1
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        v.assign(3.0)
        (tmp_path / "go").touch()
        assert float((await strategy.run(lambda: v.value()))[0]) == 3
        assert v.numpy() == 3


async def test_a_run_begins_when_the_step_of_a_cancelled_one_is_over(tmp_path: Path) -> None:
    async with pipedist.LocalCluster(workers=2) as cluster:
        await cluster.ready()
        strategy = pipedist.Strategy(cluster, replicas=1)
        with strategy.scope():
            v = pipedist.Variable(1.0)

        def slow(began: str, file: str) -> None:
            v.assign(100.0)
            Path(began).touch()
            functions.wait_for(file)

        began, go = str(tmp_path / "began"), str(tmp_path / "go")
        run = asyncio.create_task(strategy.run(slow, args=(began, go)))
        await asyncio.to_thread(functions.wait_for, began)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        v.assign(3.0)
        reading = asyncio.create_task(strategy.run(lambda: v.value()))
        for _ in range(TURNS):
            await asyncio.sleep(0)
        assert list(await strategy.run(functions.double, args=(4,))) == [8]  # on the worker that is free
        assert not reading.done()
        (tmp_path / "go").touch()
        assert float((await reading)[0]) == 3


async def test_assignments_of_a_cancelled_run_are_never_read(tmp_path: Path) -> None:
    async with pipedist.LocalCluster(workers=1) as cluster:
        strategy = pipedist.Strategy(cluster, replicas=1)
        with strategy.scope():
            v = pipedist.Variable(0.0)

        def step(variable: Any, added: float, file: str) -> float:
            if variable is None:
                functions.wait_for(file)
                return 0.0
            variable.assign_add(added)
            return float(variable)

        for _ in range(50):  # short ones, of which a worker gets some in advance
            await strategy.run(step, args=(v, 0.0, ""))
        before = asyncio.create_task(strategy.run(step, args=(None, 0.0, str(tmp_path / "go"))))
        await asyncio.sleep(0)
        run = asyncio.create_task(strategy.run(step, args=(v, 100.0, "")))
        for _ in range(TURNS):
            await asyncio.sleep(0)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        v.assign(5.0)
        again = asyncio.create_task(strategy.run(step, args=(v, 1.0, "")))
        for _ in range(TURNS):
            await asyncio.sleep(0)
        (tmp_path / "go").touch()
        await before
        assert float((await again)[0]) == 6
        assert v.numpy() == 6


async def test_only_the_strategy_of_its_scope_can_use_a_variable() -> None:
    async with pipedist.LocalCluster(workers=1) as cluster:
        strategy, other = pipedist.Strategy(cluster, replicas=1), pipedist.Strategy(cluster, replicas=1)
        alone = pipedist.Variable(1.0, name="alone")
        with other.scope():
            foreign = pipedist.Variable(1.0, name="foreign")
        with pytest.raises(ValueError, match=r"'alone'.*outside of strategy\.scope\(\)"):
            await strategy.run(lambda: alone.value())
        with pytest.raises(ValueError, match=r"'foreign'.*another strategy"):
            await strategy.run(functions.double, args=(foreign,))
        for variable, where in ((alone, "outside of strategy.scope"), (foreign, "another strategy")):
            with pytest.raises(ValueError, match=where):
                await strategy.update(variable, lambda copy: copy.assign(2.0))
            assert variable.numpy() == 1.0
        with pytest.raises(
            pipedist.CallError, match="creating a variable inside a replica function"
        ) as caught:
            await strategy.run(lambda: pipedist.Variable(1.0))
        assert isinstance(caught.value.__cause__, ValueError)


async def test_without_a_strategy_a_variable_is_a_value_in_this_process() -> None:
    v = pipedist.Variable([1.0], name="v")
    m = pipedist.Variable(1, synchronization="on_read", aggregation="sum")
    default: Any = pipedist.get_strategy()

    def step(x: Any) -> Any:
        v.assign_add(x)
        m.assign_add(2)
        return v + 1

    assert (await default.run(step, args=(np.ones(1),))).tolist() == [3]
    assert v.numpy().tolist() == [2]
    assert m.numpy() == 3
    assert len(v.local_values) == 1


async def test_workers_drop_variables_that_were_garbage_collected(sent: list[msg.Message]) -> None:
    async with pipedist.LocalCluster(workers=1) as cluster:
        strategy = pipedist.Strategy(cluster, replicas=1)
        for _ in range(3):
            with strategy.scope():
                v = pipedist.Variable(np.zeros(10))
            await strategy.run(functions.double, args=(v,))
            del v
        assert [type(message).__name__ for message in sent] == ["StateVersion", "DropState"] * 2 + [
            "StateVersion"
        ]
