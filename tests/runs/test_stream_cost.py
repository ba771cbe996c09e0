"""The cost of a streamed step in the driver, counted in Python calls."""

from __future__ import annotations

import sys

import pytest

import pipedist

STEPS = 5_000


@pytest.mark.asyncio
async def test_a_streamed_step_costs_few_python_calls() -> None:
    spec = {
        "pipedist": 1,
        "dataset": {"range": STEPS, "batch": 1},
        "stages": {"y": {"run": "tests.runs.functions:double"}},
    }
    made, total = 0, 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal made
        made += event == "call"

    async with pipedist.LocalCluster(workers=1) as cluster, pipedist.open(spec, cluster=cluster) as run:
        stream = run.steps("y")
        total += int((await anext(stream))["y"][0][0])  # with the start of the run
        sys.setprofile(count)
        try:
            async for step in stream:
                total += int(step["y"][0][0])
        finally:
            sys.setprofile(None)
    assert total == STEPS * (STEPS - 1)
    assert made < 14 * STEPS
