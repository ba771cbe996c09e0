"""The replica context: information about the running call, and its collectives.

`ctx.rng` is the only source of randomness that keeps results reproducible: a PCG64 generator whose
`numpy.random.SeedSequence` has the entropy

    [seed, int.from_bytes(sha256(stage name)[:8], "big"), step, replica]

and, with `per: element`, the element's id. So it does not depend on the worker, the attempt, or earlier calls.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from pipedist.core.types import Tree
from pipedist.worker import process_setup
from pipedist.worker.strategy_views import (
    MergeStrategy,
    ReplicaStrategy,
    VariablesOfReplica,
    current_strategy,
)

if TYPE_CHECKING:
    from numpy.random import Generator

    from pipedist.collectives.options import CommunicationOptions
    from pipedist.collectives.requests import CallSite, CollectiveRequest
    from pipedist.values import ReduceOp


_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


@dataclass(frozen=True, slots=True)
class ClusterTask:
    """The role ("chief", "worker", ...) and index of a program of a cluster."""

    type: str
    index: int


_task: ClusterTask | None = None  # the program of this process


def set_task(text: str) -> None:
    """Set this process's program of a cluster: "worker/1"; "": none."""
    global _task
    role, slash, index = text.rpartition("/")
    _task = ClusterTask(role, int(index)) if slash else None


class Collectives(Protocol):
    is_async: bool  # whether the function is async, and collectives must be awaited

    def call(self, request: CollectiveRequest) -> Any:
        """Execute a collective; return its result, or an awaitable of it."""
        ...


