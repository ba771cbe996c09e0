"""The strategies (tf.distribute: Mirrored, MultiWorkerMirrored, OneDevice, CentralStorage, default).

| name | class | replicas | variables | values |
|---|---|---|---|---|
| | `Strategy` | R; 1 by default | one copy per replica | PerReplica, also if R is 1 |
| mirrored | `MirroredStrategy` | one per worker of one host | one copy per replica | PerReplica |
| multi_worker_mirrored | `MultiWorkerMirroredStrategy` | W workers x R | one copy per replica | PerReplica |
| central_storage | `CentralStorageStrategy` | R | one copy | PerReplica |
| one_device | `OneDeviceStrategy` | 1 | one copy | plain: gather and distribution are the identity |
| default | `DefaultStrategy`, `get_strategy()` | 1, in this process | one copy | plain |

All except the default one run functions in the workers of a cluster: the calls of a step run at the same
time, on as many workers as there are. The number of workers and their failures never change a result.

A worker gets several steps in advance if there are several to execute (tf.distribute: steps_per_run): start
runs as tasks, or use `run_steps`. Results are returned step by step, in order.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

from pipedist.cluster.base import Cluster, LocalCluster
from pipedist.collectives.gang import LocalGang
from pipedist.collectives.options import CommunicationOptions
from pipedist.collectives.requests import CollectiveRequest, UnawaitedCollectives
from pipedist.core import functions
from pipedist.core.arguments import check_int
from pipedist.core.names import did_you_mean
from pipedist.core.remote_errors import exception_text
from pipedist.core.types import Tree
from pipedist.errors import CallError
from pipedist.strategy.base import BaseStrategy
from pipedist.strategy.context import (
    current_strategy,
    default_running,
    in_replica_function,
    set_default_strategy,
)
from pipedist.strategy.function_references import require_callable
from pipedist.strategy.replicated import ClusterLike, Strategy
from pipedist.worker.array_isolation import as_readonly
from pipedist.worker.context import ReplicaContext, current, get_replica_context
from pipedist.worker.strategy_views import MergeStrategy, ReplicaStrategy
from pipedist.worker.strategy_views import current_strategy as merging

if TYPE_CHECKING:
    from pipedist.cluster.resolvers import ClusterResolver


class CentralStorageStrategy(Strategy):
    """R replicas whose variables have one copy (tf: CentralStorageStrategy).

    Arguments: as for `Strategy`. An on_read variable has one copy too: it is aggregated when it is
    assigned.

    Example:
        strategy = pipedist.CentralStorageStrategy(cluster, replicas=2)
    """

    _variables_in_one_place: ClassVar = True


class MirroredStrategy(Strategy):
    """Replicas on one host, with a copy of each variable per replica.

    It is `Strategy` with another default, one replica per worker, and limited to one host.

    Args:
        cluster: an open `LocalCluster`.
        replicas: R; None: one for each of `devices`, or else for each worker.
        seed, devices, communication_options: as for `Strategy`.

    Raises:
        ValueError, TypeError: as for `Strategy`; or the workers of the cluster may be on other hosts.

    Example:
        strategy = pipedist.MirroredStrategy(cluster, replicas=4)
        doubled = await strategy.run(lambda x: 2 * x, args=(batch,))
    """

    @classmethod
    def _check_cluster(cls, cluster: ClusterLike) -> None:
        if isinstance(cluster, Cluster) and not isinstance(cluster, LocalCluster):
            raise ValueError(
                f"mirrored replicas share one host, but the workers of a {type(cluster).__name__} may be "
                "anywhere: use multi_worker_mirrored, or a LocalCluster"
            )
        super()._check_cluster(cluster)

    @staticmethod
    def _default_replicas(cluster: ClusterLike) -> int:
        workers: int = getattr(cluster, "workers", 1)
        return workers


_REPLICA_JOBS: Final = ("chief", "master", "worker")  # their tasks hold replicas; an evaluator does not


class MultiWorkerMirroredStrategy(Strategy):
    """Replicas on several workers (tf: MultiWorkerMirroredStrategy).

    The program runs once, here, and not once per worker as in tf.distribute. A worker is a logical one,
    with its own input pipeline: datasets are sharded among the workers as their auto-shard policy
    requires. The processes are those of the cluster.

    Args:
        cluster: an open cluster.
        workers: W, at least 1; None: the number of chief and worker tasks of the resolver, or else of the
            cluster's workers.
        replicas_per_worker: at least 1; None: the number of accelerators of a task as the resolver
            reports it, or else 1.
        cluster_resolver: knows the tasks and their accelerators.
        seed, devices, communication_options: as for `Strategy`.

    Raises:
        ValueError, TypeError: as for `Strategy`.

    Example:
        async with pipedist.open_cluster() as cluster:  # from TF_CONFIG
            strategy = pipedist.MultiWorkerMirroredStrategy(cluster)
    """

    def __init__(
        self,
        cluster: ClusterLike,
        workers: int | None = None,
        *,
        replicas_per_worker: int | None = None,
        cluster_resolver: ClusterResolver | None = None,
        seed: int = 0,
        devices: Sequence[str] | None = None,
        communication_options: CommunicationOptions | None = None,
    ) -> None:
        tasks = accelerators = 0  # unknown
        if cluster_resolver is not None:
            from pipedist.cluster.resolvers import ClusterResolver  # few strategies have one

            if not isinstance(cluster_resolver, ClusterResolver):
                raise TypeError(
                    f"cluster_resolver is {cluster_resolver!r}; expected a pipedist.ClusterResolver"
                )
            spec = cluster_resolver.cluster_spec()
            tasks = sum(spec.num_tasks(job) for job in spec.jobs if job in _REPLICA_JOBS)
            accelerators = sum(cluster_resolver.num_accelerators().values())
        if workers is None:
            workers = tasks or getattr(cluster, "workers", 1)
        if replicas_per_worker is None:
            replicas_per_worker = accelerators or 1
        self._logical_workers = check_int("workers", workers, at_least=1)
        each = check_int("replicas_per_worker", replicas_per_worker, at_least=1)
        self._resolver = cluster_resolver
        super().__init__(
            cluster,
            self._logical_workers * each,
            seed=seed,
            devices=devices,
            communication_options=communication_options,
        )

    @property
    def workers(self) -> int:
        """W, the number of logical workers."""
        return self._logical_workers

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """The resolver given to the strategy, or None."""
        return self._resolver

    @property
    def _input_pipelines(self) -> int:
        return self._logical_workers


class OneDeviceStrategy(Strategy):
    """One replica, whose values stay plain: a reference for tests.

    Args:
        cluster: an open cluster.
        device: the replica's device, `ctx.device` in its functions; None: the CPU.
        seed: as for `Strategy`.

    Example:
        strategy = pipedist.OneDeviceStrategy(cluster)
        value = await strategy.run(step, args=(batch,))
    """

    _identity: ClassVar = True
    _variables_in_one_place: ClassVar = True

    def __init__(self, cluster: ClusterLike, device: str | None = None, *, seed: int = 0) -> None:
        super().__init__(cluster, 1, seed=seed, devices=None if device is None else [device])


NAMES: Final[Mapping[str, Callable[..., Strategy]]] = {
    "mirrored": MirroredStrategy,
    "multi_worker_mirrored": MultiWorkerMirroredStrategy,
    "central_storage": CentralStorageStrategy,
    "one_device": OneDeviceStrategy,
}
"""Classes of strategies by the names that `strategy_of` accepts."""


def strategy_of(name: str, cluster: ClusterLike, **options: Any) -> Strategy:
    """Return a new strategy by its name.

    Args:
        name: mirrored, multi_worker_mirrored, central_storage or one_device.
        cluster: an open cluster.
        options: arguments of the class.

    Raises:
        ValueError: the name is unknown, or the class raises it.
        TypeError: the class has no such option, or raises it.

    Example:
        strategy = pipedist.strategy_of("mirrored", cluster, replicas=2)
    """
    kind = NAMES.get(name)
    if kind is None:
        raise ValueError(
            f"there is no strategy {name!r}; expected one of {', '.join(NAMES)}"
            + did_you_mean(str(name), NAMES)
        )
    return kind(cluster, **options)


class DefaultStrategy(BaseStrategy):
    """One replica in this process, whose values stay plain.

    `get_strategy` returns it outside of scopes. Code written for a strategy runs with it unchanged. There is
    one instance, and it needs no cluster.
    """

    is_default: ClassVar = True

    _identity: ClassVar = True
    _variables_in_one_place: ClassVar = True

    def __init__(self) -> None:
        super().__init__(1)

    async def run(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Tree:
        """Call `fn` in this process, and return its result unchanged."""
        require_callable(fn)
        [(own_args, own_kwargs)] = as_readonly(self._arguments(args, kwargs))
        label = getattr(fn, "__qualname__", type(fn).__qualname__)
        collectives = _SingleReplicaCollectives(inspect.iscoroutinefunction(fn))
        context = ReplicaContext(
            replica_id_in_sync_group=0,
            num_replicas_in_sync=1,
            step=0,
            epoch=0,
            stage=label,
            elements=None,
            seed=0,
            collectives=collectives,
        )
        if functions.wants_ctx(fn):
            own_kwargs.setdefault("ctx", context)
        token = current.set(context)
        try:
            with default_running():
                result = fn(*own_args, **own_kwargs)
                if inspect.isawaitable(result):
                    result = await result
                    collectives.unawaited.check()
        except Exception as error:
            raise CallError(
                stage=label,
                step=0,
                replica=0,
                worker="this process",
                attempts=1,
                cause=f"{type(error).__name__}: {exception_text(error)}",
                remote_traceback="".join(traceback.format_exception(error)),
            ) from error
        finally:
            current.reset(token)
            collectives.unawaited.drop()
        return result

    def __repr__(self) -> str:
        return "<DefaultStrategy>"


DEFAULT: Final = DefaultStrategy()
set_default_strategy(DEFAULT)


def get_strategy() -> BaseStrategy | ReplicaStrategy | MergeStrategy:
    """Return the current strategy; outside of any scope, the default one.

    Example:
        with strategy.scope():
            assert pipedist.get_strategy() is strategy
    """
    context = get_replica_context()
    if context is not None and in_replica_function():
        return context.strategy
    merge = merging.get()
    if merge is not None:
        return merge
    strategy = current_strategy()
    assert isinstance(strategy, BaseStrategy)
    return strategy


class _SingleReplicaCollectives:
    """Collectives of a single replica: each folds one value."""

    def __init__(self, is_async: bool) -> None:
        self.is_async = is_async
        self.unawaited = UnawaitedCollectives()  # collectives that an async function has not awaited yet

    def call(self, request: CollectiveRequest) -> Any:
        return self.unawaited.add(request, self._later(request)) if self.is_async else self._result(request)

    def _result(self, request: CollectiveRequest) -> Tree:
        gang = LocalGang(replicas=1, local=range(1))
        [outcome] = gang.run([lambda: gang.call(0, request)])
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    async def _later(self, request: CollectiveRequest) -> Tree:
        return self._result(request)
