"""A fold that goes on from its state and log gives the same bits as one that was never left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from pipedist.errors import JournalError
from pipedist.journal.log_format import LogEnd, RecordLog, read_log
from pipedist.protocol.codec import decode, encode
from pipedist.reduction.tree import FoldTree, Reduction
from pipedist.runs.combine_fold import CombineFold
from pipedist.runs.folds import Fold, Per
from pipedist.runs.gather_fold import GatherFold
from pipedist.runs.reduce_fold import ReduceFold

SUM = Reduction.of("sum", 0)
STEPS = 75


async def slow_fold(groups: list[list[str]]) -> str:
    await anyio.sleep(0.0005)
    outer: FoldTree[str] = FoldTree(lambda a, b: f"({a} {b})")
    for index, group in enumerate(groups):
        inner: FoldTree[str] = FoldTree(lambda a, b: f"({a} {b})")
        for place, leaf in enumerate(group):
            inner.push(place, leaf)
        if group:
            outer.push(index, inner.result() or "")
    return outer.result() or ""


def made(kind: str, per: Per, log: RecordLog | None) -> Fold:
    match kind:
        case "reduce":
            return ReduceFold("t", per, SUM, None, log=log)
        case "gather":
            return GatherFold("t", per, 0, None, log=log)
        case _:
            return CombineFold("t", per, slow_fold, None, calls_max=2, log=log)


def parts(kind: str, step: int) -> list[Any]:
    rng = np.random.default_rng(step)
    values = [rng.normal(size=3).astype(np.float32) for _ in range(step % 4)]
    if kind == "reduce":
        return [SUM.partial(value) for value in values]
    return values if kind == "gather" else [f"{step}.{place}" for place in range(len(values))]


async def result(kind: str, per: Per, path: Path, cuts: list[int]) -> Any:
    """Fold all steps, by one fold after the other: each goes on from what is left of the one before."""
    end, state = LogEnd(0, 0), None
    for first, last in zip([0, *cuts], [*cuts, STEPS], strict=True):

        def fails(error: OSError) -> JournalError:
            return JournalError(str(error))

        import os

        log = RecordLog(os.open(path, os.O_RDWR | os.O_CREAT), end, fails)
        fold = made(kind, per, log)
        async with anyio.create_task_group() as tasks:
            if isinstance(fold, CombineFold):
                fold.attach(tasks)
            if state is not None:
                entries = ((entry.meta, decode(frames)) for entry, frames in read_log(path, end))
                await fold.restore(decode(encode(state)), entries)
            for step in range(first, last):
                await fold.add(step // 20, [parts(kind, step)])
            if last == STEPS:
                await fold.finish(4)
            state, end = fold.state(), log.end()
            tasks.cancel_scope.cancel()  # what was running of a combine is lost
        log.close()
    return fold.result


@pytest.mark.asyncio
@pytest.mark.parametrize("per", ["run", "epoch", "step"])
@pytest.mark.parametrize("kind", ["reduce", "gather", "combine"])
async def test_a_fold_continues_from_the_state_of_another(kind: str, per: Per, tmp_path: Path) -> None:
    straight = await result(kind, per, tmp_path / "log", [])
    for cuts in ([0], [1], [19, 20, 21], [31, 32, 33], [5, 40, 74], [STEPS]):
        again = await result(kind, per, tmp_path / f"log{cuts}", cuts)
        assert b"".join(map(bytes, encode(again))) == b"".join(map(bytes, encode(straight))), cuts


@pytest.mark.asyncio
async def test_blocks_that_were_folded_and_not_moved_up_are_moved_up() -> None:
    """What a fold is when it waits for room between two levels."""
    straight = CombineFold("t", "run", slow_fold, None, calls_max=2)
    again = CombineFold("t", "run", slow_fold, None, calls_max=2)
    async with anyio.create_task_group() as tasks:
        for fold in (straight, again):
            fold.attach(tasks)
        await straight.add(0, [[str(step)] for step in range(16)])
        await straight.finish(1)
        node = await slow_fold([[str(step)] for step in range(16)])
        state = {"levels": [([], 1, 0, [(0, [node])], [])]}
        await again.restore({"epoch": 0, "nothing": -1, "finished": False, **state}, [])
        await again.finish(1)
    assert again.result == straight.result == node
