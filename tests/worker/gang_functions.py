"""Replica functions that call collectives."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

import pipedist
from pipedist.collectives.options import CommunicationOptions
from pipedist.worker.context import ReplicaContext, get_replica_context
from pipedist.worker.strategy_views import MergeStrategy

FLOATS = (
    np.random.default_rng(5).normal(size=(8, 1000)).astype(np.float32) * 10.0 ** np.arange(-4, 4)[:, None]
)
"""One row a replica: their sum depends on the order."""


def row(ctx: ReplicaContext) -> Any:
    return FLOATS[ctx.replica_id_in_sync_group].astype(np.float32)


def every_kind(x: Any, ctx: ReplicaContext) -> dict[str, Any]:
    replica = ctx.replica_id_in_sync_group
    total = ctx.all_reduce("sum", {"a": row(ctx), "b": [replica, np.float64(replica) / 3]})
    gathered = ctx.all_gather(np.full((replica % 3, 2), replica), axis=0)
    sent = ctx.broadcast(f"from {replica}", source=1)
    ctx.barrier()
    merged = ctx.merge_call(merge, (row(ctx),), {"scale": 2})
    return {"total": total, "gathered": gathered, "sent": sent, "merged": merged}


def merge(strategy: MergeStrategy, rows: Any, *, scale: Any) -> dict[str, Any]:
    assert get_replica_context() is None
    assert scale.components == (2,) * strategy.num_replicas_in_sync
    return {
        "mean": strategy.reduce("mean", rows, axis=None),
        "rows": strategy.gather(rows, axis=0),
        "own": rows,
        "count": len(strategy.local_results(rows)),
    }


async def every_kind_async(x: Any, ctx: ReplicaContext) -> dict[str, Any]:
    replica = ctx.replica_id_in_sync_group
    beats = 0

    async def beat() -> None:
        nonlocal beats
        while True:
            beats += 1
            await asyncio.sleep(0)

    beating = asyncio.ensure_future(beat())
    total, gathered = await asyncio.gather(
        ctx.all_reduce("sum", {"a": row(ctx), "b": [replica, np.float64(replica) / 3]}),
        ctx.all_gather(np.full((replica % 3, 2), replica), axis=0),
    )
    sent = await ctx.broadcast(f"from {replica}", source=1)
    await asyncio.sleep(0.001)
    await ctx.barrier()
    merged = await ctx.merge_call(merge, (row(ctx),), {"scale": 2})
    beating.cancel()
    assert beats > 1
    return {"total": total, "gathered": gathered, "sent": sent, "merged": merged}


_inside = 0


def one_at_a_time(x: Any, ctx: ReplicaContext) -> list[int]:
    """Would see another replica's code in the middle of its own."""
    global _inside
    seen = []
    for _ in range(5):
        _inside += 1
        time.sleep(0.001)
        seen.append(_inside)
        _inside -= 1
        ctx.barrier()
    return seen


def in_main_thread(x: Any, ctx: ReplicaContext) -> bool:
    ctx.barrier()
    return threading.current_thread() is threading.main_thread()


def raises_on(x: int, ctx: ReplicaContext) -> Any:
    """Replica x raises; the others wait for it."""
    if ctx.replica_id_in_sync_group == x:
        raise KeyError(f"replica {x}")
    return ctx.all_reduce("sum", 1)


def raises_while_it_cleans_up(x: int, ctx: ReplicaContext) -> Any:
    if ctx.replica_id_in_sync_group == x:
        raise KeyError(f"replica {x}")
    try:
        return ctx.all_reduce("sum", 1)
    finally:
        raise OSError("cleaning up")


def returns_on(x: int, ctx: ReplicaContext) -> Any:
    """Replica x returns; the others wait for it."""
    return None if ctx.replica_id_in_sync_group == x else ctx.all_reduce("sum", 1)


def mismatch(kind: str, ctx: ReplicaContext) -> Any:
    """The last replica does something else."""
    odd = ctx.replica_id_in_sync_group == ctx.num_replicas_in_sync - 1
    match kind:
        case "kind":
            return ctx.barrier() if odd else ctx.all_reduce("sum", 1)
        case "op":
            return ctx.all_reduce("mean" if odd else "sum", 1)
        case "shape":
            return ctx.all_reduce("sum", np.ones(3 if odd else 2))
        case "dtype":
            return ctx.all_reduce("sum", np.ones(2, np.int32 if odd else np.float64))
        case "tree":
            return ctx.all_reduce("sum", {"a": 1} if odd else [1])
        case "order":
            first, second = (1, {"b": 1}) if odd else ({"b": 1}, 1)
            ctx.all_reduce("sum", first)
            return ctx.all_reduce("sum", second)
        case "source":
            return ctx.broadcast(1, source=1 if odd else 0)
        case "function":
            return ctx.merge_call(_nothing if odd else _nothing_else)
        case "returned":
            return None if odd else ctx.barrier()
    raise AssertionError(kind)


