"""The frozen tree behind a `Dataset`: the interface of its nodes, and its sources.

The tree is data: auto-sharding rewrites it (see `pipedist.datasets.sharding`), and every iteration
starts from the beginning. The transformations are in `pipedist.datasets.transforms`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np

from pipedist.core import trees
from pipedist.core.types import Tree
from pipedist.datasets.element import (
    ArraySpec,
    as_element,
    common_rows,
    kept,
    merge_specs,
    read_only,
    spec_of,
    stack,
)
from pipedist.datasets.sources.base import SourceReader
from pipedist.datasets.sources.memory import leading_arrays

_SOURCE_ROWS: Final = 64  # elements of a reader that are read together for an iteration
INFINITE: Final = -1  # the cardinality of a dataset that never ends (tf.data.INFINITE_CARDINALITY)
UNKNOWN: Final = -2  # the cardinality of a dataset of unknown length (tf.data.UNKNOWN_CARDINALITY)


class Node(ABC):
    """A node of the tree: immutable, and iterable any number of times."""

    __slots__ = ()

    @property
    def inputs(self) -> tuple[Node, ...]:
        """The nodes that this one reads; none for a source."""
        return ()

    def with_inputs(self, inputs: Sequence[Node]) -> Node:
        return self

    @abstractmethod
    def __iter__(self) -> Iterator[Tree]: ...

    @abstractmethod
    def cardinality(self) -> int:
        """Return the number of elements, INFINITE or UNKNOWN, without reading any."""

    @abstractmethod
    def spec(self) -> Tree:
        """Return the tree of ArraySpecs that fits every element."""

    @property
    def batch_depth(self) -> int:
        """The number of leading axes of an element that batching added."""
        return min((node.batch_depth for node in self.inputs), default=0)

    def blocks(self, size: int, *, whole: bool = False) -> Iterator[tuple[int, Tree]]:
        """Yield (count, stacked) blocks of `size` consecutive elements, the last one shorter.

        `whole`: drop a shorter last block, whose elements need not have one shape.
        """
        pending: list[Tree] = []
        for element in self:
            pending.append(element)
            if len(pending) == size:
                yield size, stack(pending)
                pending = []
        if pending and not whole:
            yield len(pending), stack(pending)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RangeNode(Node):
    """The integers of a range, as int64 scalars."""

    values: range

    def __iter__(self) -> Iterator[Tree]:
        return map(np.int64, self.values)

    def cardinality(self) -> int:
        return len(self.values)

    def spec(self) -> Tree:
        return ArraySpec(np.int64)

    def blocks(self, size: int, *, whole: bool = False) -> Iterator[tuple[int, Tree]]:
        for start in range(0, len(self.values), size):
            part = self.values[start : start + size]
            yield len(part), np.arange(part.start, part.stop, part.step, dtype=np.int64)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SlicesNode(Node):
    """The slices of a tree of arrays along their leading axis."""

    arrays: Tree
    length: int

    @classmethod
    def of(cls, tree: Any) -> SlicesNode:
        """Return a node with read-only views of the arrays; raise ValueError or TypeError if it can't be made."""
        arrays = read_only(as_element(tree))
        return cls(arrays, common_rows(arrays))

    def __iter__(self) -> Iterator[Tree]:
        leaves, treedef = trees.flatten(self.arrays)
        for index in range(self.length):
            yield trees.unflatten(treedef, [leaf[index] for leaf in leaves])

    def cardinality(self) -> int:
        return self.length

    def spec(self) -> Tree:
        return trees.tree_map(lambda leaf: ArraySpec(leaf.dtype, leaf.shape[1:]), self.arrays)

    def blocks(self, size: int, *, whole: bool = False) -> Iterator[tuple[int, Tree]]:
        leaves, treedef = trees.flatten(self.arrays)
        for start in range(0, self.length, size):
            stop = min(start + size, self.length)
            yield stop - start, trees.unflatten(treedef, [leaf[start:stop] for leaf in leaves])


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SourceNode(Node):
    """The elements of a reader, in the order of their ids."""

    reader: SourceReader
    length: int

    def _read(self, start: int, stop: int) -> Tree:
        ids = np.arange(start, min(stop, self.length), dtype=np.int64)
        arrays, rows = leading_arrays(
            self.reader.read(ids), f"{type(self.reader).__name__}.read()", key="class"
        )
        if rows != len(ids):
            raise ValueError(
                f"{type(self.reader).__name__}.read() of {len(ids)} ids returned arrays of {rows} rows"
            )
        return read_only(arrays)

    def __iter__(self) -> Iterator[Tree]:
        for count, block in self.blocks(_SOURCE_ROWS):
            leaves, treedef = trees.flatten(block)
            for row in range(count):
                yield trees.unflatten(treedef, [leaf[row] for leaf in leaves])

    def cardinality(self) -> int:
        return self.length

    def spec(self) -> Tree:
        declared = getattr(self.reader, "element_spec", None)
        if declared is not None:
            return declared
        return trees.tree_map(lambda leaf: ArraySpec(leaf.dtype, leaf.shape[1:]), self._read(0, 1))

    def blocks(self, size: int, *, whole: bool = False) -> Iterator[tuple[int, Tree]]:
        for start in range(0, self.length, size):
            count = min(size, self.length - start)
            if count == size or not whole:
                yield count, self._read(start, start + size)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SingleNode(Node):
    """One element."""

    element: Tree

    def __iter__(self) -> Iterator[Tree]:
        yield read_only(self.element)

    def cardinality(self) -> int:
        return 1

    def spec(self) -> Tree:
        return spec_of(self.element)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class GeneratorNode(Node):
    """The elements of a callable's iterable; called once for each iteration."""

    factory: Callable[[], Iterable[Any]]
    declared: Tree | None  # the spec of an element; None: derived from the first two
    batched: bool  # each element is a global batch

    def __iter__(self) -> Iterator[Tree]:
        for element in self.factory():
            yield trees.tree_map(kept, as_element(element))

    def cardinality(self) -> int:
        return UNKNOWN

    def spec(self) -> Tree:
        return self.declared if self.declared is not None else sampled_spec(self, "from_generator")

    @property
    def batch_depth(self) -> int:
        return int(self.batched)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class FilesNode(Node):
    """A source of files, which FILE sharding divides."""

    paths: tuple[str, ...]

    def spec(self) -> Tree:
        return ArraySpec(str)


