"""Source `function`: what a factory of the user's returns.

A tree of arrays with one leading dimension is read by element, like `arrays`. An iterable is
read in order, its elements stacked; each epoch calls the factory again. Which of the two it is
shows in the type: an array or a container that trees are made of (dict, list, tuple, dataclass)
is a tree; anything else that can be iterated is an iterable.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pipedist import trees
from pipedist.datasets.element import kept
from pipedist.datasets.sources.base import Config, Ids, Source, SourceError, plain_array, sealed
from pipedist.datasets.sources.memory import ArraysSource, leading_arrays
from pipedist.functions import load, reference
from pipedist.program import Tree

_PLAIN: dict[type, np.dtype[Any]] = {
    bool: np.dtype(np.bool_),
    int: np.dtype(np.int64),
    float: np.dtype(np.float64),
    complex: np.dtype(np.complex128),
    str: np.dtype(np.str_),
}

_RAISED = (Exception, SystemExit)
"""What functions of the user's raise; sys.exit() in one of them is not the end of the program."""


@dataclass(frozen=True, slots=True)
class _Element:
    """The structure that all elements of an iterable must have: that of the first one."""

    treedef: trees.Treedef
    paths: tuple[str, ...]
    leaves: tuple[tuple[np.dtype[Any], tuple[int, ...]], ...]


class IterableSource(Source):
    """Elements that can only be read in order, in this process.

    Args:
        label: names the factory in an error.
        factory: returns a new iterable for each epoch.
        first: an iterable that the factory has returned already, for the first epoch.
    """

    length = None
    random_access = False
    portable = False
    travels = "the function that makes them is called in this process"

    def __init__(self, label: str, factory: Callable[[], object], first: Iterable[Tree]) -> None:
        self.config = {}
        self._label = label
        self._factory = factory
        self._first: Iterable[Tree] | None = first
        self._element: _Element | None = None

    def locate(self, ids: Ids) -> Tree:
        """Refuse: there is no random access.

        Raises:
            SourceError: always.
        """
        raise SourceError(f"{self._label} returns an iterable, which can only be read in order", key="call")

    def read(self, location: Tree) -> Tree:
        """Refuse: there is no random access.

        Raises:
            SourceError: always.
        """
        return self.locate(location)

    def blocks(self, batch: int) -> Iterator[Tree]:
        """Yield one epoch as consecutive blocks of `batch` stacked elements, the last one shorter.

        Raises:
            SourceError: the iterable raises, or an element differs from the first one in
                structure, dtype or shape; the message names the element's index.
        """
        elements = enumerate(self._elements())
        while block := [self._arrays(element, index) for index, element in itertools.islice(elements, batch)]:
            assert self._element is not None
            stacked = [sealed(np.stack(leaf)) for leaf in zip(*block, strict=True)]
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
        """Return an element's leaves, if they are like those of the first one."""
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
            # The width of text is that of the longest one, and no part of the structure.
            same = array.dtype == dtype or array.dtype.kind == dtype.kind == "U"
            if array.shape != shape or not same:
                raise self._mismatch(index, _shown(array.dtype, array.shape), _shown(dtype, shape), path)
        return [kept(array) for array in arrays]

    def _describe(self, leaves: list[Any], treedef: trees.Treedef, element: Tree) -> _Element:
        if not leaves:
            raise SourceError(f"{self._label}, element 0: there is no value in it", key="call")
        paths = tuple(trees.paths(element))
        arrays = [self._leaf(leaf, path, 0) for leaf, path in zip(leaves, paths, strict=True)]
        return _Element(treedef, paths, tuple((array.dtype, array.shape) for array in arrays))

    def _leaf(self, leaf: Any, path: str, index: int) -> npt.NDArray[Any]:
        what = f"{self._label}, element {index}" + (f", {path}" if path else "")
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
                expected="arrays, numbers or text; numpy.frombuffer makes an array of bytes",
            )
        return plain_array(leaf, what, "call")

    def _mismatch(self, index: int, there: str, expected: str, path: str) -> SourceError:
        what = f", {path}" if path else ""
        return SourceError(
            f"{self._label}, element {index}{what}: {there}, element 0 has {expected}",
            key="call",
            expected="elements of one structure, dtype and shape",
        )


def open_function(config: Config, code: Sequence[str]) -> Source:
    """Call a factory, and open what it returns.

    Args:
        config: `call`: "module:factory", or a callable; optional `with`: its keyword arguments.
        code: folders where modules are found, too.

    Raises:
        SourceError: the factory raises, or returns neither a tree of arrays nor an iterable.
        pipedist.errors.PipedistError: there is no such function.
    """
    call: Callable[..., Any] | str = config["call"]
    if isinstance(call, str):
        function, label = load(reference(call), code), call
    else:
        function, label = call, getattr(call, "__qualname__", repr(call))
    kwargs = dict(config.get("with") or {})

    def factory() -> object:
        return function(**kwargs)

    result = _call(label, factory)
    if isinstance(result, set | frozenset):
        raise SourceError(
            f"{label}: a {type(result).__name__} has no order, and each process its own",
            key="call",
            expected="sorted(...) of it, as an array or iter(...)",
        )
    if _is_iterable(result):
        return IterableSource(label, factory, result)
    return ArraysSource(*leading_arrays(result, label, key="call"))


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


def _shown(dtype: np.dtype[Any], shape: tuple[int, ...]) -> str:
    return f"{'str' if dtype.kind == 'U' else dtype}{list(shape)}"
