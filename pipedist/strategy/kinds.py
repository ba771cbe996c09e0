"""The kinds of strategies (tf.distribute: Mirrored, OneDevice, CentralStorage, the default one).

| kind | replicas | their calls run in | values |
|---|---|---|---|
| `Strategy` | R | the cluster's workers | PerReplica, also where R is 1 |
| `CentralStorageStrategy` | R | the cluster's workers | PerReplica |
| `OneDeviceStrategy` | 1 | the cluster's workers | plain: gather and distribution are the identity |
| the default one, `get_strategy()` | 1 | this process | plain |
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Protocol

import anyio.lowlevel

from pipedist.datasets.input import count
from pipedist.errors import CallError, LocalProtocolError, UsageError
from pipedist.functions import reference
from pipedist.program import FunctionRef, Tree
from pipedist.strategy.base import BaseStrategy
from pipedist.strategy.context import NotForReplicas, default_running, require_cross_replica
from pipedist.strategy.passes import SLOT, Passes
from pipedist.transport.codec import UnsendableError, encode
from pipedist.worker.boundary import guard
from pipedist.worker.context import ReplicaContext, current

if TYPE_CHECKING:
    from pipedist.coordinator import Coordinator


class Cluster(Protocol):
    """What a strategy needs of a cluster (`pipedist.LocalCluster` is one)."""

    @property
    def coordinator(self) -> Coordinator:
        """What executes the calls."""
        ...


class Strategy(BaseStrategy):
    """R replicas whose calls are executed by a cluster's workers (tf.distribute.MirroredStrategy).

        async with pipedist.LocalCluster(workers=2) as cluster:
            strategy = pipedist.Strategy(cluster, replicas=4)
            y = await strategy.run(fn, args=(x,))

    Replicas are logical: neither the number of workers nor what happens to them changes a result.

    Args:
        cluster: an open cluster; strategies may share one.
        replicas: R, at least 1.
        seed: together with the function's turn, step and replica it decides what `ctx.rng` draws.

    Raises:
        ValueError: `replicas` or `seed` is out of range.
        TypeError: one of them is no int, or `cluster` is no cluster.
    """

    def __init__(self, cluster: Cluster, replicas: int = 1, *, seed: int = 0) -> None:
        super().__init__(count("replicas", replicas, at_least=1))
        if not hasattr(type(cluster), "coordinator") and not hasattr(cluster, "coordinator"):
            raise TypeError(
                f"a strategy needs an open cluster, such as pipedist.LocalCluster, not {cluster!r}"
            )
        self._cluster = cluster
        self._seed = count("seed", seed, at_least=0)
        self._passes: Passes | None = None

    @property
    def cluster(self) -> Cluster:
        """The cluster whose workers execute the calls."""
        return self._cluster

    @property
    def _identity(self) -> bool:
        return False

    async def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Tree:
        """Call `fn` on every replica: see `BaseStrategy.run`."""
        require_cross_replica("Strategy.run")
        function = _reference(fn)
        arguments = self._arguments(args, kwargs)
        if self._passes is None:
            self._passes = Passes(self._cluster.coordinator, self._replicas, self._seed)
        with self._passes.using(function) as handle:
            try:
                results = await handle.call_step(arguments)
            except CallError as error:
                if isinstance(error.__cause__, UnsendableError):
                    _refuse_unsendable(arguments)
                raise
        if len(results) != self._replicas:
            raise LocalProtocolError(
                f"{function.label}: {len(results)} results came back for {self._replicas} replicas"
            )
        return self._joined([result[SLOT] for result in results])

    async def aclose(self) -> None:
        """Let the workers forget this strategy's functions; leaving the cluster does it too."""
        if self._passes is not None:
            self._passes.close()
            self._passes = None
        await anyio.lowlevel.checkpoint()

    async def __aenter__(self) -> Strategy:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()


def _refuse_unsendable(arguments: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]) -> None:
    """Raise the UnsendableError of the first argument that can't be sent; none: it was a result."""
    for own_args, own_kwargs in arguments:
        encode({"args": own_args, "kwargs": own_kwargs})


class CentralStorageStrategy(Strategy):
    """R replicas whose variables are kept in one place (tf.distribute's CentralStorageStrategy).

    Arguments: as for `Strategy`. Without variables there is no difference to it.
    """


class OneDeviceStrategy(Strategy):
    """One replica, whose values stay plain (tf.distribute.OneDeviceStrategy): a reference to test with.

    Args:
        cluster: an open cluster.
        seed: as for `Strategy`.
    """

    def __init__(self, cluster: Cluster, *, seed: int = 0) -> None:
        super().__init__(cluster, 1, seed=seed)

    @property
    def _identity(self) -> bool:
        return True


class DefaultStrategy(BaseStrategy):
    """No strategy: one replica in this process, whose values stay plain; what `get_strategy` returns.

    The same code runs with it and with a strategy. It is one object for all, and needs no cluster.
    """

    def __init__(self) -> None:
        super().__init__(1)

    @property
    def _identity(self) -> bool:
        return True

    async def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Tree:
        """Call `fn` here and now; as `Strategy.run`, but what it returns stays as it is."""
        _callable(fn)
        [(own_args, own_kwargs)] = guard(self._arguments(args, kwargs))
        label = getattr(fn, "__qualname__", type(fn).__qualname__)
        context = ReplicaContext(
            replica_id_in_sync_group=0,
            num_replicas_in_sync=1,
            step=0,
            epoch=0,
            stage=label,
            elements=None,
            seed=0,
        )
        if _has_ctx(fn):
            own_kwargs.setdefault("ctx", context)
        token = current.set(context)
        try:
            with default_running():
                result = fn(*own_args, **own_kwargs)
                if inspect.isawaitable(result):
                    result = await result
        except Exception as error:
            raise CallError(
                stage=label,
                step=0,
                replica=0,
                worker="this process",
                attempts=1,
                cause=f"{type(error).__name__}: {error}",
                remote_traceback="".join(traceback.format_exception(error)),
            ) from error
        finally:
            current.reset(token)
        return result

    def __repr__(self) -> str:
        return "<DefaultStrategy>"


DEFAULT: Final = DefaultStrategy()
"""The one default strategy."""


def _callable(fn: Callable[..., Any]) -> None:
    if not callable(fn):
        raise TypeError(f"run needs a function, but {fn!r} of type {type(fn).__name__} can't be called")


def _reference(fn: Callable[..., Any]) -> FunctionRef:
    _callable(fn)
    try:
        return reference(fn)
    except UsageError as error:
        if isinstance(error.__cause__, NotForReplicas):
            raise error.__cause__ from None
        raise


def _has_ctx(fn: Callable[..., Any]) -> bool:
    try:
        return "ctx" in inspect.signature(fn).parameters
    except (TypeError, ValueError):  # a built-in without a signature
        return False
