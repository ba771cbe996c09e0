"""Replica functions of the acceptance tests, importable by name in workers."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np


def kinds(x: np.ndarray) -> dict[str, Any]:
    """Every kind of leaf and node that the codec knows."""
    print("a line for the log")
    return {
        "text": "é" * len(x),
        "raw": b"\x00\xff",
        "big": 2**100,
        "complex": 1 + 2j,
        "scalar": np.float32(1.5),
        "none": None,
        "pair": (1, [2.5, True]),
        "slice": slice(1, 5, 2),
        "range": range(3),
        "texts": np.array(["a", "bc"]),
        "days": np.array(["2020-01-01"], "datetime64[D]"),
        "medium": np.arange(300, dtype=np.int16),
        "rows": x,
    }


def wide(x: np.ndarray) -> np.ndarray:
    """Rows of 40 KiB: a step's gather has frames of its own."""
    return np.repeat(x[:, None].astype(np.float32), 10_000, axis=1)


def minus(x: np.ndarray, mean: np.ndarray) -> np.ndarray:
    return x[:, :3] - mean[:3]


def meets(x: np.ndarray, ctx: Any, w: Any) -> np.ndarray:
    return np.asarray(ctx.all_reduce("sum", int(x.sum())) + np.int64(w))[None]


def step(state: Any, value: Any) -> Any:
    return int(np.asarray(value).reshape(-1)[0])


def raises(x: np.ndarray) -> np.ndarray:
    raise ValueError("as it should")


def floats(x: np.ndarray, ctx: Any, pause_s: float = 0.0) -> np.ndarray:
    """Floats whose sum depends on the order of folding, among them NaN, infinities and -0.0."""
    if pause_s:
        time.sleep(pause_s)
    y = (x[:, None].astype(np.float32) + np.float32(0.1)) ** np.array([1.5, 0.5, -1.0, 1.0], np.float32)
    y[:, 2] = np.where(x % 53 == 7, np.float32("inf"), y[:, 2])
    y[:, 3] = np.where(x % 37 == 5, np.float32("nan"), np.float32(-0.0))
    return y + ctx.rng.standard_normal((len(x), 1)).astype(np.float32) * np.array([1, 1, 1, 0], np.float32)


def minus_total(x: np.ndarray, total: np.ndarray) -> np.ndarray:
    return x - np.nan_to_num(total)


def fold(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Sums of floats: the order of folding shows in their bits."""
    return a[:1].sum(0, keepdims=True) + b[:1].sum(0, keepdims=True)


def once(folder: str, ctx: Any) -> bool:
    """Whether this is the call's first attempt anywhere."""
    try:
        Path(folder, f"{ctx.stage}-{ctx.step}-{ctx.replica_id_in_sync_group}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def fragile(x: np.ndarray, ctx: Any, folder: str, pause_s: float, every: int) -> np.ndarray:
    """Every n-th call ends its process, the first time: by a fault of memory, or by exiting."""
    call = ctx.step * ctx.num_replicas_in_sync + ctx.replica_id_in_sync_group
    if call % every == every - 1 and once(folder, ctx):
        if call // every % 2:
            ctypes.string_at(0)
        os._exit(call % 3)
    return floats(x, ctx, pause_s)


def trapped(x: np.ndarray, ctx: Any, folder: str, point: str) -> np.ndarray:
    """The calls of one step, the first time, set a trap in their process, which kills it at a point."""
    if ctx.step == 3 and once(folder, ctx):
        traps = {"before receive": _before_receive, "after compute": _after_compute, "mid-send": _mid_send}
        traps[point]()
    return floats(x, ctx)


def _die(*_args: Any, **_more: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def _before_receive() -> None:
    from pipedist.transport.dealer import Dealer

    Dealer.poll = Dealer.recv = _die  # type: ignore[method-assign]


def _after_compute() -> None:
    from pipedist.transport.dealer import Dealer

    Dealer.send = _die  # type: ignore[method-assign]


def _mid_send() -> None:
    """Send the first frame of two, and die."""
    from pipedist.transport.dealer import Dealer

    def first_of_two(self: Any, parts: list[Any], **_more: Any) -> None:
        self._socket.send_multipart([*parts, b"more"][:1], 2)  # ZMQ_SNDMORE: the rest never comes
        _die()

    Dealer._send_parts = first_of_two  # type: ignore[method-assign, assignment]


def holds_the_interpreter(x: np.ndarray, hold_s: float) -> np.ndarray:
    """Computes in C with the interpreter's lock held: no other thread of the process runs."""
    libc = ctypes.PyDLL(None)
    libc.usleep(int(hold_s * 1e6))
    return x


def hangs(x: np.ndarray, folder: str, ctx: Any) -> np.ndarray:
    """The first call never ends by itself, and says when it began; with the interpreter's lock held."""
    if ctx.step == 0 and once(folder, ctx):
        Path(folder, "began").write_text(str(time.monotonic()))
        libc = ctypes.PyDLL(None)
        libc.usleep(600_000_000)
    return x


def patient(x: np.ndarray, folder: str, pause_s: float) -> np.ndarray:
    """Take time until the file `enough` exists."""
    deadline = time.monotonic() + 30 * pause_s
    while not Path(folder, "enough").exists() and time.monotonic() < deadline:
        time.sleep(pause_s)
    return x


def quick(x: np.ndarray) -> np.ndarray:
    return x
