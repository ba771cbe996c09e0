"""Folds: how the components of a stage become its value, in step order, whatever arrived first.

A fold takes the parts of each step, in step order, and gives one value a scope: the run, an
epoch, or a step (`per`). The parts of a step are those of its calls in replica order; empty
shards make no call and are those of the last replicas, so part r is replica r's. Built-in ops
fold partials here, with NumPy. A `combine` function is user code: it runs on workers, in blocks
of `BLOCK_STEPS` steps, shaped so that the blocks are nodes of the fixed tree: node(0, n) over
steps of node(0, R) over replicas.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Literal

import anyio
import anyio.abc
import anyio.to_thread
import numpy as np

from pipedist import trees
from pipedist.errors import OutputError
from pipedist.program import Tree
from pipedist.reductions import FoldTree, Partial, Reduction
from pipedist.values import PerReplica, gather

if TYPE_CHECKING:
    from pipedist.outputs import Sink
from pipedist.partial_runs import push_steps

Per = Literal["run", "epoch", "step"]

BLOCK_STEPS = 16
"""Nodes that one fold call folds; a power of two, so that a block is a node of the fixed tree."""

TINY_PARTS = 1024
TINY_BYTES = 1024
"""So many parts, of about so few bytes each, are put end to end before there are more of them."""

THREAD_BYTES = 1 << 20
"""A piece larger than this is written in a thread, so that the loop stays responsive."""


class Fold(ABC):
    """The value or values of one reduce or gather stage.

    Args:
        name: the stage.
        per: what gets a value of its own.
        sink: where values go; None: they are kept.
        keep: keep the values, though there may be a sink: a later phase reads them.
    """

    def __init__(self, name: str, per: Per, sink: Sink | None, *, keep: bool = True) -> None:
        self.name = name
        self.kept = keep
        """Whether `result` holds the values; otherwise they are only in the sink."""
        self._values: list[Tree] = []
        self._per = per
        self._sink = sink
        self._epoch = 0
        """The epoch that is open; those before it have their values."""
        self._fresh: list[Tree] | None = None
        """Values that `take_fresh` has not taken; None: nobody does."""
        self._nothing = 0
        """Components so far, while all of them are None; -1 from the first other one."""

    async def add(self, epoch: int, steps: Sequence[Sequence[Tree]]) -> None:
        """Take the parts of the next steps, all of one epoch.

        Raises:
            ValueError: the components do not fit together.
            TypeError: a component is of a kind that can't be folded.
            OverflowError: an integer result does not fit its dtype.
            CallError: a `combine` function failed.
            OutputError: the file can't be written.
        """
        if self._nothing >= 0:
            made = [part for parts in steps for part in parts]
            self._nothing = self._nothing + len(made) if all(map(self._is_none, made)) else -1
        if self._per == "epoch":
            await self._close_epochs(epoch)
        if self._per == "step":
            for parts in steps:
                await self._take((parts,))
                await self._close()
        else:
            await self._take(steps)

    def watch(self) -> None:
        """Keep new values for `take_fresh`, from now on."""
        self._fresh = []

    def take_fresh(self) -> list[Tree]:
        """Return the values since the last time, in order."""
        fresh, self._fresh = self._fresh or [], []
        return fresh

    async def end_epoch(self, epoch: int) -> None:
        """Take note that the epoch, to which all steps since the last one belong, is over.

        Raises:
            As `add`.
        """
        if self._per == "epoch":
            await self._close_epochs(epoch + 1)

    async def finish(self, epochs: int) -> None:
        """Take note that there are no more steps, of so many epochs in all.

        Raises:
            As `add`.
        """
        if self._per == "run":
            await self._close()
        elif self._per == "epoch":
            await self._close_epochs(epochs)

    @property
    def of_nothing(self) -> bool:
        """Whether there were components, and every one of them was None."""
        return self._nothing > 0

    def _is_none(self, part: Tree) -> bool:
        return part is None

    @property
    def result(self) -> Tree:
        """The stage's value: one, or a list of them in order."""
        if self._per == "run":
            return self._values[0] if self._values else None
        return self._values

    async def _close_epochs(self, before: int) -> None:
        while self._epoch < before:
            await self._close()
            self._epoch += 1

    async def _close(self) -> None:
        value = await self._scope_value()
        if self.kept:
            self._values.append(value)
        if self._fresh is not None:
            self._fresh.append(value)
        await self._deliver(value)

    async def _deliver(self, value: Tree) -> None:
        if self._sink is not None:
            await write(self._sink, value)

    @abstractmethod
    async def _take(self, steps: Sequence[Sequence[Tree]]) -> None:
        """Take the parts of steps into the current scope."""

    @abstractmethod
    async def _scope_value(self) -> Tree:
        """Return the current scope's value, and begin a new scope."""


async def write(sink: Sink, value: Tree) -> None:
    """Append to a sink; a large value in a thread."""
    if array_bytes(value) > THREAD_BYTES:
        await anyio.to_thread.run_sync(sink.append, value)
    else:
        sink.append(value)


def array_bytes(value: Tree) -> int:
    """Return the bytes of a tree's arrays."""
    if isinstance(value, np.ndarray):
        return value.nbytes
    return sum(leaf.nbytes for leaf in trees.flatten(value)[0] if isinstance(leaf, np.ndarray))


