"""Replica functions of these tests; each notes its calls in a file, so that they can be counted."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tests.runs import training_functions


def note(path: str, stage: str, ctx: Any) -> None:
    """Append a line that names the call; one write, so that lines of several processes don't mix."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.write(fd, f"{stage} {ctx.step} {ctx.replica_id_in_sync_group}\n".encode())
    os.close(fd)


def numbers(x: np.ndarray, calls: str, ctx: Any) -> dict[str, Any]:
    """Floats whose sum depends on the order in which they are added."""
    note(calls, "numbers", ctx)
    return {"x": np.sqrt(x.astype(np.float64) + 0.1), "draw": ctx.rng.standard_normal(len(x))}


def centred(shard: dict[str, Any], mean: dict[str, Any], calls: str, ctx: Any) -> np.ndarray:
    """A later phase: reads the values kept of `numbers`."""
    note(calls, "centred", ctx)
    return np.asarray(shard["x"] - mean["x"])


def scaled(shard: dict[str, Any], calls: str, ctx: Any) -> dict[str, Any]:
    """Read values of `numbers` in other steps."""
    note(calls, "scaled", ctx)
    return {"x": shard["x"] * ctx.rng.standard_normal() + shard["draw"], "draw": shard["draw"]}


def halved(shard: dict[str, Any], calls: str, ctx: Any) -> np.ndarray:
    note(calls, "halved", ctx)
    return np.asarray(shard["x"] * 0.5)


def merge(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """A combine whose order shows, in bits and in text."""
    return {"x": np.array([a["x"].sum() * 0.5 + b["x"].sum()]), "draw": np.array([a["draw"][0]])}


def column(shard: dict[str, Any], calls: str, ctx: Any) -> np.ndarray:
    note(calls, "column", ctx)
    return np.asarray(shard["x"])


def gradients(shard: dict[str, Any], weights: Any, calls: str, ctx: Any) -> Any:
    note(calls, "gradients", ctx)
    return training_functions.gradients(shard, weights)


def errors(shard: dict[str, Any], weights: Any, calls: str, ctx: Any) -> Any:
    note(calls, "errors", ctx)
    return training_functions.squared_errors(shard, weights)


def descend(weights: Any, value: Any, rate: float, calls: str) -> Any:
    return training_functions.descend(weights, value, rate)


def together(x: np.ndarray, calls: str, ctx: Any) -> Any:
    """A gang: every replica gets the sum of all."""
    note(calls, "together", ctx)
    return ctx.all_reduce("sum", np.sqrt(x.astype(np.float64)).sum()) * x.astype(np.float64)


def one_by_one(count: int) -> Iterator[np.ndarray]:
    """A source without random access."""
    return (np.array(i * 3) for i in range(count))


def gated(x: np.ndarray, folder: str, waiting: list[int], replicas: int, ctx: Any) -> np.ndarray:
    """Note the call; some calls wait for a file, and elements below 0 are bad."""
    note(f"{folder}/calls", "gated", ctx)
    if x.min() < 0:
        raise ValueError("negative")
    while ctx.step * replicas + ctx.replica_id_in_sync_group in waiting and not Path(folder, "go").exists():
        time.sleep(0.005)
    return np.asarray(np.sqrt(x.astype(np.float64)))


def one_negative(count: int, last: int = 1) -> np.ndarray:
    """Numbers, of which the first one to `last` are negative."""
    numbers = np.arange(count)
    return np.where((numbers >= 1) & (numbers <= last), -1, numbers)
