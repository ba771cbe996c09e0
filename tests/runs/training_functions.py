"""Functions of the training tests, importable by name in workers."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np

Weights = dict[str, Any]


def first(bias: float) -> Weights:
    return {"w": np.zeros(3, np.float32), "b": np.float32(bias)}


def rows(count: int, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, 3)).astype(np.float32)
    return {"x": x, "y": x @ np.array([1.0, -2.0, 0.5], np.float32) + np.float32(0.25)}


def gradients(shard: dict[str, np.ndarray], weights: Weights) -> Weights:
    residual = shard["x"] @ weights["w"] + weights["b"] - shard["y"]
    return {"w": shard["x"].T @ residual, "b": residual.sum(), "n": len(residual)}


def jittered(shard: dict[str, np.ndarray], weights: Weights) -> Weights:
    time.sleep(random.random() * 0.003)
    return gradients(shard, weights)


def deadly(shard: dict[str, np.ndarray], weights: Weights, folder: str, ctx: Any) -> Weights:
    """Kills its worker at the first try of every seventh call."""
    _die_once(Path(folder) / f"{ctx.step}-{ctx.replica_id_in_sync_group}", 7)
    return gradients(shard, weights)


def _die_once(mark: Path, of: int) -> None:
    numbers = [int(part) for part in mark.name.split("-") if part.isdigit()]
    if sum(numbers) % of == 3 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def descend(weights: Weights, value: Weights, rate: float) -> Weights:
    rate = np.float32(rate / int(value["n"]))
    return {name: weights[name] - rate * value[name] for name in ("w", "b")}


def deadly_descend(weights: Weights, value: Weights, rate: float, folder: str) -> Weights:
    """Kills its worker at the first try of some updates; the value tells them apart."""
    place = int(abs(float(value["b"])) * 1e6)
    mark = Path(folder) / f"update-{place}"
    if place % 3 == 0 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return descend(weights, value, rate)


def labels(shard: dict[str, np.ndarray]) -> np.ndarray:
    return shard["y"]


def squared_errors(shard: dict[str, np.ndarray], weights: Weights) -> np.ndarray:
    return np.asarray((shard["x"] @ weights["w"] + weights["b"] - shard["y"]) ** 2)


def add(state: Any, value: Any, **with_: Any) -> Any:
    return state + value + sum(with_.values())


def append(state: list[Any], value: Any, **with_: Any) -> list[Any]:
    """Writes down what it is given."""
    return [*state, [float(np.sum(value)), *(_plain(v) for v in with_.values())]]


def _plain(value: Any) -> Any:
    return len(value) if isinstance(value, list) else float(value)


def plus(x: np.ndarray, amount: Any) -> np.ndarray:
    return x + amount


def shifted(x: np.ndarray, **states: Any) -> np.ndarray:
    return np.stack([np.full(len(x), float(np.sum(value))) for value in states.values()], axis=1)


def at_least_20(old: Any, new: Any) -> bool:
    return bool(new >= 20)


def nothing(state: Any, value: Any) -> None:
    return None


def no_truth(old: Any, new: Any) -> np.ndarray:
    return np.zeros(2)


def change(old: Any, new: Any) -> float:
    return 1.5


def raises(state: Any, value: Any) -> Any:
    raise ZeroDivisionError(f"update of {value}")


class Scaled:
    """Constructed with a state: anew for each version."""

    def __init__(self, factor: float) -> None:
        self._factor = factor

    def __call__(self, x: np.ndarray) -> np.ndarray:
        return x * self._factor


def normalized(x: np.ndarray, ctx: Any) -> np.ndarray:
    total = ctx.all_reduce("sum", {"sum": x.sum(), "n": len(x)})
    return x - total["sum"] / total["n"]


def seen(x: np.ndarray, ctx: Any) -> list[int]:
    return [ctx.step, ctx.epoch, int(ctx.elements[0])]


def slow_add(state: Any, value: Any, mark: str) -> Any:
    Path(mark).touch()
    time.sleep(0.1)
    return state + value


def slow_plus(x: np.ndarray, amount: Any, mark: str) -> np.ndarray:
    Path(mark).touch()
    time.sleep(0.1)
    return x + amount


def deadly_normalized(x: np.ndarray, shift: Any, folder: str, ctx: Any) -> np.ndarray:
    """Kills its worker, at the first try of some calls, while the others wait in the collective."""
    if folder:
        _die_once(Path(folder) / f"{ctx.step}-{ctx.replica_id_in_sync_group}", 11)
    return normalized(x, ctx) + np.float64(shift)
