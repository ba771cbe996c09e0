"""A Router that shares memory, and processes that share it, for tests."""

from __future__ import annotations

import asyncio
import gc
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from pipedist.protocol.codec import decode, encode
from pipedist.protocol.limits import KIB, MIB
from pipedist.protocol.messages import Assign, Bind, Cancel, Message, Results, Stop
from pipedist.transport.config import SharedMemory
from pipedist.transport.router import Router
from pipedist.transport.shared_memory.pool import Pool

from .sockets import WAIT_S, Inbox, router

SMALL = SharedMemory(lent_bytes_max=8 * MIB, borrowed_bytes_max=8 * MIB)


def block(number: int, size_bytes: int = 64 * KIB) -> np.ndarray[Any, Any]:
    """An array that tells which one it is."""
    return np.full(size_bytes // 8, number, np.float64)


def is_shared(value: Any) -> bool:
    """Whether an array lies in mapped memory."""
    while isinstance(value, np.ndarray | memoryview):
        value = value.base if isinstance(value, np.ndarray) else value.obj
    return isinstance(value, mmap.mmap)


def pool_of(opened: Router) -> Pool:
    listener = opened._listener
    assert listener is not None
    return listener.pool


def lent_bytes(pool: Pool) -> int:
    """Return the bytes of the slots that are out now."""
    for shelf in pool._shelves.values():
        shelf.settle()
    return sum(size * len(shelf.lent) for size, shelf in pool._shelves.items())


async def until(holds: Callable[[], bool]) -> None:
    """Wait until something holds that comes without a message."""
    async with asyncio.timeout(WAIT_S):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(text) for text in file.read().split()]


class Peer:
    """A process of `memory_peer`, from the Router's side."""

    def __init__(self, opened: Router, inbox: Inbox, name: str) -> None:
        self.opened = opened
        self.inbox = inbox
        self.identity = name.encode()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.transport.memory_peer", opened.endpoint, name]
        )

    async def ready(self) -> Peer:
        await self.inbox.get()
        listener = self.opened._listener
        if listener is not None:
            await until(lambda: self.identity in listener._links)
        return self

    def send(self, message: Message, value: Any = None) -> None:
        assert self.opened.send(self.identity, message, () if value is None else encode(value))

    async def ask(self, message: Message, value: Any = None) -> Any:
        """Send something and return what comes back; nobody else may be talking."""
        self.send(message, value)
        who, answer, frames = await self.inbox.get()
        assert who == self.identity
        assert isinstance(answer, Results)
        return decode(frames)

    async def double(self, value: Any, *, keep: bool = False) -> Any:
        return await self.ask(Assign(int(keep), 0, 0, 1, 0), value)

    async def sums_of_kept(self) -> list[float]:
        return await self.ask(Cancel(2))  # type: ignore[no-any-return]

    async def figures(self) -> tuple[int, int]:
        """Its descriptors, and the bytes of its memory."""
        descriptors, size_bytes = await self.ask(Cancel(6))
        return descriptors, size_bytes

    async def faults(self) -> list[str]:
        return await self.ask(Bind(0))  # type: ignore[no-any-return]

    async def is_stopped(self) -> None:
        status = f"/proc/{self.process.pid}/stat"

        def stopped() -> bool:
            with open(status) as file:
                return file.read().rpartition(")")[2].split()[0] == "T"

        await until(stopped)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    async def kill(self) -> None:
        self.signal(signal.SIGKILL)
        await asyncio.to_thread(self.process.wait, WAIT_S)

    async def stop(self) -> None:
        if self.process.poll() is None:
            self.opened.send(self.identity, Stop(""))
            try:
                await asyncio.to_thread(self.process.wait, 2.0)
            except subprocess.TimeoutExpired:
                await self.kill()


@asynccontextmanager
async def peers(
    count: int = 1, shared_memory: SharedMemory | None = SMALL, **options: Any
) -> AsyncIterator[list[Peer]]:
    """Open a Router and some processes that have joined it."""
    async with router(shared_memory=shared_memory, **options) as (opened, inbox):
        started = []
        try:
            for number in range(count):
                started.append(Peer(opened, inbox, f"p{number}"))
                await started[-1].ready()
            yield started
        finally:
            for peer in started:
                await peer.stop()


def memory_left() -> tuple[int, list[str]]:
    """Shared memory that this process maps, and what has a name in the file system."""
    gc.collect()  # what other tests have left does not count, or go in the middle of one
    with open("/proc/self/maps") as file:
        mapped = sum("memfd:pipedist" in line for line in file)
    return mapped, sorted(name for name in os.listdir("/dev/shm") if "pipedist" in name)
