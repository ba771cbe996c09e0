"""Replica functions that wait: in sync and async ones, in threads and processes."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from multiprocessing import Pipe
from typing import Any

kept: list[Callable[[], float]] = []


def in_a_loop_of_its_own(shard: Any) -> Any:
    async def wait() -> Any:
        await asyncio.sleep(3600.0)
        return shard

    return asyncio.run(wait())


def busy(shard: Any) -> Any:
    until = time.perf_counter() + 0.02
    while time.perf_counter() < until:
        pass
    return shard


def in_a_thread_of_its_own(shard: Any) -> Any:
    """Do what the thread of a `multiprocessing.Pool` does: it waits for no time at all, by the clock."""
    found: list[bool] = []
    with (ends := Pipe())[0], ends[1]:
        thread = threading.Thread(target=lambda: found.append(ends[0].poll(0.0)), daemon=True)
        thread.start()
        thread.join()
    return shard + len(found) - 1


async def in_a_thread_of_the_loop(shard: Any) -> Any:
    await asyncio.wait_for(asyncio.to_thread(time.sleep, 3600.0), 7200.0)
    return shard


async def in_a_loop_in_a_thread(shard: Any) -> Any:
    return await asyncio.to_thread(in_a_loop_of_its_own, shard)


async def speaks_with_others(shard: Any) -> Any:
    """Wait, under a limit of time, for what comes in real time."""
    reading, writing = os.pipe()
    arrived = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(reading, arrived.set)
    other = threading.Timer(0.01, os.write, (writing, b"!"))
    other.start()
    try:
        await asyncio.wait_for(arrived.wait(), 60.0)
        return shard
    finally:
        other.cancel()
        other.join()
        loop.remove_reader(reading)
        os.close(reading)
        os.close(writing)


def splits(shard: Any) -> Any:
    """Be left by two processes, of which one waits."""
    copy = os.fork()
    if copy:
        os.waitpid(copy, 0)
    else:
        time.sleep(0.001)
    return shard


def ends_its_process(shard: Any) -> Any:
    os._exit(3)


def keeps_a_clock(shard: Any) -> Any:
    """Do what a module does that is imported here: `from time import monotonic`."""
    kept[:] = [time.monotonic]
    return shard


async def waits_in_a_gang(shard: Any, ctx: Any) -> Any:
    await asyncio.sleep(0.1 * (1 + ctx.replica_id_in_sync_group))
    return shard + 0 * await ctx.all_reduce("sum", 1)
