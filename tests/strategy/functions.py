"""Replica functions of these tests that travel by name."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

import pipedist


def double(x: Any) -> Any:
    return 2 * x


async def double_later(x: Any) -> Any:
    return 2 * x


def ids(ctx: pipedist.ReplicaContext) -> tuple[int, int]:
    return ctx.replica_id_in_sync_group, ctx.num_replicas_in_sync


def draw(ctx: pipedist.ReplicaContext) -> float:
    return float(ctx.rng.random())


def where() -> tuple[bool, bool, int]:
    strategy = pipedist.get_strategy()
    return pipedist.has_strategy(), pipedist.in_cross_replica_context(), strategy.num_replicas_in_sync


def fail_on(ctx: pipedist.ReplicaContext, replicas: tuple[int, ...]) -> str:
    if ctx.replica_id_in_sync_group in replicas:
        raise KeyError(f"replica {ctx.replica_id_in_sync_group}")
    return "fine"


def wait_for(file: str) -> str:
    """Return once the file is there, within a minute."""
    deadline = time.monotonic() + 60
    while not Path(file).exists():
        if time.monotonic() > deadline:
            raise TimeoutError(file)
        time.sleep(0.005)
    return "found"


class _Calls:
    count = 0


def _count(_frame: object, event: str, _arg: object) -> None:
    _Calls.count += event == "call"


def calls_since_last(_x: Any) -> float:
    """Return the number of Python calls of this thread since the last call of this function."""
    sys.setprofile(None)
    counted, _Calls.count = _Calls.count, 0
    sys.setprofile(_count)
    return float(counted)


late: dict[str, Any] = {}  # of a worker: the thread of a step that has ended, and its error


def start_late_collective(x: Any, ctx: pipedist.ReplicaContext) -> float:
    """Start a thread that calls a collective when the step has ended."""
    go = late["go"] = threading.Event()

    def run() -> None:
        go.wait(60)
        try:
            ctx.all_reduce("sum", x.sum())
        except Exception as error:
            late["error"] = f"{type(error).__name__}: {error}"

    late["thread"] = threading.Thread(target=run)
    late["thread"].start()
    return float(x[0])


def end_late_collective(_x: Any) -> str:
    late["go"].set()
    late["thread"].join(60)
    return str(late["error"])
