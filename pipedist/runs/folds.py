"""Folds: turn the components of a stage into its value, in step order.

A fold takes the parts of each step, in step order, and makes one value for each scope (`per`): the run, an
epoch, or a step. The parts of a step are the results of its calls in replica order. Empty shards make no call
and belong to the last replicas, so part r is always replica r's.

Built-in ops fold partials here, with NumPy. A `combine` function is user code, so it runs on workers, in blocks
of steps; the blocks are nodes of the fixed tree: node(0, n) over steps of node(0, R) over replicas.

The progress of a fold can be made durable between any two steps, as its `state`, which is small, and a log of
the values that grow with the run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, TypeVarTuple, Unpack

import anyio
import anyio.abc
import anyio.to_thread
import numpy as np

from pipedist.core import ragged, trees
from pipedist.core.types import Tree
from pipedist.errors import OutputError
from pipedist.reduction.batched import push_steps
from pipedist.reduction.partials import ReduceOp, dtype_of, is_blank, look_of, without_rows
from pipedist.reduction.tree import FoldTree, Partial, Reduction

if TYPE_CHECKING:
    from pipedist.journal.log_format import RecordLog
    from pipedist.outputs.parts import StageSink

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")
Per = Literal["run", "epoch", "step"]

THREAD_BYTES = 1 << 20
THREAD_OBJECTS = 10_000
"""Values with more bytes or leaves are folded and written in a thread: the event loop stays responsive."""


FinishCall = Callable[[Tree, int], Awaitable[Tree]]
"""Calls the `finish` of a stage on a worker, with a whole value, and its number among the values of the stage."""


class FoldOptions(TypedDict, total=False):
    """Options of all folds, see `Fold`."""

    keep: bool
    log: RecordLog | None
    finish: FinishCall | None


class Fold(ABC):
    """The value or values of one reduce or gather stage.

    If components do not fit together, its methods raise ValueError, TypeError or OverflowError.

    Args:
        per: the scope of a value.
        sink: receives the values; None: the values are only kept.
        keep: keep the values even if there is a sink, because a later phase reads them.
        log: receives the values that `restore` can't derive from the state; None: there is no journal.
        finish: makes the values of the stage from those of the fold; None: they are the same.
    """

    def __init__(
        self,
        name: str,
        per: Per,
        sink: StageSink | None,
        *,
        keep: bool = True,
        log: RecordLog | None = None,
        finish: FinishCall | None = None,
    ) -> None:
        self.name = name
        self._finish = finish
        self._closed = 0  # number of values so far
        self._unfinished: list[Tree] = []  # the value of the run, from `prepare` on
        self._log = log
        self._unlogged: list[Tree] = []
        self._is_finished = False
        self.kept = keep  # whether `result` has the values; if not, they are only in the sink
        self._values: list[Tree] = []
        self._per = per
        self._sink = sink
        self._epoch = 0
        self._fresh: list[Tree] | None = None  # values for `take_fresh`; None: `watch` was not called
        self._delivered = 0  # number of values that were given to the sink
        self._misfit: OutputError | None = None
        """Why the file can't hold a value of the last scopes, which the fold keeps nevertheless."""
        self._nothing = 0
        """Number of components, as long as all of them are None; -1 after the first other one."""

    async def add(self, epoch: int, steps: Sequence[Sequence[Tree]]) -> None:
        """Take the parts of the next steps, all of one epoch."""
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
        await self._note()

    def watch(self) -> None:
        """Keep new values for `take_fresh` from now on."""
        self._fresh = []

    def take_fresh(self) -> list[Tree]:
        """Return the values since the previous call, in order."""
        fresh, self._fresh = self._fresh or [], []
        return fresh

    async def end_epoch(self, epoch: int) -> None:
        """End an epoch, to which all steps since the previous end belong."""
        if self._per == "epoch":
            await self._close_epochs(epoch + 1)
            await self._note()

    async def prepare(self) -> None:
        """Make the value of the run that `finish` gets, after the last step, so that a snapshot has it."""
        if self._finish is not None and self._per == "run" and not self._unfinished:
            self._unfinished = [await self._scope_value()]

    async def finish(self, epochs: int) -> None:
        """Complete the values after the last step; then raise OutputError if the file can't hold one."""
        self._is_finished = True
        if self._per == "run":
            await self._close()
        elif self._per == "epoch":
            await self._close_epochs(epochs)
        await self._settle()
        await self._note()
        if self._misfit is not None:
            raise self._misfit

    def state(self) -> dict[str, Tree]:
        """Return the state of the fold, without the values in its log."""
        state = {"epoch": self._epoch, "nothing": self._nothing, "finished": self._is_finished}
        if self._is_finished and self._per == "run" and self._notes_values:
            state["value"] = self._values[0]
        if self._unfinished:
            return {**state, **self._unfinished_state()}
        return state if "value" in state else {**state, **self._scope_state()}

    async def restore(self, state: dict[str, Tree], entries: Iterable[tuple[Tree, Tree]]) -> None:
        """Restore the `state` of a fold, and write its values to the sink again.

        `entries` are metadata and values of the log's entries at that time.
        """
        log, self._log = self._log, None
        is_over = self._per == "run" and "value" in state
        for meta, values in () if is_over else entries:
            await self._replay(meta, values)
        if is_over:
            self._values = [state["value"]]
        elif "unfinished" in state:
            self._unfinished = [state["unfinished"]]
        elif not self._notes_values:
            await self._close_epochs(state["epoch"] if self._per == "epoch" else 0)
            if state["finished"] and self._per == "run":
                await self._close()
        else:
            await self._restore_scope(state)
        self._epoch, self._nothing = state["epoch"], state["nothing"]
        self._is_finished = state["finished"]
        self._log = log

    _notes_values = True  # whether the log has the values; if not, it has their components

    async def _replay(self, meta: Tree, values: Tree) -> None:
        for value in values:
            self._closed += 1
            if self.kept:
                self._values.append(value)
            await self._deliver(value)

    async def _note(self) -> None:
        if self._log is not None and self._unlogged:
            values, self._unlogged = self._unlogged, []
            await append_to(self._log, values)

    def _unfinished_state(self) -> dict[str, Tree]:
        """Return the state after `prepare`; `pipedist replay` reads the value from it too."""
        return {"unfinished": self._unfinished[0]}

    def _scope_state(self) -> dict[str, Tree]:
        """Return the state of the current scope, without what the log has."""
        return {}

    async def _restore_scope(self, state: dict[str, Tree]) -> None:  # noqa: B027
        """Restore what `_scope_state` returned."""

    @property
    def of_nothing(self) -> bool:
        """Whether there were components, and all of them were None."""
        return self._nothing > 0

    def _is_none(self, part: Tree) -> bool:
        return part is None

    @property
    def result(self) -> Tree:
        if self._per == "run":
            return self._values[0] if self._values else None
        return self._values

    async def _close_epochs(self, before: int) -> None:
        while self._epoch < before:
            await self._close()
            self._epoch += 1

    async def _close(self) -> None:
        value = self._unfinished[0] if self._unfinished else await self._scope_value()
        if self._finish is not None and value is not None:
            value = await self._finish(value, self._closed)
        self._closed += 1
        if self._fresh is not None:
            self._fresh.append(value)
        await self._complete(value)

    async def _settle(self) -> None:  # noqa: B027
        """Complete the values that wait for later ones."""

    async def _complete(self, value: Tree) -> None:
        if self.kept:
            self._values.append(value)
        if self._log is not None and self._notes_values and self._per != "run":
            self._unlogged.append(value)
        await self._deliver(value)

    async def _deliver(self, value: Tree) -> None:
        if self._sink is None or self._misfit is not None:
            return
        place, self._delivered = self._delivered, self._delivered + 1
        try:
            await append_to(self._sink, value)
        except OutputError as error:
            fault = error if self._per == "run" else OutputError(f"{error} ({self._per} {place})")
            if not self._is_finished:
                raise fault from error
            self._misfit = fault

    @abstractmethod
    async def _take(self, steps: Sequence[Sequence[Tree]]) -> None: ...

    @abstractmethod
    async def _scope_value(self) -> Tree:
        """Return the value of the current scope, and begin a new scope."""


