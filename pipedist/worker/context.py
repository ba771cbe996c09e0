"""What a replica function can know about the call that it is executing, and do with the others'.

`ctx.rng` is the only source of randomness that keeps results reproducible: a PCG64 generator
whose `numpy.random.SeedSequence` has the entropy

    [seed, int.from_bytes(sha256(stage name)[:8], "big"), step, replica]

so it depends on nothing else: not on the worker, the attempt, or the calls before.


The body of a merge_call: cross-replica context, in the worker of replica 0."""

from __future__ import annotations

import hashlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
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
    """Which program of a cluster a replica function runs in, where each host has one.

    Args:
        type: its role: "chief", "worker", ...
        index: its number among those of that role.
    """

    type: str
    index: int


_task: ClusterTask | None = None
"""Of this process."""


def set_task(text: str) -> None:
    """Say which program of a cluster this process belongs to: "worker/1"; "": to none."""
    global _task
    role, slash, index = text.rpartition("/")
    _task = ClusterTask(role, int(index)) if slash else None


class Collectives(Protocol):
    """How one replica reaches the others of its step."""

    is_async: bool
    """Whether the function is async: then a collective is something to await."""

    def call(self, request: CollectiveRequest) -> Any:
        """Make a collective: its result, or what awaits it."""
        ...


