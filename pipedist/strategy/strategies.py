"""The kinds of strategies (tf.distribute: Mirrored, MultiWorkerMirrored, OneDevice, CentralStorage).

| name | kind | replicas | variables | values |
|---|---|---|---|---|
| | `Strategy` | R | a copy each | PerReplica, also where R is 1 |
| mirrored | `MirroredStrategy` | one for each worker of one host | a copy each | PerReplica |
| multi_worker_mirrored | `MultiWorkerMirroredStrategy` | W workers x R | a copy each | PerReplica |
| central_storage | `CentralStorageStrategy` | R | one copy | PerReplica |
| one_device | `OneDeviceStrategy` | 1 | one copy | plain: gather and distribution are the identity |
| default | the default one, `get_strategy()` | 1, in this process | one copy | plain |

All but the default one run functions in the workers of a cluster: the calls of a step at once, over as
many workers as there are. Neither their number nor what happens to them changes a result.

A worker gets several steps in advance wherever there are several to do (tf.distribute: steps_per_run):
start runs as tasks, or use `run_steps`. Results come back step by step, in order.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from pipedist.cluster.base import Cluster as OpenedCluster
from pipedist.cluster.base import LocalCluster
from pipedist.collectives.options import CommunicationOptions
from pipedist.core.arguments import check_int
from pipedist.strategy.replicated import Cluster, Strategy

if TYPE_CHECKING:
    from pipedist.cluster.resolvers import ClusterResolver


class CentralStorageStrategy(Strategy):
    """R replicas whose variables are kept in one place (tf.distribute's CentralStorageStrategy).

    Arguments: as for `Strategy`. There is one copy of every variable: an on_read one is aggregated when
    it is assigned, too.
    """

    @property
    def _variables_in_one_place(self) -> bool:
        return True


class MirroredStrategy(Strategy):
    """Replicas on one host, with a copy of every variable each (tf.distribute's MirroredStrategy).

    Args:
        cluster: an open `LocalCluster`.
        replicas: R; None: one for each of `devices`, or else for each worker.
        seed, devices, communication_options: as for `Strategy`.

    Raises:
        ValueError, TypeError: as for `Strategy`; or the cluster is one whose workers dial in.
    """

    def __init__(
        self,
        cluster: Cluster,
        replicas: int | None = None,
        *,
        seed: int = 0,
        devices: Sequence[str] | None = None,
        communication_options: CommunicationOptions | None = None,
    ) -> None:
        if isinstance(cluster, OpenedCluster) and not isinstance(cluster, LocalCluster):
            raise ValueError(
                f"mirrored replicas share one host, but the workers of a {type(cluster).__name__} may be "
                "anywhere: use multi_worker_mirrored, or a LocalCluster"
            )
        super().__init__(
            cluster, replicas, seed=seed, devices=devices, communication_options=communication_options
        )

    @staticmethod
    def _default_replicas(cluster: Cluster) -> int:
        return workers_of(cluster)


_HOLDING_REPLICAS: Final = ("chief", "master", "worker")
"""Jobs whose tasks hold replicas; an evaluator or a parameter server does not."""


class MultiWorkerMirroredStrategy(Strategy):
    """Replicas on several workers (tf.distribute's MultiWorkerMirroredStrategy).

    The program runs once, here, and not in every worker: what tf.distribute does in each of them for
    its own replicas is done for all. A worker is a logical one, with an input pipeline of its own:
    datasets are sharded among them as their auto-shard policy says. The processes are the cluster's.

    Args:
        cluster: an open cluster.
        workers: W, at least 1; None: the chief and worker tasks that the resolver knows of, or else as
            many as the cluster has.
        replicas_per_worker: at least 1; None: one for each accelerator that the resolver says a task
            has, or else 1.
        cluster_resolver: knows the tasks and their accelerators.
        seed, devices, communication_options: as for `Strategy`.

    Raises:
        ValueError, TypeError: as for `Strategy`.
    """

    def __init__(
        self,
        cluster: Cluster,
        workers: int | None = None,
        *,
        replicas_per_worker: int | None = None,
        cluster_resolver: ClusterResolver | None = None,
        seed: int = 0,
        devices: Sequence[str] | None = None,
        communication_options: CommunicationOptions | None = None,
    ) -> None:
        if cluster_resolver is not None:
            _check_resolver(cluster_resolver)
        if workers is None:
            workers = _tasks(cluster_resolver) or workers_of(cluster)
        if replicas_per_worker is None:
            replicas_per_worker = _accelerators(cluster_resolver) or 1
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
        """W: how many logical workers there are."""
        return self._logical_workers

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """What it was given; None: the cluster's workers are known already."""
        return self._resolver

    @property
    def _input_pipelines(self) -> int:
        return self._logical_workers


def _check_resolver(resolver: object) -> None:
    from pipedist.cluster.resolvers import ClusterResolver  # few strategies have one

    if not isinstance(resolver, ClusterResolver):
        raise TypeError(f"cluster_resolver is {resolver!r}; expected a pipedist.ClusterResolver")


def _tasks(resolver: ClusterResolver | None) -> int:
    """Return how many tasks of a cluster hold replicas: the chief's and the workers'."""
    if resolver is None:
        return 0
    spec = resolver.cluster_spec()
    return sum(spec.num_tasks(job) for job in spec.jobs if job in _HOLDING_REPLICAS)


def _accelerators(resolver: ClusterResolver | None) -> int:
    """Return how many accelerators each task has, of all kinds."""
    return 0 if resolver is None else sum(resolver.num_accelerators().values())


class OneDeviceStrategy(Strategy):
    """One replica, whose values stay plain (tf.distribute.OneDeviceStrategy): a reference to test with.

    Args:
        cluster: an open cluster.
        device: what the replica computes on, for `ctx.device`.
        seed: as for `Strategy`.
    """

    def __init__(self, cluster: Cluster, device: str | None = None, *, seed: int = 0) -> None:
        super().__init__(cluster, 1, seed=seed, devices=None if device is None else [device])

    @property
    def _identity(self) -> bool:
        return True


NAMES: Final[Mapping[str, Callable[..., Strategy]]] = {
    "mirrored": MirroredStrategy,
    "multi_worker_mirrored": MultiWorkerMirroredStrategy,
    "central_storage": CentralStorageStrategy,
    "one_device": OneDeviceStrategy,
}
"""Strategies that can be asked for by name, and their classes."""


def strategy_of(name: str, cluster: Cluster, **options: Any) -> Strategy:
    """Return a new strategy of a kind: `strategy_of("mirrored", cluster, replicas=2)`.

    Args:
        name: mirrored, multi_worker_mirrored, central_storage or one_device.
        cluster: an open cluster.
        options: of the kind's class.

    Raises:
        ValueError: there is no such kind, or as the class does.
        TypeError: the class has no such option, or as it does.
    """
    kind = NAMES.get(name)
    if kind is None:
        close = difflib.get_close_matches(str(name), NAMES, n=1)
        raise ValueError(
            f"there is no strategy {name!r}; expected one of {', '.join(NAMES)}"
            + (f": did you mean {close[0]!r}?" if close else "")
        )
    return kind(cluster, **options)


def workers_of(cluster: Cluster) -> int:
    """Return how many workers a cluster is to have; 1 where it does not say."""
    return getattr(cluster, "workers", 1)
