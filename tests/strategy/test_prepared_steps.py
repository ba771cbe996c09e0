"""Steps that the scheduler sees when they are over: the same bits, errors and retries as those it sees at once."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import pytest_asyncio

import pipedist
from pipedist.coordinator import prepared_steps
from pipedist.coordinator.prepared_steps import PreparedSteps
from pipedist.worker.variables.replica import ReplicaVariable
from tests.strategy import functions

pytestmark = pytest.mark.asyncio(loop_scope="module")

STEPS = 6


def parts(step: int, rows: int = 300, replicas: int = 2) -> pipedist.PerReplica:
    return pipedist.PerReplica([np.arange(rows) * 0.1 + step + replica for replica in range(replicas)])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def strategy() -> AsyncIterator[pipedist.Strategy]:
    async with pipedist.LocalCluster(workers=2) as cluster:
        yield pipedist.Strategy(cluster, replicas=2)


class Seen:
    """The events that the scheduler of a strategy's cluster handles, since `take`."""

    def __init__(self, strategy: pipedist.Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
        self._coordinator = strategy.cluster.coordinator
        scheduler = self._coordinator._scheduler
        self._handle, self._events = scheduler.handle, list[str]()
        monkeypatch.setattr(scheduler, "handle", self._see)

    def _see(self, event: Any, now: float) -> Any:
        self._events.append(type(event).__name__)
        return self._handle(event, now)

    def take(self) -> list[str]:
        self._coordinator._hand_over()  # the event of the last step would come with the next one
        events, self._events = self._events, []
        return [each for each in events if each not in ("Tick", "HeartbeatReceived")]


@pytest.fixture
def seen(strategy: pipedist.Strategy, monkeypatch: pytest.MonkeyPatch) -> Seen:
    return Seen(strategy, monkeypatch)


async def prepare(strategy: pipedist.Strategy, fn: Callable[..., Any], *args: Any) -> None:
    """Run a function until its steps are prepared: on all workers, which have its program."""
    await strategy.cluster.ready()
    for _ in range(2):
        await strategy.run(fn, args=args)


# -- equal results -------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2, 3])
async def test_the_bits_are_those_of_the_general_path(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async with pipedist.LocalCluster(workers=workers) as cluster:
        prepared = await train(cluster)
        monkeypatch.setattr(PreparedSteps, "begin", lambda *_: False)
        assert await train(cluster) == prepared
    assert len(prepared) == STEPS + 1


async def train(cluster: pipedist.LocalCluster) -> list[Any]:
    """Return what a training gives, as bytes: with random numbers, collectives and variables."""
    await cluster.ready()
    strategy = pipedist.Strategy(cluster, replicas=3, seed=5)
    with strategy.scope():
        w = pipedist.Variable(np.zeros(40), aggregation="sum")
        own = pipedist.Variable(np.float32(0), synchronization="on_read", aggregation="mean")

    def step(x: Any, ctx: pipedist.ReplicaContext) -> Any:
        noise = ctx.rng.random(40)
        w.assign_add(noise * x[:40])
        own.assign_add(np.float32(ctx.replica_id_in_sync_group / 3))
        total = ctx.all_reduce("sum", x.sum() + noise[0])
        return {"total": total, "rows": x[::7] * noise[1], "step": ctx.step}

    found = []
    for number in range(STEPS):
        result = await strategy.run(step, args=(parts(number, replicas=3),))
        mean = await strategy.reduce("mean", result["rows"], axis=0)
        found.append([mean.tobytes(), *map(repr, strategy.local_results(result))])
    found.append([w.numpy().tobytes(), own.numpy().tobytes()])
    await strategy.aclose()
    return found


async def test_a_step_is_one_event_for_the_scheduler(strategy: pipedist.Strategy, seen: Seen) -> None:
    await prepare(strategy, functions.double, parts(0))
    seen.take()
    for step in range(STEPS):
        found = await strategy.run(functions.double, args=(parts(step),))
        assert [part.tobytes() for part in found] == [(2 * part).tobytes() for part in parts(step)]
    assert seen.take() == ["StepExecuted"] * STEPS


@pytest.mark.parametrize(("steps_max", "s_max", "unseen_max"), [(3, 1e9, 3), (1000, -1.0, 1)])
async def test_the_scheduler_sees_steps_after_some_others_or_some_time(
    strategy: pipedist.Strategy,
    monkeypatch: pytest.MonkeyPatch,
    steps_max: int,
    s_max: float,
    unseen_max: int,
) -> None:
    monkeypatch.setattr(prepared_steps, "UNSEEN_STEPS_MAX", steps_max)
    monkeypatch.setattr(prepared_steps, "UNSEEN_S_MAX", s_max)
    await prepare(strategy, functions.double, 1)
    for step in range(10):
        await strategy.run(functions.double, args=(step,))
        assert len(strategy.cluster.coordinator._prepared._over) <= unseen_max


async def test_functions_may_alternate(strategy: pipedist.Strategy, seen: Seen) -> None:
    await prepare(strategy, functions.double, 1)
    await prepare(strategy, functions.ids)
    seen.take()
    for _ in range(3):
        assert list(await strategy.run(functions.double, args=(1,))) == [2, 2]
        assert [int(first) for first in (await strategy.run(functions.ids))[0]] == [0, 1]
    assert seen.take() == ["StepExecuted"] * 6


# -- the general path takes over -----------------------------------------------------------


async def test_a_worker_that_is_killed_in_a_step_costs_no_result(
    strategy: pipedist.Strategy, seen: Seen, tmp_path: Path
) -> None:
    await prepare(strategy, die_once, parts(0), "")
    seen.take()
    found = await strategy.run(die_once, args=(parts(3), str(tmp_path / "killed")))
    assert list(found) == [float(part.sum()) for part in parts(3)]
    events = seen.take()
    assert events[0] == "StepsAvailable"
    assert events.index("WorkerLost") in (1, 2), "2: the other member had reported"
    assert events.count("StepExecuted") == 0
    await prepare(strategy, die_once, parts(0), "")
    seen.take()
    await strategy.run(die_once, args=(parts(4), ""))
    assert seen.take() == ["StepExecuted"], "the replacement is a member now"


async def test_the_scheduler_sees_all_steps_before_the_death_of_a_worker(
    strategy: pipedist.Strategy, seen: Seen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepared_steps, "UNSEEN_S_MAX", 1e9)
    await prepare(strategy, die_once, parts(0), "")
    seen.take()
    for step in range(STEPS):
        await strategy.run(die_once, args=(parts(step), ""))
    found = await strategy.run(die_once, args=(parts(3), str(tmp_path / "killed")))
    assert list(found) == [float(part.sum()) for part in parts(3)]
    assert seen.take()[: STEPS + 1] == ["StepExecuted"] * STEPS + ["StepsAvailable"]


def die_once(x: Any, file: str, ctx: pipedist.ReplicaContext) -> float:
    if file and ctx.replica_id_in_sync_group == 1 and not Path(file).exists():
        Path(file).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return float(x.sum())


def fail_at(replicas: tuple[int, ...], ctx: pipedist.ReplicaContext) -> str:
    return functions.fail_on(ctx, replicas)


async def test_a_failure_is_that_of_the_general_path(strategy: pipedist.Strategy, seen: Seen) -> None:
    await prepare(strategy, fail_at, ())
    seen.take()
    with pytest.raises(pipedist.CallError, match="KeyError: 'replica 1'") as caught:
        await strategy.run(fail_at, args=((1,),))
    assert caught.value.attempts == 1
    assert sorted(seen.take()) == ["CallFailed", "CallsDone", "StepsAvailable"]
    await strategy.run(fail_at, args=((),))
    assert list(await strategy.run(fail_at, args=((),))) == ["fine", "fine"]
    assert seen.take()[-1] == "StepExecuted"


async def test_an_argument_that_cannot_be_sent_fails_its_step_only(
    strategy: pipedist.Strategy, seen: Seen
) -> None:
    await prepare(strategy, functions.double, 1)
    with pytest.raises(TypeError, match="can't send an object, at args/0"):
        await strategy.run(functions.double, args=(object(),))
    await prepare(strategy, functions.double, 1)
    seen.take()
    assert list(await strategy.run(functions.double, args=(4,))) == [8, 8]
    assert seen.take() == ["StepExecuted"]


async def test_steps_that_run_at_the_same_time_take_the_general_path(
    strategy: pipedist.Strategy, seen: Seen
) -> None:
    await prepare(strategy, functions.double, 1)
    seen.take()
    found = await asyncio.gather(*(strategy.run(functions.double, args=(n,)) for n in range(4)))
    assert [list(each) for each in found] == [[2 * n] * 2 for n in range(4)]
    assert "StepExecuted" not in seen.take()


async def test_a_cancelled_step_is_over_before_the_next_one_that_uses_variables(
    strategy: pipedist.Strategy, tmp_path: Path
) -> None:
    with strategy.scope():
        v = pipedist.Variable(0.0, aggregation="only_first_replica")

    def step(file: str) -> Any:
        v.assign_add(1.0)
        deadline = time.monotonic() + 60
        while file and not Path(file).exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        return v.value()

    await prepare(strategy, step, "")
    assert float(v.numpy()) == 2.0
    waiting = asyncio.ensure_future(strategy.run(step, args=(str(tmp_path / "go"),)))
    for _ in range(3):
        await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    after = asyncio.ensure_future(strategy.run(step, args=("",)))
    await asyncio.sleep(0)
    (tmp_path / "go").touch()
    assert list(await after) == [3.0, 3.0], "the cancelled step assigned nothing"


async def test_a_strategy_that_is_closed_ends_its_running_step(
    strategy: pipedist.Strategy, seen: Seen
) -> None:
    await strategy.cluster.ready()
    async with pipedist.Strategy(strategy.cluster, replicas=2) as other:
        await prepare(other, functions.double, 1)
        seen.take()
        running = asyncio.ensure_future(other.run(functions.double, args=(1,)))
        await asyncio.sleep(0)
    with pytest.raises(pipedist.RunCancelled):
        await running
    assert seen.take()[:2] == ["StepsAvailable", "PassClosed"]
    assert list(await strategy.run(functions.double, args=(2,))) == [4, 4]


# -- in the worker: a step that needs a general run ----------------------------------------------


def sum_if(total: bool, ctx: pipedist.ReplicaContext) -> int:
    """Call a collective in some steps only."""
    own = ctx.replica_id_in_sync_group + 1
    return int(ctx.all_reduce("sum", own)) if total else own


async def test_a_function_may_call_its_first_collective_in_any_step(
    strategy: pipedist.Strategy, seen: Seen
) -> None:
    await prepare(strategy, sum_if, False)
    seen.take()
    found = [list(await strategy.run(sum_if, args=(total,))) for total in (False, True, False, True, False)]
    assert found == [[1, 2], [3, 3], [1, 2], [3, 3], [1, 2]]
    assert seen.take() == ["StepExecuted"] * 5


async def test_steps_that_call_collectives_and_assign_variables_stay_prepared(
    strategy: pipedist.Strategy,
) -> None:
    with strategy.scope():
        w = pipedist.Variable(np.zeros(3), aggregation="sum")

    def step(ctx: pipedist.ReplicaContext) -> Any:
        before = w.value()
        w.assign_add(np.full(3, ctx.all_reduce("sum", 1.5)))
        return before, w, type(ctx._collectives).__module__

    await prepare(strategy, step)
    for number in range(2, 2 + STEPS):
        for before, after, path in strategy.local_results(await strategy.run(step)):
            assert path == "pipedist.worker.prepared_step"
            assert before.tolist() == [6.0 * number] * 3
            assert after.tolist() == [6.0 * (number + 1)] * 3
    assert w.numpy().tolist() == [6.0 * (2 + STEPS)] * 3


def describe(*values: Any) -> list[str]:
    """Describe arguments: their types and values, and whether arrays can be changed."""
    texts = []
    for value in values:
        array = value.value() if isinstance(value, ReplicaVariable) else value
        is_array = isinstance(array, np.ndarray)
        shown = f"{array.tolist()} {array.flags.writeable}" if is_array else repr(array)
        texts.append(f"{type(value).__name__} {shown}")
    return texts


def describe_list(values: list[Any], more: Any) -> list[str]:
    return describe(*values, more)


async def test_arguments_beside_a_variable_are_as_without_one(strategy: pipedist.Strategy) -> None:
    with strategy.scope():
        w = pipedist.Variable(np.arange(2))
    others = (np.arange(3.0), np.arange(400)[::100], 1, 0.5, "a", None, True, (1, 2), {"k": np.zeros(1)})
    variable, array = "ReplicaVariable [0, 1] False", "ndarray [0.0, 1.0, 2.0] False"
    for count in range(1, len(others) + 1):
        given = others[:count]
        await prepare(strategy, describe, w, *given)
        with_one = strategy.local_results(await strategy.run(describe, args=(w, *given)))
        without = strategy.local_results(await strategy.run(describe, args=given))
        assert with_one == tuple([variable, *own] for own in without)
        assert with_one[0][1] == array
    below = strategy.local_results(await strategy.run(describe_list, args=([w, others[0]], w)))
    assert below == ([variable, array, variable],) * 2


def sum_or_max(differ: bool, ctx: pipedist.ReplicaContext) -> str:
    """Call different collectives in the replicas if they are to differ, and survive that."""
    ctx.barrier()
    op = "max" if differ and ctx.replica_id_in_sync_group else "sum"
    try:
        return str(ctx.all_reduce(op, 1))
    except pipedist.CollectiveMismatchError as error:
        return str(error).partition(":")[0]


async def test_a_mismatch_that_a_function_catches_ends_with_its_step(strategy: pipedist.Strategy) -> None:
    await prepare(strategy, sum_or_max, False)
    for _ in range(2):
        texts = await strategy.run(sum_or_max, args=(True,))
        assert list(texts) == ["collective 2 of this step differs between replicas"] * 2
        assert list(await strategy.run(sum_or_max, args=(False,))) == ["2", "2"]


def survive_if(fails: bool, ctx: pipedist.ReplicaContext) -> int:
    """Catch whatever ends the collective of one replica because the other one raises."""
    ctx.barrier()
    if fails and ctx.replica_id_in_sync_group == 1:
        raise ValueError("on purpose")
    try:
        return int(ctx.all_reduce("sum", 1))
    except BaseException:
        return -1


async def test_an_aborted_collective_that_a_function_catches_ends_with_its_step(
    strategy: pipedist.Strategy,
) -> None:
    await prepare(strategy, survive_if, False)
    with pytest.raises(pipedist.CallError, match="on purpose"):
        await strategy.run(survive_if, args=(True,))
    assert list(await strategy.run(survive_if, args=(False,))) == [2, 2]


async def test_a_step_that_fails_after_an_assignment_assigns_nothing(strategy: pipedist.Strategy) -> None:
    with strategy.scope():
        w = pipedist.Variable(1.0, aggregation="sum")

    def step(fails: bool) -> Any:
        w.assign_add(2.0)
        if fails:
            raise ValueError("on purpose")
        return w.value()

    await prepare(strategy, step, False)
    with pytest.raises(pipedist.CallError, match="on purpose") as caught:
        await strategy.run(step, args=(True,))
    assert caught.value.attempts == 1
    assert float(w.numpy()) == 9.0
    assert list(await strategy.run(step, args=(False,))) == [13.0, 13.0]
    assert float(w.numpy()) == 13.0


async def test_a_variable_of_another_step_is_refused_in_a_result(strategy: pipedist.Strategy) -> None:
    with strategy.scope():
        v, w = pipedist.Variable(1.0), pipedist.Variable(2.0)
    await prepare(strategy, kept_if, v, False)
    await prepare(strategy, kept_if, w, False)
    with pytest.raises(pipedist.CallError, match="a variable of another step was used"):
        await strategy.run(kept_if, args=(w, True))


def kept_if(variable: Any, before: bool) -> Any:
    """Return a variable, or the one that came as the argument two steps before."""
    Latest.variables.append(variable)
    return Latest.variables[-4 if before else -1]


class Latest:
    variables: ClassVar[list[Any]] = []
    ctx: pipedist.ReplicaContext | None = None


def use_the_context_before(ctx: pipedist.ReplicaContext) -> str:
    before, Latest.ctx = Latest.ctx, ctx
    if before is None:
        return "first"
    try:
        before.all_reduce("sum", 1)
    except RuntimeError as error:
        return str(error)
    return "called"


async def test_the_context_of_an_earlier_step_calls_no_collective(strategy: pipedist.Strategy) -> None:
    await prepare(strategy, use_the_context_before)
    await strategy.run(use_the_context_before)
    for replica, text in enumerate(await strategy.run(use_the_context_before)):
        assert text.startswith(f"replica {replica} called a collective outside its turn")


def unsendable_if(what: str) -> Any:
    """Return a value that is refused when it leaves the function, or when it is sent."""
    return {"": 1, "date": datetime(2026, 1, 2, tzinfo=UTC), "object": {"value": object()}}[what]


@pytest.mark.parametrize("what", ["date", "object"])
async def test_a_result_that_cannot_be_sent_is_the_same_error_in_any_step(
    strategy: pipedist.Strategy, what: str
) -> None:
    async with pipedist.Strategy(strategy.cluster, replicas=2) as other:
        with pytest.raises(pipedist.CallError) as first:
            await other.run(unsendable_if, args=(what,))
    await prepare(strategy, unsendable_if, "")
    with pytest.raises(pipedist.CallError) as later:
        await strategy.run(unsendable_if, args=(what,))
    assert "can't send" in str(later.value)
    assert without_numbers(later.value) == without_numbers(first.value)


def without_numbers(error: BaseException) -> str:
    return "".join(each for each in str(error) if not each.isdecimal())


def doubled_later(x: int) -> Any:
    return functions.double_later(x)  # a plain function, whose result is awaited


async def test_a_plain_function_may_return_an_awaitable(strategy: pipedist.Strategy) -> None:
    await prepare(strategy, doubled_later, 1)
    assert list(await strategy.run(doubled_later, args=(4,))) == [8, 8]


def summed_later(differ: bool, ctx: pipedist.ReplicaContext) -> Any:
    """Call the second collective when the result is awaited."""
    first = ctx.all_reduce("sum", 1)

    async def rest() -> str:
        try:
            op = "max" if differ and ctx.replica_id_in_sync_group else "sum"
            return str(first + ctx.all_reduce(op, 10))
        except pipedist.CollectiveMismatchError as error:
            return str(error).partition(":")[0]

    return rest()


async def test_collectives_are_counted_across_a_function_and_its_awaitable(
    strategy: pipedist.Strategy,
) -> None:
    await prepare(strategy, summed_later, False)
    for _ in range(2):
        assert list(await strategy.run(summed_later, args=(False,))) == ["22", "22"]
        texts = await strategy.run(summed_later, args=(True,))
        assert list(texts) == ["collective 2 of this step differs between replicas"] * 2


def exit_if(leaves: bool) -> int:
    if leaves:
        raise SystemExit(3)
    return 1


async def test_a_step_that_exits_is_a_failure_in_any_step(strategy: pipedist.Strategy) -> None:
    await prepare(strategy, exit_if, False)
    with pytest.raises(pipedist.CallError, match="SystemExit"):
        await strategy.run(exit_if, args=(True,))
    assert list(await strategy.run(exit_if, args=(False,))) == [1, 1]
