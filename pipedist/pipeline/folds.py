"""Folds: how the components of a stage become its value, in step order, whatever arrived first.

A fold takes the parts of each step, in step order, and gives one value a scope: the run, an
epoch, or a step (`per`). Built-in ops fold partials here, with NumPy. A `combine` function is
user code: it runs on workers, in blocks of `BLOCK_STEPS` steps, shaped so that the blocks are
nodes of the fixed tree: node(0, n) over steps of node(0, R) over replicas.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal

import anyio
import anyio.abc
import anyio.to_thread
import numpy as np

from pipedist import trees
from pipedist.outputs import Sink
from pipedist.program import Tree
from pipedist.reductions import FoldTree, Partial, Reduction
from pipedist.values import PerReplica, gather

Per = Literal["run", "epoch", "step"]

BLOCK_STEPS = 16
"""Nodes that one fold call folds; a power of two, so that a block is a node of the fixed tree."""

THREAD_BYTES = 1 << 20
"""A piece larger than this is written in a thread, so that the loop stays responsive."""


class Fold(ABC):
    """The value or values of one reduce or gather stage.

    Args:
        name: the stage.
        per: what gets a value of its own.
        sink: where values go; None: they are kept.
        keep: keep the values though there is a sink: a later phase reads them.
    """

    def __init__(self, name: str, per: Per, sink: Sink | None, *, keep: bool = True) -> None:
        self.name = name
        self.values: list[Tree] = []
        """The finished values, if they are kept."""
        self._per = per
        self._sink = sink
        self._keep = keep
        self._epoch: int | None = None

    async def add(self, epoch: int, parts: Sequence[Tree | None]) -> None:
        """Take the parts of the next step, in replica order; None where no call was made."""
        if self._per == "epoch" and self._epoch is not None and epoch != self._epoch:
            await self._close()
        self._epoch = epoch
        await self._take(parts)
        if self._per == "step":
            await self._close()

    async def finish(self) -> None:
        """Take note that there are no more steps."""
        if self._per == "run" or (self._per == "epoch" and self._epoch is not None):
            await self._close()

    @property
    def kept(self) -> bool:
        """Whether `result` holds the values; otherwise they are only in the sink."""
        return self._keep

    @property
    def result(self) -> Tree:
        """The stage's value: one, or a list of them in order."""
        if self._per == "run":
            return self.values[0] if self.values else None
        return self.values

    async def _close(self) -> None:
        value = await self._scope_value()
        if self._keep:
            self.values.append(value)
        await self._deliver(value)

    async def _deliver(self, value: Tree) -> None:
        if self._sink is not None:
            await write(self._sink, value)

    @abstractmethod
    async def _take(self, parts: Sequence[Tree | None]) -> None:
        """Take a step's parts into the current scope."""

    @abstractmethod
    async def _scope_value(self) -> Tree:
        """Return the current scope's value, and begin a new scope."""


async def write(sink: Sink, value: Tree) -> None:
    """Append to a sink; a large value in a thread."""
    size = sum(x.nbytes for x in trees.flatten(value)[0] if isinstance(x, np.ndarray))
    if size > THREAD_BYTES:
        await anyio.to_thread.run_sync(sink.append, value)
    else:
        sink.append(value)


class ReduceFold(Fold):
    """A built-in op; its parts are partials, made on the workers."""

    def __init__(
        self, name: str, per: Per, reduction: Reduction, sink: Sink | None, *, keep: bool = True
    ) -> None:
        super().__init__(name, per, sink, keep=keep)
        self._reduction = reduction
        self._begin()

    def _begin(self) -> None:
        self._steps: FoldTree[Partial] = FoldTree(self._reduction.combine)
        self._index = 0

    async def _take(self, parts: Sequence[Tree | None]) -> None:
        node = step_partial(self._reduction, parts)
        if node is not None:
            self._steps.push(self._index, node)
        self._index += 1

    async def _scope_value(self) -> Tree:
        partial = self._steps.result()
        self._begin()
        return self._reduction.finish(partial)


