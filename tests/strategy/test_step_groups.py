"""Several steps of `run_steps` in one message: the results and errors of steps that are sent one by one."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import pipedist
from pipedist.strategy import step_runs

pytestmark = pytest.mark.asyncio(loop_scope="module")

STEPS = 30
ODD = 17  # the step in which something differs: the second of a group, as the first step is alone

setting: ContextVar[int] = ContextVar("setting", default=0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def strategy() -> AsyncIterator[pipedist.Strategy]:
    async with pipedist.LocalCluster(workers=2) as cluster:
        await cluster.ready()
        yield pipedist.Strategy(cluster, replicas=2)


@pytest.fixture(autouse=True)
def large_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Group steps on a slow machine, too."""
    monkeypatch.setattr(step_runs, "GROUP_S", 60.0)


async def numbered(first: int = 0, count: int = STEPS) -> AsyncIterator[Any]:
    for number in range(first, first + count):
        rows = 700 if number != ODD else 900
        yield pipedist.PerReplica([np.arange(rows) * 0.1 + number, np.arange(rows) * 0.3 - number])


def context_of(x: Any, ctx: pipedist.ReplicaContext) -> dict[str, Any]:
    seen = setting.get()
    setting.set(ctx.step)
    return {
        "step": ctx.step,
        "noise": ctx.rng.random(3) * x[:3],
        "sum": x.sum(),
        "seen": seen,
        "replica": ctx.replica_id_in_sync_group,
        "current": pipedist.get_replica_context() is ctx,
        "rows": x[::50],
        "writeable": x.flags.writeable,
    }


def plain(strategy: pipedist.Strategy, result: Any) -> list[str]:
    with np.printoptions(floatmode="unique"):
        return [repr(part) for part in strategy.local_results(result)]


async def test_the_bits_are_those_of_single_steps(strategy: pipedist.Strategy) -> None:
    found = []
    for ahead in (1, 16, 7):
        async with pipedist.Strategy(strategy.cluster, replicas=2, seed=3) as own:
            steps = [plain(own, each) async for each in own.run_steps(context_of, numbered(), ahead=ahead)]
            single = await own.run(context_of, args=(await anext(numbered(99)),))
            more = [plain(own, x) async for x in own.run_steps(context_of, numbered(40, 9), ahead=ahead)]
        found.append([*steps, plain(own, single), *more])
    assert found[0] == found[1] == found[2]
    assert all("'step': 12," in part for part in found[0][12])
    assert all(f"'step': {STEPS}," in part for part in found[1][STEPS])
    assert all("'seen': 0, " in part for step in found[1] for part in step)


async def test_a_group_is_one_step_of_the_scheduler(
    strategy: pipedist.Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    handled = []
    scheduler = strategy.cluster.coordinator._scheduler
    handle = scheduler.handle
    monkeypatch.setattr(
        scheduler, "handle", lambda event, now: handled.append(type(event).__name__) or handle(event, now)
    )
    results = [each async for each in strategy.run_steps(lambda x: x.sum(), numbered(), ahead=16)]
    assert len(results) == STEPS
    strategy.cluster.coordinator._hand_over()  # the event of the last one would come with the next
    in_advance = 16  # started before the time of a step is known
    offers = handled.count("StepsAvailable") + handled.count("StepExecuted")
    assert offers == in_advance + -(-(STEPS - in_advance) // step_runs.GROUP_STEPS_MAX)


async def results_until_error(
    strategy: pipedist.Strategy, fn: Callable[..., Any]
) -> tuple[list[Any], pipedist.CallError]:
    results = []
    try:
        async for each in strategy.run_steps(fn, numbered()):
            results.append(each)
    except pipedist.CallError as error:
        return results, error
    raise AssertionError("no step failed")


def fail_at_odd(x: Any, ctx: pipedist.ReplicaContext) -> float:
    if ctx.step == ODD and ctx.replica_id_in_sync_group == 1:
        raise KeyError("odd")
    return float(x[0])


async def test_an_error_is_that_of_its_step(strategy: pipedist.Strategy) -> None:
    results, error = await results_until_error(strategy, fail_at_odd)
    assert [int(each[0]) for each in results] == list(range(ODD))
    assert (error.step, error.replica, error.attempts) == (ODD, 1, 1)
    assert isinstance(error.__cause__, KeyError)
    found = [int(each[0]) async for each in strategy.run_steps(fail_at_odd, numbered())]
    assert found == list(range(STEPS)), "later steps have later numbers"


def unsendable_at_odd(x: Any, ctx: pipedist.ReplicaContext) -> Any:
    return {"y": float(x[0]) if ctx.step != ODD else object()}


async def test_a_result_that_cannot_be_sent_fails_its_step(strategy: pipedist.Strategy) -> None:
    results, error = await results_until_error(strategy, unsendable_at_odd)
    assert [int(each["y"][0]) for each in results] == list(range(ODD))
    assert error.step == ODD
    assert "can't send an object, at y" in str(error)


def gather_at_odd(x: Any, ctx: pipedist.ReplicaContext) -> float:
    if ctx.step == ODD:
        try:
            return float(ctx.all_reduce("sum", x.sum()))
        except Exception:
            return -1.0
    return float(x.sum())


async def async_gather_at_odd(x: Any, ctx: pipedist.ReplicaContext) -> float:
    return float(await ctx.all_reduce("sum", x.sum()) if ctx.step == ODD else x.sum())


@pytest.mark.parametrize("fn", [gather_at_odd, async_gather_at_odd])
async def test_a_step_that_calls_a_collective_is_executed_with_the_other_replicas(
    strategy: pipedist.Strategy, fn: Callable[..., Any]
) -> None:
    found = [list(each) async for each in strategy.run_steps(fn, numbered())]
    given = [each async for each in numbered()]
    expected = [[float(part.sum()) for part in step] for step in given]
    expected[ODD] = [sum(expected[ODD])] * 2
    assert found == expected


def kill_at_odd(file: str, x: Any, ctx: pipedist.ReplicaContext) -> float:
    if ctx.step == ODD and ctx.replica_id_in_sync_group == 1 and not Path(file).exists():
        Path(file).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return float(x.sum() + ctx.rng.random())


async def test_a_worker_that_is_killed_in_a_group_costs_no_result(
    strategy: pipedist.Strategy, tmp_path: Path
) -> None:
    file = str(tmp_path / "killed")

    async def steps() -> AsyncIterator[Any]:
        async for each in numbered():
            yield file, each

    runs = []
    for _ in range(2):
        async with pipedist.Strategy(strategy.cluster, replicas=2) as own:
            runs.append([list(each) async for each in own.run_steps(kill_at_odd, steps())])
    assert (tmp_path / "killed").exists()
    assert runs[0] == runs[1]
    assert len(runs[0]) == STEPS


async def test_results_that_reuse_memory_are_those_of_their_step(strategy: pipedist.Strategy) -> None:
    def reuses(x: Any, memory: Any = np.zeros(64)) -> Any:  # noqa: B008
        memory = memory if memory.flags.writeable else memory.copy()
        globals()["kept"] = kept = globals().get("kept", memory)
        kept[:] = x[0]
        return kept

    found = [[part[0] for part in each] async for each in strategy.run_steps(reuses, numbered())]
    assert found == [[float(number), float(-number)] for number in range(STEPS)]
