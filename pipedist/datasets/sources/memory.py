"""Sources that are not files: `range`, and `arrays` that the program already has."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pipedist import trees
from pipedist.datasets.sources.base import (
    Config,
    Ids,
    Reader,
    Source,
    SourceError,
    plain_array,
    rows_of,
    sealed,
)
from pipedist.program import Tree

_INT64 = np.iinfo(np.int64)


class RangeSource(Source):
    """Integers that are computed where they are needed.

    Args:
        numbers: the elements, all within int64.
    """

    by_id = True

    def __init__(self, numbers: range) -> None:
        self.length: int = len(numbers)
        self.config = {"kind": "range", "start": numbers.start, "stop": numbers.stop, "step": numbers.step}
        self._reader = RangeReader(self.config)

    def locate(self, ids: Ids) -> Tree:
        """Return `ids`."""
        return ids

    def read(self, location: Tree) -> npt.NDArray[np.int64]:
        """Return int64[n]."""
        return self._reader.read(location)


class RangeReader(Reader):
    """Computes integers.

    Args:
        config: `start`, `stop`, `step`.
    """

    def __init__(self, config: Config) -> None:
        self._numbers = range(config["start"], config["stop"], config["step"])

    def read(self, location: Tree) -> npt.NDArray[np.int64]:
        """Return int64[n]: the elements with the ids `location`."""
        rows = rows_of(location, len(self._numbers))
        if isinstance(rows, range):
            rows = np.arange(rows.start, rows.stop, dtype=np.int64)
        return sealed(self._numbers.start + rows * self._numbers.step)


def open_range(config: Config) -> RangeSource:
    """Open a range of integers.

    Args:
        config: `stop`, and optional `start` (0) and `step` (1).

    Raises:
        SourceError: a number is missing, no integer, or beyond int64; the step is 0; or there are more
            elements than int64 can count.
    """
    numbers = {"start": 0, "step": 1, **config}
    for key in ("start", "stop", "step"):
        value = numbers.get(key)
        if isinstance(value, bool) or not isinstance(value, int):
            raise SourceError(f"{key} of the range is {value!r}", key=key, expected="an integer")
        if not _INT64.min <= value <= _INT64.max:
            raise SourceError(f"{key} of the range does not fit int64", key=key)
    if numbers["step"] == 0:
        raise SourceError("step of the range is 0", key="step", expected="any other integer")
    try:
        return RangeSource(range(numbers["start"], numbers["stop"], numbers["step"]))
    except OverflowError:  # its length
        raise SourceError(
            "the range has more elements than there are numbers for them",
            key="stop",
            expected=f"at most {_INT64.max} elements",
        ) from None


class ArraysSource(Source):
    """A tree of arrays in this process; shards are slices of it, and travel as values.

    The arrays are not copied: they must not be changed while the source is open.

    Args:
        tree: leaves are arrays with one common leading dimension, see `leading_arrays`.
        length: that dimension.
    """

    portable = False
    travels = "they are in this process's memory"
    by_id = True

    def __init__(self, tree: Tree, length: int) -> None:
        self._tree = tree
        self.length: int = length
        self.config = {}

    def locate(self, ids: Ids) -> Tree:
        """Return `ids`."""
        return ids

    def read(self, location: Tree) -> Tree:
        """Return the tree of the arrays' rows with the ids `location`."""
        rows = rows_of(location, self.length)
        chosen = slice(rows.start, rows.stop) if isinstance(rows, range) else rows
        return trees.tree_map(lambda leaf: sealed(leaf[chosen]), self._tree)


def open_arrays(config: Config) -> ArraysSource:
    """Open arrays that the program already has.

    Args:
        config: `arrays`: a tree of arrays with one common leading dimension.

    Raises:
        SourceError: a leaf is no array, or leading dimensions differ.
    """
    return ArraysSource(*leading_arrays(config["arrays"], "arrays", key="arrays"))


def leading_arrays(tree: Tree, what: str, *, key: str) -> tuple[Tree, int]:
    """Return `tree` with each leaf as a NumPy array, and their common leading dimension.

    Args:
        tree: leaves are arrays, or objects with `__array__`.
        what: names the tree in an error.
        key: the setting at fault.

    Raises:
        SourceError: there is no leaf, a leaf is no array or has no leading dimension, two
            leading dimensions differ, or a dtype can't be sent.
    """
    leaves, treedef = trees.flatten(tree)
    names = [f"{what}/{path}" if path else what for path in trees.paths(tree)]
    if not leaves:
        raise SourceError(f"{what}: no array in it", key=key)
    arrays = [_array(leaf, name, key) for leaf, name in zip(leaves, names, strict=True)]
    for array, name in zip(arrays, names, strict=True):
        if len(array) != len(arrays[0]):
            raise SourceError(
                f"{names[0]} has {len(arrays[0])} rows, {name} has {len(array)}",
                key=key,
                expected="the same leading dimension in all arrays",
            )
    return trees.unflatten(treedef, arrays), len(arrays[0])


def _array(leaf: Any, name: str, key: str) -> npt.NDArray[Any]:
    if not hasattr(leaf, "__array__"):
        elements = "; of a list of elements, return iter(...)" if key == "call" else ""
        raise SourceError(
            f"{name}: a {type(leaf).__name__}, not an array",
            key=key,
            expected=f"arrays with one leading dimension; numpy.asarray makes one of a list{elements}",
        )
    array = plain_array(leaf, name, key)
    if array.ndim == 0:
        raise SourceError(f"{name}: a scalar has no leading dimension", key=key)
    return array