def step_partial(reduction: Reduction, parts: Sequence[Partial | None]) -> Partial | None:
    """Fold the partials of one step in replica order."""
    if len(parts) == 1:
        return parts[0]
    replicas: FoldTree[Partial] = FoldTree(reduction.combine)
    for replica, part in enumerate(parts):
        if part is not None:
            replicas.push(replica, part)
    return replicas.result()


class GatherFold(Fold):
    """Components end to end. With a sink and one value a run, they stream into the file."""

    def __init__(self, name: str, per: Per, axis: int, sink: Sink | None, *, keep: bool = True) -> None:
        super().__init__(name, per, sink, keep=keep)
        self._axis = axis
        self._streams = sink is not None and per == "run"
        self._parts: list[Tree] = []
        self._checked = False

    async def _take(self, parts: Sequence[Tree | None]) -> None:
        made = [p for p in parts if p is not None]
        if made and not self._checked:  # what can't be gathered at all is told at once, not at the end
            gather(PerReplica(made), self._axis, len(made))
            self._checked = True
        if self._streams and self._sink is not None:
            for part in made:
                await write(self._sink, part)
        if self._keep or not self._streams:
            self._parts += made

    async def _scope_value(self) -> Tree:
        parts, self._parts = self._parts, []
        return gather(PerReplica(parts), self._axis, len(parts)) if parts else None

    async def _deliver(self, value: Tree) -> None:
        if not self._streams:
            await super()._deliver(value)


FoldCall = Callable[[list[list[Tree]]], Awaitable[Tree]]
"""Folds groups on a worker: each inner list by the fixed tree, then their nodes."""


class CombineFold(Fold):
    """A `combine` function, which runs on workers.

    Args:
        call: executes one fold call.
        calls_max: fold calls of this stage that may run at one time.
    """

    def __init__(self, name: str, per: Per, call: FoldCall, sink: Sink | None, *, calls_max: int) -> None:
        super().__init__(name, per, sink)
        self._call = call
        self._room = anyio.CapacityLimiter(calls_max)
        self._levels: list[_Level] = []
        self._running = 0
        self._idle = anyio.Event()
        self._tasks: anyio.abc.TaskGroup | None = None

    def attach(self, tasks: anyio.abc.TaskGroup) -> None:
        """Give the task group in which fold calls run."""
        self._tasks = tasks

    async def step_value(self, parts: Sequence[Tree | None]) -> Tree:
        """Return the value of one step by itself."""
        node = await self._fold([[p for p in parts if p is not None]])
        return node[0] if node else None

    async def _take(self, parts: Sequence[Tree | None]) -> None:
        await self._put(0, [p for p in parts if p is not None])

    async def _put(self, level: int, group: list[Tree]) -> None:
        """Append a node's group to a level; a full block is folded into a node of the next level."""
        if level == len(self._levels):
            self._levels.append(_Level())
        here = self._levels[level]
        here.groups.append(group)
        if len(here.groups) == BLOCK_STEPS:
            groups, here.groups = here.groups, []
            place = here.blocks
            here.blocks += 1
            await self._fold_later(level, place, groups)

    async def _fold_later(self, level: int, place: int, groups: list[list[Tree]]) -> None:
        if self._tasks is None:
            raise RuntimeError("attach() comes before the first step")
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
            self._levels[level].folded[place] = node
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

    async def _fold(self, groups: list[list[Tree]]) -> list[Tree]:
        """Return the node of some groups, as a group of one, or of none."""
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
        return node[0] if node else None


class _Level:
    """One level of the tree of blocks."""

    def __init__(self) -> None:
        self.groups: list[list[Tree]] = []
        """Nodes of the block that is not full."""
        self.blocks = 0
        """Full blocks so far."""
        self.promoted = 0
        """Blocks whose nodes were moved to the next level."""
        self.folded: dict[int, list[Tree]] = {}
        """Nodes of folded blocks that wait for an earlier one."""