async def append_to(target: StageSink | RecordLog, value: Tree, *meta: Tree) -> None:
    """Append to a sink or log; in a thread if the value is large."""
    await in_thread_if(is_large(value), target.append, value, *meta)


async def in_thread_if(condition: bool, fn: Callable[[Unpack[Arguments]], T], *arguments: *Arguments) -> T:
    """Call a function, in a thread if the condition holds; a cancel waits for its end."""
    if condition:
        return await anyio.to_thread.run_sync(fn, *arguments)
    return fn(*arguments)


def is_large(value: Tree) -> bool:
    """Return whether work on a value may block the event loop for long."""
    if type(value) not in (dict, list, tuple):
        return array_bytes(value) > THREAD_BYTES
    leaves = trees.flatten(value)[0]
    return len(leaves) > THREAD_OBJECTS or array_bytes(leaves) > THREAD_BYTES


def array_bytes(value: Tree) -> int:
    if isinstance(value, np.ndarray):
        return ragged.size_bytes(value)
    if type(value) is list and set(map(type, value)) == {np.ndarray}:
        return sum(map(ragged.size_bytes, value))
    return sum(ragged.size_bytes(leaf) for leaf in trees.flatten(value)[0] if isinstance(leaf, np.ndarray))


class ValueFold(Fold):
    """A finished fold, restored from the journal."""

    async def _take(self, steps: Sequence[Sequence[Tree]]) -> None:
        raise RuntimeError(f"the fold of stage {self.name} is finished")

    async def _scope_value(self) -> Tree:
        return None


