"""Cluster resolvers: the tasks of a cluster (tf.distribute's).

This module has ClusterSpec and the resolvers that get their values as arguments; `resolvers_environment` has those
for TF_CONFIG and Slurm, and `resolvers_kubernetes` the one that queries a Kubernetes API server, the only one that
opens a connection. Arguments and variables are checked at construction.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from pipedist.core.arguments import check_int
from pipedist.errors import UsageError


class ClusterSpec:
    """A cluster's tasks; immutable.

    Args:
        cluster: job name -> addresses, `host:port`; or -> {task index: address}, if some tasks are missing.
            Another ClusterSpec is copied. The order of jobs is kept.

    Raises:
        TypeError: it is not a mapping, a job's tasks are neither a list nor a mapping, or an address is
            not a string.
        ValueError: a task index is not an int of at least 0.

    Example:
        spec = pipedist.ClusterSpec({"chief": ["a:5000"], "worker": ["b:5000", "c:5000"]})
        spec.num_tasks("worker")  # 2
    """

    __slots__ = ("_jobs",)

    def __init__(
        self, cluster: Mapping[str, Sequence[str] | Mapping[int, str] | Mapping[str, str]] | ClusterSpec
    ) -> None:
        if isinstance(cluster, ClusterSpec):
            self._jobs: dict[str, dict[int, str]] = cluster._jobs
            return
        if not isinstance(cluster, Mapping):
            raise TypeError(
                f"a cluster is {cluster!r} of type {type(cluster).__name__}; expected a mapping from job "
                "names to lists of addresses"
            )
        self._jobs = {job: _tasks(job, tasks) for job, tasks in cluster.items()}

    @property
    def jobs(self) -> list[str]:
        """The names of the jobs."""
        return list(self._jobs)

    def as_dict(self) -> dict[str, list[str] | dict[int, str]]:
        """Return job -> list of addresses.

        If tasks are missing, or a job has none, it is job -> {index: address}.
        """
        return {
            job: list(tasks.values()) if tasks and list(tasks) == list(range(len(tasks))) else dict(tasks)
            for job, tasks in self._jobs.items()
        }

    def num_tasks(self, job_name: str) -> int:
        """Return the number of tasks of a job.

        Raises:
            ValueError: there is no such job.
        """
        return len(self._job(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """Return the indices of a job's tasks, in ascending order.

        Raises:
            ValueError: there is no such job.
        """
        return list(self._job(job_name))

    def task_address(self, job_name: str, task_index: int) -> str:
        """Return a task's address.

        Raises:
            ValueError: there is no such job or task.
        """
        tasks = self._job(job_name)
        if task_index not in tasks:
            raise ValueError(
                f"job {job_name!r} has no task {task_index!r}: its tasks are {_listed(list(tasks))}"
            )
        return tasks[task_index]

    def job_tasks(self, job_name: str) -> list[str | None]:
        """Return the addresses of a job's tasks.

        A missing index below the last one has None.

        Raises:
            ValueError: there is no such job.
        """
        tasks = self._job(job_name)
        return [tasks.get(index) for index in range(max(tasks, default=-1) + 1)]

    def _job(self, name: str) -> dict[int, str]:
        if name not in self._jobs:
            raise ValueError(f"the cluster has no job {name!r}: its jobs are {_listed(list(self._jobs))}")
        return self._jobs[name]

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ClusterSpec) and self._jobs == other._jobs

    def __hash__(self) -> int:
        return hash(tuple((job, tuple(tasks.items())) for job, tasks in sorted(self._jobs.items())))

    def __repr__(self) -> str:
        return f"ClusterSpec({self.as_dict()!r})"


def _tasks(job: object, tasks: object) -> dict[int, str]:
    if not isinstance(job, str):
        raise TypeError(f"a job's name is {job!r}; expected a string")
    if isinstance(tasks, Mapping):
        numbered = {}
        for index, address in tasks.items():
            if (place := index_or_none(index)) is None:
                raise ValueError(f"a task index of job {job!r} is {index!r}; expected an int >= 0")
            numbered[place] = address
    elif isinstance(tasks, Sequence) and not isinstance(tasks, str | bytes):
        numbered = dict(enumerate(tasks))
    else:
        raise TypeError(
            f"the tasks of job {job!r} are {tasks!r}; expected a list of addresses, or a mapping from "
            "task indices to addresses"
        )
    for index, address in numbered.items():
        if not isinstance(address, str):
            raise TypeError(f"the address of task {index} of job {job!r} is {address!r}; expected a string")
    return dict(sorted(numbered.items()))


def index_or_none(value: object) -> int | None:
    """Return a task index, also from digits; None: it is malformed."""
    if isinstance(value, bool) or not isinstance(value, int | str) or not str(value).isdecimal():
        return None
    return int(value)


def _listed(items: Sequence[object]) -> str:
    return ", ".join(map(str, items)) or "none"


class ResolverError(UsageError, ValueError):
    """The malformed argument or variable of a resolver, which the text names."""


class ResolverStateError(UsageError, RuntimeError):
    """A variable, running pod, task or GPU of a resolver is missing (yet)."""


class ClusterResolver(ABC):
    """The tasks of a cluster, and the task of this process.

    These are the semantics of tf.distribute.cluster_resolver.ClusterResolver.

    A subclass sets the attributes that it knows at construction; the others stay unknown.

    Example:
        class Fixed(pipedist.ClusterResolver):
            def cluster_spec(self):
                return pipedist.ClusterSpec({"worker": ["a:5000", "b:5000"]})
    """

    _task_type: str | None = None
    _task_id: int | None = None
    _environment: str | None = ""
    _rpc_layer: str | None = None
    _num_accelerators: Mapping[str, int] = MappingProxyType({})

    @abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Return the present tasks of the cluster."""

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Return the address of a task.

        Args:
            task_type, task_id: the task; None: the resolver's default.
            rpc_layer: the prefix: "grpc" gives `grpc://HOST:PORT`; "": no prefix; None: the resolver's.

        Returns:
            The address; an empty one if the resolver knows no master, as in tf.distribute.

        Raises:
            ValueError: there is no such task.
        """
        if task_type is None or task_id is None:
            return self._default_master(rpc_layer)
        return self._url(self.cluster_spec().task_address(task_type, task_id), rpc_layer)

    def _default_master(self, rpc_layer: str | None) -> str:
        """Return the address if no task is given; "": unknown."""
        return ""

    @property
    def task_type(self) -> str | None:
        """The job of this process; None: unknown."""
        return self._task_type

    @property
    def task_id(self) -> int | None:
        """The index of this process in its job; None: unknown."""
        return self._task_id

    @property
    def environment(self) -> str | None:
        """The environment in which the cluster runs, as given.

        "" or None: unknown.
        """
        return self._environment

    @property
    def rpc_layer(self) -> str | None:
        """The prefix of the addresses that `master` returns; None: no prefix."""
        return self._rpc_layer

    def num_accelerators(self, task_type: str | None = None, task_id: int | None = None) -> dict[str, int]:
        """Return kind of accelerator -> number per task, as far as known.

        Args:
            task_type, task_id: ignored; all tasks have the same number.
        """
        return dict(self._num_accelerators)

    def _url(self, address: str, rpc_layer: str | None) -> str:
        """Return an address with the given prefix, or with the resolver's."""
        layer = self._rpc_layer if rpc_layer is None else rpc_layer
        return f"{layer}://{address}" if layer else address

    def __repr__(self) -> str:
        return f"<{type(self).__name__}, task {self.task_type} {self.task_id}>"


