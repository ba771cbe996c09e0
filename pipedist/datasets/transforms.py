"""The transformations of a `Dataset`, as nodes of its frozen tree (semantics: tf.data)."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
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
    split,
    stack_padded,
    zeros,
)
from pipedist.datasets.nodes import INFINITE, UNKNOWN, Node, UnknownSpecError, sampled_spec
from pipedist.datasets.read_ahead import ReadAhead

SHARD_HINT: Final = -1  # in `shard(SHARD_HINT, SHARD_HINT)`, which policy HINT replaces by real numbers


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Transform(Node):
    """A node with one input; by default it changes neither number nor spec of the elements."""

    input: Node

    @property
    def inputs(self) -> tuple[Node, ...]:
        return (self.input,)

    def with_inputs(self, inputs: Sequence[Node]) -> Node:
        (replaced,) = inputs
        return dataclasses.replace(self, input=replaced)

    def cardinality(self) -> int:
        return self.input.cardinality()

    def spec(self) -> Tree:
        return self.input.spec()


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class BatchNode(Transform):
    """Consecutive elements, stacked."""

    size: int
    drop_remainder: bool
    padded: bool = False

    def __iter__(self) -> Iterator[Tree]:
        whole = self.drop_remainder
        blocks = self._padded_blocks() if self.padded else self.input.blocks(self.size, whole=whole)
        for rows, block in blocks:
            if rows == self.size or not self.drop_remainder:
                yield block

    def _padded_blocks(self) -> Iterator[tuple[int, Tree]]:
        iterator = iter(self.input)
        while elements := list(itertools.islice(iterator, self.size)):
            yield len(elements), stack_padded(elements)

    def cardinality(self) -> int:
        count = self.input.cardinality()
        if count < 0:
            return count
        return count // self.size if self.drop_remainder else -(-count // self.size)

    def spec(self) -> Tree:
        rows = self.size if self.drop_remainder else None
        return trees.tree_map(lambda leaf: leaf.with_shape((rows, *leaf.shape)), self.input.spec())

    @property
    def batch_depth(self) -> int:
        return self.input.batch_depth + 1


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class UnbatchNode(Transform):
    """The rows of each element."""

    def __iter__(self) -> Iterator[Tree]:
        for element in self.input:
            rows = common_rows(element)
            leaves, treedef = trees.flatten(element)
            for row in range(rows):
                yield trees.unflatten(treedef, [leaf[row] for leaf in leaves])

    def cardinality(self) -> int:
        count = self.input.cardinality()
        leaves, _ = trees.flatten(self.input.spec())
        rows = leaves[0].shape[0] if leaves and leaves[0].shape else None
        if count <= 0:
            return count
        return UNKNOWN if rows is None else count * rows

    def spec(self) -> Tree:
        return trees.tree_map(lambda leaf: leaf.with_shape(leaf.shape[1:]), self.input.spec())

    @property
    def batch_depth(self) -> int:
        return max(self.input.batch_depth - 1, 0)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RebatchNode(Transform):
    """Each element divided into `parts` chunks of ceil(rows / parts), empty ones included."""

    parts: int

    def __iter__(self) -> Iterator[Tree]:
        for element in self.input:
            yield from split(element, self.parts)

    def cardinality(self) -> int:
        count = self.input.cardinality()
        return count if count < 0 else count * self.parts

    def spec(self) -> Tree:
        return trees.tree_map(self._divided, self.input.spec())

    def _divided(self, leaf: ArraySpec) -> ArraySpec:
        if not leaf.shape:
            raise ValueError(
                "can't divide a scalar among replicas: batch the dataset last, with .batch(global_batch_size)"
            )
        rows = leaf.shape[0]
        chunk = rows // self.parts if rows is not None and rows % self.parts == 0 else None
        return leaf.with_shape((chunk, *leaf.shape[1:]))


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RepeatNode(Transform):
    """The input `times` times in a row; INFINITE: without end."""

    times: int

    def __iter__(self) -> Iterator[Tree]:
        rounds = itertools.count() if self.times == INFINITE else range(self.times)
        for _ in rounds:
            empty = True
            for element in self.input:
                empty = False
                yield element
            if empty:
                return

    def cardinality(self) -> int:
        count = self.input.cardinality()
        if self.times == 0 or count == 0:
            return 0
        if INFINITE in (self.times, count):
            return INFINITE
        return UNKNOWN if count == UNKNOWN else count * self.times


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TakeNode(Transform):
    """The first `count` elements."""

    count: int

    def __iter__(self) -> Iterator[Tree]:
        return itertools.islice(iter(self.input), self.count)

    def cardinality(self) -> int:
        count = self.input.cardinality()
        if count == INFINITE:
            return self.count
        return UNKNOWN if count == UNKNOWN else min(count, self.count)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SkipNode(Transform):
    """All but the first `count` elements."""

    count: int

    def __iter__(self) -> Iterator[Tree]:
        return itertools.islice(iter(self.input), self.count, None)

    def cardinality(self) -> int:
        count = self.input.cardinality()
        return count if count < 0 else max(count - self.count, 0)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ShardNode(Transform):
    """Elements `index`, `index + shards`, `index + 2 * shards`, ..."""

    shards: int
    index: int

    def __iter__(self) -> Iterator[Tree]:
        if self.hinted:
            raise RuntimeError(
                "shard(SHARD_HINT, ...) has no numbers: distribute the dataset with auto-shard policy HINT, "
                "which replaces them by those of the pipelines"
            )
        return itertools.islice(iter(self.input), self.index, None, self.shards)

    @property
    def hinted(self) -> bool:
        """Whether policy HINT is to replace the numbers."""
        return self.shards == SHARD_HINT

    def cardinality(self) -> int:
        count = self.input.cardinality()
        if count < 0 or self.hinted:
            return count
        return len(range(self.index, count, self.shards))


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PrefetchNode(Transform):
    """The same elements, up to `buffer` of them read ahead in a thread."""

    buffer: int

    def __iter__(self) -> Iterator[Tree]:
        with ReadAhead(self.input, self.buffer) as elements:
            yield from elements


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class CacheNode(Transform):
    """The same elements, from memory after the first complete pass."""

    passes: list[list[Tree]] = dataclasses.field(default_factory=list)  # the first complete pass

    def with_inputs(self, inputs: Sequence[Node]) -> Node:
        (replaced,) = inputs
        return CacheNode(replaced)

    def __iter__(self) -> Iterator[Tree]:
        if self.passes:
            yield from self.passes[0]
            return
        elements = []
        for element in map(read_only, self.input):
            elements.append(element)
            yield element
        self.passes[:] = [elements]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class EnumerateNode(Transform):
    """Pairs (number, element)."""

    start: int

    def __iter__(self) -> Iterator[Tree]:
        for number, element in enumerate(self.input, self.start):
            yield np.int64(number), element

    def spec(self) -> Tree:
        return ArraySpec(np.int64), self.input.spec()


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Combination(Node):
    """A node with several inputs."""

    parts: tuple[Node, ...]

    @property
    def inputs(self) -> tuple[Node, ...]:
        return self.parts

    def with_inputs(self, inputs: Sequence[Node]) -> Node:
        return dataclasses.replace(self, parts=tuple(inputs))


class ConcatenateNode(Combination):
    """The elements of several inputs, one input after the other."""

    __slots__ = ()

    def __iter__(self) -> Iterator[Tree]:
        return itertools.chain.from_iterable(self.parts)

    def cardinality(self) -> int:
        counts = [node.cardinality() for node in self.parts]
        if INFINITE in counts:
            return INFINITE
        return UNKNOWN if UNKNOWN in counts else sum(counts)

    def spec(self) -> Tree:
        first, *rest = (node.spec() for node in self.parts)
        for other in rest:
            first = merge_specs(first, other)
        return first


class ZipNode(Combination):
    """Tuples of one element of each input, as many as the shortest has."""

    __slots__ = ()

    def __iter__(self) -> Iterator[Tree]:
        return zip(*self.parts, strict=False)

    def cardinality(self) -> int:
        counts = [node.cardinality() for node in self.parts]
        if UNKNOWN in counts:
            return UNKNOWN
        return min((count for count in counts if count != INFINITE), default=INFINITE)

    def spec(self) -> Tree:
        return tuple(node.spec() for node in self.parts)


def apply(fn: Callable[..., Any], element: Tree) -> Any:
    """Call `fn` on an element; a tuple is unpacked into arguments, as in tf.data."""
    return fn(*element) if type(element) is tuple else fn(element)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class MapNode(Transform):
    """The results of `fn` for each element."""

    fn: Callable[..., Any]
    declared: Tree | None  # the spec of the results; None: derived by calling `fn`

    def __iter__(self) -> Iterator[Tree]:
        for element in self.input:
            yield trees.tree_map(kept, as_element(apply(self.fn, element)))

    def spec(self) -> Tree:
        if self.declared is not None:
            return self.declared
        given = self.input.spec()
        try:
            result = sampled_spec(self, "map")
        except UnknownSpecError as unknown:
            # use the dtypes and ranks of the result for zeros, if `fn` accepts them
            try:
                result = spec_of(as_element(apply(self.fn, zeros(given))))
            except Exception as error:
                raise unknown from error
        # two samples of a batch can't show that its size varies, but the input's spec does
        free = {axis for leaf in trees.flatten(given)[0] for axis, n in enumerate(leaf.shape) if n is None}
        return trees.tree_map(
            lambda leaf: leaf.with_shape([None if i in free else n for i, n in enumerate(leaf.shape)]), result
        )


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class FilterNode(Transform):
    """The elements for which `predicate` is true."""

    predicate: Callable[..., Any]

    def __iter__(self) -> Iterator[Tree]:
        for element in self.input:
            accepted = apply(self.predicate, element)
            if not isinstance(accepted, bool | np.bool_) and not (
                isinstance(accepted, np.ndarray) and accepted.shape == () and accepted.dtype == np.bool_
            ):
                raise ValueError(
                    f"filter: the predicate returned {accepted!r} of type {type(accepted).__name__}; "
                    "expected one bool"
                )
            if accepted:
                yield element

    def cardinality(self) -> int:
        return UNKNOWN


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class InterleaveNode(Transform):
    """The elements of the nodes that `open_node` returns for each element, in turns.

    `cycle` nodes are open at a time, each for a turn of `block` elements; an exhausted one is replaced
    by that of the next element.
    """

    open_node: Callable[[Tree], Node]
    cycle: int
    block: int

    def __iter__(self) -> Iterator[Tree]:
        waiting = iter(self.input)
        more = True
        places: list[Iterator[Tree] | None] = [None] * self.cycle
        place = 0
        while more or any(slot is not None for slot in places):
            slot = places[place]
            if slot is None and more:
                for element in waiting:
                    slot = places[place] = iter(self.open_node(element))
                    break
                else:
                    more = False
            if slot is not None:
                taken = 0
                for element in itertools.islice(slot, self.block):
                    taken += 1
                    yield element
                if taken < self.block:
                    places[place] = None
            place = (place + 1) % self.cycle

    def cardinality(self) -> int:
        return UNKNOWN

    def spec(self) -> Tree:
        opened = self._first()
        if opened is None:
            raise UnknownSpecError("the datasets that flat_map or interleave opens")
        return opened.spec()

    @property
    def batch_depth(self) -> int:
        opened = self._first()
        return 0 if opened is None else opened.batch_depth

    def _first(self) -> Node | None:
        for element in self.input:
            return self.open_node(element)
        return None
