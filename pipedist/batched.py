"""Partials of many calls in a row at once: numbers go into vectors, and are folded as the fixed tree folds.

`node(lo, hi)` of an aligned run whose length is a power of two is: neighbours in pairs, the pairs in
pairs, and so on. So a vector of such a run is folded by adding its odd places to its even ones until one
is left, with the same sums in the same order, and hence the same bits, as leaf by leaf.

Only some are treated so: floats, and small arrays of them, under SUM, MEAN and PROD; and integers, which
are exact, under SUM, MEAN, MIN and MAX. (MIN and MAX of floats are not: of 0.0 and -0.0, NumPy's vectors
may choose another one than its scalars.) Everything else, and every error, is left to
`Reduction.combine`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pipedist.partials import ReduceOp
from pipedist.reductions import FoldTree, Partial, Reduction

RUN_MIN: Final = 16
"""Fewer steps are folded one by one."""

ARRAY_BYTES_MAX: Final = 1024
"""Larger arrays are folded one by one: memory is what they cost."""

_FLOATS: Final[dict[str, np.dtype[Any]]] = {
    "f8": np.dtype(np.float64),
    "f4": np.dtype(np.float32),
    "f2": np.dtype(np.float32),
}
"""The dtype that a code is folded in, of floats whose partials are Python's."""

_FLOAT_OPS: Final[dict[ReduceOp, np.ufunc]] = {
    ReduceOp.SUM: np.add,
    ReduceOp.MEAN: np.add,
    ReduceOp.PROD: np.multiply,
}
_INT_OPS: Final[dict[ReduceOp, Callable[[Sequence[int]], int]]] = {
    ReduceOp.SUM: sum,
    ReduceOp.MEAN: sum,
    ReduceOp.MIN: min,
    ReduceOp.MAX: max,
}


def push_steps(
    reduction: Reduction, tree: FoldTree[Partial], first: int, steps: Sequence[Sequence[Partial]]
) -> None:
    """Push the partials of steps `first`, `first + 1`, ..., each a fold over its replicas' partials.

    Args:
        tree: over the steps; its `combine` is `reduction.combine`.
        steps: for each step, the partials of its calls in replica order; may be empty.

    Raises:
        ValueError, TypeError: as `Reduction.combine`.
    """
    with np.errstate(all="ignore"):
        if len(steps) >= RUN_MIN and _push_numbers(reduction.op, tree, first, steps):
            return
        for index, parts in enumerate(steps, first):
            if parts:
                tree.push(index, parts[0] if len(parts) == 1 else step_partial(reduction, parts))


def step_partial(reduction: Reduction, parts: Sequence[Partial]) -> Partial | None:
    """Fold the partials of one step in replica order; None if there are none."""
    replicas: FoldTree[Partial] = FoldTree(reduction.combine)
    for replica, part in enumerate(parts):
        replicas.push(replica, part)
    return replicas.result()


def _push_numbers(
    op: ReduceOp, tree: FoldTree[Partial], first: int, steps: Sequence[Sequence[Partial]]
) -> bool:
    """Push steps of the same number of calls, each of which gave one number; False: they are not such."""
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
    """Return the leaves' partials of all calls in order, where each call has one leaf, of one dtype."""
    if calls == 0 or set(map(len, steps)) != {calls}:
        return None
    partials = [part for parts in steps for part in parts]
    if any(type(skeleton) is not int for skeleton, _ in partials):
        return None
    leaves: list[list[Any]] = [parts[0] for _, parts in partials]
    return leaves if len({leaf[0] for leaf in leaves}) == 1 else None


def _stacked(data: list[Any], types: set[type], dtype: np.dtype[Any]) -> NDArray[Any] | None:
    """Return floats, or small arrays of one shape, as one array of the dtype that they are folded in."""
    if types == {float}:
        return np.array(data, dtype)
    if types != {np.ndarray} or not data[0].ndim or data[0].nbytes > ARRAY_BYTES_MAX:
        return None
    if {array.dtype for array in data} != {dtype} or len({array.shape for array in data}) > 1:
        return None
    return np.concatenate(data).reshape(len(data), *data[0].shape)


def _by_replica(ufunc: np.ufunc, columns: NDArray[Any]) -> NDArray[Any]:
    """Fold [steps, replicas, ...] over the replicas, as the fixed tree does: all steps at once."""
    replicas: FoldTree[NDArray[Any]] = FoldTree(ufunc)
    for replica in range(columns.shape[1]):
        replicas.push(replica, columns[:, replica])
    folded = replicas.result()
    assert folded is not None  # there is at least one replica
    return folded


def _pairwise(ufunc: np.ufunc, values: NDArray[Any]) -> Any:
    """Fold a run whose length is a power of two."""
    while len(values) > 1:
        values = ufunc(values[0::2], values[1::2])
    return values[0]


def _aligned(lo: int, hi: int) -> list[tuple[int, int]]:
    """Cut [lo, hi) into runs (start, length), each a node of the fixed tree: aligned powers of two."""
    runs = []
    while lo < hi:
        size = lo & -lo or 1 << (hi - lo).bit_length()
        while size > hi - lo:
            size >>= 1
        runs.append((lo, size))
        lo += size
    return runs
