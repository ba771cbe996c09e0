"""Sources without files: `range`, `arrays` of the program, and the result of a `function`.

A function may return a tree of arrays with one leading dimension, which is read as `arrays` are; or an
iterable, which is read in order, with its elements stacked, and created anew for each epoch. The type
decides: an array or a container that trees are made of (dict, list, tuple, dataclass) is a tree, any
other iterable is an iterable.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from pipedist.core import ragged, trees
from pipedist.core.types import Tree
from pipedist.datasets.element import ArraySpec, kept
from pipedist.datasets.sources.base import (
    Config,
    ElementReader,
    Ids,
    ReaderSource,
    Source,
    SourceError,
    index_of,
    plain_array,
    rows_of,
    sealed,
)


class RangeReader(ElementReader):
    """Computes integers."""

    element_spec = ArraySpec(np.int64)

    def __init__(self, config: Config) -> None:
        self._numbers = range(config["start"], config["stop"], config["step"])

    def __len__(self) -> int:
        return len(self._numbers)

    def read(self, location: Tree) -> npt.NDArray[np.int64]:
        rows = rows_of(location, len(self._numbers))
        if isinstance(rows, range):
            rows = np.arange(rows.start, rows.stop, dtype=np.int64)
        return sealed(self._numbers.start + rows * self._numbers.step)


def open_range(config: Config, _folder: object) -> ReaderSource:
    """Open a range of integers: `stop`, and optional `start` (0) and `step` (1)."""
    settings = {"kind": "range", "start": 0, "step": 1, **config}
    try:
        length = len(range(settings["start"], settings["stop"], settings["step"]))
    except OverflowError:  # of len()
        raise SourceError(
            "the range has more elements than int64 can count",
            key="stop",
            expected=f"at most {2**63 - 1} elements",
        ) from None
    return ReaderSource(length, settings, RangeReader(settings))


class ArrayTreeSource(Source):
    """A tree of arrays in this process (see `leading_arrays`); shards are slices, sent as values.

    The arrays are not copied, and must not be changed while the source is open.
    """

    portable = False
    why_not_portable = "they are in this process's memory"
    in_memory = True
    by_id = True

    def __init__(self, tree: Tree, length: int) -> None:
        leaves, self._treedef = trees.flatten(tree)
        self._leaves: list[npt.NDArray[Any]] = leaves
        # Slices of these are as `sealed` makes them.
        self._views = [sealed(leaf) for leaf in leaves] if all(map(_is_plain, leaves)) else None
        self.element_spec = trees.tree_map(lambda leaf: ArraySpec(leaf.dtype, leaf.shape[1:]), tree)
        self.length: int = length
        self.config = {}

    def read(self, location: Tree) -> Tree:
        rows = rows_of(location, self.length)
        chosen = index_of(rows)
        if self._views is not None and isinstance(rows, range):
            found = list(map(itemgetter(chosen), self._views))
        else:
            found = [sealed(leaf[chosen]) for leaf in self._leaves]
        return self._treedef.unflatten(found)


def _is_plain(array: npt.NDArray[Any]) -> bool:
    """Return whether `sealed` copies neither an array nor its slices."""
    plain = array.dtype.isnative and array.dtype.kind not in "OU"
    return plain and array.flags.c_contiguous and array.flags.aligned


def open_arrays(config: Config, _folder: object) -> ArrayTreeSource:
    """Open `arrays` of the program: a tree of arrays with one common leading dimension."""
    return ArrayTreeSource(*leading_arrays(config["arrays"], "arrays", key="arrays"))


def leading_arrays(tree: Tree, what: str, *, key: str) -> tuple[Tree, int]:
    """Return `tree` with each leaf as a NumPy array, and their common leading dimension.

    Errors name the tree `what`, and the setting `key`.
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
        elements = "; for a list of elements, return iter(...)" if key == "call" else ""
        raise SourceError(
            f"{name}: a {type(leaf).__name__}, not an array",
            key=key,
            expected=f"arrays with one leading dimension; numpy.asarray converts a list{elements}",
        )
    array = plain_array(leaf, name, key)
    if array.ndim == 0:
        raise SourceError(f"{name}: a scalar has no leading dimension", key=key)
    return array


_PLAIN: dict[type, np.dtype[Any]] = {
    bool: np.dtype(np.bool_),
    int: np.dtype(np.int64),
    float: np.dtype(np.float64),
    complex: np.dtype(np.complex128),
    str: np.dtype(np.str_),
}

_RAISED = (Exception, SystemExit)  # errors of user functions: their sys.exit() must not end the program


class _Element(Struct, frozen=True):
    """The structure of an iterable's elements, that of the first one."""

    treedef: trees.Treedef
    paths: tuple[str, ...]
    leaves: tuple[tuple[np.dtype[Any], tuple[int, ...]], ...]


