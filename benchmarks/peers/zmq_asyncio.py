"""The hand-written ZeroMQ loop with zmq.asyncio on both sides."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import zmq
import zmq.asyncio

from benchmarks import functions
from benchmarks.adapter import WORKERS, Adapter, Function, Take
from benchmarks.peers.zmq_blocking import BATCHES_IN_FLIGHT, CHUNK, TASKS_IN_FLIGHT, ZmqBlocking
from benchmarks.peers.zmq_wire import answer, copies, fork, pack, unpack


def serve(endpoint: str) -> None:
    """Be a worker until an empty message comes."""
    asyncio.run(_serve(endpoint))


async def _serve(endpoint: str) -> None:
    socket = zmq.asyncio.Context(1).socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(endpoint)
    await socket.send(b"")
    while True:
        head, *frames = await socket.recv_multipart(copy=False)
        if not frames:
            return
        out = [head.bytes, *answer(frames)]
        await socket.send_multipart(out, copy=copies(out))


class ZmqAsyncio(Adapter):
    """zmq.asyncio; every workload is one coroutine."""

    settings: ClassVar[Mapping[str, str]] = {
        **ZmqBlocking.settings,
        "loop": "asyncio, zmq.asyncio on both sides",
    }

    def start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        endpoint = f"ipc://{self._folder.name}/s"
        self._processes = fork(serve, endpoint)
        self._loop = asyncio.new_event_loop()
        self._loop.run_until_complete(self._bind(endpoint))

    async def _bind(self, endpoint: str) -> None:
        self._context = zmq.asyncio.Context(1)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(endpoint)
        self._workers = [(await self._socket.recv_multipart())[0] for _ in self._processes]

    def stop(self) -> None:
        async def end() -> None:
            for worker in self._workers:
                await self._socket.send_multipart([worker, b""])

        self._loop.run_until_complete(end())
        for process in self._processes:
            process.join()
        self._socket.close()
        self._context.term()
        self._loop.close()
        self._folder.cleanup()

    async def _drive(
        self, fn: Function, is_many: bool, items: Iterable[Any], in_flight: int
    ) -> AsyncIterator[tuple[int, Any]]:
        numbered = enumerate(items)

        async def send_next(worker: bytes) -> int:
            item = next(numbered, None)
            if item is None:
                return 0
            out = [worker, item[0].to_bytes(4, "little"), *pack((fn, is_many, item[1]))]
            await self._socket.send_multipart(out, copy=copies(out))
            return 1

        running = 0
        for _ in range(in_flight):
            for worker in self._workers:
                running += await send_next(worker)
        while running:
            worker_frame, head, *frames = await self._socket.recv_multipart(copy=False)
            running += await send_next(worker_frame.bytes) - 1
            yield int.from_bytes(head.bytes, "little"), unpack(frames)

    def _all(self, fn: Function, is_many: bool, items: Sequence[Any], in_flight: int) -> list[Any]:
        async def run() -> list[Any]:
            out = [None] * len(items)
            async for index, value in self._drive(fn, is_many, items, in_flight):
                out[index] = value
            return out

        return self._loop.run_until_complete(run())

    def calls(self, fn: Function, count: int) -> Sequence[Any]:
        return self._all(fn, False, range(count), TASKS_IN_FLIGHT if count > CHUNK else 2)

    def bundled_calls(self, fn: Function, count: int) -> Sequence[Any]:
        chunks = [range(i, min(i + CHUNK, count)) for i in range(0, count, CHUNK)]
        return [value for chunk in self._all(fn, True, chunks, 2) for value in chunk]

    def stream(self, fn: Function, batches: np.ndarray, *, ordered: bool, take: Take) -> None:
        async def run() -> None:
            held: dict[int, Any] = {}
            following = 0
            async for index, value in self._drive(fn, False, batches, BATCHES_IN_FLIGHT):
                if not ordered:
                    take(index, value)
                    continue
                held[index] = value
                del value
                while following in held:
                    take(following, held.pop(following))
                    following += 1

        self._loop.run_until_complete(run())

    def steps(self, count: int, make: Callable[[int], np.ndarray]) -> list[float]:
        async def run() -> list[float]:
            means = []
            for step in range(count):
                parts = np.split(make(step), WORKERS)
                for worker, part in zip(self._workers, parts, strict=True):
                    await self._socket.send_multipart([worker, b"", *pack((functions.mean, False, part))])
                total = 0.0
                for _ in parts:
                    _, _, *frames = await self._socket.recv_multipart(copy=False)
                    total += unpack(frames)
                means.append(total / WORKERS)
            return means

        return self._loop.run_until_complete(run())
