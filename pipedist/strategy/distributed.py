"""Distribute datasets and values among the replicas of a strategy."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Final, NoReturn

import anyio
import anyio.lowlevel
import anyio.to_thread
import numpy as np

from pipedist.core import trees
from pipedist.core.misuse_hints import AsyncIterableOnly, AsyncOnly
from pipedist.core.types import Tree
from pipedist.datasets.input import InputContext, InputOptions, InputReplicationMode, ValueContext
from pipedist.datasets.logical import Dataset
from pipedist.datasets.read_ahead import ReadAhead
from pipedist.datasets.sharding import MISSING, MissingElement, divide, steps, steps_cardinality
from pipedist.errors import OutOfRangeError
from pipedist.strategy.context import NotForReplicas, require_outside
from pipedist.values import PerReplica

_OUTSIDE: Final = "take the step outside and pass it: strategy.run(fn, args=(await anext(iterator),))"


class DistributedDataset(AsyncIterableOnly):
    """A dataset divided among replicas, from `Strategy.distribute_dataset`.

    `async for step in dataset` gives the steps in order, each a tree whose leaves are `PerReplica`
    (the elements themselves if the strategy keeps values plain). Each iteration starts again.
    It can't be transformed: transform the Dataset before it is distributed.

    Example:
        async for batch in strategy.distribute_dataset(pipedist.Dataset.range(10).batch(4)):
            print(strategy.local_results(batch))
    """

    __slots__ = ("__weakref__", "_buffer", "_identity", "_pipelines", "_replicas_per_pipeline")

    def __init__(
        self, pipelines: Sequence[Dataset], replicas_per_pipeline: int, *, identity: bool, buffer_steps: int
    ) -> None:
        self._pipelines = tuple(pipelines)
        self._replicas_per_pipeline = replicas_per_pipeline
        self._identity = identity
        self._buffer = buffer_steps

    @property
    def element_spec(self) -> Tree:
        """A tree like a step, with `pipedist.ArraySpec` in place of arrays.

        Raises:
            ValueError: the dataset is empty, and no spec was declared for it.
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
        """Return an iterator over the steps, from the first one."""
        require_outside("iterating a distributed dataset", _OUTSIDE)
        identity, rows = self._identity, steps(self._pipelines, self._replicas_per_pipeline)
        found = (elements[0] if identity else joined(elements) for elements in rows)
        return DistributedIterator(ReadAhead(found, self._buffer))

    def __reduce__(self) -> NoReturn:
        raise NotForReplicas(f"using a distributed dataset inside a replica function: {_OUTSIDE}")

    def __repr__(self) -> str:
        return f"<DistributedDataset, cardinality {self.cardinality()}>"


class OptionalStep:
    """A step, or no step (tf.experimental.Optional)."""

    __slots__ = ("_has_value", "_value")

    def __init__(self, has_value: bool, value: Tree = None) -> None:
        self._has_value = has_value
        self._value = value

    def has_value(self) -> bool:
        """Return whether there is a step."""
        return self._has_value

    def get_value(self) -> Tree:
        """Return the step.

        Raises:
            ValueError: there is none.
        """
        if not self._has_value:
            raise ValueError("this optional has no value: the dataset has ended. Check has_value() first")
        return self._value


