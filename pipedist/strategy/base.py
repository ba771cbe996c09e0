"""What all strategies can do: distribute data, combine values, be current."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Final

import anyio.lowlevel
import anyio.to_thread

from pipedist import trees, values
from pipedist.datasets.input import InputContext, InputOptions, InputReplicationMode, ValueContext
from pipedist.datasets.logical import Dataset, numpy_dataset
from pipedist.datasets.sharding import divide
from pipedist.program import Tree
from pipedist.strategy.context import require_cross_replica, require_outside, scope_of
from pipedist.strategy.distributed import DistributedDataset
from pipedist.values import PerReplica, ReduceOp
from pipedist.worker.context import ReplicaStrategy

_INLINE_BYTES_MAX: Final = 2**20
"""Larger values are combined in a thread: the loop that feeds the workers must not stand still."""


class BaseStrategy(ABC):
    """Owns R replicas: runs functions on them, and combines what they return."""

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas

    @property
    def num_replicas_in_sync(self) -> int:
        """R: how many replicas a global batch is divided among."""
        return self._replicas

    @property
    @abstractmethod
    def _identity(self) -> bool:
        """Whether values are the one replica's own, and not PerReplica."""

    @abstractmethod
    async def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Tree:
        """Call `fn` on every replica.

        Args:
            fn: a replica function, sync or async; with a parameter named `ctx` it also gets the
                ReplicaContext.
            args, kwargs: its arguments; each replica gets its own component wherever a PerReplica
                stands in them, and a copy of everything else. Arrays arrive read-only.

        Returns:
            What it returned, in its structure, with every leaf a PerReplica; None stays None.

        Raises:
            TypeError: `fn` can't be called, `kwargs` is no mapping, or an argument can't be sent to
                workers (UnsendableError, which names its place).
            ValueError: `args` is neither tuple nor list; an argument has another number of components
                than there are replicas; or the replicas returned different structures (the text shows
                two).
            CallError: `fn` raised; of several replicas, the lowest one's exception is `__cause__`.
            RuntimeError: called inside a replica function.
        """

    def scope(self) -> AbstractContextManager[BaseStrategy]:
        """Return a context manager that makes this strategy current: `with strategy.scope():`.

        Raises:
            RuntimeError: on entering, where another strategy is current.
        """
        return scope_of(self)

    async def reduce(self, reduce_op: ReduceOp | str, value: Tree, axis: int | Sequence[int] | None) -> Tree:
        """Combine the replicas' values to one (tf.distribute.Strategy.reduce).

        Args:
            reduce_op: a ReduceOp or its name.
            value: a tree with PerReplica leaves.
            axis: None: across replicas, element by element; an int, or several: also along these
                axes of every component. It must be said; MEAN with an axis divides by the true
                number of rows, with None by the number of replicas, empty ones included.

        Returns:
            A tree of the same structure, without PerReplica.

        Raises:
            ValueError: there is no such op or axis, shapes don't fit, or SUM of a plain value.
            TypeError: a dtype can't be reduced; the text names the leaf.
            OverflowError: an integer result does not fit its dtype.
            RuntimeError: called inside a replica function.
        """
        require_cross_replica("Strategy.reduce")
        whole = values.per_replica([self._own(value)]) if self._identity else value
        return await _computed(partial(values.reduce, reduce_op, whole, axis, self._replicas), whole)

    async def gather(self, value: Tree, axis: int) -> Tree:
        """Put the replicas' values end to end (tf.distribute.Strategy.gather).

        Args:
            value: a tree with PerReplica leaves, of arrays whose shapes differ along `axis` only.
            axis: the axis along which they are put together, in order of replica id.

        Returns:
            A tree of the same structure, without PerReplica. A strategy whose values are its one
            replica's own returns the value as it is.

        Raises:
            ValueError: there is no such axis, or shapes don't fit.
            RuntimeError: called inside a replica function.
        """
        require_cross_replica("Strategy.gather")
        if self._identity:
            await anyio.lowlevel.checkpoint()
            return self._own(value)
        return await _computed(partial(values.gather, value, axis, self._replicas), value)

    def local_results(self, value: Tree) -> tuple[Tree, ...]:
        """Return what each replica has, as a tuple in order of replica id.

        Args:
            value: a PerReplica, or a tree of them; a plain value gives a tuple of one.

        Raises:
            ValueError: a PerReplica has another number of components.
        """
        return values.local_results(value, self._replicas)

    def distribute_dataset(self, dataset: Dataset, options: InputOptions | None = None) -> DistributedDataset:
        """Divide a dataset among the replicas.

        Each global batch of m rows is one step: replica 0 gets the first ceil(m / R) rows, and so on;
        the last replicas get fewer, or empty arrays of the right dtype and trailing shape. Batch
        boundaries are kept, and nothing is dropped.

        Args:
            dataset: batched by the GLOBAL batch size.
            options: how to read it.

        Raises:
            TypeError: `dataset` is no Dataset (a distributed one neither).
            ValueError: `dataset` is None or not batched; or called inside a replica function.
        """
        require_outside("distributing a dataset", "distribute it outside and pass its steps as arguments")
        if dataset is None:
            raise ValueError("distribute_dataset needs a pipedist.Dataset, got None")
        if not isinstance(dataset, Dataset):
            raise TypeError(
                f"distribute_dataset needs a pipedist.Dataset, got {dataset!r} of type "
                f"{type(dataset).__name__}; Dataset.from_tensor_slices makes one of arrays"
            )
        chosen = _options(options)
        if chosen.replication_mode is InputReplicationMode.PER_REPLICA:
            raise ValueError("replication mode PER_REPLICA is for distribute_datasets_from_function only")
        pipelines = [dataset] if self._identity else divide(dataset, 1, self._replicas)
        return self._distributed(pipelines, self._replicas, chosen)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Dataset], options: InputOptions | None = None
    ) -> DistributedDataset:
        """Distribute what a function makes for each input pipeline; nothing is batched or sharded here.

        Consecutive elements of a pipeline go to consecutive replicas. Where the elements don't suffice
        for the last step, the rest of the replicas get empty arrays (None in place of a scalar).

        Args:
            dataset_fn: called at once, for each pipeline, with its InputContext; its Dataset is batched
                by the PER-REPLICA batch size, if at all.
            options: PER_REPLICA makes every replica a pipeline of its own.

        Raises:
            TypeError: `dataset_fn` can't be called, or returns no Dataset.
            ValueError: called inside a replica function. What `dataset_fn` raises comes through.
        """
        require_outside("distributing a dataset", "distribute it outside and pass its steps as arguments")
        if not callable(dataset_fn):
            raise TypeError(f"distribute_datasets_from_function needs a function, not {dataset_fn!r}")
        chosen = _options(options)
        each = 1 if chosen.replication_mode is InputReplicationMode.PER_REPLICA else self._replicas
        total = self._replicas // each
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
        """Make a per-replica value by calling a function once for each replica, here.

        Args:
            value_fn: called with a ValueContext, replica 0 first.

        Raises:
            TypeError: `value_fn` can't be called.
            ValueError: its results differ in structure; or called inside a replica function. What
                `value_fn` raises comes through.
        """
        require_outside("distributing values", "make them outside and pass them as arguments")
        if not callable(value_fn):
            raise TypeError(f"distribute_values_from_function needs a function, not {value_fn!r}")
        return self._joined(
            [value_fn(ValueContext(replica, self._replicas)) for replica in range(self._replicas)]
        )

    def make_numpy_dataset(self, numpy_input: Tree) -> Dataset:
        """Return the slices of a tree of NumPy arrays along their first axis, undistributed.

        Args:
            numpy_input: arrays [n, ...]; a list of arrays is stacked to one.

        Raises:
            TypeError: a leaf is no NumPy array.
            ValueError: a leaf is a scalar, or lengths differ.
        """
        return numpy_dataset(numpy_input)

    def __reduce__(self) -> tuple[Any, ...]:
        """A strategy that a replica function has captured arrives there as its replica's side of it."""
        return ReplicaStrategy, (self._replicas,)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._replicas} replicas>"

    def _distributed(
        self, pipelines: Sequence[Dataset], each: int, options: InputOptions
    ) -> DistributedDataset:
        return DistributedDataset(
            pipelines, each, identity=self._identity, buffer_steps=options.per_replica_buffer_size
        )

    def _joined(self, components: Sequence[Tree]) -> Tree:
        return components[0] if self._identity else values.per_replica(components)

    def _own(self, value: Tree) -> Tree:
        return values.select(value, 0)

    def _arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> list[Tree]:
        """Return what each replica is called with: (args, kwargs)."""
        if not isinstance(args, list | tuple):
            raise ValueError(
                f"args is {args!r} of type {type(args).__name__}; expected a tuple: args=(value,)"
            )
        if kwargs is not None and not isinstance(kwargs, Mapping):
            raise TypeError(f"kwargs is {kwargs!r} of type {type(kwargs).__name__}; expected a dict")
        given = (tuple(args), dict(kwargs or {}))
        for leaf in trees.flatten(given)[0]:
            if isinstance(leaf, PerReplica) and len(leaf) != self._replicas:
                raise ValueError(
                    f"an argument has {len(leaf)} components, but this strategy has {self._replicas} "
                    "replicas: it comes from another strategy"
                )
        return [values.select(given, replica) for replica in range(self._replicas)]


def _options(options: InputOptions | None) -> InputOptions:
    if options is None:
        return InputOptions()
    if not isinstance(options, InputOptions):
        raise TypeError(f"options is {options!r}; expected a pipedist.InputOptions")
    return options


async def _computed(compute: Callable[[], Tree], value: Tree) -> Tree:
    """Compute on the loop if the value is small, else in a thread."""
    size = 0
    for leaf in trees.flatten(value)[0]:
        for component in leaf if isinstance(leaf, PerReplica) else (leaf,):
            size += getattr(component, "nbytes", 0)
    if size <= _INLINE_BYTES_MAX:
        await anyio.lowlevel.checkpoint()
        return compute()
    return await anyio.to_thread.run_sync(compute)
