"""Replica functions of `test_streamed_passes`: a decode on the processor, an inference on a GPU."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tests.runs import training_functions

WAIT_S = 60.0


def _until(path: Path) -> None:
    until = time.monotonic() + WAIT_S
    while not path.exists():
        if time.monotonic() > until:
            raise TimeoutError(f"{path} was not made in {WAIT_S} s")
        time.sleep(0.001)


def decode(x: np.ndarray, ctx: Any, folder: str = "", bad: tuple[int, ...] = (), dies: int = -1) -> Any:
    """Return one row per element, with the process; the element `dies` ends it once."""
    _act("decode", x, folder, bad, dies)
    return {
        "id": x,
        "noise": ctx.rng.standard_normal(len(x)).astype(np.float32),
        "decoder": np.full(len(x), os.getpid()),
    }


def infer(shard: Any, ctx: Any, folder: str = "", bad: tuple[int, ...] = (), dies: int = -1) -> Any:
    _act("infer", shard["id"], folder, bad, dies)
    assert np.asarray(ctx.elements).tolist() == shard["id"].tolist()
    rows = len(shard["id"])
    scale = np.float32(ctx.rng.standard_normal())
    return {
        **shard,
        "score": shard["noise"] * scale + shard["noise"].sum(),
        "step": np.full(rows, ctx.step),
        "replica": np.full(rows, ctx.replica_id_in_sync_group),
        "inferrer": np.full(rows, os.getpid()),
        "device": np.full(rows, ctx.device),
    }


def infer_checked(shard: Any, ctx: Any, folder: str) -> Any:
    """Fail on the elements in a file, which is no part of the spec."""
    return infer(shard, ctx, folder, tuple(json.loads((Path(folder) / "bad.json").read_text())))


def _act(stage: str, ids: np.ndarray, folder: str, bad: tuple[int, ...], dies: int) -> None:
    if folder:
        with open(Path(folder) / stage, "a") as file:
            file.write("".join(f"{i}\n" for i in ids))
    if dies in ids and not (mark := Path(folder) / f"{stage}-died").exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if found := sorted({*bad} & {*ids.tolist()}):
        raise ValueError(f"{stage} of {found[0]}")


def bits(shard: Any) -> Any:
    """Return the columns that don't depend on the worker."""
    return {name: shard[name] for name in ("id", "noise", "score", "step", "replica")}


def decode_half_before_first_inference(x: np.ndarray, folder: str, half: int) -> np.ndarray:
    """Wait on a worker that can't infer."""
    if x[0] >= half and not os.environ.get("CUDA_VISIBLE_DEVICES"):
        _until(Path(folder) / "inferred")
    return x


def infer_first(x: np.ndarray, folder: str) -> np.ndarray:
    (Path(folder) / "inferred").touch()
    return x


def length(x: np.ndarray) -> int:
    """Return a value that has no rows."""
    return len(x)


def infer_id(shard: Any) -> Any:
    return {"id": shard["id"]}


def not_four(x: int) -> int:
    if x == 4:
        raise ValueError("four")
    return x


COUNTED = 120


def counted(folder: str) -> Iterator[int]:
    for i in range(COUNTED):
        with open(Path(folder) / "read", "a") as file:
            file.write(f"{i}\n")
        yield i


def unchanged(x: np.ndarray) -> np.ndarray:
    return x


def unchanged_checked(x: np.ndarray, folder: str) -> np.ndarray:
    """Fail on the elements in a file, which is no part of the spec."""
    if found := sorted({*json.loads((Path(folder) / "bad.json").read_text())} & {*x.tolist()}):
        raise ValueError(f"inference of {found[0]}")
    return x


# -- a training behind a decode --------------------------------------------------------------


def decode_rows(shard: Any, ctx: Any, folder: str = "", dies: int = -1) -> Any:
    """Return a row of each element, with noise; the element `dies` ends the process once."""
    ids = np.asarray(ctx.elements)
    _act("decode", ids, folder, (), dies)
    noise = ctx.rng.standard_normal(shard["x"].shape).astype(np.float32) * np.float32(1e-3)
    return {**shard, "x": shard["x"] + noise, "id": ids}


def gradients_of_decoded(shard: Any, weights: Any, folder: str = "", dies: int = -1) -> Any:
    bad = Path(folder) / "bad.json"
    _act("train", shard["id"], folder, tuple(json.loads(bad.read_text())) if bad.exists() else (), dies)
    return training_functions.gradients(shard, weights)


def all_gradients(shard: Any, weights: Any, ctx: Any, folder: str = "", dies: int = -1) -> Any:
    """Return the sum of all replicas' gradients on replica 0, and zeros on the others."""
    own = gradients_of_decoded(shard, weights, folder, dies)
    total = ctx.all_reduce("sum", own)
    return {name: value if ctx.replica_id_in_sync_group == 0 else value * 0 for name, value in total.items()}