class ReplicaContext:
    """The call that a replica function is executing (tf.distribute.ReplicaContext).

    Its collectives (`all_reduce`, `all_gather`, `broadcast`, `barrier`, `merge_call`) meet the other
    replicas of the step. Every replica must call the same ones in the same order; they are numbered,
    and where two replicas differ, or one returns while others wait, all of them get a
    CollectiveMismatchError that says who called what, at which file and line (tf.distribute hangs,
    or takes replica 0's word). In a plain function they block; in an async one they are awaited, and
    several that overlap are made in the order in which they were first awaited. They need
    `collectives: true` at the stage; what `Strategy.run` calls always has it.

    Args:
        replica_id_in_sync_group: this replica's number, 0..num_replicas_in_sync-1.
        num_replicas_in_sync: R.
        step: number of the global batch, counted over all epochs.
        epoch: which reading of the dataset the step belongs to; 0 where there is no dataset.
        stage: name of the stage.
        elements: int64[n], ids of the shard's elements (epoch * N + index), or None where the
            call's value is no shard of a dataset, or its length is not known.
        seed: the spec's seed.
        collectives: how it meets the other replicas; None where it can't.
        device: where its arrays belong, for libraries with devices: "cpu", "cuda:0".
    """

    __slots__ = (
        "_collectives",
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
    ) -> None:
        self.replica_id_in_sync_group = replica_id_in_sync_group
        self.num_replicas_in_sync = num_replicas_in_sync
        self.step = step
        self.epoch = epoch
        self.stage = stage
        self.device = device
        self._elements = elements
        self._seed = seed
        self._collectives = collectives
        self._rng: Generator | None = None
        self.variables: VariablesOfReplica | None = None

    @property
    def elements(self) -> NDArray[np.int64] | None:
        """Ids of the shard's elements, int64[n], read-only; None where it has none."""
        if isinstance(self._elements, range):
            ids = np.arange(self._elements.start, self._elements.stop, self._elements.step, dtype=np.int64)
            ids.flags.writeable = False
            self._elements = ids
        return self._elements

    @property
    def rng(self) -> Generator:
        """The call's own random generator; every attempt of the call gets the same numbers."""
        if self._rng is None:
            from numpy.random import PCG64, Generator, SeedSequence  # most functions draw no numbers

            entropy = [self._seed, stage_digest(self.stage), self.step, self.replica_id_in_sync_group]
            self._rng = Generator(PCG64(SeedSequence(entropy)))
        return self._rng

    @property
    def cluster(self) -> ClusterTask | None:
        """Which program of `open_cluster` this worker belongs to, if any; no result may depend on it."""
        return _task

    @property
    def strategy(self) -> ReplicaStrategy:
        """The strategy, as far as one replica may use it."""
        return ReplicaStrategy(self.num_replicas_in_sync)

    @property
    def is_async(self) -> bool:
        """Whether collectives must be awaited, because the function is async."""
        return self._collectives is not None and self._collectives.is_async

    def all_reduce(
        self, reduce_op: ReduceOp | str, value: Tree, options: CommunicationOptions | None = None
    ) -> Any:
        """Fold all replicas' values, element by element (tf.distribute.ReplicaContext.all_reduce).

        The fold is that of `Strategy.reduce(reduce_op, value, axis=None)`, to the bit: in the order of
        replica ids, as a fixed tree. A value is always reduced, also where all replicas have the same
        object (tf.distribute then returns it as it is), and a tree may mix dtypes.

        Args:
            reduce_op: sum, mean, min, max or prod.
            value: a tree of numeric arrays and numbers, of one structure, shapes and dtypes in all replicas.
            options: of this call; a field that is not at its default overrides the strategy's.

        Returns:
            The tree with an array in place of each leaf, or a NumPy scalar for a number; the same in
            every replica. In an async function: an awaitable of it.

        Raises:
            RuntimeError: the stage has no `collectives: true`; or this is a copy of the worker.
            ValueError: there is no such op, or a leaf can't be reduced so.
            TypeError: a leaf is not numeric (bool, str).
            OverflowError: an integer result does not fit its dtype.
            CollectiveMismatchError: another replica called something else, or ended.
            CollectiveTimeoutError: a replica did not come within `timeout_s`.
        """
        return self._call(_requests().all_reduce(reduce_op, value, options, _place()))

    def all_gather(self, value: Tree, axis: int, options: CommunicationOptions | None = None) -> Any:
        """Put all replicas' arrays end to end, in replica order (tf.distribute.ReplicaContext.all_gather).

        Args:
            value: a tree of arrays of rank >= 1 and any dtype; sizes may differ along `axis` only.
            axis: which one; a negative one counts from the end.
            options: of this call.

        Returns:
            The tree of the gathered arrays, the same in every replica. In an async function: an awaitable.

        Raises:
            RuntimeError: the stage has no `collectives: true`.
            ValueError: a scalar, an axis out of range, or sizes that differ along another axis.
            TypeError: a leaf is no array, or the axis no int.
            CollectiveMismatchError, CollectiveTimeoutError: as for `all_reduce`.
        """
        return self._call(_requests().all_gather(value, axis, options, _place()))

    def broadcast(self, value: Tree, source: int = 0, options: CommunicationOptions | None = None) -> Any:
        """Give every replica the value of one of them.

        Args:
            value: a tree; that of the other replicas is not looked at.
            source: whose value all get.
            options: of this call.

        Returns:
            Replica `source`'s tree, its arrays read-only. In an async function: an awaitable.

        Raises:
            RuntimeError: the stage has no `collectives: true`.
            ValueError: there is no such replica.
            CollectiveMismatchError, CollectiveTimeoutError: as for `all_reduce`.
        """
        return self._call(_requests().broadcast(value, source, options, _place()))

    def barrier(self, options: CommunicationOptions | None = None) -> Any:
        """Go on when every replica has come here.

        Args:
            options: of this call.

        Returns:
            None. In an async function: an awaitable.

        Raises:
            RuntimeError: the stage has no `collectives: true`.
            CollectiveMismatchError, CollectiveTimeoutError: as for `all_reduce`.
        """
        return self._call(_requests().barrier(options, _place()))

    def merge_call(
        self, fn: Callable[..., Tree], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function once for all replicas (tf.distribute.ReplicaContext.merge_call).

        It meets all replicas, and runs in replica 0's worker, in cross-replica context:
        `fn(strategy, *args, **kwargs)`. There is no replica context inside; `strategy` has `reduce`,
        `gather`, `local_results` and `update`, which are not awaited here, and `num_replicas_in_sync`.

        Args:
            fn: a plain function.
            args, kwargs: trees of one structure in all replicas; fn gets them with PerReplica leaves.

        Returns:
            What fn returned, with this replica's component wherever a PerReplica stands in it. In an
            async function: an awaitable.

        Raises:
            RuntimeError: the stage has no `collectives: true`.
            TypeError: `fn` can't be called, or is async; `kwargs` is no mapping.
            ValueError: `args` is neither tuple nor list; or structures differ.
            Exception: what `fn` raised, in replica 0; in the others one of the same class and text, a
                RemoteError where such a one can't be made of its text.
            CollectiveMismatchError, CollectiveTimeoutError: as for `all_reduce`.
        """
        if not callable(fn):
            raise TypeError(f"merge_call needs a function, not {fn!r} of type {type(fn).__name__}")
        if inspect.iscoroutinefunction(fn):
            raise TypeError("merge_call needs a plain function, not an async one: nothing in it is awaited")
        if not isinstance(args, (list, tuple)):
            raise ValueError(f"args is {args!r} of type {type(args).__name__}; expected a tuple: args=(x,)")
        if kwargs is not None and not isinstance(kwargs, Mapping):
            raise TypeError(f"kwargs is {kwargs!r} of type {type(kwargs).__name__}; expected a dict")
        given, named = tuple(args), dict(kwargs or {})
        if self.variables is not None:
            fn, given, named = self.variables.merge(fn, given, named)
        body = _in_cross_replica_context(fn, self.num_replicas_in_sync)
        request = _requests().merge_call(body, given, named, None, _place())
        result = self._call(request)
        if self.variables is None:
            return result
        return _merged(result, self.variables) if self.is_async else self.variables.merged(result)

    def _collective(
        self, kind: str, tree: Tree, op: ReduceOp | str = "sum", source: int = 0, label: str = ""
    ) -> Any:
        """Make a collective for what the user called by another name ("assign_add of variable 'w'")."""
        if kind == _requests().ALL_REDUCE:
            request = _requests().all_reduce(op, tree, None, _place())
        else:
            request = _requests().broadcast(tree, source, None, _place())
        request.label = label
        return self._call(request)

    def _call(self, request: CollectiveRequest) -> Any:
        if self._collectives is None:
            raise RuntimeError(
                "a collective needs every replica of the step at once: add `collectives: true` to stage "
                f"{self.stage} (a closure of ClusterCoordinator.schedule runs alone, and meets nobody)"
            )
        if process_setup.is_copy:
            raise RuntimeError(
                f"{request.kind} was called in a copy of the worker, which a function has made (os.fork, "
                "multiprocessing): it would answer for its parent; call it there"
            )
        return self._collectives.call(request)

    def __repr__(self) -> str:
        return (
            f"ReplicaContext(stage={self.stage!r}, step={self.step}, "
            f"replica {self.replica_id_in_sync_group} of {self.num_replicas_in_sync})"
        )


async def _merged(result: Any, variables: VariablesOfReplica) -> Tree:
    return variables.merged(await result)


@cache
def _requests() -> Any:  # a module
    """Return the module of requests: most functions call no collectives, and those that do call many."""
    from pipedist.collectives import requests

    return requests


def _place() -> CallSite:
    """Return where user code made the call that is going on."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    place: CallSite = _requests().CallSite(frame.f_code, frame.f_lasti)
    return place


@lru_cache(maxsize=1024)
def stage_digest(stage: str) -> int:
    """Return the number that stands for a stage's name in the seeds of its calls."""
    return int.from_bytes(hashlib.sha256(stage.encode()).digest()[:8], "big")


current: ContextVar[ReplicaContext | None] = ContextVar("pipedist_replica_context", default=None)
"""Set around every call of a replica function."""


def get_replica_context() -> ReplicaContext | None:
    """Return the call that is being executed, or None outside a replica function.

    tf.distribute has a default replica context outside of any strategy; pipedist has none, so
    None also answers the question "am I in a replica function?".
    """
    return current.get()


def _in_cross_replica_context(fn: Callable[..., Tree], replicas: int) -> Callable[..., Tree]:
    """Return `fn` as it is called once for all replicas: in cross-replica context, the strategy first."""

    def body(*args: Any, **kwargs: Any) -> Tree:
        strategy, ctx = MergeStrategy(replicas), current.get()
        try:
            with _cross_replica(strategy):
                return fn(strategy, *args, **kwargs)
        finally:
            if process_setup.is_copy:
                process_setup.end_copy("" if ctx is None else ctx.stage)

    body.__qualname__ = str(getattr(fn, "__qualname__", None) or type(fn).__qualname__)  # its label in errors
    return body


@contextmanager
def _cross_replica(strategy: MergeStrategy) -> Iterator[None]:
    context, own = current.set(None), current_strategy.set(strategy)
    try:
        yield
    finally:
        current_strategy.reset(own)
        current.reset(context)
