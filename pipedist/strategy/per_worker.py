"""Datasets of a parameter server's closures: an iterator of its own for each logical worker.

A logical worker is a turn, not a process: closures that read a per-worker dataset take turns, the
first one as worker 0, and each gets the next element of its worker's iterator. So which element a
closure gets follows from the order of scheduling alone, and it gets the same one when it is tried
again. (tf.distribute: whichever worker is free, with no guarantee that an element is visited once.)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from pipedist.core.types import Tree
from pipedist.datasets.input import InputContext
from pipedist.datasets.logical import Dataset
from pipedist.datasets.read_ahead import ReadAhead
from pipedist.errors import OutOfRangeError
from pipedist.strategy.context import NotForReplicas
from pipedist.strategy.distributed import DistributedDataset, DistributedIterator, until_ready

_BUFFER_ELEMENTS = 1


class ReplicatedDataset(DistributedDataset):
    """What a ParameterServerStrategy distributes: for `create_per_worker_dataset` only."""

    __slots__ = ()

    def __aiter__(self) -> DistributedIterator:
        raise ValueError(
            "a dataset of a ParameterServerStrategy can't be iterated here: give it to "
            "ClusterCoordinator.create_per_worker_dataset, and that one's iterator to closures"
        )

    @property
    def pipeline(self) -> Dataset:
        """The dataset."""
        return self._pipelines[0]


class PerWorkerDataset:
    """A dataset for each logical worker; made by `ClusterCoordinator.create_per_worker_dataset`.

    `iter(dataset)` gives an iterator for closures; each `iter` begins anew.
    """

    def __init__(self, datasets: Sequence[Dataset]) -> None:
        self._datasets = tuple(datasets)

    @property
    def element_spec(self) -> Tree:
        """A tree like an element, with `pipedist.ArraySpec` in place of arrays.

        Raises:
            ValueError: the dataset is empty, and its spec was not declared.
        """
        return self._datasets[0].element_spec

    def __iter__(self) -> PerWorkerIterator:
        return PerWorkerIterator(self._datasets)

    def __reduce__(self) -> NoReturn:
        raise NotForReplicas(AS_ARGUMENT)

    def __repr__(self) -> str:
        return f"<PerWorkerDataset of {len(self._datasets)} workers>"


class PerWorkerIterator:
    """An iterator for each logical worker: as a closure's argument it stands for the next element.

    The closure gets the element itself, so there is no `next(iterator)` in it. Where the worker's
    iterator has ended, the closure fails with OutOfRangeError, without being executed.
    """

    def __init__(self, datasets: Sequence[Dataset]) -> None:
        self._readers: list[ReadAhead[Tree]] = [ReadAhead(each, _BUFFER_ELEMENTS) for each in datasets]

    async def take(self, worker: int) -> Tree:
        """Return the next element of a worker's iterator; a call that is cancelled takes nothing.

        Raises:
            OutOfRangeError: there is none.
            Exception: whatever reading the data raises.
        """
        reader = self._readers[worker]
        await until_ready(reader)
        for element in reader:
            return element
        raise OutOfRangeError(f"the per-worker dataset of worker {worker} has no more elements")

    def __iter__(self) -> PerWorkerIterator:
        return self

    def __next__(self) -> NoReturn:
        raise RuntimeError(AS_ARGUMENT)

    def __reduce__(self) -> NoReturn:
        raise NotForReplicas(AS_ARGUMENT)


AS_ARGUMENT = (
    "a per-worker dataset is read by giving its iterator to a closure as an argument, which then gets "
    "the next element: await coordinator.schedule(fn, args=(iter(dataset),))"
)


def per_worker_datasets(source: object, workers: int) -> list[Dataset]:
    """Return a dataset for each logical worker.

    Args:
        source: a Dataset or ReplicatedDataset, which every worker reads as a whole; or a function that
            returns one, called once for each worker, with nothing or with its InputContext.
        workers: how many there are.

    Raises:
        ValueError: it is none of these, or the function returns something else.
    """
    if not callable(source):
        return [
            _dataset(source, "create_per_worker_dataset needs a Dataset or a function that returns one")
        ] * workers
    wants_context = _takes_one(source)
    return [
        _dataset(
            source(InputContext(workers, worker, 1)) if wants_context else source(),
            "the dataset function must return a Dataset",
        )
        for worker in range(workers)
    ]


def _dataset(value: object, expected: str) -> Dataset:
    if isinstance(value, ReplicatedDataset):
        return value.pipeline
    if isinstance(value, Dataset):
        return value
    raise ValueError(f"{expected}, not {value!r} of type {type(value).__name__}")


def _takes_one(fn: Callable[..., Any]) -> bool:
    """Whether a function can't be called without an argument, but with one."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # a built-in without a signature
        return False
    try:
        signature.bind()
    except TypeError:
        try:
            signature.bind(None)
        except TypeError:
            return False  # the call itself says best what is wrong
        return True
    return False
