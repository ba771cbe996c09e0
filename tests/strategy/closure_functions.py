"""Closures that travel by name."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pipedist

WAIT_S = 60.0


def increment(x: Any) -> Any:
    return x + 1


async def double_later(x: Any) -> Any:
    return 2 * x


def step_and_replicas(*, ctx: pipedist.ReplicaContext) -> tuple[int, int]:
    return ctx.replica_id_in_sync_group, ctx.num_replicas_in_sync


def fail(text: str) -> None:
    raise ValueError(text)


def wait_for(path: str) -> str:
    """Return as soon as a file exists."""
    end = time.monotonic() + WAIT_S
    while not Path(path).exists():
        if time.monotonic() > end:
            raise TimeoutError(path)
        time.sleep(0.005)
    return path


def fail_after(path: str, text: str) -> None:
    wait_for(path)
    raise ValueError(text)


def touch_and_fail(path: str, text: str) -> None:
    Path(path).touch()
    raise ValueError(text)


def die_once(marker: str, value: Any) -> Any:
    """Return `value`; the first process that tries is killed."""
    if not Path(marker).exists():
        Path(marker).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return value


def add(variable: Any, delta: Any) -> Any:
    return variable.assign_add(delta)


async def add_later(variable: Any, delta: Any) -> Any:
    variable.assign_add(delta)
    return variable


def add_and_die_once(variable: Any, delta: Any, marker: str) -> Any:
    variable.assign_add(delta)
    return die_once(marker, delta)


def mix(variable: Any, x: float) -> float:
    """A step whose order matters."""
    old = float(variable)
    variable.assign_sub(0.3 * old - x)
    return old


def mix_after(variable: Any, x: float, path: str) -> float:
    wait_for(path)
    return mix(variable, x)


def mix_and_touch(variable: Any, x: float, path: str) -> float:
    Path(path).touch()
    return mix(variable, x)