class ReduceFold(Fold):
    """A built-in op; its parts are partials, made on the workers."""

    def __init__(
        self, name: str, per: Per, reduction: Reduction, sink: Sink | None, *, keep: bool = True
    ) -> None:
        super().__init__(name, per, sink, keep=keep)
        self._reduction = reduction
        self._fits = sink is None
        """Whether a value like that of the first call is known to fit its file."""
        self._begin()

    def _is_none(self, part: Partial) -> bool:
        skeleton, leaves = part
        return skeleton is None and not leaves

    def _begin(self) -> None:
        self._steps: FoldTree[Partial] = FoldTree(self._reduction.combine)
        self._index = 0

    async def _take(self, steps: Sequence[Sequence[Partial]]) -> None:
        if not self._fits:
            self._check_first(steps)
        push_steps(self._reduction, self._steps, self._index, steps)
        self._index += len(steps)

    async def _scope_value(self) -> Tree:
        partial = self._steps.result()
        self._begin()
        return self._reduction.finish(partial)

    def _check_first(self, steps: Sequence[Sequence[Partial]]) -> None:
        """Tell at once what a file can't hold: a call's own value is like the final one."""
        first = next((part for parts in steps for part in parts), None)
        if first is None or self._sink is None:
            return
        self._fits = True
        with suppress(OverflowError):  # a sum may come back into the range of its dtype
            self._sink.check(self._reduction.finish(first))


class GatherFold(Fold):
    """Components end to end. With a sink and one value a run, they stream into the file."""

    def __init__(self, name: str, per: Per, axis: int, sink: Sink | None, *, keep: bool = True) -> None:
        super().__init__(name, per, sink, keep=keep)
        self._axis = axis
        self._streams = sink is not None and per == "run"
        self._parts: list[Tree] = []
        """What is kept; blocks of tiny parts are one part already."""
        self._whole = 0
        """How many of them are such blocks, at the front."""
        self._checked = False
        self._steps = 0

    async def _take(self, steps: Sequence[Sequence[Tree]]) -> None:
        first, self._steps = self._steps, self._steps + len(steps)
        made = [part for parts in steps for part in parts]
        if made and not self._checked:  # what can't be gathered at all is told at once, not at the end
            try:
                self._together(made)
            except (TypeError, ValueError) as error:
                raise type(error)(self._located(first, steps, error)) from error
            self._checked = True
        if self._streams and self._sink is not None:
            for step, parts in enumerate(steps, first):
                for replica, part in enumerate(parts):
                    try:
                        await write(self._sink, part)
                    except OutputError as error:
                        raise OutputError(f"{error} (step {step}, replica {replica})") from error
        if self.kept or not self._streams:
            self._parts += made
            if len(self._parts) - self._whole >= TINY_PARTS:
                self._compact()

    def _located(self, first: int, steps: Sequence[Sequence[Tree]], error: Exception) -> str:
        """Return the text of an error with the component that does not fit, alone or behind the first."""
        seen: list[Tree] = []
        for step, parts in enumerate(steps, first):
            for replica, part in enumerate(parts):
                seen = [*seen[:1], part]
                for tried in ([part], seen):
                    try:
                        self._together(tried)
                    except (TypeError, ValueError) as fault:
                        hint = ""
                        if isinstance(part, list | tuple):
                            hint = "; a list is a tree of values: return np.array(...) of it for one array"
                        return f"step {step}, replica {replica}: {fault}{hint}"
        return str(error)

    def _compact(self) -> None:
        """Put tiny parts end to end: a million of them cost more than what is in them."""
        tiny = self._parts[self._whole :]
        if sum(map(array_bytes, tiny)) <= TINY_BYTES * len(tiny):
            self._parts[self._whole :] = [self._together(tiny)]
        self._whole = len(self._parts)

    def _together(self, parts: Sequence[Tree]) -> Tree:
        if not parts:
            return None
        if {type(part) for part in parts} == {np.ndarray} and len({part.dtype for part in parts}) == 1:
            with suppress(ValueError):  # they don't fit: `gather` says why
                return np.concatenate(parts, axis=self._axis)
        return gather(PerReplica(parts), self._axis, len(parts))

    async def _scope_value(self) -> Tree:
        parts, self._parts, self._whole = self._parts, [], 0
        return self._together(parts)

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

    def __init__(
        self, name: str, per: Per, call: FoldCall, sink: Sink | None, *, keep: bool = True, calls_max: int
    ) -> None:
        super().__init__(name, per, sink, keep=keep)
        self._call = call
        self._room = anyio.CapacityLimiter(calls_max)
        self._levels: list[_Level] = []
        self._running = 0
        self._idle = anyio.Event()
        self._tasks: anyio.abc.TaskGroup | None = None

    def attach(self, tasks: anyio.abc.TaskGroup) -> None:
        """Give the task group in which fold calls run."""
        self._tasks = tasks

    async def step_value(self, parts: Sequence[Tree]) -> Tree:
        """Return the value of one step by itself, None if it made no call."""
        node = await self._fold([list(parts)])
        return node[0] if node else None

    async def _take(self, steps: Sequence[Sequence[Tree]]) -> None:
        for parts in steps:
            await self._put(0, list(parts))

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
