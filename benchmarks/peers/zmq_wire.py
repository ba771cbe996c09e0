"""What the hand-written ZeroMQ loops send: pickle 5, buffers out of band, large ones uncopied."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from benchmarks.adapter import WORKERS

Frames = list[Any]

COPY_BYTES_MAX = 65_536


def pack(value: Any) -> Frames:
    """Return frames: the pickle, and the buffers beside it."""
    buffers: list[pickle.PickleBuffer] = []
    body = pickle.dumps(value, 5, buffer_callback=buffers.append)
    return [body, *(buffer.raw() for buffer in buffers)]


def unpack(frames: Sequence[zmq.Frame]) -> Any:
    """Return the value; its arrays are views of the frames."""
    return pickle.loads(frames[0].buffer, buffers=[frame.buffer for frame in frames[1:]])


def answer(frames: Sequence[zmq.Frame]) -> Frames:
    """Execute a task: (function, whether there are many arguments, argument)."""
    fn, is_many, x = unpack(frames)
    return pack([fn(one) for one in x] if is_many else fn(x))


def copies(frames: Frames) -> bool:
    """Whether a message is better copied into ZeroMQ's queue than shared with it."""
    last = frames[-1]
    return not (isinstance(last, memoryview) and last.nbytes > COPY_BYTES_MAX)


def fork(target: Callable[..., None], *args: Any) -> list[Any]:
    """Return started worker processes."""
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=target, args=args) for _ in range(WORKERS)]
    for process in processes:
        process.start()
    return processes
