"""Replica functions that can't bear some elements, each in its own way."""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.random  # not within the time of a call: NumPy loads it when it is asked for

import pipedist

GIGABYTE = 1 << 30


def poison(x: np.ndarray, how: str, culprits: Sequence[int], ctx: Any) -> dict[str, Any]:
    """Double a shard, unless one of the culprits is in it."""
    if set(culprits) & set(x.tolist()):
        fall_ill(how)
    return {"y": x * 2, "ids": ctx.elements, "noise": ctx.rng.standard_normal(1)}


def fall_ill(how: str) -> None:
    """Fail, in one of the ways in which code fails."""
    match how:
        case "raises":
            raise ValueError("indigestible")
        case "segfault":
            ctypes.string_at(0)
        case "exit":
            os._exit(3)
        case "sys.exit":
            raise SystemExit(4)
        case "hang with the GIL":
            re.match(r"(a+)+$", "a" * 40 + "b")
        case "hang":
            time.sleep(1000)
        case "memory":
            before = resource.getrlimit(resource.RLIMIT_AS)
            resource.setrlimit(resource.RLIMIT_AS, (GIGABYTE, before[1]))
            try:
                np.zeros(4 * GIGABYTE, np.int8)
            finally:
                resource.setrlimit(resource.RLIMIT_AS, before)
        case _:
            raise AssertionError(how)


def _note_attempt(notes: Path) -> None:
    with notes.open("ab") as file:
        file.write(b".")


def plus_sum(x: np.ndarray) -> np.ndarray:
    return x + x.sum()


def reject(x: int, culprits: Sequence[int]) -> int:
    """Return an element or a shard as it is, unless it is or has one of the culprits."""
    if set(culprits) & set(np.atleast_1d(x).tolist()):
        raise ValueError("indigestible")
    return x


async def poison_async(x: np.ndarray, how: str, culprits: Sequence[int], ctx: Any) -> dict[str, Any]:
    """The same, among other calls on one event loop."""
    await asyncio.sleep(0.001)
    if how == "await" and set(culprits) & set(x.tolist()):
        await asyncio.sleep(1000)
    return poison(x, how, culprits, ctx)


def only_y(parts: dict[str, Any]) -> np.ndarray:
    """Take the doubled elements on; 70 is not to be borne here."""
    if 70 in parts["y"]:
        raise KeyError("seventy")
    y: np.ndarray = parts["y"]
    return y


def together(x: np.ndarray) -> np.ndarray:
    """3 and 5 do not get along."""
    if {3, 5} <= set(x.tolist()):
        raise ValueError("3 and 5")
    return x


def needs_company(x: np.ndarray) -> np.ndarray:
    """Element 1 can't be borne, and nothing alone either."""
    if 1 in x or len(x) < 2:
        raise ValueError(f"{len(x)} elements")
    return x


def flaky(x: np.ndarray, folder: str) -> np.ndarray:
    """Raise on 9 always; and on every shard, the first two times."""
    if 9 in x:
        raise ValueError("nine")
    notes = Path(folder) / f"{x[0]}-{x[-1]}"
    _note_attempt(notes)
    if notes.stat().st_size < 3:
        raise ConnectionError("not yet")
    return x


def slow_once(x: np.ndarray, folder: str) -> np.ndarray:
    """Hang on the first attempt of each call; leave a note of each attempt."""
    notes = Path(folder) / str(x[0])
    _note_attempt(notes)
    if notes.stat().st_size == 1 and 8 in x:
        re.match(r"(a+)+$", "a" * 40 + "b")
    return x


def bad_row(columns: dict[str, Any]) -> np.ndarray:
    value: np.ndarray = columns["value"]
    if (value < 0).any():
        raise ValueError("negative")
    return value


def gang_of_three(x: np.ndarray, ctx: Any, how: str) -> np.ndarray:
    """Add up over the replicas; element 5 can't be borne."""
    if 5 in x:
        fall_ill(how)
    total: np.ndarray = ctx.all_reduce(pipedist.ReduceOp.SUM, np.asarray(x.sum()))
    return np.asarray(total).reshape(1)


def first_of(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Combine to the first."""
    return a


def with_ids(parts: dict[str, Any], size: Any, ctx: Any) -> dict[str, Any]:
    """What a later phase sees of a shard of which elements were set aside."""
    assert parts["ids"].tolist() == list(ctx.elements)
    ids = np.asarray(ctx.elements)
    return {"ids": ids, "replica": np.full(len(ids), ctx.replica_id_in_sync_group)}


def unless(parts: dict[str, Any], path: str, folder: str) -> np.ndarray:
    """Raise on 60, unless there is a file; leave a note of each call."""
    if 60 in parts["ids"] and not Path(path).exists():
        raise RuntimeError("sixty")
    _note_attempt(Path(folder) / str(parts["ids"][0]))
    ids: np.ndarray = parts["ids"]
    return ids


async def hog_among_waiters(x: np.ndarray, path: str) -> np.ndarray:
    """Wait a moment; 300 waits less, and then never lets go of the thread, while earlier ones wait."""
    await asyncio.sleep(0.001 if 300 in x else 0.004)
    if 300 in x:
        _note_attempt(Path(path))
        fall_ill("hang with the GIL")
    return x


def wait_for_the_slow(x: np.ndarray, ctx: Any) -> np.ndarray:
    """The later half of the replicas take their time, one after the other, before they meet the others."""
    if ctx.replica_id_in_sync_group >= ctx.num_replicas_in_sync / 2:
        time.sleep(0.4)
    total: np.ndarray = ctx.all_reduce(pipedist.ReduceOp.SUM, np.asarray(x.sum()))
    return np.asarray(total).reshape(1)


def rejects_bad_files(shard: dict[str, list[Any]]) -> np.ndarray:
    if any(content.startswith(b"bad") for content in shard["bytes"]):
        raise ValueError("indigestible")
    return np.array([len(content) for content in shard["bytes"]])
