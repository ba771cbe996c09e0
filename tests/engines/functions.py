"""Replica functions of these tests."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np


def roots(shard: np.ndarray) -> np.ndarray:
    return np.sqrt(shard.astype(np.float64))


def slow_roots(shard: np.ndarray, ctx: Any, begun: str) -> np.ndarray:
    """Report that a step has begun; take long enough that a process can be killed meanwhile."""
    Path(begun, f"{ctx.step}-{ctx.replica_id_in_sync_group}-{os.getpid()}").touch()
    time.sleep(0.02)
    return roots(shard)


def dies_once(shard: np.ndarray, ctx: Any, marker: str) -> np.ndarray:
    if ctx.step == 3 and not os.path.exists(marker):
        Path(marker).touch()
        os.kill(os.getppid(), signal.SIGKILL)  # the supervisor; this process dies with it
        time.sleep(60)
    return roots(shard)


def leaves_one_behind(shard: np.ndarray, ctx: Any, marker: str) -> np.ndarray:
    """As `dies_once`, with a process of its own that outlives it and has its standard error."""
    if ctx.step == 3 and not os.path.exists(marker):
        stays = subprocess.Popen(["sleep", "300"], start_new_session=True)
        Path(marker).write_text(str(stays.pid))
    return dies_once(shard, ctx, f"{marker}.died")


def dies_always(shard: np.ndarray) -> np.ndarray:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)
    return shard


def dies_of_threes(shard: np.ndarray) -> np.ndarray:
    if (shard % 8 == 3).any():
        os.kill(os.getpid(), signal.SIGKILL)
    return shard


def raises(shard: np.ndarray) -> np.ndarray:
    raise ValueError("no")


def threads(shard: np.ndarray) -> int:
    return int(os.environ["OMP_NUM_THREADS"])
