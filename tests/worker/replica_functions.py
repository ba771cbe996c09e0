"""Replica functions of these tests."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import pipedist.worker.context

print("imported the replica functions")


def double(x: Any) -> Any:
    return x * 2


def identity(x: Any) -> Any:
    return x


def fail_on_odd(x: int) -> int:
    if x % 2:
        raise KeyError(f"odd {x}")
    return x


def unsendable_on_odd(x: int) -> Any:
    return {"a": [1, {"b": {1, 2}}]} if x % 2 else x


def describe(x: Any, ctx: Any, scale: float = 1.0) -> dict[str, Any]:
    inside = pipedist.worker.context.get_replica_context()
    return {
        "replica": ctx.replica_id_in_sync_group,
        "of": ctx.num_replicas_in_sync,
        "step": ctx.step,
        "epoch": ctx.epoch,
        "stage": ctx.stage,
        "elements": ctx.elements,
        "random": ctx.rng.random(),
        "scale": scale,
        "same": inside is ctx,
        "x": x,
    }


def flags(x: np.ndarray) -> list[bool]:
    return [bool(x.flags.writeable), bool(x.flags.c_contiguous)]


def transposed(x: np.ndarray) -> np.ndarray:
    return np.arange(6.0).reshape(2, 3).T


def in_thread_of(x: Any) -> list[Any]:
    import threading

    return [threading.current_thread() is threading.main_thread(), Path("/proc/self/comm").read_text()]


def environment(x: Any) -> dict[str, Any]:
    return {
        "threads": os.environ["OPENBLAS_NUM_THREADS"],
        "path": list(sys.path),
        "cwd": os.getcwd(),
        "stdin": os.readlink("/proc/self/fd/0"),
        "fds": sorted(
            os.readlink(f"/proc/self/fd/{n}")
            for n in os.listdir("/proc/self/fd")
            if os.path.islink(f"/proc/self/fd/{n}")
        ),
        "shadowed": "shadow" in getattr(sys.modules.get("json"), "__file__", ""),
    }


def talk(x: int) -> int:
    print("printed", x)
    print("to stderr", x, file=sys.stderr)
    logging.getLogger("user").warning("logged %d", x)
    print("unfinished", end="")
    os.write(1, b"")
    return x


def wait_for_file(path: str) -> str:
    """Busy-wait (bounded) until a file appears."""
    end = time.monotonic() + 20
    while not os.path.exists(path):
        if time.monotonic() > end:
            raise TimeoutError(path)
        time.sleep(0.001)
    return path


def maybe_wait(path: str) -> str:
    print(f"got {path!r}")
    return wait_for_file(path) if path else path


def exit_hard(x: int) -> int:
    if x == 2:
        os._exit(7)
    return x


def exit_with(code: int) -> int:
    os._exit(code)


def exit_softly(x: int) -> int:
    if x == 2:
        sys.exit(5)
    return x


def interrupt(x: int) -> int:
    if x == 2:
        raise KeyboardInterrupt
    return x


class Custom(BaseException):
    pass


def base_exception(x: int) -> int:
    if x == 2:
        raise Custom("gone")
    return x


def segfault(x: int) -> int:
    if x == 2:
        ctypes.string_at(0)
    return x


_barrier = asyncio.Barrier(4)


async def meet(x: int) -> int:
    """Returns when four calls are here at once."""
    async with asyncio.timeout(20):
        await _barrier.wait()
    return x


async def cancelled_on_odd(x: int) -> int:
    await asyncio.sleep(0)
    if x % 2:
        raise asyncio.CancelledError
    print("calm", x)
    return x


async def exit_in_loop(x: int) -> int:
    await asyncio.sleep(0)
    if x == 2:
        sys.exit(5)
    return x


class Exits:
    async def __call__(self, x: int) -> int:
        return await exit_in_loop(x)


async def exit_in_own_task(x: int) -> None:
    async def end() -> None:
        sys.exit(5)

    await asyncio.gather(end(), asyncio.sleep(20))


def text_on_odd(x: int) -> object:
    return "odd" if x % 2 else x


def add_badly(a: object, b: object) -> object:
    raise ValueError(f"{a} {b}")


_seen_loops: set[int] = set()


async def loops(x: int) -> int:
    _seen_loops.add(id(asyncio.get_running_loop()))
    return len(_seen_loops)


class Model:
    made = 0

    def __init__(self, scale: float) -> None:
        type(self).made += 1
        self.scale = scale

    def __call__(self, x: Any) -> Any:
        return [x * self.scale, type(self).made]


class AsyncModel:
    def __init__(self) -> None:
        self.inside = 0

    async def __call__(self, x: int, ctx: Any) -> list[int]:
        self.inside += 1
        assert self.inside == 1
        await asyncio.sleep(0.001)
        self.inside -= 1
        return [x, ctx.step]


class Uncallable:
    pass


class ReusesItsBuffer:
    def __init__(self) -> None:
        self.buffer = np.zeros(1000)

    def __call__(self, x: float) -> Any:
        self.buffer[:] = x
        return {"buffer": self.buffer, "view": self.buffer[:3]}


def append(x: list[int], more: list[int]) -> list[int]:
    more.append(1)
    x.append(len(more))
    return x


def add(a: Any, b: Any) -> Any:
    return f"({a}{b})"


def apply_me(a: int, b: int, *, c: int, ctx: Any) -> list[int]:
    return [a, b, c, ctx.step]


def write_below(x: int) -> int:
    os.write(1, b"from below\n")
    return x


def hold_the_interpreter(x: int) -> bool:
    """Never gives the GIL away, for longer than any test takes."""
    print("holding")
    return re.match(r"(a+)+$", "a" * 40 + "b") is None


def leave_processes(path: str) -> str:
    """Leave a copy of the worker and a subprocess, which hang, and store their process ids."""
    child = os.fork()
    if child == 0:
        time.sleep(600)
        os._exit(0)
    pids = f"{child} {subprocess.Popen(['sleep', '600']).pid}"
    Path(path + ".part").write_text(pids)
    os.rename(path + ".part", path)
    return path


def leave_processes_and_exec(path: str) -> None:
    leave_processes(path)
    os.execv("/bin/sleep", ["sleep", "600"])
