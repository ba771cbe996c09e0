"""Replica functions of the tests, importable by name in workers."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np


def double(x: np.ndarray) -> np.ndarray:
    return x * 2


def wider_rows(x: np.ndarray) -> np.ndarray:
    """From the element 8 on, rows of another shape."""
    return np.zeros((len(x), 2 if x[0] < 8 else 3))


def number(x: np.ndarray) -> float:
    return float(x[0])


def as_float(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32) / np.float32(3)


def jittered(x: np.ndarray) -> np.ndarray:
    """A float result after a random while: calls finish in another order every time."""
    time.sleep(random.random() * 0.004)
    return (x.astype(np.float32) + np.float32(0.1)) ** np.float32(1.5)


def noisy(x: np.ndarray, ctx: Any) -> dict[str, Any]:
    """Draws from the call's own generator, in whatever order calls happen to run."""
    time.sleep(random.random() * 0.004)
    return {"noise": ctx.rng.standard_normal(len(x)), "ids": ctx.elements}


def component(x: np.ndarray) -> dict[str, Any]:
    """A component for `merge`: the order of folding shows in `order`, and in float bits."""
    time.sleep(random.random() * 0.002)
    return {"order": np.array([x[0]]), "total": np.float32(np.sum(np.sqrt(x.astype(np.float32))))}


def merge(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    return {
        "order": np.concatenate([a["order"], b["order"]]),
        "total": np.float32(a["total"] + b["total"]),
    }


def slow_sum(state: float, total: np.ndarray) -> float:
    time.sleep(0.05)
    return state + float(np.sum(total))


def many_numbers(x: np.ndarray) -> list[int]:
    return [0] * 1_000_000


def many_keys(x: np.ndarray) -> dict[int, int]:
    return dict.fromkeys(range(1_000_000), len(x))


def count_keys(a: dict[Any, int], b: dict[Any, int]) -> dict[str, int]:
    return {"keys": len(a) + len(b)}


def larger(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """A component whose order of folding shows: end to end."""
    return np.concatenate([a, b])[-2:]


def first_of(x: np.ndarray, amount: np.ndarray) -> np.ndarray:
    return x + amount[0]


def fails_on_eleven_once(x: np.ndarray, folder: str) -> np.ndarray:
    path = os.path.join(folder, "failed")
    if 11 in x and not os.path.exists(path):
        open(path, "w").close()
        raise ValueError("once")
    return x


def subtract(x: np.ndarray, mean: float) -> np.ndarray:
    return x - mean


def plus(x: np.ndarray, amount: float) -> np.ndarray:
    return x + amount


async def awaited(x: np.ndarray) -> np.ndarray:
    await asyncio.sleep(0.001)
    return x + 1


class Model:
    """Loaded once per worker; counts the instances made in its process."""

    made = 0

    def __init__(self, scale: float) -> None:
        Model.made += 1
        self.scale = scale

    def __call__(self, x: np.ndarray, ctx: Any) -> dict[str, Any]:
        return {
            "y": x * self.scale,
            "made": np.array([Model.made]),
            "replica": np.array([ctx.replica_id_in_sync_group]),
        }


def context(x: np.ndarray, ctx: Any) -> dict[str, Any]:
    return {
        "replica": np.array([ctx.replica_id_in_sync_group]),
        "replicas": np.array([ctx.num_replicas_in_sync]),
        "step": np.array([ctx.step]),
        "elements": ctx.elements,
    }


def fails_on_13(x: np.ndarray) -> np.ndarray:
    if 13 in x:
        raise KeyError("thirteen")
    return x


def fails_slowly_on_low_steps(x: np.ndarray, ctx: Any) -> np.ndarray:
    """Every step fails; earlier ones later: the first failure to arrive is not the lowest."""
    time.sleep(0.02 * max(0, 4 - ctx.step))
    raise ValueError(f"step {ctx.step} replica {ctx.replica_id_in_sync_group}")


def fails_twice(x: np.ndarray, folder: str, ctx: Any) -> np.ndarray:
    """Raises on the first two attempts of each call."""
    path = os.path.join(folder, f"{ctx.step}-{ctx.replica_id_in_sync_group}")
    with open(path, "a") as file:
        file.write("x")
    if os.path.getsize(path) <= 2:
        raise RuntimeError("not yet")
    return x


def dies_once(x: np.ndarray, folder: str, ctx: Any) -> np.ndarray:
    """Kills its worker at the first attempt of every fifth step."""
    path = os.path.join(folder, f"{ctx.step}-{ctx.replica_id_in_sync_group}")
    if ctx.step % 5 == 2 and not os.path.exists(path):
        open(path, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return (x.astype(np.float32) + np.float32(0.1)) ** np.float32(1.5)


def always_dies(x: np.ndarray) -> np.ndarray:
    os._exit(7)


def unsendable(x: np.ndarray) -> dict[str, Any]:
    return {"a": [1, lambda: None]}


def hangs(x: np.ndarray, begun: str) -> np.ndarray:
    with open(begun, "wb"):  # a fifo, whose reader returns when this is closed
        pass
    signal.pause()
    return x


def prints(x: np.ndarray) -> np.ndarray:
    print("seen", int(x[0]))
    return x


def empty_dict(x: np.ndarray) -> np.ndarray:
    return np.array(["a", "b"])


def napping(x: np.ndarray) -> np.ndarray:
    time.sleep(0.05)
    return x


def slow_the_first_time(x: np.ndarray, folder: str, ctx: Any) -> np.ndarray:
    """Take ten minutes in step 5, unless it was begun there before."""
    if ctx.step == 5:
        try:
            (Path(folder) / "begun").touch(exist_ok=False)
        except FileExistsError:
            (Path(folder) / "again").touch()
        else:
            time.sleep(600.0)
    return x


def slow_then_deadly(x: np.ndarray, folder: str, ctx: Any) -> np.ndarray:
    """In step 5 take ten minutes the first time, kill the worker the second time, then return."""
    if ctx.step == 5:
        name = next(n for n in ("slow", "deadly", "well") if _is_first(Path(folder) / n))
        if name == "slow":
            time.sleep(600.0)
        elif name == "deadly":
            os.kill(os.getpid(), signal.SIGKILL)
    return x


def _is_first(path: Path) -> bool:
    """Return whether nobody has made this file before."""
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def waits_in_step(x: np.ndarray, folder: str, step: int, ctx: Any) -> np.ndarray:
    """Wait in one step until the file `go` is there."""
    while ctx.step == step and not (Path(folder) / "go").exists():
        time.sleep(0.01)
    return x


def waits_with_state(x: np.ndarray, folder: str, state: int, ctx: Any) -> np.ndarray:
    return waits_in_step(x, folder, 1, ctx=ctx)


def doubles_in_place(x: Any) -> Any:
    x *= 2
    return x
