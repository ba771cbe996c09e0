"""A hand-written minimum over ZeroMQ, blocking: what is left when there is no engine at all.

Driver: one ROUTER on ipc; 2 forked workers with a DEALER each. No names, no heartbeats, no
recovery, no fairness: a floor, not a product.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import zmq

from benchmarks.adapter import Function, Peer, Unsupported
from benchmarks.peers.zmq_wire import answer, copies, fork, pack, unpack

TASKS_IN_FLIGHT = 64
"""Tasks in flight per worker where they are short."""

BATCHES_IN_FLIGHT = 4
"""Batches in flight per worker."""

CHUNK = 1000


def serve(endpoint: str) -> None:
    """Be a worker until an empty message comes."""
    socket = zmq.Context(1).socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(endpoint)
    socket.send(b"")
    while True:
        head, *frames = socket.recv_multipart(copy=False)
        if not frames:
            return
        out = [head.bytes, *answer(frames)]
        socket.send_multipart(out, copy=copies(out))


class ZmqBlocking(Peer):
    """Blocking sockets on both sides."""

    settings: ClassVar[Mapping[str, str]] = {
        "sockets": "ROUTER and DEALER over ipc, pickle 5 out of band, copy=False above 64 KiB; fork",
        "W1": "one message a task, 64 in flight per worker",
        "W1b": "1000 tasks a message",
        "W2": "4 in flight per worker",
    }
    cold = """\
from benchmarks.peers.zmq_blocking import ZmqBlocking
def f(x): return x * x
if __name__ == "__main__":
    peer = ZmqBlocking()
    peer.start()
    print(sum(peer.bundled(f, range(100))))
    peer.stop()
"""

    def start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        endpoint = f"ipc://{self._folder.name}/s"
        self._processes = fork(serve, endpoint)
        self._context = zmq.Context(1)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(endpoint)
        self._workers = [self._socket.recv_multipart()[0] for _ in self._processes]

    def stop(self) -> None:
        for worker in self._workers:
            self._socket.send_multipart([worker, b""])
        for process in self._processes:
            process.join()
        self._socket.close()
        self._context.term()
        self._folder.cleanup()

    def _drive(
        self, fn: Function, is_many: bool, items: Iterable[Any], in_flight: int
    ) -> Iterator[tuple[int, Any]]:
        numbered = enumerate(items)

        def send_next(worker: bytes) -> int:
            item = next(numbered, None)
            if item is None:
                return 0
            out = [worker, item[0].to_bytes(4, "little"), *pack((fn, is_many, item[1]))]
            self._socket.send_multipart(out, copy=copies(out))
            return 1

        running = sum(send_next(worker) for _ in range(in_flight) for worker in self._workers)
        while running:
            worker, head, *frames = self._socket.recv_multipart(copy=False)
            running += send_next(worker.bytes) - 1
            yield int.from_bytes(head.bytes, "little"), unpack(frames)

    def each(self, fn: Function, args: Sequence[Any]) -> list[Any]:
        out = [None] * len(args)
        # Long tasks must not queue up at one worker while the other has none.
        in_flight = TASKS_IN_FLIGHT if len(args) > CHUNK else 2
        for index, value in self._drive(fn, False, args, in_flight):
            out[index] = value
        return out

    def bundled(self, fn: Function, args: Sequence[Any]) -> list[Any]:
        chunks = [args[i : i + CHUNK] for i in range(0, len(args), CHUNK)]
        done: dict[int, list[Any]] = dict(self._drive(fn, True, chunks, 2))
        return [value for index in range(len(chunks)) for value in done[index]]

    def windowed(
        self, fn: Function, batches: Iterable[np.ndarray], ordered: bool
    ) -> Iterator[tuple[int, Any]]:
        arrived = self._drive(fn, False, batches, BATCHES_IN_FLIGHT)
        if not ordered:
            yield from arrived
            return
        held: dict[int, Any] = {}
        following = 0
        for index, value in arrived:
            held[index] = value
            del value
            while following in held:
                yield following, held.pop(following)
                following += 1

    def step(self, fn: Function, parts: Sequence[np.ndarray]) -> list[Any]:
        for place, (worker, part) in enumerate(zip(self._workers, parts, strict=True)):
            self._socket.send_multipart([worker, bytes([place]), *pack((fn, False, part))])
        out: list[Any] = [None] * len(parts)
        for _ in parts:
            _, head, *frames = self._socket.recv_multipart(copy=False)
            out[head.bytes[0]] = unpack(frames)
        return out

    def worker_pids(self) -> list[int]:
        raise Unsupported  # nothing here recovers
