"""Fold one vector of each replica into one: the arithmetic and memory of all_reduce.

The result has the same bits as `values.reduce(op, per_replica, axis=None)`, element by element, so a
vector may be split anywhere and each part folded by another process: operands are ordered by
`reductions.FoldTree` over the replicas, and the rules are those of `pipedist.reduction.partials`. float32 and
float64, the dtypes of gradients, have a kernel that allocates nothing; other dtypes use `partials`.
A tree of arrays is packed into one vector per dtype, so that many leaves are folded as one.
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextvars import Context
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from math import prod
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from pipedist.reduction import partials
from pipedist.reduction.partials import ReduceOp
from pipedist.reduction.tree import fold_all

T = TypeVar("T")

Vector = NDArray[Any]  # one dimension, contiguous, native byte order

BLOCK_BYTES: Final = 256 << 10  # block size of `fold_blocks`: operands and result fit into a core's cache
_DOT_MAX: Final = 8192  # elements up to which a dot product is the fastest NaN check, on one thread


_quiet = threading.local()


def quietly(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function without NumPy's floating-point warnings: overflow to infinity is a valid result.

    The setting lives in a reused context, which costs a tenth of `numpy.errstate`.
    """
    try:
        context: Context = _quiet.context
    except AttributeError:
        context = _quiet.context = Context()
        context.run(np.seterr, all="ignore")
    return context.run(function, *arguments)


class _FloatKernel:
    """Kernel of float32 and float64: folds in the same dtype, in place."""

    __slots__ = ("_is_mean", "_ufunc", "dtype", "result")

    def __init__(self, op: ReduceOp, dtype: np.dtype[Any]) -> None:
        self.dtype = self.result = dtype
        self._ufunc = partials.UFUNCS[op]
        self._is_mean = op is ReduceOp.MEAN

    def fold(self, parts: Sequence[Vector], out: Vector) -> None:
        """Fold `parts`, one per replica, in order, into `out`, which is none of them; call it with `quietly`."""
        count = len(parts)
        if count == 2:
            self._ufunc(parts[0], parts[1], out=out)
        elif count == 1:
            np.copyto(out, parts[0])
        else:
            self._fold_range(parts, 0, count, out)
        if self._is_mean:
            # Below 2**24 replicas this equals the division in float64 that `partials` does.
            np.divide(out, self.dtype.type(count), out=out)
        if out.size:
            # Either value is NaN if and only if an element is: squares do not cancel.
            probe = np.dot(out, out) if out.size <= _DOT_MAX else np.minimum.reduce(out)
            if probe != probe:
                out[np.isnan(out)] = np.nan

    def _fold_range(self, parts: Sequence[Vector], lo: int, hi: int, out: Vector) -> None:
        """Write node(lo, hi) of the fixed tree, with at least two leaves, to `out`."""
        mid = lo + (1 << (hi - lo - 1).bit_length() - 1)
        left = parts[lo]
        if mid - lo > 1:
            self._fold_range(parts, lo, mid, out)
            left = out
        right = parts[mid]
        if hi - mid > 1:
            right = np.empty_like(out)
            self._fold_range(parts, mid, hi, right)
        self._ufunc(left, right, out=out)


class _PartialsKernel:
    """Kernel of other dtypes, with the arithmetic of `partials`."""

    __slots__ = ("_op", "dtype", "result")

    def __init__(self, op: ReduceOp, dtype: np.dtype[Any]) -> None:
        self._op = op
        self.dtype = dtype
        one = partials.leaf_partial(op, None, np.ones(1, dtype))
        self.result: np.dtype[Any] = partials.finish_leaf(op, one).dtype

    def fold(self, parts: Sequence[Vector], out: Vector) -> None:
        """As `_FloatKernel.fold`; if an integer does not fit, raise OverflowError, and leave `out` undefined."""
        join = partial(partials.join_leaf, self._op)
        folded = fold_all(join, (partials.leaf_partial(self._op, None, part) for part in parts))
        assert folded is not None  # there is at least one replica
        np.copyto(out, partials.finish_leaf(self._op, folded))


Kernel: TypeAlias = _FloatKernel | _PartialsKernel  # folds vectors of one dtype with one operator


@lru_cache(maxsize=256)
def kernel_for(op: ReduceOp, dtype: np.dtype[Any]) -> Kernel:
    """Return the kernel of an operator and a native dtype, or raise TypeError."""
    if dtype in (np.float32, np.float64):
        return _FloatKernel(op, dtype)
    return _PartialsKernel(op, dtype)


@dataclass(slots=True, eq=False)
class FusedUpdate:
    """An assignment to a variable, applied to each part of the folded vector while the part is in the cache.

    A replica that requests it must not rely on it: `is_done` is False if the fold had another path.
    """

    ufunc: np.ufunc  # add or subtract
    old: NDArray[Any]  # the variable's value, of the dtype and shape of the operands, C-contiguous
    is_done: bool = False  # whether the result is the variable's new value

    def apply(self, part: slice, folded: Vector) -> None:
        """Replace a part of the folded vector by that of the new value; call it with `quietly`."""
        self.ufunc(self.old.reshape(-1)[part], folded, out=folded)


