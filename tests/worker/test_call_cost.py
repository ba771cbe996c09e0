"""The cost of a call in a worker, counted in Python calls."""

from __future__ import annotations

import sys

import numpy as np

from pipedist.plan import compile_plan
from pipedist.protocol.program import Shards, from_frames, to_frames
from pipedist.runs.pass_feeds import feed_of
from pipedist.runs.programs import pass_program
from pipedist.spec import load
from pipedist.worker.execution import PassExecutor
from pipedist.worker.lease_run import LeaseRun, PersistentLoop
from pipedist.worker.progress import CallProgress


def test_a_call_of_a_lease_costs_few_python_calls() -> None:
    run = {"run": "tests.runs.functions:double"}
    plan = compile_plan(
        load({"pipedist": 1, "dataset": {"range": 1000, "batch": 1}, "stages": {"y": run}}), workers=1
    )
    (pass_,) = plan.passes
    program = pass_program(plan, pass_, feed_of(plan, pass_, {}, {}).reader, {}, ("y",))
    frames = [memoryview(frame) for frame in to_frames(program)]
    progress, made = CallProgress(), 0
    executor = PassExecutor(from_frames(frames, lambda folder: folder), program.threads, progress.clock)

    def execute(lo: int, hi: int) -> list[dict[str, np.ndarray]]:
        lease = LeaseRun(executor, PersistentLoop(), Shards(), lo, hi, progress.of_lease(1))
        assert lease.advance(60.0, 2**30) is None
        return lease.take().outcomes

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal made
        made += event == "call"

    execute(0, 10)  # loads the function
    sys.setprofile(count)
    try:
        outcomes = execute(10, 1000)
    finally:
        sys.setprofile(None)
    assert [int(value[0]) for (value,) in map(dict.values, outcomes)] == list(range(20, 2000, 2))
    assert made < 9 * len(outcomes)
    executor.close()
    progress.close()
