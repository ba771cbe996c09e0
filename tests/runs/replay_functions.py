"""Replica functions of the tests of replays; the elements that they fail at come in by `bad`."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np


class Indigestible(ValueError):
    """What these functions raise."""


def noisy(x: np.ndarray, scale: float, bad: Sequence[int], ctx: Any) -> dict[str, Any]:
    """Something that hangs on everything that a call has."""
    found = sorted({int(i) for i in ctx.elements} & {*bad})
    if found:
        raise Indigestible(f"elements {found}")
    return {
        "y": x * scale + ctx.rng.standard_normal(),
        "ids": np.asarray(ctx.elements),
        "step": np.full(len(x), ctx.step),
    }


def centred(shard: dict[str, Any], total: dict[str, Any]) -> np.ndarray:
    return np.asarray(shard["y"] - total["y"])


async def slow(x: np.ndarray, ctx: Any) -> np.ndarray:
    return x + ctx.rng.integers(1000)


def together(x: np.ndarray, bad: Sequence[int], ctx: Any) -> np.ndarray:
    if {*ctx.elements} & {*bad}:
        raise Indigestible(f"replica {ctx.replica_id_in_sync_group}")
    return np.asarray(ctx.all_reduce("sum", x.sum()) + x)


def deadly(x: np.ndarray) -> np.ndarray:
    if 17 in x:
        os.kill(os.getpid(), signal.SIGSEGV)
    return x


def gradient(x: np.ndarray, w: dict[str, Any], fails_at: int, ctx: Any) -> float:
    if ctx.step == fails_at:
        raise Indigestible(f"w is {w['w']}, after {w['updates']}")
    return float((x * 0.01 - w["w"]).mean())


def moved(w: dict[str, Any], value: Any) -> dict[str, Any]:
    return {"w": w["w"] + 0.1 * float(value), "updates": w["updates"] + 1}


def moved_so_far(w: dict[str, Any], value: Any, limit: str) -> dict[str, Any]:
    """As `moved`; fails after as many updates as a file says."""
    if w["updates"] >= int(Path(limit).read_text()):
        raise Indigestible(f"after {w['updates']}")
    return moved(w, value)


def origin() -> dict[str, Any]:
    return {"w": 0.25, "updates": 0}


def distance(x: np.ndarray, w: dict[str, Any]) -> np.ndarray:
    return np.array([[w["w"], w["updates"]]])


def one_by_one(count: int) -> Iterator[np.ndarray]:
    return (np.array(i * 3) for i in range(count))


def blocks(x: np.ndarray) -> np.ndarray:
    if "BLOCKS" in os.environ:
        os.write(2, b"here\n")
        time.sleep(1e6)
    return x


async def blocks_async(x: np.ndarray) -> np.ndarray:
    if "BLOCKS" in os.environ:
        os.write(2, b"here\n")
        await asyncio.sleep(1e6)
    return x


def blocks_together(x: np.ndarray, ctx: Any) -> np.ndarray:
    if "BLOCKS" in os.environ:
        os.write(2, b"here\n")
        time.sleep(1e6)
    return np.asarray(ctx.all_reduce("sum", x.sum()) + x)


def raises_an_interrupt(x: np.ndarray) -> np.ndarray:
    raise KeyboardInterrupt
