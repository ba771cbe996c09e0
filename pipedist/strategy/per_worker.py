"""Datasets of a parameter server's closures, with one iterator per logical worker.

A logical worker is not a process: closures that read a per-worker dataset are numbered in the order of
scheduling, closure n belongs to logical worker n modulo W, and gets the next element of that worker's iterator.
The order of scheduling alone decides the element, also for a closure that is retried. (In tf.distribute any free
worker reads, and an element may be read more than once.)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from pipedist.core.types import Tree
from pipedist.datasets.input import InputContext
from pipedist.datasets.logical import Dataset
from pipedist.datasets.read_ahead import ReadAhead
from pipedist.errors import OutOfRangeError
from pipedist.strategy.context import NotForReplicas
from pipedist.strategy.distributed import DistributedDataset, DistributedIterator

_BUFFER_ELEMENTS = 1


class ReplicatedDataset(DistributedDataset):
    """A dataset distributed by a ParameterServerStrategy, for `create_per_worker_dataset` only."""

    __slots__ = ()

    def __aiter__(self) -> DistributedIterator:
        raise ValueError(
            "a dataset of a ParameterServerStrategy can't be iterated here. Pass it to "
            "ClusterCoordinator.create_per_worker_dataset, and pass the iterator of that to closures"
        )


class PerWorkerDataset:
    """A dataset for each logical worker; made by `ClusterCoordinator.create_per_worker_dataset`.

    `iter(dataset)` returns an iterator for closures, from the first element.
    """

    def __init__(self, datasets: Sequence[Dataset]) -> None:
        self._datasets = tuple(datasets)

    @property
    def element_spec(self) -> Tree:
        """A tree like an element, with `pipedist.ArraySpec` in place of arrays.

        Raises:
            ValueError: the dataset is empty, and no spec was declared for it.
        """
        return self._datasets[0].element_spec

    def __iter__(self) -> PerWorkerIterator:
        return PerWorkerIterator(self._datasets)

    def __reduce__(self) -> NoReturn:
        raise NotForReplicas(AS_ARGUMENT)

    def __repr__(self) -> str:
        return f"<PerWorkerDataset of {len(self._datasets)} workers>"


class PerWorkerIterator:
    """One iterator per logical worker; as an argument of a closure it is replaced by the next element.

    The closure gets the element itself, and must not call `next`. If the worker's iterator has ended, the
    closure fails with OutOfRangeError, without being executed.
    """

    def __init__(self, datasets: Sequence[Dataset]) -> None:
        self._readers: list[ReadAhead[Tree]] = [ReadAhead(each, _BUFFER_ELEMENTS) for each in datasets]

    def reader(self, worker: int) -> ReadAhead[Tree]:
        return self._readers[worker]

    def take(self, worker: int) -> Tree:
        """Return the next element of a worker's iterator, whose reader is ready."""
        for element in self._readers[worker]:
            return element
        raise OutOfRangeError(f"the per-worker dataset of worker {worker} has no more elements")

    def __iter__(self) -> PerWorkerIterator:
        return self

    def __next__(self) -> NoReturn:
        raise RuntimeError(AS_ARGUMENT)

    def __reduce__(self) -> NoReturn:
        raise NotForReplicas(AS_ARGUMENT)


AS_ARGUMENT = (
    "pass the iterator of a per-worker dataset to a closure as an argument; the closure gets the next "
    "element: await coordinator.schedule(fn, args=(iter(dataset),))"
)


def per_worker_datasets(source: object, workers: int) -> list[Dataset]:
    """Return a dataset for each logical worker: see `ClusterCoordinator.create_per_worker_dataset`."""
    if not callable(source):
        expected = "create_per_worker_dataset needs a Dataset or a function that returns one"
        return [_dataset(source, expected)] * workers
    expected = "the dataset function must return a Dataset"
    if not _takes_one(source):
        return [_dataset(source(), expected) for _ in range(workers)]
    return [_dataset(source(InputContext(workers, worker, 1)), expected) for worker in range(workers)]


def _dataset(value: object, expected: str) -> Dataset:
    if isinstance(value, ReplicatedDataset):
        return value._pipelines[0]
    if isinstance(value, Dataset):
        return value
    raise ValueError(f"{expected}, not {value!r} of type {type(value).__name__}")


def _takes_one(fn: Callable[..., Any]) -> bool:
    """Return whether a function must be called with one argument."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # a built-in without a signature
        return False
    for args in ((), (None,)):
        with suppress(TypeError):
            signature.bind(*args)
            return bool(args)
    return False  # calling it raises the best error