class ReplicaContext:
    """The context of a replica function's call (tf.distribute.ReplicaContext).

    Its collectives (`all_reduce`, `all_gather`, `broadcast`, `barrier`, `merge_call`) involve all replicas of the
    step. Every replica must call the same ones in the same order; they are numbered, and if two replicas differ, or
    one returns while others wait, all of them get a CollectiveMismatchError with the calls of each, and their files
    and lines (tf.distribute blocks forever, or uses the call of replica 0). In a plain function collectives block;
    in an async one they are awaited, and overlapping ones execute in the order in which they were first awaited.
    They need `collectives: true` at the stage; functions of `Strategy.run` always have it.

    Example:
        def step(x, ctx):
            return x / ctx.all_reduce("sum", x.sum())

    Args:
        replica_id_in_sync_group: this replica's number, 0..num_replicas_in_sync-1.
        num_replicas_in_sync: R.
        step: number of the global batch, counted over all epochs.
        epoch: the epoch of the step; 0 without a dataset.
        stage: name of the stage.
        elements: int64[n], ids of the shard's elements (epoch * N + index); None if the call's value is not a
            shard of a dataset, or the length of the dataset is unknown.
        seed: the spec's seed.
        collectives: executes its collectives; None if the stage has none.
        device: the device for its arrays, in libraries with devices: "cpu", "cuda:0".
        element: the only element's id, in a stage with `per: element`.
    """

    __slots__ = (
        "_collectives",
        "_element",
        "_elements",
        "_rng",
        "_seed",
        "device",
        "epoch",
        "num_replicas_in_sync",
        "replica_id_in_sync_group",
        "stage",
        "step",
        "variables",
    )

    def __init__(
        self,
        replica_id_in_sync_group: int,
        num_replicas_in_sync: int,
        step: int,
        epoch: int,
        stage: str,
        elements: NDArray[np.int64] | range | None,
        seed: int,
        collectives: Collectives | None = None,
        device: str = "cpu",
        element: int | None = None,
    ) -> None:
        self.replica_id_in_sync_group = replica_id_in_sync_group
        self.num_replicas_in_sync = num_replicas_in_sync
        self.step = step
        self.epoch = epoch
        self.stage = stage
        self.device = device
        self._elements = elements
        self._element = element
        self._seed = seed
        self._collectives = collectives
        self._rng: Generator | None = None
        self.variables: VariablesOfReplica | None = None

    @property
    def elements(self) -> NDArray[np.int64] | None:
        """Ids of the shard's elements, int64[n], read-only; None if it has none."""
        if isinstance(self._elements, range):
            ids = np.arange(self._elements.start, self._elements.stop, self._elements.step, dtype=np.int64)
            ids.flags.writeable = False
            self._elements = ids
        return self._elements

    @property
    def rng(self) -> Generator:
        """The call's own random generator.

        Every attempt of the call gets the same numbers.
        """
        if self._rng is None:
            from numpy.random import PCG64, Generator, SeedSequence  # most functions draw no numbers

            entropy = [self._seed, stage_digest(self.stage), self.step, self.replica_id_in_sync_group]
            entropy += [] if self._element is None else [self._element]
            self._rng = Generator(PCG64(SeedSequence(entropy)))
        return self._rng

    @property
    def cluster(self) -> ClusterTask | None:
        """The program of `open_cluster` to which this worker belongs, or None.

        No result may depend on it.
        """
        return _task

    @property
    def strategy(self) -> ReplicaStrategy:
        """The strategy, limited to the methods that a single replica may call."""
        return ReplicaStrategy(self.num_replicas_in_sync)

    @property
    def is_async(self) -> bool:
        """Whether collectives must be awaited, because the function is async."""
        return self._collectives is not None and self._collectives.is_async

    def all_reduce(
        self, reduce_op: ReduceOp | str, value: Tree, options: CommunicationOptions | None = None
    ) -> Any:
        """Reduce all replicas' values (tf.distribute.ReplicaContext.all_reduce).

        The result equals `Strategy.reduce(reduce_op, value, axis=None)`, bit for bit: the values are folded in the
        order of replica ids, in a fixed tree. A value is always reduced, even if all replicas have the same object
        (tf.distribute then returns it unchanged), and a tree may mix dtypes.

        Args:
            reduce_op: sum, mean, min, max or prod.
            value: a tree of numeric arrays and numbers, of one structure, shapes and dtypes in all replicas.
            options: of this call; a field with another value than its default overrides the strategy's.

        Returns:
            The tree with an array in place of each leaf, or a NumPy scalar in place of a number; equal in all
            replicas. In an async function, an awaitable of it.

        Raises:
            RuntimeError: the stage has no `collectives: true`; or this process is a copy of the worker.
            ValueError: the op does not exist, or does not apply to a leaf.
            TypeError: a leaf is not numeric (bool, str).
            OverflowError: an integer result does not fit its dtype.
            CollectiveMismatchError: another replica called another collective, or ended.
            CollectiveTimeoutError: a replica did not call it within `timeout_s`.
        """
        return self._request("all_reduce", value, op=reduce_op, options=options)

    def all_gather(self, value: Tree, axis: int, options: CommunicationOptions | None = None) -> Any:
        """Concatenate all replicas' arrays (tf.distribute.ReplicaContext.all_gather).

        Args:
            value: a tree of arrays of rank >= 1 and any dtype; sizes may differ along `axis` only.
            axis: the axis; a negative one counts from the end.
            options: of this call.

        Returns:
            The tree of the gathered arrays, equal in all replicas. In an async function, an awaitable.

        Raises:
            RuntimeError: the stage has no `collectives: true`.
            ValueError: a scalar, an axis out of range, or sizes that differ along another axis.
            TypeError: a leaf is not an array, or the axis not an int.
            CollectiveMismatchError, CollectiveTimeoutError: as for `all_reduce`.
        """
        return self._request("all_gather", value, axis=axis, options=options)

    def broadcast(self, value: Tree, source: int = 0, options: CommunicationOptions | None = None) -> Any:
        """Send the value of one replica to all of them.

        Args:
            value: a tree; the values of other replicas than `source` are ignored.
            source: id of the replica that sends its value.
            options: of this call.

        Returns:
            Replica `source`'s tree, with read-only arrays. In an async function, an awaitable.

        Raises:
            RuntimeError: the stage has no `collectives: true`.
            ValueError: the replica does not exist.
            CollectiveMismatchError, CollectiveTimeoutError: as for `all_reduce`.
        """
        return self._request("broadcast", value, source=source, options=options)

    def barrier(self, options: CommunicationOptions | None = None) -> Any:
        """Wait until every replica has called it.

        Args:
            options: of this call.

        Returns:
            None. In an async function, an awaitable.

        Raises:
            RuntimeError: the stage has no `collectives: true`.
            CollectiveMismatchError, CollectiveTimeoutError: as for `all_reduce`.
        """
        return self._request("barrier", options=options)

    def merge_call(
        self, fn: Callable[..., Tree], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function once for all replicas (ReplicaContext.merge_call).

        When all replicas have called it, `fn(strategy, *args, **kwargs)` runs in replica 0's worker, in
        cross-replica context. There is no replica context inside; `strategy` has `reduce`, `gather`,
        `local_results` and `update`, which are not awaited here, and `num_replicas_in_sync`.

        Args:
            fn: a plain function.
            args, kwargs: trees of one structure in all replicas; they are passed with PerReplica leaves.

        Returns:
            The result of fn, with this replica's component in place of each PerReplica. In an async function,
            an awaitable.

        Raises:
            RuntimeError: the stage has no `collectives: true`.
            TypeError: `fn` is not callable, or async; `kwargs` is not a mapping.
            ValueError: `args` is neither tuple nor list; or structures differ.
            Exception: the exception of `fn`, in replica 0; in the others one of the same class and text, or a
                RemoteError if the class cannot be constructed from its text.
            CollectiveMismatchError, CollectiveTimeoutError: as for `all_reduce`.
        """
        if not callable(fn):
            raise TypeError(f"merge_call needs a function, not {fn!r} of type {type(fn).__name__}")
        if inspect.iscoroutinefunction(fn):
            raise TypeError("merge_call needs a plain function, not an async one")
        check_call_arguments(args, kwargs)
        given, named = tuple(args), dict(kwargs or {})
        if self.variables is not None:
            fn, given, named = self.variables.merge(fn, given, named)
        body = _in_cross_replica_context(fn, self.num_replicas_in_sync)
        result = self._request("merge_call", (given, named), function=body, label=body.__qualname__)
        if self.variables is None:
            return result
        return _merged(result, self.variables) if self.is_async else self.variables.merged(result)

    def _request(self, kind: str, tree: Tree = None, **fields: Any) -> Any:  # of a CollectiveRequest
        if self._collectives is None:
            raise RuntimeError(
                "a collective needs every replica of the step at once: add `collectives: true` to stage "
                f"{self.stage} (a closure of ClusterCoordinator.schedule has no other replicas)"
            )
        if process_setup.is_copy:
            raise RuntimeError(
                f"{kind} was called in a copy of the worker, which a function has made (os.fork, "
                "multiprocessing): it would act for its parent; call it there"
            )
        return self._collectives.call(_requests().CollectiveRequest(kind, _call_site(), tree, **fields))

    def __repr__(self) -> str:
        return (
            f"ReplicaContext(stage={self.stage!r}, step={self.step}, "
            f"replica {self.replica_id_in_sync_group} of {self.num_replicas_in_sync})"
        )


async def _merged(result: Any, variables: VariablesOfReplica) -> Tree:
    return variables.merged(await result)


@cache
def _requests() -> Any:  # a module
    """Return the module of requests: most functions call no collectives, the others many."""
    from pipedist.collectives import requests

    return requests


def _call_site() -> CallSite:
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    site: CallSite = _requests().CallSite(frame.f_code, frame.f_lasti)
    return site


@lru_cache(maxsize=1024)
def stage_digest(stage: str) -> int:
    """Return the number of a stage's name in the seeds of its calls."""
    return int.from_bytes(hashlib.sha256(stage.encode()).digest()[:8], "big")


class ContextOnDemand(Struct, eq=False):
    """The context of one call, made when it is used first: few functions use it, and short calls are many."""

    make: Callable[[int], ReplicaContext]  # of a number
    number: int
    made: list[ReplicaContext] = []  # at most two, if threads of the function use it first at the same time

    def get(self) -> ReplicaContext:
        """Return the context, the same one each time."""
        if not self.made:
            self.made.append(self.make(self.number))
        return self.made[0]


current: ContextVar[ReplicaContext | ContextOnDemand | None] = ContextVar(
    "pipedist_replica_context", default=None
)
"""Set around every call of a replica function; `get_replica_context` returns its context."""


def get_replica_context() -> ReplicaContext | None:
    """Return the context of the running call; None outside replica functions.

    tf.distribute has a default replica context outside of any strategy; pipedist has none, so the result also
    shows whether a replica function runs.

    Example:
        ctx = pipedist.get_replica_context()
        replica = 0 if ctx is None else ctx.replica_id_in_sync_group
    """
    context = current.get()
    return context.get() if isinstance(context, ContextOnDemand) else context


def check_call_arguments(args: object, kwargs: object) -> None:
    """Raise ValueError or TypeError if the arguments of a call are not a sequence and a mapping, or None."""
    if not isinstance(args, list | tuple):
        raise ValueError(f"args is {args!r} of type {type(args).__name__}; expected a tuple: args=(value,)")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(f"kwargs is {kwargs!r} of type {type(kwargs).__name__}; expected a dict")


def _in_cross_replica_context(fn: Callable[..., Tree], replicas: int) -> Callable[..., Tree]:

    def body(*args: Any, **kwargs: Any) -> Tree:
        strategy, ctx = MergeStrategy(replicas), get_replica_context()
        context, own = current.set(None), current_strategy.set(strategy)
        try:
            return fn(strategy, *args, **kwargs)
        finally:
            current_strategy.reset(own)
            current.reset(context)
            if process_setup.is_copy:
                process_setup.end_copy("" if ctx is None else ctx.stage)

    body.__qualname__ = str(getattr(fn, "__qualname__", None) or type(fn).__qualname__)  # its name in errors
    return body
