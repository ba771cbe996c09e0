"""The benchmark of steps runs, and its results are right."""

from __future__ import annotations

import asyncio

from benchmarks.steps import WAYS, measure


def test_every_way_is_measured() -> None:
    lines = asyncio.run(measure(rounds=1, steps=40))
    assert [line.split()[0] for line in lines] == ["zmq", *WAYS]