class DistributedIterator(AsyncOnly, AsyncIterableOnly):
    """Reads the steps of a distributed dataset in a thread, a limited number of them ahead.

    Reading ends when the iterator is closed (`async with`, `aclose`) or garbage collected. A call that is
    cancelled while it waits loses no step: the next call gets it.
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
        if not found.has_value():
            raise StopAsyncIteration
        return found.get_value()

    async def get_next(self) -> Tree:
        """Return the next step.

        Raises:
            OutOfRangeError: there is none.
            ValueError: called inside a replica function.
        """
        found = await self.get_next_as_optional()
        if not found.has_value():
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
        """Stop reading; there are no more steps."""
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._reader.close)

    async def __aenter__(self) -> DistributedIterator:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.aclose()

    def __reduce__(self) -> NoReturn:
        raise NotForReplicas(f"using a distributed dataset's iterator inside a replica function: {_OUTSIDE}")


async def until_ready(reader: ReadAhead[Tree]) -> None:
    """Wait until a reader has its next element or has ended; safe to cancel."""
    if reader.ready:
        await anyio.lowlevel.checkpoint()
        return
    loop, ready = asyncio.get_running_loop(), asyncio.Event()

    def set_ready() -> None:
        with suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(ready.set)

    unsubscribe = reader.when_ready(set_ready)
    try:
        await ready.wait()
    finally:
        unsubscribe()


def joined(elements: Sequence[Tree | MissingElement]) -> Tree:
    """Return the replicas' elements, not all of them MISSING, as one tree with PerReplica leaves.

    A missing element is empty in every leaf: shape (0, ...) of the right dtype, or None in place of a
    scalar, which has no empty form.
    """
    present = [element for element in elements if element is not MISSING]
    columns, treedef = trees.same_structure(present)
    empty = [leaf[:0] if np.ndim(leaf) else None for leaf in columns[0]]
    rows = iter(columns)
    replicas: list[list[Any]] = [empty if element is MISSING else next(rows) for element in elements]
    return trees.unflatten(treedef, [PerReplica(leaves) for leaves in zip(*replicas, strict=True)])


class InputStrategy(ABC):
    """Owns R replicas, and distributes data among them."""

    _identity: ClassVar[bool] = False  # values stay plain, with a single replica, instead of PerReplica

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas

    @property
    def num_replicas_in_sync(self) -> int:
        """R, the number of replicas that a global batch is divided among."""
        return self._replicas

    @property
    def _input_pipelines(self) -> int:
        """The number of logical input pipelines; each feeds the same number of replicas."""
        return 1

    def distribute_dataset(self, dataset: Dataset, options: InputOptions | None = None) -> DistributedDataset:
        """Divide a dataset among the replicas.

        Each global batch of m rows is one step: replica 0 gets the first ceil(m / R) rows, and so on;
        the last replicas get fewer, or empty arrays of the right dtype and trailing shape. Batch
        boundaries are kept, and no row is dropped.

        Args:
            dataset: batched by the GLOBAL batch size.
            options: number of steps to read ahead; None: the defaults.

        Raises:
            TypeError: `dataset` is not a Dataset, or is distributed already.
            ValueError: `dataset` is None or not batched; or called inside a replica function.
        """
        require_outside("distributing a dataset", "distribute it outside and pass its steps as arguments")
        if dataset is None:
            raise ValueError("distribute_dataset needs a pipedist.Dataset, got None")
        if not isinstance(dataset, Dataset):
            raise TypeError(
                f"distribute_dataset needs a pipedist.Dataset, got {dataset!r} of type "
                f"{type(dataset).__name__}; Dataset.from_tensor_slices makes one from arrays"
            )
        chosen = _options(options)
        if chosen.replication_mode is InputReplicationMode.PER_REPLICA:
            raise ValueError("replication mode PER_REPLICA is for distribute_datasets_from_function only")
        each = self._replicas // self._input_pipelines
        pipelines = [dataset] if self._identity else divide(dataset, self._input_pipelines, each)
        return self._distributed(pipelines, each, chosen)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Dataset], options: InputOptions | None = None
    ) -> DistributedDataset:
        """Distribute one dataset per input pipeline, as a function returns them.

        The datasets are neither batched nor sharded. Consecutive elements of a pipeline go to consecutive
        replicas. If the last step has too few elements, the remaining replicas get empty arrays (None in
        place of a scalar).

        Args:
            dataset_fn: called once per pipeline, immediately, with its InputContext; its Dataset is batched
                by the PER-REPLICA batch size, if at all.
            options: PER_REPLICA gives every replica its own pipeline.

        Raises:
            TypeError: `dataset_fn` is not callable, or does not return a Dataset.
            ValueError: called inside a replica function. Exceptions of `dataset_fn` are passed on.
        """
        require_outside("distributing a dataset", "distribute it outside and pass its steps as arguments")
        if not callable(dataset_fn):
            raise TypeError(f"distribute_datasets_from_function needs a function, not {dataset_fn!r}")
        chosen = _options(options)
        alone = chosen.replication_mode is InputReplicationMode.PER_REPLICA
        total = self._replicas if alone else self._input_pipelines
        each = self._replicas // total
        pipelines = []
        for index in range(total):
            dataset = dataset_fn(InputContext(total, index, self._replicas))
            if not isinstance(dataset, Dataset):
                raise TypeError(
                    f"the dataset function returned {dataset!r} of type {type(dataset).__name__}; "
                    "expected a pipedist.Dataset"
                )
            pipelines.append(dataset)
        return self._distributed(pipelines, each, chosen)

    def distribute_values_from_function(self, value_fn: Callable[[ValueContext], Tree]) -> Tree:
        """Make a per-replica value by calling a function once per replica, in this process.

        Args:
            value_fn: called with a ValueContext, replica 0 first.

        Raises:
            TypeError: `value_fn` is not callable.
            ValueError: its results differ in structure; or called inside a replica function. Exceptions of
                `value_fn` are passed on.
        """
        require_outside("distributing values", "make them outside and pass them as arguments")
        if not callable(value_fn):
            raise TypeError(f"distribute_values_from_function needs a function, not {value_fn!r}")
        contexts = [ValueContext(replica, self._replicas) for replica in range(self._replicas)]
        return self._joined([value_fn(context) for context in contexts])

    def make_numpy_dataset(self, numpy_input: Tree) -> Dataset:
        """Return the slices of a tree of NumPy arrays along their first axis, undistributed.

        Args:
            numpy_input: arrays [n, ...]; a list of arrays is stacked to one.

        Raises:
            TypeError: a leaf is not a NumPy array.
            ValueError: a leaf is a scalar, or lengths differ.
        """
        leaves, treedef = trees.flatten(numpy_input)
        for name, leaf in zip(trees.treedef_paths(treedef), leaves, strict=True):
            if not isinstance(leaf, np.ndarray | np.generic):
                raise TypeError(
                    f"make_numpy_dataset: {name or 'the value'} is {leaf!r} of type {type(leaf).__name__}; "
                    "expected NumPy arrays (np.asarray converts it)"
                )
        return Dataset.from_tensor_slices(numpy_input)

    def _distributed(
        self, pipelines: Sequence[Dataset], each: int, options: InputOptions
    ) -> DistributedDataset:
        return DistributedDataset(
            pipelines, each, identity=self._identity, buffer_steps=options.per_replica_buffer_size
        )

    @abstractmethod
    def _joined(self, components: Sequence[Tree]) -> Tree:
        """Return the replicas' values as one value."""


def _options(options: InputOptions | None) -> InputOptions:
    if options is None:
        return InputOptions()
    if not isinstance(options, InputOptions):
        raise TypeError(f"options is {options!r}; expected a pipedist.InputOptions")
    return options
