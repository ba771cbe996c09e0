from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np


def squares(shard: Any) -> Any:
    return shard * shard


def draws(shard: Any, ctx: Any) -> Any:
    return ctx.rng.normal(size=len(shard))


def sleeps(shard: Any) -> Any:
    time.sleep(3600.0)
    return shard


async def waits(shard: Any) -> Any:
    await asyncio.sleep(1.2)
    return shard


def at_what_time(shard: Any) -> Any:
    return shard + time.time_ns() % 1000


class HowMany:
    """Its result depends on how many calls its instance has served."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, shard: Any) -> Any:
        self.calls += 1
        return np.full(len(shard), self.calls)


def fails(shard: Any, ctx: Any) -> Any:
    if ctx.step == 2:
        raise ValueError("two is bad")
    return shard


def whitened(shard: Any, ctx: Any) -> Any:
    total = ctx.all_reduce("sum", shard.sum())
    count = ctx.all_reduce("sum", len(shard))
    return shard - total / count


async def whitened_in_turns(shard: Any, ctx: Any) -> Any:
    total = await ctx.all_reduce("sum", shard.sum())
    return shard - total


def prints(shard: Any) -> Any:
    print("noise")
    return shard


def never_executed(shard: Any) -> Any:
    raise AssertionError("a stage of a declared cost was executed")


async def answer(element: Any, ctx: Any) -> float:
    """Wait, and raise in every third attempt."""
    await asyncio.sleep(float(ctx.rng.random()))
    tried = _tried[int(element)] = _tried.get(int(element), 0) + 1
    if tried % 3 == 1:
        raise ConnectionError("reset")
    return float(element) + float(ctx.rng.random())


_tried: dict[int, int] = {}


async def waits_long(shard: Any) -> Any:
    await asyncio.sleep(3)
    return shard * 2.0