class IterableSource(Source):
    """Elements that can only be read in order, in this process.

    `factory` returns a new iterable for each epoch; `first` is that of the first epoch.
    """

    length = None
    random_access = False
    portable = False
    why_not_portable = "their function is called in this process"

    def __init__(self, label: str, factory: Callable[[], object], first: Iterable[Tree]) -> None:
        self.config = {}
        self._label = label
        self._factory = factory
        self._first: Iterable[Tree] | None = first
        self._element: _Element | None = None

    def locate(self, ids: Ids) -> Tree:
        raise SourceError(f"{self._label} returns an iterable, which can only be read in order", key="call")

    def read(self, location: Tree) -> Tree:
        return self.locate(location)

    def blocks(self, batch: int) -> Iterator[Tree]:
        """Yield one epoch as consecutive blocks of `batch` stacked elements, the last one shorter.

        The SourceError of an element that differs from the first in structure, dtype or shape names its index.
        """
        elements = enumerate(self._elements())
        while block := [self._arrays(element, index) for index, element in itertools.islice(elements, batch)]:
            assert self._element is not None
            columns = zip(*block, strict=True)
            stacked = [sealed(ragged.stack(column)) for column in columns]
            yield trees.unflatten(self._element.treedef, stacked)

    def _elements(self) -> Iterator[Tree]:
        iterable, self._first = self._first, None
        if iterable is None:
            again = _call(self._label, self._factory)
            if not _is_iterable(again):
                raise SourceError(
                    f"{self._label} returned an iterable at first, and now a {type(again).__name__}",
                    key="call",
                )
            iterable = again
        index = 0
        try:
            for index, element in enumerate(iterable):
                yield element
                index += 1
        except _RAISED as error:
            raise SourceError(
                f"{self._label}, element {index}: {type(error).__name__}: {error}", key="call"
            ) from error

    def _arrays(self, element: Tree, index: int) -> list[npt.NDArray[Any]]:
        """Return an element's leaves after a comparison with those of the first element."""
        leaves, treedef = trees.flatten(element)
        if self._element is None:
            self._element = self._describe(leaves, treedef, element)
        if treedef != self._element.treedef:
            there, wanted = trees.describe(treedef), trees.describe(self._element.treedef)
            raise self._mismatch(index, there, wanted, "")
        arrays = [
            self._leaf(leaf, path, index) for leaf, path in zip(leaves, self._element.paths, strict=True)
        ]
        for array, path, (dtype, shape) in zip(
            arrays, self._element.paths, self._element.leaves, strict=True
        ):
            # the width of text is not part of the structure
            if array.shape != shape or not ragged.fit(array.dtype, dtype):
                raise self._mismatch(
                    index, _dtype_text(array.dtype, array.shape), _dtype_text(dtype, shape), path
                )
        return [kept(array) for array in arrays]

    def _describe(self, leaves: list[Any], treedef: trees.Treedef, element: Tree) -> _Element:
        if not leaves:
            raise SourceError(f"{self._label}, element 0 has no leaf", key="call")
        paths = tuple(trees.paths(element))
        arrays = [self._leaf(leaf, path, 0) for leaf, path in zip(leaves, paths, strict=True)]
        return _Element(treedef, paths, tuple((array.dtype, array.shape) for array in arrays))

    def _leaf(self, leaf: Any, path: str, index: int) -> npt.NDArray[Any]:
        what = f"{self._label}, element {index}" + (f", {path}" if path else "")
        if type(leaf) is bytes or (type(leaf) is str and leaf[-1:] == "\0"):  # zeros at the end are kept
            return np.array(leaf, object)
        plain = _PLAIN.get(type(leaf))
        if plain is not None:
            try:
                return np.array(leaf, plain)
            except OverflowError as error:
                raise SourceError(f"{what}: {leaf} does not fit int64", key="call") from error
        if not hasattr(leaf, "__array__"):
            raise SourceError(
                f"{what}: a {type(leaf).__name__} can't be stacked",
                key="call",
                expected="arrays, numbers, text or bytes",
            )
        return plain_array(leaf, what, "call")

    def _mismatch(self, index: int, there: str, expected: str, path: str) -> SourceError:
        what = f", {path}" if path else ""
        return SourceError(
            f"{self._label}: element {index}{what} is {there}, but element 0 is {expected}. Elements of a source "
            "have one structure, dtype and shape: pad them, or return the parts of each as elements",
            key="call",
        )


def open_function(config: Config, _folder: object) -> Source:
    """Call a factory (`call`, with the arguments `with`), and open what it returns."""
    call: Callable[..., Any] = config["call"]
    label = getattr(call, "__qualname__", repr(call))
    factory = functools.partial(call, **config.get("with", {}))
    result = _call(label, factory)
    if isinstance(result, set | frozenset):
        raise SourceError(
            f"{label}: a {type(result).__name__} has no defined order",
            key="call",
            expected="its sorted(...), as an array or iter(...)",
        )
    if _is_iterable(result):
        return IterableSource(label, factory, result)
    return ArrayTreeSource(*leading_arrays(result, label, key="call"))


def _call(label: str, factory: Callable[[], object]) -> Any:
    try:
        return factory()
    except _RAISED as error:
        raise SourceError(f"{label}: {type(error).__name__}: {error}", key="call") from error


def _is_iterable(result: object) -> bool:
    leaves, _ = trees.flatten(result)
    bare = len(leaves) == 1 and leaves[0] is result
    return (
        bare
        and isinstance(result, Iterable)
        and not isinstance(result, str | bytes)
        and not hasattr(result, "__array__")
    )


def _dtype_text(dtype: np.dtype[Any], shape: tuple[int, ...]) -> str:
    return f"{'str' if dtype.kind == 'U' else dtype}{list(shape)}"
