"""The cost of a call in a worker, counted in Python calls."""

from __future__ import annotations

import contextvars

import numpy as np

from pipedist.plan import compile_plan
from pipedist.protocol.codec import encode
from pipedist.protocol.columns import SlotValues
from pipedist.protocol.program import Shards, from_frames, to_frames
from pipedist.runs.pass_feeds import feed_of
from pipedist.runs.programs import pass_program
from pipedist.spec import load
from pipedist.worker.context import get_replica_context
from pipedist.worker.execution import PassExecutor
from pipedist.worker.lease_run import LeaseRun, PersistentLoop
from pipedist.worker.progress import CallProgress, StageClock
from tests.python_calls import PythonCalls


def executor_of(function: str, clock: StageClock | None = None) -> PassExecutor:
    spec = {"pipedist": 1, "dataset": {"range": 1000, "batch": 1}, "stages": {"y": {"run": function}}}
    plan = compile_plan(load(spec), workers=1)
    (pass_,) = plan.passes
    program = pass_program(plan, pass_, feed_of(plan, pass_, {}, {}).reader, {}, ("y",))
    frames = [memoryview(frame) for frame in to_frames(program)]
    return PassExecutor(from_frames(frames, lambda folder: folder), program.threads, clock)


def test_a_call_of_a_lease_costs_few_python_calls() -> None:
    progress = CallProgress()
    executor = executor_of("tests.runs.functions:double", progress.clock)

    def execute(lo: int, hi: int) -> list[dict[str, np.ndarray]]:
        lease = LeaseRun(executor, PersistentLoop(), Shards(), lo, hi, progress.of_lease(1))
        assert lease.advance(60.0, 2**30) is None
        return lease.take().outcomes

    execute(0, 10)  # loads the function
    with PythonCalls() as counted:
        outcomes = execute(10, 1000)
    assert [int(value[0]) for (value,) in map(dict.values, outcomes)] == list(range(20, 2000, 2))
    assert counted.made < 3 * len(outcomes)
    executor.close()
    progress.close()


def stops_at_5(x: np.ndarray) -> np.ndarray:
    if x[0] == 5:
        raise StopIteration("the end")
    context = get_replica_context()
    assert context is not None
    return np.array([context.step, np.asarray(context.elements)[0], x[0]])


def test_calls_of_a_lease_have_their_own_contexts_and_failures() -> None:
    executor = executor_of(f"{__name__}:stops_at_5")
    begun: list[int] = []
    lease = LeaseRun(executor, PersistentLoop(), Shards(), 2, 8, begun.append)
    failure = lease.advance(60.0, 2**30)
    assert executor.plain_calls is not None
    assert failure is not None
    assert (failure.call, failure.stage, failure.retryable) == (5, "y", True)
    assert (failure.name, failure.text) == ("StopIteration", "the end")
    assert "in stops_at_5" in failure.traceback
    before = lease.take()
    lease.skip()
    assert lease.advance(0.0, 2**30) is None, "the slice ends after one call"
    assert lease.advance(60.0, 2**30) is None
    after = lease.take()
    assert (before.lo, after.lo, lease.is_over) == (2, 6, True)
    outcomes = [*before.outcomes, *after.outcomes]
    assert [value.tolist() for (value,) in map(dict.values, outcomes)] == [[n, n, n] for n in (2, 3, 4, 6, 7)]
    assert begun == [2, 2, 3, 4, 5, 6, 7]
    assert get_replica_context() is None
    executor.close()


COPIES: list[tuple[contextvars.Context, object]] = []


def copies_its_context(x: np.ndarray) -> np.ndarray:
    if x[0] % 2:
        context = get_replica_context()
        assert context is not None
        assert context is get_replica_context()
        COPIES.append((contextvars.copy_context(), context))
        return context.rng.integers(0, 1000, 1)
    COPIES.append((contextvars.copy_context(), None))
    return x


def test_a_copied_context_stays_that_of_its_call() -> None:
    COPIES.clear()
    executor = executor_of(f"{__name__}:copies_its_context")
    lease = LeaseRun(executor, PersistentLoop(), Shards(), 0, 6, lambda _call: None)
    assert lease.advance(60.0, 2**30) is None
    for step, (copy, seen) in enumerate(COPIES):
        context = copy.run(get_replica_context)
        assert context is not None
        assert (context.step, np.asarray(context.elements).tolist()) == (step, [step])
        assert context is copy.run(get_replica_context)
        assert seen in (None, context), "its generator goes on"
    executor.close()


REUSED = np.zeros(1, np.int64)


def reuses_its_array(x: np.ndarray) -> np.ndarray:
    REUSED[:] = x
    return REUSED


def test_a_result_does_not_change_with_the_next_call() -> None:
    executor = executor_of(f"{__name__}:reuses_its_array")
    lease = LeaseRun(executor, PersistentLoop(), Shards(), 0, 20, lambda _call: None)
    assert lease.advance(60.0, 2**30) is None
    outcomes = lease.take().outcomes
    assert [int(outcome[next(iter(outcome))][0]) for outcome in outcomes] == list(range(20))
    executor.close()


def test_values_of_a_slot_are_sent_as_their_dicts_are() -> None:
    for values in (
        [np.array([n, n + 1]) for n in range(20)],
        [np.array([n]) for n in range(3)],
        [{"a": float(n)} for n in range(20)],
        [None, 1, "text"] * 7,
    ):
        frames = encode(SlotValues("y", values))
        assert list(map(bytes, frames)) == list(map(bytes, encode([{"y": value} for value in values])))
