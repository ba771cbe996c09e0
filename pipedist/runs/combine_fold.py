"""The fold of a `combine` function, which is user code: it runs on workers, in blocks of steps.

The blocks are nodes of the fixed tree: node(0, n) over steps of node(0, R) over replicas.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Unpack

import anyio
import anyio.abc

from pipedist.core.types import Tree
from pipedist.runs.folds import Fold, FoldOptions
from pipedist.spec import Per

if TYPE_CHECKING:
    from pipedist.outputs.parts import StageSink

BLOCK_STEPS = 16
"""Number of nodes for one fold call; a power of two, so that a block is a node of the fixed tree."""

FoldCall = Callable[[list[list[Tree]]], Awaitable[Tree]]
"""Folds groups on a worker: each inner list by the fixed tree, then the resulting nodes."""


class CombineFold(Fold):
    """The fold of a `combine` function, which runs on workers.

    At most `calls_max` fold calls run at a time.
    """

    def __init__(
        self,
        name: str,
        per: Per,
        call: FoldCall,
        sink: StageSink | None,
        *,
        calls_max: int,
        **options: Unpack[FoldOptions],
    ) -> None:
        super().__init__(name, per, sink, **options)
        self._call = call
        self._room = anyio.CapacityLimiter(calls_max)
        self._levels: list[_Level] = []
        self._running = 0
        self._idle = anyio.Event()
        self._tasks: anyio.abc.TaskGroup | None = None

    def attach(self, tasks: anyio.abc.TaskGroup) -> None:
        """Set the task group in which fold calls run."""
        self._tasks = tasks

    async def step_value(self, parts: Sequence[Tree]) -> Tree:
        """Return the value of a single step, None if it made no call."""
        node = await self._fold([list(parts)])
        return node[0] if node else None

    async def _take(self, steps: Sequence[Sequence[Tree]]) -> None:
        for parts in steps:
            await self._put(0, list(parts))

    async def _put(self, level: int, group: list[Tree]) -> None:
        """Append a node's group to a level, and fold a full block."""
        if level == len(self._levels):
            self._levels.append(_Level())
        here = self._levels[level]
        here.groups.append(group)
        if len(here.groups) == BLOCK_STEPS:
            groups, here.groups = here.groups, []
            place = here.blocks
            here.blocks += 1
            here.folding[place] = groups
            await self._fold_later(level, place, groups)

    async def _fold_later(self, level: int, place: int, groups: list[list[Tree]]) -> None:
        assert self._tasks is not None  # `attach` was called before the first step
        borrower = object()
        await self._room.acquire_on_behalf_of(borrower)
        if self._running == 0:
            self._idle = anyio.Event()
        self._running += 1

        async def run() -> None:
            try:
                node = await self._fold(groups)
            finally:
                self._room.release_on_behalf_of(borrower)
            here = self._levels[level]
            del here.folding[place]
            here.folded[place] = node
            await self._promote(level)
            self._running -= 1
            if self._running == 0:
                self._idle.set()

        self._tasks.start_soon(run, name=f"fold of {self.name}")

    async def _promote(self, level: int) -> None:
        """Move folded blocks to the next level, in order."""
        here = self._levels[level]
        while here.promoted in here.folded:
            node = here.folded.pop(here.promoted)
            here.promoted += 1
            await self._put(level + 1, node)

    def _scope_state(self) -> dict[str, Tree]:
        levels = [
            [each.groups, each.blocks, each.promoted, [*each.folded.items()], [*each.folding.items()]]
            for each in self._levels
        ]
        return {"levels": levels}

    async def _restore_scope(self, state: dict[str, Tree]) -> None:
        for groups, blocks, promoted, folded, folding in state["levels"]:
            self._levels.append(_Level(groups, blocks, promoted, dict(folded), dict(folding)))
        for number, here in enumerate(list(self._levels)):
            for place, groups in list(here.folding.items()):
                await self._fold_later(number, place, groups)
            await self._promote(number)

    async def _fold(self, groups: list[list[Tree]]) -> list[Tree]:
        """Return the node of some groups, as a group of one or zero nodes."""
        made = [g for g in groups if g]
        if sum(len(g) for g in made) <= 1:
            return made[0] if made else []
        return [await self._call(groups)]

    async def _scope_value(self) -> Tree:
        while self._running:
            await self._idle.wait()
        node: list[Tree] | None = None
        for level in self._levels:
            groups = level.groups + ([] if node is None else [node])
            node = await self._fold(groups) if groups else node
        self._levels = []
        if node and node[0] is None:
            raise ValueError("the combine function returned None for the last fold: is a `return` missing?")
        return node[0] if node else None


@dataclass(slots=True)
class _Level:
    """One level of the tree of blocks.

    Args:
        groups: nodes of the incomplete block.
        blocks: number of full blocks so far.
        promoted: number of blocks whose nodes were moved to the next level.
        folded: nodes of folded blocks that wait for an earlier block.
        folding: full blocks that are not folded yet.
    """

    groups: list[list[Tree]] = field(default_factory=list)
    blocks: int = 0
    promoted: int = 0
    folded: dict[int, list[Tree]] = field(default_factory=dict)
    folding: dict[int, list[list[Tree]]] = field(default_factory=dict)
