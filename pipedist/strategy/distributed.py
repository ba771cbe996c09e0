"""A dataset as the replicas of a strategy get it: steps of per-replica values."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, NoReturn

import anyio
import anyio.lowlevel
import anyio.to_thread
import numpy as np

from pipedist.core import trees
from pipedist.core.misuse_hints import AsyncIterableOnly, AsyncOnly
from pipedist.core.types import Tree
from pipedist.datasets.logical import Dataset
from pipedist.datasets.read_ahead import ReadAhead
from pipedist.datasets.sharding import MISSING, MissingElement, steps, steps_cardinality
from pipedist.errors import OutOfRangeError
from pipedist.strategy.context import NotForReplicas, require_outside
from pipedist.values import PerReplica

_OUTSIDE: Final = "take the step outside and pass it: strategy.run(fn, args=(await anext(iterator),))"


class DistributedDataset(AsyncIterableOnly):
    """A dataset, divided among the replicas of a strategy; made by `Strategy.distribute_dataset`.

    `async for step in dataset` gives the steps in order, each a tree whose leaves are `PerReplica`
    (of a strategy whose distribution is the identity: the elements). Each iteration starts again.
    It can't be transformed any more: transform the Dataset before it is distributed.
    """

    __slots__ = ("__weakref__", "_buffer", "_identity", "_pipelines", "_replicas_per_pipeline")

    def __init__(
        self,
        pipelines: Sequence[Dataset],
        replicas_per_pipeline: int,
        *,
        identity: bool,
        buffer_steps: int,
    ) -> None:
        self._pipelines = tuple(pipelines)
        self._replicas_per_pipeline = replicas_per_pipeline
        self._identity = identity
        self._buffer = buffer_steps

    @property
    def element_spec(self) -> Tree:
        """A tree like a step, with `pipedist.ArraySpec` in place of arrays.

        Raises:
            ValueError: the dataset is empty, and its spec was not declared.
        """
        spec = self._pipelines[0].element_spec
        if self._identity:
            return spec
        replicas = len(self._pipelines) * self._replicas_per_pipeline
        return trees.tree_map(lambda leaf: PerReplica([leaf] * replicas), spec)

    def cardinality(self) -> int:
        """Return the number of steps, `Dataset.INFINITE` (-1) or `Dataset.UNKNOWN` (-2)."""
        return steps_cardinality(self._pipelines, self._replicas_per_pipeline)

    def __aiter__(self) -> DistributedIterator:
        """Read the steps from the first one."""
        require_outside("iterating a distributed dataset", _OUTSIDE)
        return DistributedIterator(
            ReadAhead(_Steps(self._pipelines, self._replicas_per_pipeline, self._identity), self._buffer)
        )

    def __reduce__(self) -> NoReturn:
        raise NotForReplicas(f"using a distributed dataset inside a replica function: {_OUTSIDE}")

    def __repr__(self) -> str:
        return f"<DistributedDataset, cardinality {self.cardinality()}>"


class OptionalStep:
    """A step, or the news that there is none (tf.experimental.Optional)."""

    __slots__ = ("_value", "has_value")

    def __init__(self, has_value: bool, value: Tree = None) -> None:
        self.has_value = has_value
        self._value = value

    def get_value(self) -> Tree:
        """Return the step.

        Raises:
            ValueError: there is none.
        """
        if not self.has_value:
            raise ValueError("this optional has no value: the dataset has ended; look at has_value first")
        return self._value


class DistributedIterator(AsyncOnly, AsyncIterableOnly):
    """Reads the steps of a distributed dataset, a bounded number of them ahead, in a thread.

    `async with` it, or `aclose` it, to end the reading at a certain moment; one that nobody holds any
    more ends it too. A call that is cancelled while it waits loses nothing: the next one gets the step.
    """

    __slots__ = ("__weakref__", "_lock", "_reader")

    def __init__(self, reader: ReadAhead[Tree]) -> None:
        self._reader = reader
        self._lock = anyio.Lock()

    def __aiter__(self) -> DistributedIterator:
        return self

    async def __anext__(self) -> Tree:
        """Return the next step.

        Raises:
            StopAsyncIteration: there is none.
            ValueError: called inside a replica function.
        """
        found = await self.get_next_as_optional()
        if not found.has_value:
            raise StopAsyncIteration
        return found.get_value()

    async def get_next(self) -> Tree:
        """Return the next step.

        Raises:
            OutOfRangeError: there is none.
            ValueError: called inside a replica function.
        """
        found = await self.get_next_as_optional()
        if not found.has_value:
            raise OutOfRangeError("the distributed dataset has no more steps")
        return found.get_value()

    async def get_next_as_optional(self) -> OptionalStep:
        """Return the next step as an optional, which has no value after the last one.

        Raises:
            ValueError: called inside a replica function.
        """
        require_outside("taking the next step of a distributed dataset", _OUTSIDE)
        async with self._lock:
            await until_ready(self._reader)
            for step in self._reader:
                return OptionalStep(True, step)
        return OptionalStep(False)

    async def aclose(self) -> None:
        """End the reading; there are no more steps."""
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._reader.close)

    async def __aenter__(self) -> DistributedIterator:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __reduce__(self) -> NoReturn:
        raise NotForReplicas(f"using a distributed dataset's iterator inside a replica function: {_OUTSIDE}")


async def until_ready(reader: ReadAhead[Tree]) -> None:
    """Wait until a reader has its next element, or none any more; a wait that is cancelled leaves nothing."""
    if reader.ready:
        await anyio.lowlevel.checkpoint()
        return
    loop, ready = asyncio.get_running_loop(), asyncio.Event()

    def tell() -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(ready.set)

    give_up = reader.when_ready(tell)
    try:
        await ready.wait()
    finally:
        give_up()


class _Steps:
    """The steps as trees; knows no iterator, so that one that is forgotten can be collected."""

    def __init__(self, pipelines: Sequence[Dataset], replicas_per_pipeline: int, identity: bool) -> None:
        self._pipelines = pipelines
        self._replicas = replicas_per_pipeline
        self._identity = identity

    def __iter__(self) -> Iterator[Tree]:
        for elements in steps(self._pipelines, self._replicas):
            yield elements[0] if self._identity else joined(elements)


def joined(elements: Sequence[Tree | MissingElement]) -> Tree:
    """Make one tree of PerReplica leaves of the replicas' elements.

    A missing element is empty in every leaf: shape (0, ...) of the right dtype, or, since a scalar
    has no empty form, None.

    Args:
        elements: one a replica, at least one of them not MISSING.

    Raises:
        ValueError: two elements differ in structure; the text shows both.
    """
    present = [element for element in elements if element is not MISSING]
    columns, treedef = trees.same_structure(present)
    empty = [leaf[:0] if np.ndim(leaf) else None for leaf in columns[0]]
    rows = iter(columns)
    replicas: list[list[Any]] = [empty if element is MISSING else next(rows) for element in elements]
    return trees.unflatten(treedef, [PerReplica(leaves) for leaves in zip(*replicas, strict=True)])
