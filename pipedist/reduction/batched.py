"""Fold partials of many steps at once: numbers are packed into vectors, and folded like the fixed tree.

`node(lo, hi)` of an aligned run whose length is a power of two is: neighbours in pairs, then pairs of
pairs, and so on. So a vector of such a run is folded by adding its odd positions to its even ones until
one remains: the same sums in the same order, hence the same bits, as leaf by leaf.

This applies to floats and small arrays of them under SUM, MEAN and PROD, and to integers, which are
exact, under SUM, MEAN, MIN and MAX. (Not to MIN and MAX of floats: NumPy's vectors and scalars may choose
differently between 0.0 and -0.0.) All other partials, and every error, go through `Reduction.combine`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from pipedist.reduction.partials import ReduceOp
from pipedist.reduction.tree import FoldTree, Partial, Reduction

T = TypeVar("T")

RUN_MIN: Final = 16  # fewer steps are folded one by one
ARRAY_BYTES_MAX: Final = 1024  # larger arrays are folded one by one: memory bandwidth dominates

# By code: the dtype in which floats are folded whose partials are Python floats.
_FLOATS: Final[dict[str, np.dtype[Any]]] = {
    "f8": np.dtype(np.float64),
    "f4": np.dtype(np.float32),
    "f2": np.dtype(np.float32),
}
_FLOAT_OPS: Final = {ReduceOp.SUM: np.add, ReduceOp.MEAN: np.add, ReduceOp.PROD: np.multiply}
_INT_OPS: Final[dict[ReduceOp, Callable[[Sequence[int]], int]]] = {
    ReduceOp.SUM: sum,
    ReduceOp.MEAN: sum,
    ReduceOp.MIN: min,
    ReduceOp.MAX: max,
}


def push_steps(
    reduction: Reduction, tree: FoldTree[Partial], first: int, steps: Sequence[Sequence[Partial]]
) -> None:
    """Push the partials of steps `first`, `first + 1`, ..., each folded over its replicas.

    Args:
        tree: the tree over the steps; its `combine` is `reduction.combine`.
        steps: for each step, the partials of its calls in replica order; may be empty.
    """
    with np.errstate(all="ignore"):
        if len(steps) >= RUN_MIN and _push_numbers(reduction.op, tree, first, steps):
            return
        for index, parts in enumerate(steps, first):
            if parts:
                tree.push(index, parts[0] if len(parts) == 1 else step_partial(reduction, parts))


def step_partial(reduction: Reduction, parts: Sequence[Partial]) -> Partial | None:
    """Fold the partials of one step in replica order; None if there are none."""
    return _folded(reduction.combine, parts)


def _folded(combine: Callable[[T, T], T], leaves: Iterable[T]) -> T | None:
    tree = FoldTree(combine)
    for index, leaf in enumerate(leaves):
        tree.push(index, leaf)
    return tree.result()


def _push_numbers(
    op: ReduceOp, tree: FoldTree[Partial], first: int, steps: Sequence[Sequence[Partial]]
) -> bool:
    """Push steps if all have the same number of calls and one number per call; else return False."""
    calls = len(steps[0])
    leaves = _leaves(steps, calls)
    if leaves is None:
        return False
    code = leaves[0][0]
    counts = [leaf[1] for leaf in leaves]
    data = [leaf[2] for leaf in leaves]
    types = set(map(type, data))
    stacked = _stacked(data, types, _FLOATS[code]) if code in _FLOATS and op in _FLOAT_OPS else None
    if stacked is not None:
        values = _by_replica(_FLOAT_OPS[op], stacked.reshape(len(steps), calls, *stacked.shape[1:]))
        for lo, size in _aligned(first, first + len(steps)):
            at = lo - first
            value = _pairwise(_FLOAT_OPS[op], values[at : at + size])
            count = sum(counts[at * calls : (at + size) * calls])
            tree.push(lo, [0, [[code, count, float(value) if types == {float} else value]]], size)
        return True
    if types == {int} and op in _INT_OPS:
        for lo, size in _aligned(first, first + len(steps)):
            here = slice((lo - first) * calls, (lo - first + size) * calls)
            tree.push(lo, [0, [[code, sum(counts[here]), _INT_OPS[op](data[here])]]], size)
        return True
    return False


def _leaves(steps: Sequence[Sequence[Partial]], calls: int) -> list[list[Any]] | None:
    """Return the leaf partials of all calls in order if each has one leaf of one dtype, else None."""
    if calls == 0 or set(map(len, steps)) != {calls}:
        return None
    partials = [part for parts in steps for part in parts]
    if any(type(skeleton) is not int for skeleton, _ in partials):
        return None
    leaves: list[list[Any]] = [parts[0] for _, parts in partials]
    return leaves if len({leaf[0] for leaf in leaves}) == 1 else None


def _stacked(data: list[Any], types: set[type], dtype: np.dtype[Any]) -> NDArray[Any] | None:
    """Return floats, or small arrays of one shape, as one array in their fold dtype; else None."""
    if types == {float}:
        return np.array(data, dtype)
    if types != {np.ndarray} or not data[0].ndim or data[0].nbytes > ARRAY_BYTES_MAX:
        return None
    if {array.dtype for array in data} != {dtype} or len({array.shape for array in data}) > 1:
        return None
    return np.concatenate(data).reshape(len(data), *data[0].shape)


def _by_replica(ufunc: np.ufunc, columns: NDArray[Any]) -> NDArray[Any]:
    """Fold [steps, replicas, ...] over the replicas in the fixed tree, all steps at once."""
    folded: NDArray[Any] | None = _folded(ufunc, np.moveaxis(columns, 1, 0))
    assert folded is not None  # there is at least one replica
    return folded


def _pairwise(ufunc: np.ufunc, values: NDArray[Any]) -> Any:
    """Fold a run whose length is a power of two."""
    while len(values) > 1:
        values = ufunc(values[0::2], values[1::2])
    return values[0]


def _aligned(lo: int, hi: int) -> list[tuple[int, int]]:
    """Split [lo, hi) into runs (start, length), each a node of the fixed tree: aligned powers of two."""
    runs = []
    while lo < hi:
        size = lo & -lo or 1 << (hi - lo).bit_length()
        while size > hi - lo:
            size >>= 1
        runs.append((lo, size))
        lo += size
    return runs
