"""Functions that are not deterministic, each in another way, and some that are."""

from __future__ import annotations

import itertools
import random
import time
from typing import Any

import numpy as np

_calls = itertools.count()


def clock(x: np.ndarray) -> dict[str, Any]:
    return {"x": x, "at": [x * 0.5, time.time_ns()]}


async def draws(x: np.ndarray) -> np.ndarray:
    return x + random.random()


def counts(x: np.ndarray) -> int:
    return next(_calls)


class Remembers:
    """What it gives hangs on the calls before."""

    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, x: np.ndarray) -> np.ndarray:
        self.seen += len(x)
        return x + self.seen


def shapes(x: np.ndarray) -> Any:
    """Another structure around the same leaves, each time."""
    return [x] if next(_calls) % 2 else (x,)


_buffer = np.zeros(4, np.int64)


def reuses(x: np.ndarray) -> np.ndarray:
    """Gives the same array each time, with other numbers: the first must be looked at before the second."""
    _buffer[: len(x)] = x + next(_calls)
    return _buffer[: len(x)]


def hides(x: np.ndarray) -> Any:
    """Something that can't be sent, which a later stage makes use of."""
    return {"fn": lambda y: y * 2, "x": x}


def reveals(value: Any) -> np.ndarray:
    return np.asarray(value["fn"](value["x"]))


def late(value: Any) -> float:
    return time.perf_counter()


def together(x: np.ndarray, ctx: Any) -> Any:
    return ctx.all_reduce("sum", x.sum()) + (time.time_ns() if ctx.replica_id_in_sync_group else 0) * 0


def together_not(x: np.ndarray, ctx: Any) -> Any:
    ctx.all_reduce("sum", x.sum())
    return time.time_ns() if ctx.replica_id_in_sync_group == 1 and ctx.step == 1 else 0


def steady(x: np.ndarray, ctx: Any) -> dict[str, Any]:
    return {"x": x * ctx.rng.standard_normal(), "nan": np.full(2, np.nan), "none": None}


def merge(a: Any, b: Any) -> Any:
    return a + b + time.time_ns()


def moved(state: float, value: Any) -> float:
    return state + float(value) + time.time_ns()
