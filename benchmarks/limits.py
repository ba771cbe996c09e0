"""What the machine itself can do: the figures that no engine can pass.

`python -m benchmarks.limits` prints them; `benchmarks.run` takes them in each round, beside the
systems. Every figure is one number of this moment: medians are made of the rounds.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import shared_memory

import numpy as np
import zmq

GIB = 2.0**30
SLOTS = 4

CORE_IMPORTS = "numpy, zmq, msgpack, anyio"
"""What a program that embeds an engine like this one imports."""

CLI_IMPORTS = f"{CORE_IMPORTS}, optree, ruamel.yaml, click"
"""What the command line can't do without: also a YAML reader and a parser of options."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is moved: as published, or in a smoke test."""

    block_bytes: int = 4 << 20
    blocks: int = 256
    messages: int = 50_000


@dataclass(frozen=True, slots=True)
class Limit:
    """One limit: what it is, its unit, and how it is measured."""

    title: str
    unit: str
    measure: Callable[[Scale], float]


# -- one process -----------------------------------------------------------------------------------


def _memcpy(scale: Scale) -> float:
    source = np.ones(scale.block_bytes, np.uint8)
    target = np.empty_like(source)
    np.copyto(target, source)
    start = time.perf_counter()
    for _ in range(scale.blocks):
        np.copyto(target, source)
    return scale.blocks * scale.block_bytes / GIB / (time.perf_counter() - start)


def _imports(modules: str) -> Callable[[Scale], float]:
    def measure(_scale: Scale) -> float:
        seconds = 0.0
        for _ in range(2):  # the first one writes the bytecode
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", f"import {modules}"], check=True)
            seconds = time.perf_counter() - start
        return seconds

    return measure


# -- two processes -----------------------------------------------------------------------------------


def _beside(work: Callable[[str], None], drive: Callable[[str], float]) -> float:
    """Run `work(endpoint)` in a forked process and `drive(endpoint)` here; return what this returns."""
    with tempfile.TemporaryDirectory() as folder:
        endpoint = f"ipc://{folder}/s"
        process = multiprocessing.get_context("fork").Process(target=work, args=(endpoint,))
        process.start()
        try:
            return drive(endpoint)
        finally:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()


def _socket(kind: int) -> zmq.Socket[bytes]:
    socket = zmq.Context(1).socket(kind)
    socket.setsockopt(zmq.LINGER, 1000)
    return socket


def _zmq_one_way(scale: Scale) -> float:
    def swallow(endpoint: str) -> None:
        socket = _socket(zmq.DEALER)
        socket.bind(endpoint)
        for _ in range(scale.messages):
            socket.recv()
        socket.send(b"done")

    def drive(endpoint: str) -> float:
        socket = _socket(zmq.DEALER)
        socket.connect(endpoint)
        message = b"x" * 64
        start = time.perf_counter()
        for _ in range(scale.messages):
            socket.send(message)
        socket.recv()
        return scale.messages / (time.perf_counter() - start)

    return _beside(swallow, drive)


