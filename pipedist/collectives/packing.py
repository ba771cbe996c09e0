"""A tree of arrays as a few vectors, one for each dtype: so that many leaves are folded as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from pipedist.collectives import memory
from pipedist.collectives.folding import Kernel, Vector, kernel_for
from pipedist.partials import ReduceOp


@dataclass(frozen=True, slots=True)
class Group:
    """The leaves of one dtype, end to end.

    Args:
        kernel: how they are folded.
        leaves: their numbers in the tree.
        bounds: where each begins in the vector, and where the last one ends; elements.
    """

    kernel: Kernel
    leaves: tuple[int, ...]
    bounds: tuple[int, ...]

    @property
    def elements(self) -> int:
        """The length of the vector."""
        return self.bounds[-1]


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """How the leaves of a tree lie in vectors; the same in all replicas that agree.

    Args:
        groups: in order of the first leaf of each.
        shapes: of the leaves.
        size_bytes: of all vectors of one replica, inputs or outputs, whichever are larger.
    """

    groups: tuple[Group, ...]
    shapes: tuple[tuple[int, ...], ...]
    size_bytes: int

    @classmethod
    def of(cls, op: ReduceOp, dtypes: Sequence[np.dtype[Any]], shapes: Sequence[tuple[int, ...]]) -> Layout:
        """Return the layout of leaves that are to be folded.

        Raises:
            TypeError: a dtype can't be reduced.
        """
        by_dtype: dict[np.dtype[Any], list[int]] = {}
        for leaf, dtype in enumerate(dtypes):
            by_dtype.setdefault(dtype, []).append(leaf)
        groups = []
        for dtype, leaves in by_dtype.items():
            bounds = [0]
            for leaf in leaves:
                bounds.append(bounds[-1] + prod(shapes[leaf]))
            groups.append(Group(kernel_for(op, dtype), tuple(leaves), tuple(bounds)))
        size_bytes = sum(
            group.elements * max(group.kernel.dtype.itemsize, group.kernel.result.itemsize)
            for group in groups
        )
        return cls(tuple(groups), tuple(shapes), size_bytes)

    def vectors(self, leaves: Sequence[np.ndarray[Any, Any]]) -> list[Vector]:
        """Return one replica's leaves as vectors: views where a group has one leaf, else copies."""
        if len(leaves) == 1:
            only = leaves[0]
            return [only if only.ndim == 1 else only.reshape(-1)]
        return [
            leaves[group.leaves[0]].reshape(-1)
            if len(group.leaves) == 1
            else np.concatenate([leaves[leaf].reshape(-1) for leaf in group.leaves])
            for group in self.groups
        ]

    def outputs(self) -> list[Vector]:
        """Return memory for the result, uninitialised."""
        return [memory.empty(group.elements, group.kernel.result) for group in self.groups]

    def leaves(self, vectors: Sequence[Vector]) -> list[Any]:
        """Return the leaves of a result: views of its vectors; NumPy scalars for those without axes."""
        if len(self.shapes) == 1:
            shape, vector = self.shapes[0], vectors[0]
            return [vector if len(shape) == 1 else vector.reshape(shape) if shape else vector[0]]
        leaves: list[Any] = [None] * len(self.shapes)
        for group, vector in zip(self.groups, vectors, strict=True):
            for leaf, start, stop in zip(group.leaves, group.bounds, group.bounds[1:], strict=False):
                shape = self.shapes[leaf]
                leaves[leaf] = vector[start:stop].reshape(shape) if shape else vector[start]
        return leaves


@dataclass(slots=True)
class Pack:
    """One member's side of one all_reduce.

    Args:
        layout: of all replicas' trees.
        inputs: the vectors of each of the member's replicas, in order.
        outputs: where the result goes, once; see `Layout.outputs`.
        pack_bytes: what is cut at most into one piece of a transfer; 0: the channel chooses.
    """

    layout: Layout
    inputs: list[list[Vector]]
    outputs: list[Vector]
    pack_bytes: int = 0