class FileNamesNode(FilesNode):
    """The names of files."""

    __slots__ = ()

    def __iter__(self) -> Iterator[Tree]:
        return map(np.str_, self.paths)

    def cardinality(self) -> int:
        return len(self.paths)


class TextFilesNode(FilesNode):
    """The lines of UTF-8 files in the order of the files, without their line ends."""

    __slots__ = ()

    def __iter__(self) -> Iterator[Tree]:
        for path in self.paths:
            with open(path, encoding="utf-8", newline="\n") as file:
                for line in file:
                    yield np.str_(line.removesuffix("\n").removesuffix("\r"))

    def cardinality(self) -> int:
        return UNKNOWN


class UnknownSpecError(ValueError):
    def __init__(self, maker: str) -> None:
        super().__init__(
            f"the element_spec of this empty dataset is unknown: pass element_spec= to {maker}, "
            "a tree of pipedist.ArraySpec"
        )


def sampled_spec(node: Node, maker: str) -> Tree:
    """Return the spec of a node whose elements user code makes, from the first two of them.

    `maker` is the Dataset method that created the node, as errors name it.
    """
    specs = [spec_of(element) for element in itertools.islice(iter(node), _SAMPLES)]
    if not specs:
        raise UnknownSpecError(maker)
    return functools.reduce(merge_specs, specs)


_SAMPLES = 2  # two show which dimensions differ; a spec that needs more can be declared
