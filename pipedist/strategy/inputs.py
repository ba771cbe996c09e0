"""What all strategies do with data: they divide datasets and values among their replicas."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from pipedist import values
from pipedist.core.types import Tree
from pipedist.datasets.input import InputContext, InputOptions, InputReplicationMode, ValueContext
from pipedist.datasets.logical import Dataset, numpy_dataset
from pipedist.datasets.sharding import divide
from pipedist.strategy.context import require_outside
from pipedist.strategy.distributed import DistributedDataset


class InputStrategy(ABC):
    """Owns R replicas, and feeds them.

    Args:
        replicas: R.
    """

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

    @property
    def _input_pipelines(self) -> int:
        """How many logical input pipelines feed the replicas, each as many of them."""
        return 1

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
        each = self._replicas // self._input_pipelines
        pipelines = [dataset] if self._identity else divide(dataset, self._input_pipelines, each)
        return self._distributed(pipelines, each, chosen)

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
        total = (
            self._replicas
            if chosen.replication_mode is InputReplicationMode.PER_REPLICA
            else self._input_pipelines
        )
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

    def _distributed(
        self, pipelines: Sequence[Dataset], each: int, options: InputOptions
    ) -> DistributedDataset:
        return DistributedDataset(
            pipelines, each, identity=self._identity, buffer_steps=options.per_replica_buffer_size
        )

    def _joined(self, components: Sequence[Tree]) -> Tree:
        """Return one value of what the replicas have."""
        return components[0] if self._identity else values.per_replica(components)


def _options(options: InputOptions | None) -> InputOptions:
    if options is None:
        return InputOptions()
    if not isinstance(options, InputOptions):
        raise TypeError(f"options is {options!r}; expected a pipedist.InputOptions")
    return options
