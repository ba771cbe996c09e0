"""Folds: turn the components of a stage into its value, in step order.

A fold takes the parts of each step, in step order, and makes one value for each scope (`per`): the run, an
epoch, or a step. The parts of a step are the results of its calls in replica order. Empty shards make no call
and belong to the last replicas, so part r is always replica r's.

Built-in ops fold partials in the driver, with NumPy (`reduce_fold`). A `combine` function is user code, so it runs
on workers (`combine_fold`).

The progress of a fold can be made durable between any two steps, as its `state`, which is small, and a log of
the values that grow with the run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, TypedDict, TypeVar, TypeVarTuple, Unpack

import anyio
import anyio.abc
import anyio.to_thread
import numpy as np

from pipedist.core import ragged, trees
from pipedist.core.types import Tree
from pipedist.errors import OutputError
from pipedist.spec import Per

if TYPE_CHECKING:
    from pipedist.journal.log_format import RecordLog
    from pipedist.outputs.parts import StageSink

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")

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
        self.misfit_at: tuple[int, int] | None = None
        """Step and replica of the first component that does not fit the others, for errors, if it is known."""
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
        has_objects = "O" in set(map(attrgetter("dtype.kind"), value))
        return sum(map(ragged.size_bytes if has_objects else attrgetter("nbytes"), value))
    return sum(ragged.size_bytes(leaf) for leaf in trees.flatten(value)[0] if isinstance(leaf, np.ndarray))


class ValueFold(Fold):
    """A finished fold, restored from the journal."""

    async def _replay(self, meta: Tree, values: Tree) -> None:
        if meta is None:  # the log of a gather with a `finish` has the components too
            await super()._replay(meta, values)

    async def _take(self, steps: Sequence[Sequence[Tree]]) -> None:
        raise RuntimeError(f"the fold of stage {self.name} is finished")

    async def _scope_value(self) -> Tree:
        return None
