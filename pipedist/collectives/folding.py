"""Folding one vector of each replica into one: all_reduce's arithmetic.

The result has the very bits of `values.reduce(op, per_replica, axis=None)`, element by element, so
that a vector may be cut anywhere and each part folded by another process: the order of operands is
that of `reductions.FoldTree` over the replicas, the rules are those of `pipedist.partials`. float32
and float64, which is what gradients are made of, have a road of their own that allocates nothing;
all other dtypes go through `partials` itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextvars import Context
from functools import lru_cache
from typing import Any, Final, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from pipedist import partials
from pipedist.partials import ReduceOp
from pipedist.reductions import FoldTree

T = TypeVar("T")

_NUMPY_MAJOR: Final = int(np.__version__.partition(".")[0])

Vector = NDArray[Any]
"""One dimension, contiguous, native byte order."""

BLOCK_BYTES: Final = 256 << 10
"""What `fold_blocks` folds at once: operands and result stay in a core's own cache."""

_DOT_MAX: Final = 8192
"""Elements up to which a dot product is the fastest look at all of them, and BLAS takes no threads."""

_UFUNC: Final[dict[ReduceOp, np.ufunc]] = {
    ReduceOp.SUM: np.add,
    ReduceOp.MEAN: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PROD: np.multiply,
}


_quiet = threading.local()


def quietly(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function with NumPy's floating-point warnings off: overflow to infinity is a result here.

    The setting is in a context of its own that is entered again and again, which costs a tenth of
    `numpy.errstate`; NumPy 1 keeps it elsewhere.
    """
    if _NUMPY_MAJOR < 2:
        with np.errstate(all="ignore"):
            return function(*arguments)
    try:
        context: Context = _quiet.context
    except AttributeError:
        context = _quiet.context = Context()
        context.run(np.seterr, all="ignore")
    return context.run(function, *arguments)


class Kernel(Protocol):
    """How vectors of one dtype are folded with one operator."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of what is folded."""
        ...

    @property
    def result(self) -> np.dtype[Any]:
        """The dtype of the result."""
        ...

    def fold(self, parts: Sequence[Vector], out: Vector) -> None:
        """Fold `parts`, one a replica, in order, into `out`, which is none of them.

        To be called `quietly`.

        Raises:
            OverflowError: an integer does not fit; `out` may hold anything then.
        """
        ...


@lru_cache(maxsize=256)
def kernel_for(op: ReduceOp, dtype: np.dtype[Any]) -> Kernel:
    """Return the kernel of an operator and a native dtype.

    Raises:
        TypeError: it can't be reduced: it is not numeric, or complex for MIN and MAX.
    """
    if dtype in (np.float32, np.float64):
        return _FloatKernel(op, dtype)
    return _PartialsKernel(op, dtype)


def fold_blocks(kernel: Kernel, parts: Sequence[Vector], out: Vector) -> None:
    """Fold vectors of any length, a cacheful at a time; see `Kernel.fold`."""
    elements = BLOCK_BYTES // max(kernel.dtype.itemsize, kernel.result.itemsize)
    if out.size <= elements:
        kernel.fold(parts, out)
        return
    for start in range(0, out.size, elements):
        block = slice(start, start + elements)
        kernel.fold([part[block] for part in parts], out[block])


class _FloatKernel:
    """float32 and float64: folded in their own dtype, in place."""

    __slots__ = ("_is_mean", "_ufunc", "dtype", "result")

    def __init__(self, op: ReduceOp, dtype: np.dtype[Any]) -> None:
        self.dtype = self.result = dtype
        self._ufunc = _UFUNC[op]
        self._is_mean = op is ReduceOp.MEAN

    def fold(self, parts: Sequence[Vector], out: Vector) -> None:
        count = len(parts)
        if count == 2:
            self._ufunc(parts[0], parts[1], out=out)
        elif count == 1:
            np.copyto(out, parts[0])
        else:
            self._fold_range(parts, 0, count, out)
        if self._is_mean:
            # Below 2**24 replicas this has the bits of the division in float64 that `partials` makes.
            np.divide(out, self.dtype.type(count), out=out)
        if out.size:
            # Either is NaN if and only if an element is: squares do not cancel each other.
            seen = np.dot(out, out) if out.size <= _DOT_MAX else np.minimum.reduce(out)
            if seen != seen:
                out[np.isnan(out)] = np.nan

    def _fold_range(self, parts: Sequence[Vector], lo: int, hi: int, out: Vector) -> None:
        """Put node(lo, hi) of the fixed tree, of at least two leaves, into `out`."""
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
    """Every other dtype, through the arithmetic that all reductions share."""

    __slots__ = ("_op", "dtype", "result")

    def __init__(self, op: ReduceOp, dtype: np.dtype[Any]) -> None:
        self._op = op
        self.dtype = dtype
        one = partials.leaf_partial(op, None, np.ones(1, dtype))
        self.result: np.dtype[Any] = partials.finish_leaf(op, one).dtype

    def fold(self, parts: Sequence[Vector], out: Vector) -> None:
        tree: FoldTree[list[Any]] = FoldTree(self._join)
        for replica, part in enumerate(parts):
            tree.push(replica, partials.leaf_partial(self._op, None, part))
        folded = tree.result()
        if folded is not None:
            np.copyto(out, partials.finish_leaf(self._op, folded))

    def _join(self, a: list[Any], b: list[Any]) -> list[Any]:
        return partials.join_leaf(self._op, a, b)
