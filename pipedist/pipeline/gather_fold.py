"""The fold of a gather stage: components end to end, kept or written as they come."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np

from pipedist.errors import OutputError
from pipedist.pipeline.folds import Fold, Per, array_bytes, note, write
from pipedist.program import Tree
from pipedist.values import PerReplica, gather

if TYPE_CHECKING:
    from pipedist.journal.logs import Log
    from pipedist.outputs import Sink

TINY_PARTS = 1024
TINY_BYTES = 1024
"""So many parts, of about so few bytes each, are put end to end before there are more of them."""


class GatherFold(Fold):
    """Components end to end. With a sink and one value a run, they stream into the file.

    Its log has the components: they are gathered anew.
    """

    _notes_values = False

    def __init__(
        self,
        name: str,
        per: Per,
        axis: int,
        sink: Sink | None,
        *,
        keep: bool = True,
        log: Log | None = None,
    ) -> None:
        super().__init__(name, per, sink, keep=keep, log=log)
        self._axis = axis
        self._streams = sink is not None and per == "run"
        self._parts: list[Tree] = []
        """What is kept; blocks of tiny parts are one part already."""
        self._whole = 0
        """How many of them are such blocks, at the front."""
        self._checked = False
        self._steps = 0

    async def add(self, epoch: int, steps: Sequence[Sequence[Tree]]) -> None:
        """As `Fold.add`."""
        await super().add(epoch, steps)
        if self._log is not None:
            await note(self._log, [p for parts in steps for p in parts], [epoch, [len(p) for p in steps]])

    async def _replay(self, said: Tree, values: Tree) -> None:
        epoch, counts = said
        ends = [0, *accumulate(counts)]
        await self.add(epoch, [values[a:b] for a, b in pairwise(ends)])

    def _scope_state(self) -> dict[str, Tree]:
        return {}

    async def _restore_scope(self, state: dict[str, Tree]) -> None:
        """The log has brought everything back."""

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