def text_or_none(name: str, value: object) -> str | None:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{name} is {value!r}; expected a string")
    return value


def task_id_or_none(value: object) -> int | None:
    return None if value is None else number("task_id", value)


def number(name: str, value: object, *, at_least: int = 0) -> int:
    """Return an argument that is an int, not a bool, of at least `at_least`."""
    try:
        return check_int(name, value, at_least=at_least)
    except ValueError as error:
        raise ResolverError(str(error)) from None


class SimpleClusterResolver(ClusterResolver):
    """A resolver of given values (tf.distribute's SimpleClusterResolver).

    Args:
        cluster_spec: the tasks.
        master: the address that `master()` returns.
        task_type, task_id: the task of this process; they do not affect `master()`.
        environment: the environment in which the cluster runs.
        num_accelerators: accelerators of each task: {"GPU": 4}.
        rpc_layer: prefix of addresses.

    Raises:
        TypeError: an argument has the wrong type.
        ResolverError: a number is negative.

    Example:
        spec = pipedist.ClusterSpec({"worker": ["a:5000", "b:5000"]})
        resolver = pipedist.SimpleClusterResolver(spec, task_type="worker", task_id=0)
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
        self._task_id = task_id_or_none(task_id)
        self._environment = text_or_none("environment", environment)
        if not isinstance(num_accelerators, Mapping | None):
            raise TypeError(
                f"num_accelerators is {num_accelerators!r}; expected a mapping such as {{'GPU': 2}}"
            )
        counts = (num_accelerators or {}).items()
        self._num_accelerators = {kind: number(f"num_accelerators[{kind!r}]", n) for kind, n in counts}
        self._rpc_layer = text_or_none("rpc_layer", rpc_layer)

    def cluster_spec(self) -> ClusterSpec:
        """Return the tasks."""
        return self._cluster_spec

    def _default_master(self, rpc_layer: str | None) -> str:
        return self._url(self._master, rpc_layer)


class UnionResolver(ClusterResolver):
    """Several clusters as one (tf.distribute's UnionResolver).

    If several resolvers have a job, its tasks are concatenated in order of the resolvers, and a repeated address
    is skipped. If a resolver gives task indices with gaps, all indices of that job are kept, and must differ.
    `environment`, accelerators and `master()` are those of the first resolver.

    Args:
        resolvers: at least one.
        task_type, task_id: the task of this process; None: that of the first resolver.
        rpc_layer: prefix of the addresses of tasks; None: no prefix, whatever that of the first resolver is.

    Raises:
        ValueError: there is no resolver.
        TypeError: one of them is not a resolver, or an argument has the wrong type.

    Example:
        resolver = pipedist.UnionResolver(first, second)
        resolver.cluster_spec().as_dict()
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
        first = resolvers[0]
        self._task_type = first.task_type if task_type is None else text_or_none("task_type", task_type)
        self._task_id = first.task_id if task_id is None else task_id_or_none(task_id)
        self._environment = first.environment
        self._rpc_layer = text_or_none("rpc_layer", rpc_layer)

    def cluster_spec(self) -> ClusterSpec:
        """Return the tasks of all clusters.

        Raises:
            KeyError: two resolvers with task indices give one index two addresses.
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

    def _default_master(self, rpc_layer: str | None) -> str:
        return self._resolvers[0].master(rpc_layer=rpc_layer)

    @property
    def rpc_layer(self) -> str | None:
        """The given prefix.

        If not given, it is the first resolver's, which only that resolver's master gets.
        """
        return self._resolvers[0].rpc_layer if self._rpc_layer is None else self._rpc_layer

    def num_accelerators(self, task_type: str | None = None, task_id: int | None = None) -> dict[str, int]:
        """Return the accelerators of the first resolver."""
        return self._resolvers[0].num_accelerators(task_type, task_id)
