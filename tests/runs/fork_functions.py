"""Replica functions that are left by two processes, as they let a copy of theirs go on."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import numpy as np


def split(folder: str, how: str) -> None:
    """Make a copy of this process, and wait for its end."""
    time.sleep(0.1)  # another replica of this process that slept, too, waits for its turn now
    copy = os.fork()
    if not copy:
        if how == "raises":
            raise ValueError("the copy fails")
        return
    (Path(folder) / "copy").write_text(str(copy))
    os.waitpid(copy, 0)


def plain(x: np.ndarray, folder: str, how: str) -> Any:
    if 13 in x:
        split(folder, how)
    return x * 2


async def later(x: np.ndarray, folder: str, how: str) -> Any:
    return plain(x, folder, how)


def together(x: np.ndarray, ctx: Any, folder: str, how: str) -> Any:
    worker = os.getpid()
    ctx.barrier()
    y = plain(x, folder, how)
    return y + ctx.all_reduce("sum", int(os.getpid() != worker))


async def together_later(x: np.ndarray, ctx: Any, folder: str, how: str) -> Any:
    worker = os.getpid()
    await ctx.barrier()
    if 13 not in x:
        await asyncio.sleep(0.01)
    y = plain(x, folder, how)
    return y + await ctx.all_reduce("sum", int(os.getpid() != worker))


def merges(x: np.ndarray, ctx: Any, folder: str, how: str) -> Any:
    worker = os.getpid()

    def merge(strategy: Any, found: Any) -> int:
        if any(strategy.local_results(found)):
            split(folder, how)
        return int(os.getpid() != worker)

    return x * 2 + ctx.merge_call(merge, args=(13 in x,))
