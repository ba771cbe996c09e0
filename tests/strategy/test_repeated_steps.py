"""Steps of one function, repeated: what they cost, and that each still gives its own result or error."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import pipedist
from tests.python_calls import PythonCalls
from tests.strategy import functions
from tests.transport.memory import is_shared

pytestmark = pytest.mark.asyncio(loop_scope="module")

STEPS = 6
CHANGE_AT = 4  # the step in which something differs: layouts of arguments are known by then
ROWS = 2048
LARGE = 2**18 + 1  # elements of a variable that is updated in the pass of its all_reduce


def halves(step: int, rows: int = ROWS) -> pipedist.PerReplica:
    """Return the rows of a step, divided among two replicas; large enough for frames of their own."""
    return pipedist.PerReplica(np.split(np.arange(2 * rows, dtype=np.float64) + step, 2))


def tree_of(x: Any) -> Any:
    return {"sum": x.sum(), "rows": x[:600] * 2, "place": (len(x), None)}


def collective(x: Any, ctx: pipedist.ReplicaContext) -> float:
    return float(ctx.all_reduce("sum", x.sum()))


def fail_in_collective(x: Any, ctx: pipedist.ReplicaContext) -> float:
    if ctx.replica_id_in_sync_group == 1:
        raise ValueError("replica 1")
    return float(ctx.all_reduce("sum", x.sum()))


def context_of(x: Any, ctx: pipedist.ReplicaContext) -> tuple[Any, ...]:
    own = ctx.replica_id_in_sync_group
    return ctx.step, own, ctx.num_replicas_in_sync, ctx.device, ctx.elements, ctx.rng.random()


def fail_at(x: Any) -> float:
    if x[0] % ROWS == CHANGE_AT:
        raise ValueError(f"step {CHANGE_AT}")
    return float(x[0])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def strategy() -> AsyncIterator[pipedist.Strategy]:
    async with pipedist.LocalCluster(workers=2) as cluster:
        yield pipedist.Strategy(cluster, replicas=2)


async def test_a_tree_keeps_its_structure_and_bits(strategy: pipedist.Strategy) -> None:
    for step in range(STEPS):
        given = halves(step)
        found = strategy.local_results(await strategy.run(tree_of, args=(given,)))
        for replica, result in enumerate(found):
            x = given[replica]
            assert list(result) == ["sum", "rows", "place"]
            assert result["sum"] == x.sum()
            assert result["rows"].tobytes() == (x[:600] * 2).tobytes()
            assert result["place"] == (ROWS, None)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bool"])
async def test_shapes_and_dtypes_may_change_between_steps(strategy: pipedist.Strategy, dtype: str) -> None:
    for step in range(STEPS):
        given = halves(step, ROWS + (step == CHANGE_AT))
        if step >= CHANGE_AT:
            given = pipedist.PerReplica([part.astype(dtype) for part in given])
        found = await strategy.run(lambda x: (x.dtype.str, x.shape, x.flags.writeable), args=(given,))
        kinds = [(part.dtype.str, part.shape, False) for part in given]
        assert list(strategy.local_results(found)) == kinds


async def test_an_error_ends_only_its_own_step(strategy: pipedist.Strategy) -> None:
    for step in range(STEPS):
        given = pipedist.PerReplica([np.full(ROWS, step), np.full(ROWS, step)])
        if step == CHANGE_AT:
            with pytest.raises(pipedist.CallError, match=rf"ValueError: step {CHANGE_AT}") as caught:
                await strategy.run(fail_at, args=(given,))
            assert caught.value.attempts == 1
        else:
            assert list(await strategy.run(fail_at, args=(given,))) == [step, step]


async def test_collectives_of_each_step_are_its_own(strategy: pipedist.Strategy) -> None:
    """Members use the channel of their latest gang again."""
    for step in range(STEPS):
        given = halves(step)
        if step == CHANGE_AT:
            with pytest.raises(pipedist.CallError, match="ValueError: replica 1"):
                await strategy.run(fail_in_collective, args=(given,))
        total = given[0].sum() + given[1].sum()
        assert list(await strategy.run(collective, args=(given,))) == [total, total]


async def test_a_step_that_has_ended_calls_no_collective(strategy: pipedist.Strategy) -> None:
    """A step without a collective makes no gang: its late threads get the same error as those of a gang."""
    for _ in range(2):  # the first call of a function in a worker takes the general path
        await strategy.run(functions.start_late_collective, args=(halves(0),))
        errors = await strategy.run(functions.end_late_collective, args=(halves(0),))
        for replica, error in enumerate(errors):
            assert error.startswith(f"RuntimeError: replica {replica} called a collective outside its turn")


async def test_each_step_has_a_context_of_its_own(strategy: pipedist.Strategy) -> None:
    """The first step of a pass takes the general path, the others the short one."""
    draws = set()
    for step in range(STEPS):
        found = strategy.local_results(await strategy.run(context_of, args=(halves(step),)))
        for replica, (number, own, replicas, device, elements, draw) in enumerate(found):
            assert (number, own, replicas, device, elements) == (step, replica, 2, "cpu", None)
            draws.add(draw)
    assert len(draws) == 2 * STEPS


async def test_a_worker_that_dies_in_a_step_is_retried_with_the_same_result(
    strategy: pipedist.Strategy, tmp_path: Path
) -> None:
    with strategy.scope():
        steps = pipedist.Variable(np.int64(0), aggregation="only_first_replica")
        total = pipedist.Variable(np.zeros(ROWS), aggregation="sum")
    for step in range(STEPS):
        killed = tmp_path / "killed" if step == CHANGE_AT else None
        given = halves(step)
        found = await strategy.run(die_once(killed, steps, total), args=(given,))
        assert list(found) == [given[0][0], given[1][0]]
    assert (tmp_path / "killed").exists()
    assert int(steps.value()) == STEPS
    expected = sum(halves(step)[0] + halves(step)[1] for step in range(STEPS))
    assert total.value().tobytes() == expected.tobytes()


def die_once(
    file: Path | None, steps: pipedist.Variable, total: pipedist.Variable
) -> Callable[[Any, pipedist.ReplicaContext], float]:
    """Return a function whose replica 1 kills its process, once, after its assignments."""

    def step_fn(x: Any, ctx: pipedist.ReplicaContext) -> float:
        steps.assign_add(1)
        total.assign_add(x)
        if file is not None and ctx.replica_id_in_sync_group == 1 and not file.exists():
            file.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return float(x[0])

    return step_fn


async def test_a_step_leaves_no_reference_cycles(strategy: pipedist.Strategy) -> None:
    """Garbage collections would interrupt later steps, and inputs would be freed late."""
    await strategy.run(collective, args=(halves(0),))
    gc.collect()
    gc.disable()
    try:
        for step in range(STEPS):
            await strategy.reduce("mean", await strategy.run(collective, args=(halves(step),)), axis=None)
        assert gc.collect() == 0
    finally:
        gc.enable()


async def test_a_step_may_return_a_variable(strategy: pipedist.Strategy) -> None:
    with strategy.scope():
        w = pipedist.Variable(0.0, aggregation="sum")

    def step(x: Any) -> Any:
        w.assign_add(x[0])
        return {"w": w}

    expected = 0.0
    for number in range(STEPS):
        given = halves(number)
        found = await strategy.run(step, args=(given,))
        expected += sum(part[0] for part in given)
        assert list(found["w"]) == [expected, expected]


def change_large(w: Any, x: Any) -> int:
    """Assign a large variable; return the garbage of earlier steps."""
    gc.disable()
    garbage = gc.collect()
    w.assign_add(np.full(LARGE, x[0], np.float32))
    return garbage


async def test_a_large_variable_is_shared_and_leaves_no_cycle(strategy: pipedist.Strategy) -> None:
    await strategy.cluster.ready()  # both workers: one may have been killed before
    with strategy.scope():
        w = pipedist.Variable(np.zeros(LARGE, np.float32), aggregation="sum")
    kept = []
    for step in range(STEPS):
        garbage = strategy.local_results(await strategy.run(change_large, args=(w, halves(step))))
        if step > 1:
            assert garbage == (0, 0)
        assert is_shared(w.value())
        kept.append(w.value())
    sums = np.cumsum([sum(part[0] for part in halves(step)) for step in range(STEPS)])
    assert [value[-1] for value in kept] == list(sums), "earlier values never change"


# The number of Python calls of a step, as it was measured, plus a tenth. It is the same on every machine: more calls
# in the path of a step show here, while its time depends on the load.
DRIVER_CALLS_MAX = 152
WORKER_CALLS_MAX = 65


async def test_a_step_makes_a_limited_number_of_python_calls(strategy: pipedist.Strategy) -> None:
    await strategy.cluster.ready()  # both workers: one may have been killed before
    counts = []
    for step in range(30):
        given = halves(step)
        with PythonCalls() as counted:
            parts = await strategy.run(functions.calls_since_last, args=(given,))
            await strategy.reduce("mean", parts, axis=None)
        counts.append((counted.made, *parts))
    driver, *workers = (min(column) for column in zip(*counts[10:], strict=True))
    assert driver <= DRIVER_CALLS_MAX
    assert max(workers) <= WORKER_CALLS_MAX
