"""Cluster resolvers that read TF_CONFIG or the variables of srun."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, MutableMapping
from typing import Any, Final

from pipedist.cluster.resolvers import (
    ClusterResolver,
    ClusterSpec,
    ResolverError,
    ResolverStateError,
    index_or_none,
    number,
    task_id_or_none,
    text_or_none,
)
from pipedist.core import gpus as accelerators

PORT_BASE: Final = 8888
VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
VARIABLE: Final = "TF_CONFIG"

_OUTSIDE: Final = "evaluator"  # a task of this type need not be in the cluster
HOSTS_MAX: Final = 2**20  # maximum hosts of an expression: more than any cluster has

_HOST = re.compile(r"(?P<prefix>[^,\[\]]*)(?:\[(?P<ranges>[^\[\]]+)\])?")
_SEPARATOR = re.compile(r",(?![^\[]*\])")
_RANGE = re.compile(r"(?P<first>[0-9]+)(?:-(?P<last>[0-9]+))?")
_TASKS = re.compile(r"(?P<tasks>[0-9]+)(?:\(x(?P<times>[0-9]+)\))?")


def expand_hostlist(hostlist: str) -> list[str]:
    """Return the hosts of a Slurm host list: "n[1-2],m" gives n1, n2, m.

    Leading zeros are kept: "n[08-10]" gives n08, n09, n10. A host has at most one pair of brackets, at its end.
    """
    hosts: list[str] = []
    parts = _SEPARATOR.split(hostlist)
    if parts[-1] == "":
        parts.pop()  # a trailing comma, or an empty list
    for part in parts:
        match = _HOST.fullmatch(part)
        if match is None or not part:
            raise ResolverError(f"the host list {hostlist!r} has a malformed part: {part!r}")
        if match["ranges"] is None:
            hosts.append(part)
            continue
        for each in match["ranges"].split(","):
            numbers = _RANGE.fullmatch(each)
            first, last = (numbers["first"], numbers["last"] or numbers["first"]) if numbers else ("1", "0")
            if int(first) > int(last):
                raise ResolverError(f"the host list {hostlist!r} has a malformed range: {each!r}")
            if len(hosts) + int(last) - int(first) >= HOSTS_MAX:
                raise ResolverError(f"the host list {hostlist!r} has more than {HOSTS_MAX} hosts")
            hosts += [f"{match['prefix']}{n:0{len(first)}d}" for n in range(int(first), int(last) + 1)]
    return hosts


def expand_tasks_per_node(tasks_per_node: str) -> list[int]:
    """Return the number of tasks of each node: "2(x3),1" gives 2, 2, 2, 1."""
    tasks: list[int] = []
    for part in tasks_per_node.split(","):
        match = _TASKS.fullmatch(part)
        if match is None:
            raise ResolverError(
                f"the tasks per node {tasks_per_node!r} have a malformed part, {part!r}; expected a form "
                "such as 2(x3)"
            )
        times = int(match["times"] or 1)
        if len(tasks) + times > HOSTS_MAX:
            raise ResolverError(f"the tasks per node {tasks_per_node!r} have more than {HOSTS_MAX} nodes")
        tasks += [int(match["tasks"])] * times
    return tasks


class SlurmClusterResolver(ClusterResolver):
    """A resolver of a Slurm job step (tf.distribute's SlurmClusterResolver).

    The variables of the step are read once.

    Tasks are in Slurm's order of hosts, as their SLURM_PROCID is: n9 comes before n10. (tf.distribute sorts the
    names, and then uses the address of n10 for task 0, which is on n9.) The tasks of a host get consecutive
    ports. Jobs get tasks in order of their names: with {"ps": 1, "worker": 4}, task 0 of the step is the
    parameter server.

    Args:
        jobs: job name -> number of tasks; together all tasks of the step. None: all are workers.
        port_base: port of the first task of each host.
        gpus_per_node: None: the number that `nvidia-smi`, or else the driver, lists on this host. Without GPUs,
            and without `gpus_per_task`, everything works too. (tf.distribute fails then.)
        gpus_per_task: None: those of a node, divided evenly among the tasks of the node with most tasks.
        tasks_per_node: a number, or host -> number; None: Slurm's.
        auto_set_gpu: set CUDA_VISIBLE_DEVICES to this task's GPUs, if it has any.
        rpc_layer: prefix of addresses.
        environ: the environment; None: that of the process.

    Raises:
        ResolverStateError: a variable is missing, the jobs have another number of tasks than the step, or a
            node has too few GPUs for its tasks.
        ResolverError: a variable or an argument is malformed.
        TypeError: an argument has the wrong type.

    Example:
        async with pipedist.open_cluster(pipedist.SlurmClusterResolver()) as cluster:  # once per node, by srun
            found = await cluster.everywhere(work)
    """

    _task_type: str
    _task_id: int

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int = PORT_BASE,
        gpus_per_node: int | None = None,
        gpus_per_task: int | None = None,
        tasks_per_node: int | Mapping[str, int] | None = None,
        auto_set_gpu: bool = True,
        rpc_layer: str | None = "grpc",
        *,
        environ: MutableMapping[str, str] | None = None,
    ) -> None:
        self._environ = os.environ if environ is None else environ
        self._rpc_layer = text_or_none("rpc_layer", rpc_layer)
        rank = self._number("PROCID")
        tasks = self._tasks(tasks_per_node)
        total = sum(tasks.values())
        requested = self._jobs(jobs, total)
        if sum(requested.values()) != total:
            raise ResolverStateError(
                f"the jobs {requested} have {sum(requested.values())} tasks, but the Slurm step has {total}"
            )
        if rank >= total:
            raise ResolverError(f"SLURM_PROCID is {rank}, but the step has {total} tasks, counted from 0")
        port = number("port_base", port_base, at_least=1)
        gpus = self._gpus_of_a_task(gpus_per_node, gpus_per_task, max(tasks.values(), default=0))
        self._num_accelerators = {"GPU": gpus}
        addresses = [f"{host}:{port + i}" for host, count in tasks.items() for i in range(count)]
        places = [i for count in tasks.values() for i in range(count)]
        self._cluster: dict[str, list[str]] = {}
        first = 0
        for job, count in sorted(requested.items()):
            self._cluster[job] = addresses[first : first + count]
            if first <= rank < first + count:
                self._task_type, self._task_id = job, rank - first
            first += count
        self._devices = ",".join(str(places[rank] * gpus + gpu) for gpu in range(gpus))
        if auto_set_gpu and gpus:
            self._environ[VISIBLE] = self._devices

    def cluster_spec(self) -> ClusterSpec:
        """Return the tasks."""
        return ClusterSpec(self._cluster)

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Return a task's address, this process's own one by default."""
        kind = self._task_type if task_type is None else task_type
        index = self._task_id if task_id is None else task_id
        return self._url(self.cluster_spec().task_address(kind, index), rpc_layer)

    def get_task_info(self) -> tuple[str, int]:
        """Return the job of this process, and its index in that job."""
        return self._task_type, self._task_id

    @property
    def visible_devices(self) -> str:
        """This task's GPUs, in the form of CUDA_VISIBLE_DEVICES: "2,3"."""
        return self._devices

    # -- variables -----------------------------------------------------------------------

    def _text(self, name: str) -> str:
        value = self._environ.get(f"SLURM_{name}")
        if value is None:
            raise ResolverStateError(
                f"the variable SLURM_{name} is not set: this process was not started by srun"
            )
        return value

    def _number(self, name: str) -> int:
        text = self._text(name)
        if not text.isdecimal():
            raise ResolverError(f"SLURM_{name} is {text!r}; expected an int >= 0")
        return int(text)

    def _tasks(self, given: int | Mapping[str, int] | None) -> dict[str, int]:
        """Return host -> number of tasks."""
        if isinstance(given, Mapping):
            return {host: number(f"tasks_per_node[{host!r}]", n, at_least=1) for host, n in given.items()}
        try:
            hosts = expand_hostlist(self._text("STEP_NODELIST"))
        except ResolverError as error:
            raise ResolverError(f"SLURM_STEP_NODELIST: {error}") from None
        if len(set(hosts)) != len(hosts):
            raise ResolverError("SLURM_STEP_NODELIST names a host twice")
        if given is not None:
            return dict.fromkeys(hosts, number("tasks_per_node", given, at_least=1))
        text = self._text("STEP_TASKS_PER_NODE")
        try:
            counts = expand_tasks_per_node(text)
        except ResolverError as error:
            raise ResolverError(f"SLURM_STEP_TASKS_PER_NODE: {error}") from None
        if len(counts) != len(hosts):
            raise ResolverError(
                f"SLURM_STEP_TASKS_PER_NODE {text!r} is for {len(counts)} nodes, but "
                f"SLURM_STEP_NODELIST has {len(hosts)}"
            )
        return dict(zip(hosts, counts, strict=True))

    def _jobs(self, jobs: Mapping[str, int] | None, total: int) -> dict[str, int]:
        if jobs is not None:
            if not isinstance(jobs, Mapping):
                raise TypeError(f"jobs is {jobs!r}; expected a mapping such as {{'ps': 1, 'worker': 4}}")
            return {job: number(f"jobs[{job!r}]", count) for job, count in jobs.items()}
        given = self._number("STEP_NUM_TASKS")
        if given != total:
            raise ResolverStateError(
                f"SLURM_STEP_NUM_TASKS is {given}, but the step's nodes have {total} tasks in total"
            )
        return {"worker": total}

    def _gpus_of_a_task(self, per_node: int | None, per_task: int | None, tasks: int) -> int:
        gpus, how = (
            accelerators.installed(self._environ)
            if per_node is None
            else (number("gpus_per_node", per_node), "gpus_per_node")
        )
        if per_task is None:
            return gpus // max(1, tasks)
        each = number("gpus_per_task", per_task)
        if each * tasks > gpus:
            raise ResolverStateError(
                f"{tasks} tasks on a node with {each} GPUs each need {each * tasks}, but the node has {gpus} ({how})"
            )
        return each


