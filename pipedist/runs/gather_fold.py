"""The fold of a gather stage: components end to end, kept or written as they come."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import accumulate, groupby, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from pipedist.core import trees
from pipedist.core.types import Tree
from pipedist.errors import OutputError
from pipedist.runs.folds import Fold, Per, array_bytes, note, write
from pipedist.values import PerReplica, gather

if TYPE_CHECKING:
    from pipedist.journal.log_format import RecordLog
    from pipedist.outputs import Sink

TINY_PARTS = 1024
TINY_BYTES = 1024
"""So many parts, of about so few bytes each, are put end to end before there are more of them."""

BLOCK_PART_BYTES_MAX = 512
"""Parts of at most so many bytes go into the file together, where they come together and are alike. A row
of them is small then, so no format's blocks, which end after so many rows or bytes, depend on it."""


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
        log: RecordLog | None = None,
    ) -> None:
        super().__init__(name, per, sink, keep=keep, log=log)
        self._axis = axis
        self._streams = sink is not None and per == "run"
        self._parts: list[Tree] = []
        """What is kept; blocks of tiny parts are one part already."""
        self._whole = 0
        """How many of them are such blocks, at the front."""
        self._head: list[Tree] = []
        """The scope's first component, in shape alone: the others must fit behind it."""
        self._fitting: set[object] = set()
        """Kinds of components that do."""
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
        if self._per != "step" or not first:
            self._check(first, steps, made)
        if self._streams and self._sink is not None:
            for place, block in self._blocks(made):
                try:
                    await write(self._sink, block)
                except OutputError as error:
                    step, replica = _place_of(steps, place)
                    raise OutputError(f"{error} (step {first + step}, replica {replica})") from error
        if self.kept or not self._streams:
            self._parts += made
            if len(self._parts) - self._whole >= TINY_PARTS:
                self._compact()

    def _check(self, first: int, steps: Sequence[Sequence[Tree]], made: Sequence[Tree]) -> None:
        """Tell at once, and where, what does not fit; whatever comes together with what.

        Raises:
            ValueError, TypeError: a component can't be gathered, or not behind the scope's first one.
        """
        unlike = {_look(part): part for part in made}  # most are alike, and looking costs little
        kinds = {_fit(part, self._axis) for part in unlike.values()}
        if None not in kinds and kinds <= self._fitting:
            return
        try:
            self._together([*self._head, *made])
        except (TypeError, ValueError) as error:
            raise type(error)(self._located(first, steps, error)) from error
        if not self._head:
            self._head = [trees.tree_map(_outline, part) for part in made if part is not None][:1]
        self._fitting |= kinds - {None}

    def _blocks(self, parts: Sequence[Tree]) -> Iterator[tuple[int, Tree]]:
        """Yield what is written at once, behind the place of its first part: tiny parts together.

        A part that is None is left out, as `gather` does it.
        """
        if len(parts) > 1 and _is_one_kind(parts, self._axis):
            yield 0, self._together(parts)
            return
        kinds = [_kind(part, self._axis) for part in parts]
        for kind, run in groupby(range(len(parts)), kinds.__getitem__):
            places = list(run)
            if kind is None or len(places) == 1:
                yield from ((place, parts[place]) for place in places if parts[place] is not None)
            else:
                yield places[0], self._together([parts[place] for place in places])

    def _located(self, first: int, steps: Sequence[Sequence[Tree]], error: Exception) -> str:
        """Return the text of an error with the component that does not fit, alone or behind the first."""
        seen = list(self._head)
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
        self._head, self._fitting = [], set()
        return self._together(parts)

    async def _deliver(self, value: Tree) -> None:
        if not self._streams:
            await super()._deliver(value)


def _look(part: Tree) -> object:
    """Return what is the same for parts of which one need be looked at closely, while they are alive."""
    if type(part) is np.ndarray:
        return part.dtype, part.shape
    if type(part) is dict and {np.ndarray}.issuperset(map(type, part.values())):
        return *part, *[(leaf.dtype, leaf.shape) for leaf in part.values()]
    return id(part)


def _fit(part: Tree, axis: int) -> object:
    """Return what parts that fit together have in common, at least; None: each must be tried."""
    leaves, structure = ([part], None) if type(part) is np.ndarray else trees.flatten(part)
    if not all(type(leaf) is np.ndarray and -leaf.ndim <= axis < leaf.ndim for leaf in leaves):
        return None
    along = [axis % leaf.ndim for leaf in leaves]
    shapes = [(leaf.shape[:at], leaf.shape[at + 1 :]) for leaf, at in zip(leaves, along, strict=True)]
    return structure, tuple(leaf.dtype for leaf in leaves), tuple(shapes)


def _outline(leaf: Any) -> np.ndarray[Any, np.dtype[Any]]:
    """Return an array of the same shape that takes no memory."""
    array = np.asarray(leaf)  # a range is one here, too
    return np.broadcast_to(np.zeros((), array.dtype), array.shape)


def _is_one_kind(parts: Sequence[Tree], axis: int) -> bool:
    """Tell of tiny arrays of one dtype and shape, as most are, at the cost of three sets."""
    return (
        set(map(type, parts)) == {np.ndarray}
        and _kind(parts[0], axis) is not None
        and {part.dtype for part in parts} == {parts[0].dtype}
        and {part.shape for part in parts} == {parts[0].shape}
    )


def _kind(part: Tree, axis: int) -> object:
    """Return what tiny parts that may be written together have in common; None: it is written alone."""
    if type(part) is np.ndarray:
        return _kind_of_array(part, axis) if part.nbytes <= BLOCK_PART_BYTES_MAX else None
    leaves, structure = trees.flatten(part)
    if not leaves or not all(type(leaf) is np.ndarray for leaf in leaves):
        return None
    if sum(leaf.nbytes for leaf in leaves) > BLOCK_PART_BYTES_MAX:
        return None
    kinds = [_kind_of_array(leaf, axis) for leaf in leaves]
    return None if None in kinds else (structure, kinds)


def _kind_of_array(array: np.ndarray[tuple[int, ...], np.dtype[Any]], axis: int) -> object:
    shape = array.shape
    if not -len(shape) <= axis < len(shape) or array.dtype.kind not in "biufc":
        return None
    axis %= len(shape)
    return array.dtype, shape[:axis], shape[axis + 1 :]


def _place_of(steps: Sequence[Sequence[Tree]], place: int) -> tuple[int, int]:
    """Return step and replica of the part that has so many parts before it."""
    for step, parts in enumerate(steps):
        if place < len(parts):
            return step, place
        place -= len(parts)
    raise IndexError(place)
