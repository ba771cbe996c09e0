"""The cost of a step in the driver, counted in Python calls."""

from __future__ import annotations

import numpy as np
import pytest

import pipedist
from pipedist.coordinator.results import ResultStore, open_chunk
from pipedist.protocol.codec import encode
from pipedist.runs.gather_fold import GatherFold
from pipedist.runs.programs import parts_of
from tests.python_calls import PythonCalls

STEPS = 5_000


@pytest.mark.asyncio
async def test_a_streamed_step_costs_few_python_calls() -> None:
    spec = {
        "pipedist": 1,
        "dataset": {"range": STEPS, "batch": 1},
        "stages": {"y": {"run": "tests.runs.functions:double"}},
    }
    total = 0
    async with pipedist.LocalCluster(workers=1) as cluster, pipedist.open(spec, cluster=cluster) as run:
        stream = run.steps("y")
        total += int((await anext(stream))["y"][0][0])  # with the start of the run
        with PythonCalls() as counted:
            async for step in stream:
                total += int(step["y"][0][0])
    assert total == STEPS * (STEPS - 1)
    assert counted.made < 14 * STEPS


@pytest.mark.asyncio
async def test_a_gathered_array_costs_no_python_call_of_its_own() -> None:
    messages = [encode([{"=y": np.array([n])} for n in range(lo, lo + 250)]) for lo in range(0, STEPS, 250)]
    slots = frozenset(["=y"])
    store, fold = ResultStore(in_order=True), GatherFold("all", "run", 0, None)
    with PythonCalls() as counted:
        for lo, frames in zip(range(0, STEPS, 250), messages, strict=True):
            store.put(open_chunk(lo, lo + 250, frames, slots, slots))
        for first in range(0, STEPS, 200):
            steps, _ = store.take(first, first + 200, 1)
            await fold.add(0, parts_of("=y", steps))
        await fold.finish(1)
    assert np.array_equal(fold.result, np.arange(STEPS))
    assert counted.made < STEPS / 2