class TFConfigClusterResolver(ClusterResolver):
    """A resolver of TF_CONFIG (tf.distribute's TFConfigClusterResolver).

    The variable is read and checked once.

        {"cluster": {"worker": ["host1:2222", "host2:2222"]}, "task": {"type": "worker", "index": 0}}

    If the variable is not set, the cluster has no tasks.

    Args:
        task_type, task_id, rpc_layer: used instead of the variable's values.
        environment: the environment in which the cluster runs; the variable's value is ignored, as in
            tf.distribute.
        environ: the environment; None: that of the process.

    Raises:
        ResolverError: TF_CONFIG is malformed, or its task is not in the cluster; the text names the key and
            the mistake. (tf.distribute fails on first use.)
        TypeError: an argument has the wrong type.

    Example:
        resolver = pipedist.TFConfigClusterResolver()  # reads the variable TF_CONFIG
        resolver.task_type, resolver.task_id
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
        self._task_id = task_id_or_none(task_id)
        if self._task_id is None:
            index = task.get("index")
            self._task_id = index_or_none(index)
            if self._task_id is None and index is not None:
                raise ResolverError(f"{VARIABLE}: task.index is {index!r}; expected an int >= 0")
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
            TF_CONFIG's `session_master`, if it has one, for any task; "" in a cluster of at most one task,
            which is this process.

        Raises:
            ValueError: there is no such task.
        """
        if self._master is not None:
            return self._master
        cluster = self._cluster_spec
        if not cluster.jobs or (len(cluster.jobs) == 1 and len(cluster.job_tasks(cluster.jobs[0])) == 1):
            return ""  # a task 1 alone implies a task 0 elsewhere
        kind = self._task_type if task_type is None else task_type
        index = self._task_id if task_id is None else task_id
        if kind is None or index is None:
            raise ValueError(f"{VARIABLE} has no task for this process; pass task_type and task_id")
        return self._url(cluster.task_address(kind, index), rpc_layer)


def _parsed(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ResolverError(f"{VARIABLE} is not JSON: {error}; it is {text[:80]!r}") from None
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
            raise ResolverError(f"{VARIABLE}: job {job!r} has no tasks; remove it")
    return spec


def _text(value: object, key: str) -> str | None:
    if value is not None and not isinstance(value, str):
        raise ResolverError(f"{VARIABLE}: {key} is {value!r}; expected a string")
    return value
