"""Functions that need GPUs, as workers import them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

import pipedist


def look(shard: np.ndarray, ctx: Any, folder: str) -> dict[str, Any]:
    """Return what the call sees; raise if another one is on the same GPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    locks = [Path(folder) / f"gpu{number}" for number in (visible or "").split(",")]
    for lock in locks:
        os.close(os.open(lock, os.O_CREAT | os.O_EXCL))
    for lock in locks:
        lock.unlink()
    return _seen(ctx)


def meet(shard: np.ndarray, ctx: Any) -> dict[str, Any]:
    """Return what the replica of a gang sees."""
    total = ctx.all_reduce("sum", int(shard.sum()))
    return {**_seen(ctx), "sum": np.array([total])}


def describe(shard: Any) -> dict[str, Any]:
    """Return the device of a call that asked for none."""
    ctx = pipedist.get_replica_context()
    assert ctx is not None
    return {"device": np.array([ctx.device])}


def _seen(ctx: Any) -> dict[str, Any]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return {"visible": np.array([visible]), "device": np.array([ctx.device]), "pid": np.array([os.getpid()])}
