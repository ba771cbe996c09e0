"""Cluster descriptions: ClusterSpec, and resolvers from arguments or TF_CONFIG.

Nothing here opens a connection. Arguments and variables are checked at construction.
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, SupportsIndex

from pipedist.errors import UsageError


class ClusterSpec:
    """A cluster's tasks; immutable.

    Args:
        cluster: job name -> addresses, `host:port`; or -> {task index: address}, where some are missing.
            Another ClusterSpec is copied. The order of jobs is kept.

    Raises:
        TypeError: it is no mapping, a job's tasks are neither a list nor a mapping, or an address is
            no text.
        ValueError: a task index is no int of at least 0.
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
        self._jobs = {_name(job): _tasks(job, tasks) for job, tasks in cluster.items()}

    @property
    def jobs(self) -> list[str]:
        """The names of the jobs."""
        return list(self._jobs)

    def as_dict(self) -> dict[str, list[str] | dict[int, str]]:
        """Return job -> list of addresses; -> {index: address} where some are missing, or all."""
        return {
            job: list(tasks.values()) if tasks and list(tasks) == list(range(len(tasks))) else dict(tasks)
            for job, tasks in self._jobs.items()
        }

    def num_tasks(self, job_name: str) -> int:
        """Return how many tasks a job has.

        Raises:
            ValueError: there is no such job.
        """
        return len(self._job(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """Return the numbers of a job's tasks, in ascending order.

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
        """Return the addresses of a job's tasks; None for a number below the last that is missing.

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


def _name(job: object) -> str:
    if not isinstance(job, str):
        raise TypeError(f"a job's name is {job!r}; expected text")
    return job


def _tasks(job: object, tasks: object) -> dict[int, str]:
    if isinstance(tasks, Mapping):
        numbered = {_job_index(job, index): address for index, address in tasks.items()}
    elif isinstance(tasks, Sequence) and not isinstance(tasks, str | bytes):
        numbered = dict(enumerate(tasks))
    else:
        raise TypeError(
            f"the tasks of job {job!r} are {tasks!r}; expected a list of addresses, or a mapping from "
            "task numbers to addresses"
        )
    for index, address in numbered.items():
        if not isinstance(address, str):
            raise TypeError(f"the address of task {index} of job {job!r} is {address!r}; expected text")
    return dict(sorted(numbered.items()))


def _job_index(job: object, index: object) -> int:
    text = index if isinstance(index, str) else "" if isinstance(index, bool) else str(index)
    if not isinstance(index, int | str) or not text.isdecimal():
        raise ValueError(f"a task index of job {job!r} is {index!r}; expected an int >= 0")
    return int(text)


def _listed(items: Sequence[object]) -> str:
    return ", ".join(map(str, items)) or "none"


class ResolverError(UsageError, ValueError):
    """What a resolver was told, or found in the environment, is malformed: the text names it."""


class ResolverStateError(UsageError, RuntimeError):
    """What a resolver needs is not there, or not yet: a variable, a running pod, tasks or GPUs enough."""


class ClusterResolver(ABC):
    """Knows the tasks of a cluster, and which of them this process is.

    What a kind of resolver knows beyond the tasks' addresses it sets when it is made; the rest stays unknown.
    """

    _task_type: str | None = None
    _task_id: int | None = None
    _environment: str | None = ""
    _rpc_layer: str | None = None
    _num_accelerators: Mapping[str, int] = MappingProxyType({})

    @abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Return the tasks of the cluster, as they are now."""

    @abstractmethod
    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Return the address of a task.

        Args:
            task_type, task_id: which one; None: the resolver's own choice.
            rpc_layer: put in front: "grpc" gives `grpc://HOST:PORT`; "": nothing; None: the resolver's.

        Returns:
            The address; nothing behind the layer where the resolver knows of no master, as in tf.distribute.

        Raises:
            ValueError: there is no such task.
        """

    @property
    def task_type(self) -> str | None:
        """The job of this process; None: unknown."""
        return self._task_type

    @property
    def task_id(self) -> int | None:
        """The number of this process in its job; None: unknown."""
        return self._task_id

    @property
    def environment(self) -> str | None:
        """Where the cluster runs, as it was told; "" or None: unknown."""
        return self._environment

    @property
    def rpc_layer(self) -> str | None:
        """What `master` puts in front of addresses; None: nothing."""
        return self._rpc_layer

    def num_accelerators(self, task_type: str | None = None, task_id: int | None = None) -> dict[str, int]:
        """Return kind of accelerator -> how many a task has, as far as the resolver was told.

        Args:
            task_type, task_id: which one; all tasks have the same.
        """
        return dict(self._num_accelerators)

    def _url(self, address: str, rpc_layer: str | None) -> str:
        """Return an address, behind the layer that `master` was told, or its own."""
        layer = self._rpc_layer if rpc_layer is None else rpc_layer
        return f"{layer}://{address}" if layer else address

    def __repr__(self) -> str:
        return f"<{type(self).__name__}, task {self.task_type} {self.task_id}>"


def text_or_none(name: str, value: object) -> str | None:
    """Return an argument that is text, or None.

    Raises:
        TypeError: it is something else.
    """
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{name} is {value!r}; expected text")
    return value


def number_or_none(name: str, value: object, *, at_least: int = 0) -> int | None:
    """Return an argument that is an int, or None.

    Raises:
        TypeError: it is something else; bool counts as no int.
        ResolverError: it is smaller than `at_least`.
    """
    return None if value is None else number(name, value, at_least=at_least)


def number(name: str, value: object, *, at_least: int = 0) -> int:
    """Return an argument that is an int.

    Raises:
        TypeError: it is something else; bool counts as no int.
        ResolverError: it is smaller than `at_least`.
    """
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise TypeError(f"{name} is {value!r}; expected an int")
    if value.__index__() < at_least:
        raise ResolverError(f"{name} is {value!r}; expected an int >= {at_least}")
    return value.__index__()


def accelerators(value: Mapping[str, int] | None) -> dict[str, int]:
    """Return an argument that says how many accelerators of each kind there are.

    Raises:
        TypeError: it is no mapping, or a number is no int.
        ResolverError: a number is negative.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise TypeError(f"num_accelerators is {value!r}; expected a mapping such as {{'GPU': 2}}")
    return {kind: number(f"num_accelerators[{kind!r}]", count) for kind, count in value.items()}


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


VARIABLE: Final = "TF_CONFIG"

_OUTSIDE: Final = "evaluator"
"""A task of this type need not be one of the cluster."""


class TFConfigClusterResolver(ClusterResolver):
    """Reads TF_CONFIG (tf.distribute's TFConfigClusterResolver), once, and checks all of it.

        {"cluster": {"worker": ["host1:2222", "host2:2222"]}, "task": {"type": "worker", "index": 0}}

    A variable that is not set describes a cluster without tasks.

    Args:
        task_type, task_id, rpc_layer: in place of what the variable says.
        environment: where the cluster runs; what the variable says of it does not count, as in
            tf.distribute.
        environ: the environment; None: that of the process.

    Raises:
        ResolverError: TF_CONFIG is not what it should be, or its task is none of the cluster's; the text
            names the variable, the key and what is wrong. (tf.distribute finds out when it is used.)
        TypeError: an argument is of the wrong kind.
    """

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
        *,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        config = _parsed((os.environ if environ is None else environ).get(VARIABLE))
        task = _object(config.get("task", {}), "task")
        self._environment = text_or_none("environment", environment)
        self._cluster_spec = _cluster_spec(config.get("cluster", {}))
        self._master = _text(config.get("session_master"), "session_master")
        self._rpc_layer = text_or_none("rpc_layer", rpc_layer)
        if self._rpc_layer is None:
            self._rpc_layer = _text(config.get("rpc_layer"), "rpc_layer")
        self._task_type = text_or_none("task_type", task_type)
        if self._task_type is None:
            self._task_type = _text(task.get("type"), "task.type")
        self._task_id = number_or_none("task_id", task_id)
        if self._task_id is None:
            self._task_id = _index(task.get("index"))
        if self._cluster_spec:
            self._check_task()

    def _check_task(self) -> None:
        kind, index, cluster = self._task_type, self._task_id, self._cluster_spec
        if kind is None and index is None:
            return
        if kind is None or index is None:
            missing = "type" if kind is None else "index"
            raise ResolverError(f"{VARIABLE}: the task has no {missing}; expected `task: {{type, index}}`")
        if kind not in cluster.jobs:
            if kind != _OUTSIDE:
                raise ResolverError(
                    f"{VARIABLE}: the task's type is {kind!r}, but the cluster's jobs are "
                    f"{', '.join(cluster.jobs)}"
                )
        elif index not in cluster.task_indices(kind):
            raise ResolverError(
                f"{VARIABLE}: the task's index is {index}, but job {kind!r} has {cluster.num_tasks(kind)} "
                "tasks, counted from 0"
            )

    def cluster_spec(self) -> ClusterSpec:
        """Return the tasks."""
        return self._cluster_spec

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Return a task's address, this process's own one by default.

        Returns:
            TF_CONFIG's `session_master`, whatever is asked for, if it has one; "" in a cluster of at
            most one task, which is this process.

        Raises:
            ValueError: there is no such task.
        """
        if self._master is not None:
            return self._master
        cluster = self._cluster_spec
        if not cluster.jobs or (len(cluster.jobs) == 1 and len(cluster.job_tasks(cluster.jobs[0])) == 1):
            return ""  # task 1 alone is not: there is a task 0, elsewhere
        kind = self._task_type if task_type is None else task_type
        index = self._task_id if task_id is None else task_id
        if kind is None or index is None:
            raise ValueError(
                f"{VARIABLE} does not say which task this process is: give task_type and task_id"
            )
        return self._url(cluster.task_address(kind, index), rpc_layer)


def _parsed(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ResolverError(f"{VARIABLE} is no JSON: {error}; it is {text[:80]!r}") from None
    return _object(config, "")


def _object(value: object, key: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        place = f"{VARIABLE}: {key}" if key else VARIABLE
        raise ResolverError(f"{place} is {value!r}; expected a JSON object")
    return value


def _cluster_spec(cluster: object) -> ClusterSpec:
    jobs = _object(cluster, "cluster")
    try:
        spec = ClusterSpec(jobs)
    except (TypeError, ValueError) as error:
        raise ResolverError(f"{VARIABLE}: {error}") from None
    for job in spec.jobs:
        if spec.num_tasks(job) == 0:
            raise ResolverError(f"{VARIABLE}: job {job!r} has no tasks; leave it out")
    return spec


def _text(value: object, key: str) -> str | None:
    if value is not None and not isinstance(value, str):
        raise ResolverError(f"{VARIABLE}: {key} is {value!r}; expected text")
    return value


def _index(value: object) -> int | None:
    if value is None:
        return None
    text = value if isinstance(value, str) else "" if isinstance(value, bool) else str(value)
    if not isinstance(value, int | str) or not text.isdecimal():
        raise ResolverError(f"{VARIABLE}: task.index is {value!r}; expected an int >= 0")
    return int(text)
