"""A server that counts requests, and functions that ask it: what is asked again after a driver was killed?"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import Counter
from random import Random
from typing import Any

PROCESS = "PIPEDIST_TEST_PROCESS"
"""The environment variable with the number of the driver process."""


class CountingServer:
    """Answers a line `N` with `answer N` after a random latency, in a thread; notes when it answered.

    The first process gets no answer about the elements `silent`. It gets no answer before it has asked `together`
    times, and about element 0 after half of these.
    """

    def __init__(
        self,
        latency_s: tuple[float, float],
        seed: int = 0,
        silent: frozenset[int] = frozenset(),
        together: int = 0,
    ) -> None:
        self.answered: list[tuple[int, int, float]] = []
        """(number, driver process, time) of each answer."""
        self.asked: Counter[int] = Counter()
        """Number of requests by driver process."""
        self._latency_s, self._random = latency_s, Random(seed)
        self._silent, self._together = silent, together
        self.port = 0
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> CountingServer:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        async def begin() -> None:
            self._loop = asyncio.get_running_loop()
            self._stop, self._all_asked = asyncio.Event(), asyncio.Event()
            async with await asyncio.start_server(self._serve, "127.0.0.1", 0) as server:
                self.port = server.sockets[0].getsockname()[1]
                self._ready.set()
                await self._stop.wait()
                others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
                await asyncio.wait(others or [asyncio.ensure_future(asyncio.sleep(0))])

        asyncio.run(begin())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            number, process = map(int, (await reader.readline()).split())
            self.asked[process] += 1
            if process == 0 and number in self._silent:
                await reader.read()  # until the process is killed
            if self.asked[0] == self._together:
                self._all_asked.set()
            if self._together:
                await self._all_asked.wait()
            await asyncio.sleep(self._random.uniform(*self._latency_s))
            while not number and len(self.answered) < self._together // 2:  # noqa: ASYNC110 - in a test
                await asyncio.sleep(0.001)
            writer.write(b"answer %d\n" % number)
            self.answered.append((number, process, time.monotonic()))
            await writer.drain()
        except (ConnectionError, ValueError):
            pass  # its process was killed
        writer.close()


async def ask(number: Any, port: int) -> str:
    """Ask the server about one element."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{number} {os.environ[PROCESS]}\n".encode())
    answer = await reader.readline()
    writer.close()
    await writer.wait_closed()
    return answer.decode().strip()


async def ask_in_vain(number: Any, port: int, bad: list[int]) -> str:
    """Ask the server about one element, and fail for some of them."""
    answer = await ask(number, port)
    if number in bad:
        raise ValueError(f"{answer} is bad")
    return answer


async def ask_and_note(number: Any, port: int, note: str) -> str:
    """Ask the server about one element, and note its answer; element 0 fails in the first process."""
    answer = await ask(number, port)
    if number == 0 and os.environ[PROCESS] == "0":
        raise ValueError("element 0 is bad")
    fd = os.open(note, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.write(fd, b"%d\n" % number)
    os.close(fd)
    return answer


async def ask_shard(numbers: Any, port: int) -> Any:
    import numpy as np

    return np.array([await ask(number, port) for number in numbers])
