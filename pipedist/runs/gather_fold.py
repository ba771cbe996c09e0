"""The fold of a gather stage, which concatenates components."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import accumulate, groupby, pairwise
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from pipedist.coordinator import GroupedByStep
from pipedist.core import ragged, trees
from pipedist.core.types import Tree
from pipedist.errors import OutputError
from pipedist.runs.folds import (
    THREAD_OBJECTS,
    Fold,
    FoldOptions,
    append_to,
    array_bytes,
    in_thread_if,
    is_large,
)
from pipedist.spec import Per
from pipedist.values import PerReplica, concatenate, gather, is_blank

if TYPE_CHECKING:
    from pipedist.outputs.parts import StageSink

TINY_PARTS = 1024
TINY_BYTES = 1024
"""TINY_PARTS parts are concatenated at once if they have at most TINY_BYTES bytes on average."""

BLOCK_PART_BYTES_MAX = 512
"""Adjacent parts of one kind are written together if each has at most this many bytes. Their rows are small,
so the blocks of file formats, which end after a number of rows or bytes, do not depend on it."""


class GatherFold(Fold):
    """Concatenates components; with `per: run`, streams them into a sink.

    Its log has the components, which are gathered again on a resume. With a `finish` it has the values of ended steps
    or epochs too, which are not finished again.
    """

    def __init__(
        self, name: str, per: Per, axis: int, sink: StageSink | None, **options: Unpack[FoldOptions]
    ) -> None:
        super().__init__(name, per, sink, **options)
        self._axis = axis
        self._notes_values = self._finish is not None
        self._streams = sink is not None and per == "run" and self._finish is None
        self._parts: list[Tree] = []  # kept parts; blocks of tiny parts are already concatenated
        self._whole = 0  # number of parts at the front that need no concatenation
        self._head: list[Tree] = []
        """An outline (shape and dtype) of the scope's first component, which the others must match."""
        self._head_place = ""  # step and replica of that component
        self._blank: Tree = None
        """The scope's first component without rows, dtype and shape, which is the value if there is no other."""
        self._fitting: set[object] = set()  # kinds of components that match it
        self._steps = 0
        self._is_large = False  # whether the parts of a message have had more than THREAD_OBJECTS leaves

    async def add(self, epoch: int, steps: Sequence[Sequence[Tree]]) -> None:
        await super().add(epoch, steps)
        if self._log is not None and not (self._notes_values and self._per == "step"):
            made = [part for parts in steps for part in parts]
            await append_to(self._log, made, [epoch, [len(parts) for parts in steps]])

    def _unfinished_state(self) -> dict[str, Tree]:
        return {"is_whole": True}  # the log has the components

    async def _replay(self, meta: Tree, values: Tree) -> None:
        if meta is None:  # values of ended steps or epochs, not components
            await super()._replay(meta, values)
            self._parts, self._whole, self._head, self._fitting, self._blank = [], 0, [], set(), None
            self._epoch += len(values) * (self._per == "epoch")
            return
        epoch, counts = meta
        ends = [0, *accumulate(counts)]
        await self.add(epoch, [values[a:b] for a, b in pairwise(ends)])

    async def _take(self, steps: Sequence[Sequence[Tree]]) -> None:
        first, self._steps = self._steps, self._steps + len(steps)
        stacked = _stacked_rows(steps, self._axis)
        # stacked parts are alike, so the first one shows whether they fit
        made = [part for parts in steps for part in parts] if stacked is None else [steps[0][0]]
        unlike = list({_look(part): part for part in made}.values())  # most are alike, and this is cheap
        if blank := [part for part in unlike if is_blank(part, self._axis)]:
            self._blank = blank[0] if self._blank is None else self._blank
            made = [None if is_blank(part, self._axis) else part for part in made]
            unlike = [part for part in unlike if not is_blank(part, self._axis)]
        objects = max((trees.structure(part).num_nodes for part in unlike), default=0) * len(made)
        self._is_large = self._is_large or objects > THREAD_OBJECTS
        if self._per != "step" or not first:
            await in_thread_if(self._is_large, self._check, first, steps, made, unlike)
        if stacked is not None:
            made = [stacked]
        if self._streams and self._sink is not None:
            for place, block in await in_thread_if(self._is_large, lambda: [*self._blocks(made)]):
                try:
                    await append_to(self._sink, block)
                except OutputError as error:
                    raise OutputError(f"{error} ({_place_of(first, steps, place)})") from error
        if self.kept or not self._streams:
            self._parts += made
            if len(self._parts) - self._whole >= TINY_PARTS:
                await in_thread_if(self._is_large, self._compact)

    def _check(
        self, first: int, steps: Sequence[Sequence[Tree]], made: Sequence[Tree], unlike: Sequence[Tree]
    ) -> None:
        """Check that components fit, of which `unlike` are all kinds; the error names step and replica."""
        kinds = {_kind(part, self._axis) for part in unlike}
        if None not in kinds and kinds <= self._fitting:
            return
        try:
            self._together([*self._head, *made])
        except (TypeError, ValueError) as error:
            raise type(error)(self._located(first, steps, error)) from error
        if not self._head:
            place = next((place for place, part in enumerate(made) if part is not None), None)
            if place is not None:
                self._head = [trees.tree_map(_outline, made[place])]
                self._head_place = _place_of(first, steps, place)
        self._fitting |= kinds - {None}

    def _blocks(self, parts: Sequence[Tree]) -> Iterator[tuple[int, Tree]]:
        """Yield (index of its first part, block) for each write, without None."""
        looks = [_look(part) for part in parts]
        kinds = {look: _block_kind(part, self._axis) for look, part in zip(looks, parts, strict=True)}
        for kind, run in groupby(range(len(parts)), lambda place: kinds[looks[place]]):
            places = list(run)
            if kind is None or len(places) == 1:
                yield from ((place, parts[place]) for place in places if parts[place] is not None)
            else:
                yield places[0], self._together([parts[place] for place in places])

    def _located(self, first: int, steps: Sequence[Sequence[Tree]], error: Exception) -> str:
        """Return the text of an error with step and replica of the misfit."""
        seen, names = list(self._head), [self._head_place] * len(self._head)
        for step, parts in enumerate(steps, first):
            for replica, part in enumerate(parts):
                for tried in ([part], [*seen, part]):
                    try:
                        concatenate(tried, self._axis, [*names, "this one"][-len(tried) :])
                    except (TypeError, ValueError) as fault:
                        hint, misfit, self.misfit_at = "", getattr(fault, "leaf", ""), (step, replica)
                        if problem := ragged.record_problem(part):
                            return f"step {step}, replica {replica}: {problem}. Return plain dicts, one for each row"
                        if isinstance(part, list | tuple):
                            hint = "; a list is a tree of values: to return one array, use np.array(...)"
                        for key, column in part.items() if isinstance(part, dict) else ():
                            if isinstance(column, list | tuple) and misfit.startswith(f"{key}/"):
                                hint = f"; {key!r} is a list, a tree of values: to return one array, use np.array(...)"
                        return f"step {step}, replica {replica}: {fault}{hint}"
                if not seen and part is not None:
                    seen, names = [part], [f"step {step}, replica {replica}"]
        return str(error)

    def _compact(self) -> None:
        """Concatenate tiny parts, whose overhead would exceed their data."""
        tiny = self._parts[self._whole :]
        if array_bytes(tiny) <= TINY_BYTES * len(tiny):
            block = self._together(tiny)
            # texts for which `<U` would be wasteful, but need not be with those to come, wait for the end
            if not ("O" in _dtype_kinds([block]) and "U" in _dtype_kinds(tiny)):
                self._parts[self._whole :] = [block]
        self._whole = len(self._parts)

    def _together(self, parts: Sequence[Tree]) -> Tree:
        if not parts:
            return None
        if {type(part) for part in parts} == {np.ndarray} and len({part.dtype for part in parts}) == 1:
            with suppress(ValueError):  # if they don't fit, `gather` raises an error with the reason
                return ragged.concatenate(parts, self._axis)
        return gather(PerReplica(parts), self._axis, len(parts))

    async def _scope_value(self) -> Tree:
        parts, self._parts, self._whole = self._parts, [], 0
        others = self._head if self._streams else [part for part in parts if part is not None]
        blank, self._blank = self._blank, None
        self._head, self._fitting = [], set()
        if blank is not None and not others:
            if self._streams and self._sink is not None:
                await append_to(self._sink, blank)
            return blank
        return await in_thread_if(self._is_large or is_large(parts), self._together, parts)

    async def _deliver(self, value: Tree) -> None:
        if not self._streams:
            await super()._deliver(value)


