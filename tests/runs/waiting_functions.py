"""Functions that wait for a server, for the tests of calls that overlap."""

# ruff: noqa: ASYNC230, ASYNC240, ASYNC251 - tests count calls in files, and block on purpose
from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

import pipedist


async def all_there(x: np.ndarray, folder: str, count: int, ctx: Any) -> np.ndarray:
    """Wait until `count` calls are here at the same time."""
    Path(folder, f"{ctx.step}-{os.getpid()}").touch()
    deadline = time.monotonic() + 20
    while len(os.listdir(folder)) < count:
        assert time.monotonic() < deadline, f"{len(os.listdir(folder))} calls at the same time"
        await asyncio.sleep(0.01)
    return x * 2


class Client:
    """An instance that serves several calls."""

    def __init__(self, folder: str, count: int) -> None:
        self.folder, self.count = folder, count

    async def __call__(self, x: np.ndarray, ctx: Any) -> np.ndarray:
        return await all_there(x, self.folder, self.count, ctx)


def plain(x: np.ndarray) -> np.ndarray:
    return x * 2


async def doubled(x: Any) -> np.ndarray:
    return np.asarray(x) * 2


def plus_sum(x: np.ndarray, ctx: Any) -> np.ndarray:
    """Add the sum of all replicas' shards."""
    return x + int(ctx.all_reduce("sum", int(x.sum())))


def plain_element(x: Any, ctx: Any) -> dict[str, Any]:
    return {"text": f"{x}-{ctx.elements[0]}", "draw": ctx.rng.random()}


async def element(x: Any) -> dict[str, Any]:
    await asyncio.sleep(0.02 if x % 3 else 0.0)
    return {"text": f"answer {x}", "n": int(x), "vector": np.arange(2) + x, "raw": b"x" * int(x) + b"\0"}


async def bad_element(x: Any, note: str, bad: list[int]) -> float:
    with open(note, "a") as file:
        file.write(f"{x}\n")
    await asyncio.sleep(0)
    if x in bad:
        raise ValueError(f"no {x}")
    return float(x)


async def flaky(x: Any, note: str) -> float:
    """Fail twice for each element; the times of the attempts are noted."""
    with open(note, "a") as file:
        file.write(f"{x} {time.monotonic()}\n")
    attempt = sum(line.split()[0] == str(x) for line in Path(note).read_text().splitlines())
    if attempt == 1:
        raise ConnectionError("reset")
    if attempt == 2:
        raise pipedist.RetryAfter(0.2)
    return float(x)


async def hangs(x: Any, note: str) -> float:
    """Hang the first time for element 3."""
    with open(note, "a") as file:
        file.write(f"{x} {os.getpid()}\n")
    if x == 3 and Path(note).read_text().count("3 ") == 1:
        await asyncio.sleep(1000)
    await asyncio.sleep(0.02)
    return float(x)


async def blocks(x: Any, note: str) -> float:
    """Block the thread, the first time."""
    if x == 3 and not Path(note).exists():
        Path(note).touch()
        time.sleep(1000)
    return float(x)


async def timed(x: Any, note: str) -> float:
    with open(note, "a") as file:
        file.write(f"{time.monotonic()}\n")
    return float(x)


async def ragged(x: Any) -> np.ndarray:
    return np.arange(int(x) + 1)


async def timed_numbers(x: Any, ctx: Any) -> float:
    await asyncio.sleep(float(ctx.rng.random()) / 50)
    return float(np.sqrt(x) + ctx.rng.random())


def above(x: np.ndarray, least: int) -> np.ndarray:
    return x[x >= least]


async def none_of(x: Any, note: str, bad: int) -> float | None:
    return None if await bad_element(x, note, []) == bad else float(x)


async def meets(x: Any, folder: str, count: int) -> float:
    """Wait until `count` elements are here at the same time, and never more."""
    mine = Path(folder, f"here-{x}")
    mine.touch()
    deadline = time.monotonic() + 20
    while (here := len(list(Path(folder).glob("here-*")))) < count and not Path(folder, "met").exists():
        assert time.monotonic() < deadline, f"{here} elements at the same time"
        await asyncio.sleep(0.01)
    assert here <= count, f"{here} elements at the same time"
    Path(folder, "met").touch()
    await asyncio.sleep(0.05)
    mine.unlink()
    return float(x)


async def dies(x: Any, folder: str, most: int) -> float:
    """Check that at most `most` elements are here; the first time, element 5 kills its worker."""
    mine = Path(folder, f"{os.getpid()}-{x}")
    mine.touch()
    here = sorted(path.name for path in Path(folder).glob("*-*"))
    assert len(here) <= most, f"elements {here} at the same time"
    await asyncio.sleep(0.02)
    if x == 5 and not Path(folder, "died").exists():
        Path(folder, "died").touch()
        for path in Path(folder).glob(f"{os.getpid()}-*"):
            path.unlink()
        os.kill(os.getpid(), 9)
    mine.unlink()
    return float(x)


async def refuses(x: Any, note: str, seconds: float) -> float:
    """Fail for elements above 0 until a file says otherwise, with a wait of `seconds`; 0: with another error."""
    with open(note, "a") as file:
        file.write(f"{x}\n")
    if x and not Path(f"{note}-is-up").exists():
        raise pipedist.RetryAfter(seconds) if seconds else ConnectionError("reset")
    return x * 1.0


class CollectorError(Exception):
    """An exception that only this module has."""


def generates(x: Any) -> Any:
    yield float(x)


async def generates_late(x: Any) -> Any:
    yield float(x)


def lazy(x: Any) -> Any:
    return (each for each in [x])


async def late(x: Any) -> float:
    raise pipedist.RetryAfter(4000)