def fold_blocks(
    kernel: Kernel, parts: Sequence[Vector], out: Vector, update: FusedUpdate | None = None
) -> None:
    """Fold vectors of any length in blocks of `BLOCK_BYTES`; see `_FloatKernel.fold`."""
    elements = BLOCK_BYTES // max(kernel.dtype.itemsize, kernel.result.itemsize)
    for start in range(0, max(1, out.size), elements):
        block = slice(start, start + elements)
        kernel.fold([part[block] for part in parts], out[block])
        if update is not None:
            update.apply(block, out[block])


RECYCLED_BYTES_MIN: Final = 1 << 20  # smaller arrays are allocated: the allocator reuses their memory anyway
_KEPT_BYTES_MAX: Final = 256 << 20
_KEPT_MAX: Final = 16


class _ArrayCache:
    """Reuses large arrays that have no other references.

    A new array of 64 MiB costs more than folding it: the system must find and clear its pages. A training
    step drops the previous result when it receives the next, so a few arrays suffice. An array is free if
    this object holds the only reference: every view keeps its base alive.
    """

    def __init__(self) -> None:
        self._arrays: OrderedDict[int, NDArray[np.uint8]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, size_bytes: int) -> NDArray[np.uint8]:
        with self._lock:
            for key in self._arrays:  # a variable for the array would be one more reference
                if self._arrays[key].size == size_bytes and self._references(key) <= _ALONE:
                    self._arrays.move_to_end(key)
                    return self._arrays[key]
            new = np.empty(size_bytes, np.uint8)
            if size_bytes <= _KEPT_BYTES_MAX:
                self._arrays[id(new)] = new
                while (
                    len(self._arrays) > _KEPT_MAX
                    or sum(array.size for array in self._arrays.values()) > _KEPT_BYTES_MAX
                ):
                    self._arrays.popitem(last=False)
            return new

    def _references(self, key: int) -> int:
        return sys.getrefcount(self._arrays[key])

    def measure(self) -> int:
        """Return `_references` of an array without other references; depends on the interpreter."""
        self._arrays[0] = np.empty(1, np.uint8)
        count = self._references(0)
        self._arrays.clear()
        return count


_ALONE: Final = _ArrayCache().measure()
_cache: Final = _ArrayCache()


def empty(shape: int | tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return an uninitialised array, like `numpy.empty`; large arrays are reused."""
    size_bytes = (shape if isinstance(shape, int) else prod(shape)) * dtype.itemsize
    if size_bytes < RECYCLED_BYTES_MIN:
        return np.empty(shape, dtype)
    return _cache.get(size_bytes).view(dtype).reshape(shape)


@dataclass(frozen=True, slots=True)
class DtypeGroup:
    kernel: Kernel
    leaves: tuple[int, ...]  # their indices in the tree
    bounds: tuple[int, ...]  # start of each leaf in the vector, and the end of the last one

    @property
    def elements(self) -> int:
        return self.bounds[-1]

    @property
    def itemsize(self) -> int:
        return max(self.kernel.dtype.itemsize, self.kernel.result.itemsize)


@dataclass(frozen=True, slots=True, eq=False)
class LeafLayout:
    """How the leaves of a tree are packed into vectors; equal in all replicas that agree."""

    groups: tuple[DtypeGroup, ...]  # ordered by their first leaf
    shapes: tuple[tuple[int, ...], ...]
    size_bytes: int  # all vectors of one replica, inputs or outputs, the larger of both

    @classmethod
    def of(
        cls, op: ReduceOp, dtypes: Sequence[np.dtype[Any]], shapes: Sequence[tuple[int, ...]]
    ) -> LeafLayout:
        by_dtype: dict[np.dtype[Any], list[int]] = {}
        for leaf, dtype in enumerate(dtypes):
            by_dtype.setdefault(dtype, []).append(leaf)
        groups = []
        for dtype, leaves in by_dtype.items():
            bounds = accumulate((prod(shapes[leaf]) for leaf in leaves), initial=0)
            groups.append(DtypeGroup(kernel_for(op, dtype), tuple(leaves), tuple(bounds)))
        size_bytes = sum(group.elements * group.itemsize for group in groups)
        return cls(tuple(groups), tuple(shapes), size_bytes)

    def vectors(self, leaves: Sequence[np.ndarray[Any, Any]]) -> list[Vector]:
        """Return one replica's leaves as vectors: views if a group has one leaf, else copies."""
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
        return [empty(group.elements, group.kernel.result) for group in self.groups]

    def leaves(self, vectors: Sequence[Vector]) -> list[Any]:
        """Return the leaves of a result: views of its vectors; NumPy scalars for those without axes."""
        if len(self.shapes) == 1:
            shape, vector = self.shapes[0], vectors[0]
            return [vector if len(shape) == 1 else vector.reshape(shape) if shape else vector[0]]
        leaves: list[Any] = [None] * len(self.shapes)
        for group, vector in zip(self.groups, vectors, strict=True):
            for leaf, (start, stop) in zip(group.leaves, pairwise(group.bounds), strict=True):
                shape = self.shapes[leaf]
                leaves[leaf] = vector[start:stop].reshape(shape) if shape else vector[start]
        return leaves


@dataclass(slots=True)
class Pack:
    layout: LeafLayout
    inputs: list[list[Vector]]  # for each local replica, in order
    outputs: list[Vector]  # receive the result
    pack_bytes: int  # maximum size of one piece of a transfer; 0: the channel chooses
    update: FusedUpdate | None = None  # the channel applies it to the only vector, a large one