def _zmq_blocks(scale: Scale) -> float:
    def add_up(endpoint: str) -> None:
        socket = _socket(zmq.DEALER)
        socket.bind(endpoint)
        for _ in range(scale.blocks):
            np.frombuffer(socket.recv(copy=False).buffer, np.float32).sum()
        socket.send(b"done")

    def drive(endpoint: str) -> float:
        socket = _socket(zmq.DEALER)
        socket.setsockopt(zmq.SNDHWM, 8)
        socket.connect(endpoint)
        blocks = [np.ones(scale.block_bytes // 4, np.float32) for _ in range(16)]
        start = time.perf_counter()
        for number in range(scale.blocks):
            socket.send(blocks[number % 16], copy=False)
        socket.recv()
        return scale.blocks * scale.block_bytes / GIB / (time.perf_counter() - start)

    return _beside(add_up, drive)


def _shared_memory(back: bool) -> Callable[[Scale], float]:
    """A ring of reused slots; one process writes a block and tells its number, the other reads it.

    Args:
        back: the reader writes twice the block into a slot of its own, which is read here;
            otherwise it adds the block up.
    """

    def measure(scale: Scale) -> float:
        memory = shared_memory.SharedMemory(create=True, size=2 * SLOTS * scale.block_bytes)
        elements = scale.block_bytes // 4

        def slots(of: shared_memory.SharedMemory) -> list[np.ndarray]:
            return [
                np.frombuffer(of.buf, np.float32, elements, k * scale.block_bytes) for k in range(2 * SLOTS)
            ]

        def read(endpoint: str) -> None:
            places = slots(memory)  # inherited by the fork: no second mapping is needed
            socket = _socket(zmq.DEALER)
            socket.bind(endpoint)
            while (told := socket.recv()) != b"end":
                slot = told[0]
                if back:
                    np.multiply(places[slot], 2, out=places[SLOTS + slot])
                else:
                    places[slot].sum()
                socket.send(told)

        def drive(endpoint: str) -> float:
            places = slots(memory)
            for place in places:
                place.fill(1)  # its pages are there before the clock runs
            socket = _socket(zmq.DEALER)
            socket.connect(endpoint)
            blocks = [np.ones(elements, np.float32) for _ in range(16)]
            free = list(range(SLOTS))

            def take() -> int:
                slot = socket.recv()[0]
                if back:
                    places[SLOTS + slot].sum()
                return slot

            start = time.perf_counter()
            for number in range(scale.blocks):
                slot = free.pop() if free else take()
                np.copyto(places[slot], blocks[number % 16])
                socket.send(bytes([slot]))
            for _ in range(SLOTS - len(free)):
                take()
            seconds = time.perf_counter() - start
            socket.send(b"end")
            places.clear()
            return scale.blocks * scale.block_bytes / GIB / seconds

        try:
            return _beside(read, drive)
        finally:
            memory.close()
            memory.unlink()

    return measure


LIMITS: dict[str, Limit] = {
    "memcpy": Limit("memcpy of 4 MiB, one thread", "GiB/s", _memcpy),
    "handover": Limit("shared-memory hand-over of 4 MiB, reader sums", "GiB/s", _shared_memory(False)),
    "both-ways": Limit("shared memory there and back, 4 MiB", "GiB/s", _shared_memory(True)),
    "zmq-messages": Limit("ZeroMQ one way, 64 bytes, ipc", "messages/s", _zmq_one_way),
    "zmq-blocks": Limit("ZeroMQ one way, 4 MiB uncopied, ipc", "GiB/s", _zmq_blocks),
    "imports": Limit(f"python -c 'import {CORE_IMPORTS}'", "s", _imports(CORE_IMPORTS)),
    "imports-cli": Limit(f"python -c 'import {CLI_IMPORTS}'", "s", _imports(CLI_IMPORTS)),
}

SMOKE_SCALE = Scale(block_bytes=1 << 16, blocks=8, messages=500)

FOR_WORKLOAD: dict[str, tuple[str, ...]] = {
    "W1": ("zmq-messages",),
    "W2": ("memcpy", "zmq-blocks", "handover"),
    "W3": ("both-ways",),
    "W5": ("imports",),
    "W5c": ("imports-cli",),
}
"""What is measured with which workload; the last one named is its limit."""


def main() -> None:
    """Print the limits, or those named, as JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(LIMITS))
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    unknown = set(options.names) - set(LIMITS)
    if unknown:
        parser.error(f"no such limit: {', '.join(sorted(unknown))}")
    scale = SMOKE_SCALE if options.smoke else Scale()
    for name in options.names or LIMITS:
        limit = LIMITS[name]
        record = {"limit": name, "value": limit.measure(scale), "unit": limit.unit, "title": limit.title}
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
