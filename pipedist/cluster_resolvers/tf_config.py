"""The cluster as the environment variable TF_CONFIG describes it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, Final

from pipedist.cluster_resolvers.base import (
    ClusterResolver,
    ResolverError,
    number_or_none,
    text_or_none,
)
from pipedist.cluster_resolvers.cluster_spec import ClusterSpec

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
