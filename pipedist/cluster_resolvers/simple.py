"""Resolvers that are told everything: one cluster, or the union of several."""

from __future__ import annotations

from collections.abc import Mapping

from pipedist.cluster_resolvers.base import (
    ClusterResolver,
    accelerators,
    number_or_none,
    text_or_none,
)
from pipedist.cluster_resolvers.cluster_spec import ClusterSpec


class SimpleClusterResolver(ClusterResolver):
    """Knows what it is told (tf.distribute's SimpleClusterResolver).

    Args:
        cluster_spec: the tasks.
        master: what `master()` returns.
        task_type, task_id: which task this process is; of no effect on `master()`.
        environment: where the cluster runs.
        num_accelerators: of each task: {"GPU": 4}.
        rpc_layer: put in front of addresses.

    Raises:
        TypeError: `cluster_spec` is no ClusterSpec, or an argument is of the wrong kind.
        ResolverError: a number is negative.
    """

    def __init__(
        self,
        cluster_spec: ClusterSpec,
        master: str = "",
        task_type: str | None = None,
        task_id: int | None = None,
        environment: str = "",
        num_accelerators: Mapping[str, int] | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        if not isinstance(cluster_spec, ClusterSpec):
            raise TypeError(
                f"cluster_spec is {cluster_spec!r}; expected a ClusterSpec: ClusterSpec({{'worker': [...]}})"
            )
        self._cluster_spec = cluster_spec
        self._master = text_or_none("master", master) or ""
        self._task_type = text_or_none("task_type", task_type)
        self._task_id = number_or_none("task_id", task_id)
        self._environment = text_or_none("environment", environment)
        self._num_accelerators = accelerators(num_accelerators)
        self._rpc_layer = text_or_none("rpc_layer", rpc_layer)

    def cluster_spec(self) -> ClusterSpec:
        """Return the tasks."""
        return self._cluster_spec

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Return a task's address; without a task, what was given as `master`."""
        address = self._master
        if task_type is not None and task_id is not None:
            address = self._cluster_spec.task_address(task_type, task_id)
        return self._url(address, rpc_layer)


class UnionResolver(ClusterResolver):
    """Several clusters as one (tf.distribute's UnionResolver).

    The tasks of a job that several have follow each other, in order of the resolvers; an address that a
    job has already is not taken twice. Where a resolver numbers its tasks itself, with gaps, all
    numbers of that job are kept, and must differ. `environment`, accelerators and `master()` are the
    first resolver's.

    Args:
        resolvers: at least one.
        task_type, task_id: which task this process is; None: what the first resolver says.
        rpc_layer: put in front of the addresses of tasks; None: nothing, whatever the first resolver's is.

    Raises:
        ValueError: there is no resolver.
        TypeError: one of them is none, or an argument is of the wrong kind.
    """

    def __init__(
        self,
        *resolvers: ClusterResolver,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        if not resolvers:
            raise ValueError("a union needs at least one cluster resolver")
        for resolver in resolvers:
            if not isinstance(resolver, ClusterResolver):
                raise TypeError(f"a union is made of cluster resolvers, not {resolver!r}")
        self._resolvers = resolvers
        self._task_type = text_or_none("task_type", task_type)
        self._task_id = number_or_none("task_id", task_id)
        self._rpc_layer = text_or_none("rpc_layer", rpc_layer)

    def cluster_spec(self) -> ClusterSpec:
        """Return the tasks of all.

        Raises:
            KeyError: two resolvers that number their tasks themselves use a number twice.
        """
        clusters = [resolver.cluster_spec() for resolver in self._resolvers]
        parts = [cluster.as_dict() for cluster in clusters]
        numbered = {job for part in parts for job, tasks in part.items() if tasks and isinstance(tasks, dict)}
        merged: dict[str, dict[int, str]] = {}
        for cluster in clusters:
            for job in cluster.jobs:
                tasks = merged.setdefault(job, {})
                for index in cluster.task_indices(job):
                    address = cluster.task_address(job, index)
                    if job in numbered:
                        if tasks.setdefault(index, address) != address:
                            raise KeyError(f"task {index} of job {job!r} has two addresses in the union")
                    elif address not in tasks.values():
                        tasks[len(tasks)] = address
        return ClusterSpec(merged)

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Return a task's address; without a task, the first resolver's master."""
        if task_type is not None and task_id is not None:
            return self._url(self.cluster_spec().task_address(task_type, task_id), rpc_layer)
        return self._resolvers[0].master(rpc_layer=rpc_layer)

    @property
    def task_type(self) -> str | None:
        """The job of this process; where it was not given, as the first resolver says."""
        return self._resolvers[0].task_type if self._task_type is None else self._task_type

    @property
    def task_id(self) -> int | None:
        """The number of this process in its job; where it was not given, as the first resolver says."""
        return self._resolvers[0].task_id if self._task_id is None else self._task_id

    @property
    def rpc_layer(self) -> str | None:
        """What was given; else the first resolver's, which `master` puts in front of that resolver's only."""
        return self._resolvers[0].rpc_layer if self._rpc_layer is None else self._rpc_layer

    @property
    def environment(self) -> str | None:
        """Where the first cluster runs."""
        return self._resolvers[0].environment

    def num_accelerators(self, task_type: str | None = None, task_id: int | None = None) -> dict[str, int]:
        """Return the first resolver's."""
        return self._resolvers[0].num_accelerators(task_type, task_id)