def _nothing(strategy: MergeStrategy) -> None:
    return None


def _nothing_else(strategy: MergeStrategy) -> None:
    return None


def merge_raises(x: Any, ctx: ReplicaContext) -> Any:
    def body(strategy: MergeStrategy) -> None:
        raise ValueError("in the body")

    return ctx.merge_call(body)


async def merge_stops_async(x: Any, ctx: ReplicaContext) -> Any:
    def body(strategy: MergeStrategy) -> None:
        next(iter([]))

    return await ctx.merge_call(body)


def merge_misuse(x: Any, ctx: ReplicaContext) -> list[str]:
    def body(strategy: MergeStrategy) -> list[str]:
        texts = []
        for name in ("run", "scope", "distribute_dataset", "batch_reduce_to", "extended"):
            try:
                getattr(strategy, name)(None)
            except (RuntimeError, AttributeError) as error:
                texts.append(str(error))
        return texts

    return ctx.merge_call(body)


def dies_once(folder: str, ctx: ReplicaContext) -> Any:
    """Replica 1's worker is killed in the middle of its second collective, the first time."""
    first = ctx.all_reduce("sum", row(ctx))
    if ctx.replica_id_in_sync_group == 1:
        try:
            (Path(folder) / "died").touch(exist_ok=False)
        except FileExistsError:
            pass
        else:
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()
            time.sleep(600)
    return ctx.all_reduce("sum", first)


def hangs_once(folder: str, ctx: ReplicaContext) -> Any:
    """The last replica does not come, the first time; the others are impatient only then."""
    replica, timeout_s = ctx.replica_id_in_sync_group, 0.3
    try:
        (Path(folder) / f"came{replica}").touch(exist_ok=False)
    except FileExistsError:
        timeout_s = 600.0
    else:
        if replica == ctx.num_replicas_in_sync - 1:
            time.sleep(600)
    return ctx.all_reduce("sum", row(ctx), options=CommunicationOptions(timeout_s=timeout_s))


def says_who_it_is(x: Any, ctx: ReplicaContext) -> list[Any]:
    print("replica", ctx.replica_id_in_sync_group)
    ctx.barrier()
    return [ctx.replica_id_in_sync_group, ctx.num_replicas_in_sync, ctx.step, os.getpid(), ctx.device]


def shard_of(x: Any, ctx: ReplicaContext) -> list[Any]:
    total = ctx.all_reduce("sum", len(x))
    return [str(getattr(x, "dtype", type(x).__name__)), list(getattr(x, "shape", [len(x)])), int(total)]


def length(x: Any) -> int:
    return len(x)


class PerReplicaState:
    def __init__(self, scale: Any) -> None:
        self.calls = 0
        self.scale = scale

    def __call__(self, x: Any, ctx: ReplicaContext) -> list[Any]:
        self.calls += 1
        mine = self.calls
        ctx.barrier()
        return [mine, self.calls, float(np.sum(self.scale))]


def read_state(x: Any, w: Any, more: Any = None) -> list[Any]:
    return [w.tolist(), bool(w.flags.writeable), more]


def apply_state(w: Any, nested: Any) -> list[Any]:
    return [w.tolist(), nested["a"][0].tolist()]


def reduce_alone(x: Any, ctx: ReplicaContext) -> Any:
    return pipedist.get_replica_context().all_reduce("sum", 1)  # type: ignore[union-attr]


async def forgets_to_wait(x: Any, ctx: ReplicaContext) -> int:
    """Cancels a collective that the others make."""
    collective = asyncio.ensure_future(ctx.all_reduce("sum", 1))
    await asyncio.sleep(0)
    collective.cancel()
    return ctx.replica_id_in_sync_group


async def forced(x: Any, ctx: ReplicaContext) -> Any:
    return await ctx.all_reduce("sum", 1, options=CommunicationOptions(implementation="shared"))  # type: ignore[arg-type]


_told: dict[int, set[int]] = {}


async def waits_for_the_others(x: int, ctx: ReplicaContext) -> list[int]:
    """Every replica waits until all have been here, without a collective."""
    here = _told.setdefault(ctx.step, set())
    here.add(ctx.replica_id_in_sync_group)
    async with asyncio.timeout(60):
        while len(here) < ctx.num_replicas_in_sync:  # noqa: ASYNC110  # they have loops of their own
            await asyncio.sleep(0.001)
    return sorted(here)