def _stacked_rows(steps: Sequence[Sequence[Tree]], axis: int) -> Tree:
    """Return the rows of all parts if they are stacked, else None."""
    if type(steps) is not GroupedByStep or type(steps.values) is not np.ndarray or axis != 0:
        return None
    rows = steps.values
    return rows.reshape(-1, *rows.shape[2:]) if rows.size else None


def _look(part: Tree) -> object:
    """Return a cheap key that is equal only for live parts of one kind."""
    if type(part) is np.ndarray:
        return part.dtype, part.shape
    if type(part) is dict and {np.ndarray}.issuperset(map(type, part.values())):
        return *part, *[(leaf.dtype, leaf.shape) for leaf in part.values()]
    return id(part)


def _kind(part: Tree, axis: int) -> tuple[object, tuple[np.dtype[Any], ...], object] | None:
    """Return a key that fitting parts share, with their dtypes; None: the part must be tried."""
    leaves, structure = ([part], None) if type(part) is np.ndarray else trees.flatten(part)
    if not all(type(leaf) is np.ndarray and -leaf.ndim <= axis < leaf.ndim for leaf in leaves):
        return None
    along = [axis % leaf.ndim for leaf in leaves]
    shapes = [(leaf.shape[:at], leaf.shape[at + 1 :]) for leaf, at in zip(leaves, along, strict=True)]
    return structure, tuple(leaf.dtype for leaf in leaves), tuple(shapes)


def _dtype_kinds(parts: Sequence[Tree]) -> set[str]:
    return {leaf.dtype.kind for leaf in trees.flatten(parts)[0] if isinstance(leaf, np.ndarray)}


def _outline(leaf: Any) -> np.ndarray[Any, np.dtype[Any]]:
    """Return an array of the same shape and dtype that takes no memory."""
    array = np.asarray(leaf)  # a range counts as an array too
    return np.broadcast_to(np.zeros((), array.dtype), array.shape)


def _block_kind(part: Tree, axis: int) -> object:
    """Return a key of tiny parts to write together; None: write it alone."""
    kind = _kind(part, axis)
    if kind is None or array_bytes(part) > BLOCK_PART_BYTES_MAX:
        return None
    _, dtypes, _ = kind
    return kind if dtypes and all(dtype.kind in "biufc" for dtype in dtypes) else None


def _place_of(first: int, steps: Sequence[Sequence[Tree]], place: int) -> str:
    for step, parts in enumerate(steps, first):
        if place < len(parts):
            return f"step {step}, replica {place}"
        place -= len(parts)
    raise IndexError(place)