def _bytes_of(steps: Sequence[Sequence[Partial]]) -> int:
    """Return about how many bytes some partials have, as if all were like the first one."""
    first = next((part for parts in steps for part in parts), None)
    if first is None:
        return 0
    each = sum(getattr(leaf, "nbytes", 0) for leaf in trees.flatten(first)[0])
    return each * sum(map(len, steps))


WAITING_MAX = 4096
"""Number of different values that wait for the dtype of a leaf; then it is float64."""


class ReduceFold(Fold):
    """The fold of a built-in op, over partials made by the workers.

    If a leaf had no rows but those of `np.array([])` in a step or epoch, it has the dtype and shape of the first one
    that had rows. The values before that one wait for it; at the end, or from WAITING_MAX on, they are float64. An
    update or a `finish` can't wait, and gets float64.
    """

    def __init__(
        self,
        name: str,
        per: Per,
        reduction: Reduction,
        sink: StageSink | None,
        **options: Unpack[FoldOptions],
    ) -> None:
        super().__init__(name, per, sink, **options)
        self._reduction = reduction
        self._fits = sink is None or self._finish is not None
        """Whether a value like the first one with rows has been checked against the file format."""
        self._looks: dict[str, list[Any]] = {}  # dtype and shape of each leaf since it had rows, by path
        self._assumed: set[str] = set()  # leaves that count as float64, because they had no rows for too long
        self._waiting: list[list[Any]] = []  # [partial, number of scopes in a row], in order
        self._last: Partial | None = None  # the partial of the scope that ends
        self._taken = 0  # number of steps of the run
        self._begin()

    def _is_none(self, part: Partial) -> bool:
        skeleton, leaves = part
        return skeleton is None and not leaves

    def _begin(self) -> None:
        self._steps: FoldTree[Partial] = FoldTree(self._reduction.combine)
        self._index = 0
        self._codes: set[str] = set()  # the dtypes of the scope
        self._first: tuple[str, Tree] | None = None  # place, dtypes and shapes of a part of the scope
        self._misfits = ""  # its place and that of a part of another dtype

    async def _take(self, steps: Sequence[Sequence[Partial]]) -> None:
        if not self._fits:
            self._check_first(steps)
        leaves = sum(len(part[1]) for parts in steps for part in parts)
        is_large = leaves > THREAD_OBJECTS or _bytes_of(steps) > THREAD_BYTES
        self._compare(steps)
        with self._located():
            await in_thread_if(is_large, push_steps, self._reduction, self._steps, self._index, steps)
        self._index += len(steps)
        self._taken += len(steps)

    async def _scope_value(self) -> Tree:
        last = self._steps.state()[-1:]
        is_large = any(len(partial[1]) > THREAD_OBJECTS for _, partial in last)
        with self._located():
            partial = await in_thread_if(is_large, self._steps.result)
        if self._per != "run":
            self._learn(partial)
            self._last = partial = self._typed(partial)
        value = await in_thread_if(is_large, self._reduction.finish, partial)
        self._begin()
        return value

    def _compare(self, steps: Sequence[Sequence[Partial]]) -> None:
        """Note the first part of the scope, and the first one of other dtypes, for errors."""
        codes = {leaf[0] for parts in steps for _, leaves in parts for leaf in leaves if leaf[1]}
        if self._misfits or codes <= self._codes:
            return
        self._codes |= codes
        for place, look in self._places(steps):
            self._first = self._first or (place, look)
            if look != self._first[1]:
                self._misfits = f"{place} does not fit {self._first[0]}: "
                return

    @contextmanager
    def _located(self) -> Iterator[None]:
        """Begin errors of parts of different dtypes with their places."""
        try:
            yield
        except (TypeError, ValueError) as error:
            if not self._misfits:
                raise
            raise type(error)(f"{self._misfits}{error}") from error

    def _places(self, steps: Sequence[Sequence[Partial]]) -> Iterator[tuple[str, Tree]]:
        """Yield place, structure, dtypes and shapes of the parts that have rows."""
        for step, parts in enumerate(steps, self._taken):
            for replica, (skeleton, leaves) in enumerate(parts):
                if all(leaf[1] for leaf in leaves):
                    yield f"step {step}, replica {replica}", [skeleton, *map(look_of, leaves)]

    def _learn(self, partial: Partial | None) -> None:
        """Note the dtypes and shapes of leaves that have rows for the first time."""
        if partial is None or (len(self._looks) >= len(partial[1]) and not self._assumed):
            return
        for path, part in zip(trees.paths(partial[0]), partial[1], strict=True):
            if is_blank(part):
                continue
            found = look_of(part)
            if self._looks.setdefault(path, found) != found and path in self._assumed:
                raise ValueError(
                    f"leaf {path!r} had no rows in more than {WAITING_MAX:,} values, which are written as float64, and "
                    f"now has dtype {dtype_of(found)}, shape {found[1]}. For a shard without rows return an empty "
                    "array of that dtype and shape, such as np.empty((0, 2), np.int64), not np.array([])"
                )

    def _without_look(self, partial: Partial | None) -> list[str]:
        """Return the paths of leaves without rows whose dtype is not known."""
        if partial is None or not any(map(is_blank, partial[1])) or self._reduction.op in _EXTREMES:
            return []
        each = zip(trees.paths(partial[0]), partial[1], strict=True)
        return [path for path, part in each if is_blank(part) and path not in self._looks]

    def _typed(self, partial: Partial | None) -> Partial | None:
        """Return a partial in which leaves without rows have their dtype and shape, where these are known."""
        if partial is None or not any(map(is_blank, partial[1])) or self._reduction.op in _EXTREMES:
            return partial
        each = zip(trees.paths(partial[0]), partial[1], strict=True)
        parts = [
            without_rows(self._reduction.op, self._looks[path])
            if is_blank(part) and path in self._looks
            else part
            for path, part in each
        ]
        return [partial[0], parts]

    async def _complete(self, value: Tree) -> None:
        partial, self._last = self._last, None
        is_read = (self.kept or self._sink is not None) and self._finish is None
        if not is_read or not (self._waiting or self._without_look(partial)):
            await super()._complete(value)
            return
        last = self._waiting[-1] if self._waiting else None
        if last is not None and _is_bare(partial) and _is_bare(last[0]) and last[0] == partial:
            last[1] += 1
        else:
            self._waiting.append([partial, 1])
        if len(self._waiting) > WAITING_MAX:
            unknown = {path for each, _ in self._waiting for path in self._without_look(each)}
            self._assumed |= unknown
            self._looks |= {path: look_of(_BARE_PART) for path in unknown}
        await self._settle(is_last=False)

    async def _settle(self, *, is_last: bool = True) -> None:
        while self._waiting and (is_last or not self._without_look(self._waiting[0][0])):
            partial, scopes = self._waiting.pop(0)
            value = self._reduction.finish(self._typed(partial))
            for _ in range(scopes):
                await super()._complete(value)

    def _scope_state(self) -> dict[str, Tree]:
        dtypes = [self._looks, sorted(self._assumed), self._waiting, self._taken]
        return {"index": self._index, "nodes": self._steps.state(), "dtypes": dtypes}

    async def _restore_scope(self, state: dict[str, Tree]) -> None:
        self._index = state["index"]
        self._steps.restore(state["nodes"])
        looks, assumed, waiting, self._taken = state["dtypes"]
        self._looks, self._assumed, self._waiting = (
            dict(looks),
            set(assumed),
            [list(each) for each in waiting],
        )

    def _check_first(self, steps: Sequence[Sequence[Partial]]) -> None:
        """Check early, with the value of the first call that has rows, whether the file can hold it."""
        has_rows = (part for parts in steps for part in parts if all(leaf[1] for leaf in part[1]))
        first = next(has_rows, None)
        if first is None or self._sink is None:
            return
        self._fits = True
        with suppress(OverflowError):  # later components may bring a sum back into the range of its dtype
            self._sink.check(self._reduction.finish(first))


_EXTREMES = (ReduceOp.MIN, ReduceOp.MAX)  # without rows they are None, of whatever dtype

_BARE_PART = ["f8", 0, 0.0]


def _is_bare(partial: Partial | None) -> bool:
    """Return whether no leaf of a partial has rows, a dtype or a shape."""
    return partial is None or all(map(is_blank, partial[1]))


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
