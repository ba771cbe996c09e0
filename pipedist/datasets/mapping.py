"""The transformations of a `Dataset` that call the user's functions (semantics: tf.data)."""



from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from pipedist import trees
from pipedist.datasets.element import as_element, kept, spec_of, zeros
from pipedist.datasets.nodes import UNKNOWN, Node, UnknownSpecError, sampled_spec
from pipedist.datasets.transforms import Transform
from pipedist.program import Tree


def apply(fn: Callable[..., Any], element: Tree) -> Any:
    """Call `fn` on an element; a tuple is unpacked into arguments, as in tf.data."""
    return fn(*element) if type(element) is tuple else fn(element)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Map(Transform):
    """What `fn` makes of each element.

    Args:
        declared: the spec of the results, or None: found by calling `fn`.
    """

    fn: Callable[..., Any]
    declared: Tree | None

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
            # Dtypes and ranks are those of an element of zeros, if `fn` takes one.
            try:
                result = spec_of(as_element(apply(self.fn, zeros(given))))
            except Exception as error:
                raise unknown from error
        # Two samples of a batch can't show that its size varies, but the input's spec says it.
        free = {axis for leaf in trees.flatten(given)[0] for axis, n in enumerate(leaf.shape) if n is None}
        return trees.tree_map(
            lambda leaf: leaf.with_shape([None if i in free else n for i, n in enumerate(leaf.shape)]), result
        )


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Filter(Transform):
    """The elements for which `predicate` is true."""

    predicate: Callable[..., Any]

    def __iter__(self) -> Iterator[Tree]:
        for element in self.input:
            verdict = apply(self.predicate, element)
            if not isinstance(verdict, bool | np.bool_) and not (
                isinstance(verdict, np.ndarray) and verdict.shape == () and verdict.dtype == np.bool_
            ):
                raise ValueError(
                    f"filter: the predicate returned {verdict!r} of type {type(verdict).__name__}; "
                    "expected one bool"
                )
            if verdict:
                yield element

    def cardinality(self) -> int:
        return UNKNOWN


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Interleave(Transform):
    """The elements of the pipelines that `open_node` makes of each element, taken in turns.

    `cycle` of them are open at a time; `block` elements are taken from one before the next has its
    turn; one that is exhausted gives its place to the next element's.
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
