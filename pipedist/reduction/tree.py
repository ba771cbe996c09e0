"""Reductions: SUM, MEAN, MIN, MAX and PROD of the components of many replica calls.

A component (the return value of one call) is reduced to its PARTIAL by the worker, so rows are never sent.
Partials are combined in one fixed tree (`FoldTree`), whatever their order of arrival; the last partial is
finished into the value. Float arithmetic is not associative: the fixed tree makes the result bit-identical
on any number of workers.

A partial is a tree that the codec can encode: `[skeleton, leaves]`. The skeleton is the component's tree
with the numbers 0, 1, ... in place of its leaves; `leaves[i]` is that leaf's partial (`pipedist.reduction.partials`
defines it, and the fold rules).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, TypeVar

import numpy as np

from pipedist.core import trees
from pipedist.core.types import Tree
from pipedist.reduction import partials
from pipedist.reduction.partials import ReduceOp as ReduceOp
from pipedist.reduction.partials import axes_of

Partial = Any  # from `Reduction.partial`: a tree that the codec can encode
T = TypeVar("T")

_NUMBERS = frozenset({int, float})


@dataclass(frozen=True, slots=True)
class Reduction:
    """One reduction: an operator and axes; made by `Reduction.of`."""

    op: ReduceOp
    axis: tuple[int, ...] | None  # None: across the components, element by element; else along axes too

    @classmethod
    def of(cls, op: ReduceOp | str, axis: int | Sequence[int] | None) -> Reduction:
        """Return the reduction of an operator and axes as a spec or a call names them; see `axes_of`."""
        return _across(op) if axis is None and type(op) is str else cls(ReduceOp.of(op), axes_of(axis))

    def partial(self, component: Tree) -> Partial:
        """Reduce one component, a tree of numeric arrays and numbers, to its partial.

        Raises:
            TypeError: a leaf cannot be reduced (bool, str, bytes, ...); the text names its path.
            ValueError: a leaf lacks an axis of the reduction, or two axes are the same; the text names its path.
        """
        if type(component) is float and self.axis is None:
            return [0, [partials.leaf_partial(self.op, None, component)]]
        return self._partial(component)

    @np.errstate(all="ignore")
    def _partial(self, component: Tree) -> Partial:
        if isinstance(component, (np.ndarray, float, int, np.generic)):
            leaves, skeleton = [component], 0
        else:
            leaves, treedef = trees.flatten(component)
            skeleton = trees.unflatten(treedef, range(len(leaves)))
        return [skeleton, self._each(skeleton, partials.leaf_partial, [self.axis] * len(leaves), leaves)]

    def combine(self, a: Partial, b: Partial) -> Partial:
        """Combine the partials of two neighbouring ranges of calls, `a` before `b`.

        A different structure or shape is a ValueError, a different dtype a TypeError.
        """
        if type(a[0]) is int and type(b[0]) is int and type(a[1][0][2]) in _NUMBERS:
            joined = partials.join_numbers(self.op, a[1][0], b[1][0])
            if joined is not None:
                return [0, [joined]]
        return self._combine(a, b)

    @np.errstate(all="ignore")
    def _combine(self, a: Partial, b: Partial) -> Partial:
        skeleton = a[0]
        if skeleton != b[0] and trees.structure(skeleton) != trees.structure(b[0]):
            one, other = (trees.excerpt(trees.structure(each)) for each in (skeleton, b[0]))
            hint = ""
            if type(skeleton) is dict and type(b[0]) is dict:
                hint = '; where keys differ, reduce them key by key: "pipedist.combiners:by_key", or counter'
            raise ValueError(
                f"components of different structure can't be reduced together: {one} and {other}{hint}"
            )
        return [skeleton, self._each(skeleton, partials.join_leaf, a[1], b[1])]

    def finish(self, partial: Partial | None) -> Tree:
        """Return the value of the combination of all partials; None if there are none.

        Its leaves are arrays, or NumPy scalars if no axis remains; None for MIN or MAX without rows. An integer result
        that does not fit its dtype is an OverflowError, whose text names the leaf's path.
        """
        if partial is None:
            return None
        if type(partial[0]) is int:
            code, count, data = partial[1][0]
            if type(data) is float and code == "f8" and count:
                return partials.finish_leaf(self.op, partial[1][0])  # without NumPy, which may warn
        return self._finish(partial)

    @np.errstate(all="ignore")
    def _finish(self, partial: Partial) -> Tree:
        skeleton, parts = partial
        values = self._each(skeleton, partials.finish_leaf, parts)
        return values[0] if type(skeleton) is int else trees.unflatten(trees.structure(skeleton), values)

    def _each(self, skeleton: Tree, fn: Callable[..., Any], *columns: Sequence[Any]) -> list[Any]:
        """Return `fn(op, ...)` for each leaf; an error has its path and its documented class."""
        found: list[Any] = []
        for leaf in zip(*columns, strict=True):
            try:
                found.append(fn(self.op, *leaf))
            except (TypeError, OverflowError, ValueError) as error:
                cls = next(kind for kind in (TypeError, OverflowError, ValueError) if isinstance(error, kind))
                path = trees.paths(skeleton)[len(found)]
                place = f"leaf {path!r}" if path else "the value"
                raise cls(f"{self.op.value} of {place}: {error}") from None
        return found


@lru_cache(maxsize=64)
def _across(op: str) -> Reduction:
    return Reduction(ReduceOp.of(op), None)


def fold_all(combine: Callable[[T, T], T], leaves: Iterable[T]) -> T | None:
    """Return the fold of leaves in the fixed tree, None without leaves."""
    tree = FoldTree(combine)
    for index, leaf in enumerate(leaves):
        tree.push(index, leaf)
    return tree.result()


class FoldTree(Generic[T]):
    """Folds leaves in the fixed order, one by one, with O(log n) state.

    `node(lo, hi) = combine(node(lo, mid), node(mid, hi))` with `mid = lo + the largest power of two
    below hi - lo`; if a side has no leaves, the node is the other side. So the shape depends only on
    the leaves' indices, not on the workers that computed them, and a missing leaf (an empty shard) does
    not move any other. `combine` must not modify its arguments.
    """

    __slots__ = ("_combine", "_pending")

    def __init__(self, combine: Callable[[T, T], T]) -> None:
        self._combine = combine
        # Subtrees that wait for their right neighbour, as (index of the last leaf, value). The
        # smallest aligned blocks that hold two neighbours shrink from the first to the last.
        self._pending: list[tuple[int, T]] = []

    def push(self, index: int, leaf: T) -> None:
        """Add a leaf. Indices increase, with or without gaps; else it is a ValueError."""
        pending = self._pending
        last = pending[-1][0] if pending else -1
        if index <= last:
            raise ValueError(f"leaf {index} after leaf {last}: leaves are pushed in increasing order")
        while len(pending) > 1:
            # The block shared by the last two subtrees is complete once the new leaf is outside it.
            block = (pending[-2][0] ^ pending[-1][0]).bit_length()
            if index >> block == pending[-1][0] >> block:
                break
            end, right = pending.pop()
            _, left = pending.pop()
            pending.append((end, self._combine(left, right)))
        pending.append((index, leaf))

    def state(self) -> list[tuple[int, T]]:
        """Return the nodes folded so far, O(log n) of them, for `restore`."""
        return list(self._pending)

    def restore(self, state: Sequence[tuple[int, T]]) -> None:
        """Continue from the `state` of a tree with the same `combine`."""
        self._pending = [(last, node) for last, node in state]

    def result(self) -> T | None:
        """Return the fold of all leaves so far, None without leaves; more may be pushed later."""
        pending = self._pending
        if not pending:
            return None
        value = pending[-1][1]
        for _, left in reversed(pending[:-1]):
            value = self._combine(left, value)
        return value
