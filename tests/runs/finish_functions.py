"""Functions of tests that finish the values of reductions."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np


def moments(x: np.ndarray[Any, Any]) -> dict[str, Any]:
    return {"n": np.ones(len(x), np.int64), "sum": x.astype(float), "squares": x.astype(float) ** 2}


def std(sums: dict[str, Any], ddof: int = 0) -> float:
    mean = sums["sum"] / sums["n"]
    return float(np.sqrt(sums["squares"] / (sums["n"] - ddof) - mean**2 * sums["n"] / (sums["n"] - ddof)))


def counted(sums: dict[str, Any], folder: str) -> float:
    """Return `std`, and note the call in a file."""
    with (Path(folder) / "finished").open("a") as file:
        file.write("x")
    return std(sums)


def largest(values: np.ndarray[Any, Any], top: int) -> np.ndarray[Any, Any]:
    assert not values.flags.writeable
    return np.sort(values)[::-1][:top]


def once_dead(values: np.ndarray[Any, Any], folder: str) -> int:
    """Kill the worker the first time, and raise the second time."""
    path = Path(folder) / "attempts"
    attempts = len(path.read_text()) if path.exists() else 0
    path.write_text("x" * (attempts + 1))
    if attempts == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if attempts == 1:
        raise ValueError("the second attempt")
    return int(values.sum())


def centred(values: np.ndarray[Any, Any], spread: float) -> np.ndarray[Any, Any]:
    return values / spread


def fails(values: np.ndarray[Any, Any], folder: str) -> float:
    if not (Path(folder) / "fixed").exists():
        raise ValueError(f"no value of {len(values)} numbers")
    return float(values.sum())


def called(x: np.ndarray[Any, Any], folder: str) -> np.ndarray[Any, Any]:
    with (Path(folder) / "calls").open("a") as file:
        file.write("x")
    return x


def nothing(value: Any) -> None:
    return None


def doubled(value: float) -> float:
    return value * 2


def add(state: float, value: float) -> float:
    return state + value


def above(old: float, new: float, limit: float) -> bool:
    return bool(new > limit)


def fails_late(x: np.ndarray[Any, Any], folder: str, ctx: Any) -> np.ndarray[Any, Any]:
    if ctx.step == 5 and not (Path(folder) / "fixed").exists():
        raise ValueError("step 5")
    return x + ctx.step


def noted(values: np.ndarray[Any, Any], folder: str) -> np.ndarray[Any, Any]:
    """Return a part of the values, and note the call in a file."""
    with (Path(folder) / "finished").open("a") as file:
        file.write("x")
    return values[-2:]


def above_four(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    found = x[x > 4]
    return found if len(found) else np.array([])
