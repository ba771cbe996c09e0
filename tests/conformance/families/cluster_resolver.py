"""Family `cluster_resolver`: what the cluster resolvers make of arguments and of the environment."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from pipedist.cluster.resolvers import ClusterResolver, ClusterSpec, SimpleClusterResolver, UnionResolver
from pipedist.cluster.resolvers_environment import (
    SlurmClusterResolver,
    TFConfigClusterResolver,
    expand_hostlist,
    expand_tasks_per_node,
)
from pipedist.cluster.resolvers_kubernetes import KubernetesClusterResolver, Pod
from tests.conformance.cases import Case, Deviation, Json, Outcome, Raised, Skip
from tests.conformance.session import Session

FAMILY = "cluster_resolver"

VISIBLE = "CUDA_VISIBLE_DEVICES"

UNION_ARGUMENTS = {"task_type", "task_id", "rpc_layer"}


async def replay(case: Case, session: Session) -> Outcome:
    """Do what the call says."""
    call = case.call
    try:
        match call["op"]:
            case "tf_config_resolver":
                return Outcome(_fields(TFConfigClusterResolver(**call["kwargs"], environ=call["env"])))
            case "simple_resolver":
                return Outcome(_fields(_simple(call)))
            case "simple_resolver_raw":
                return Outcome(_fields(SimpleClusterResolver(call["cluster"])))
            case "union_resolver":
                return Outcome(_fields(UnionResolver(*map(_simple, call["parts"]), **call["kwargs"])))
            case "union_resolver_raw":  # things that are no resolvers, told in words
                parts = [None if part == "None" else part for part in call["parts"]]
                return Outcome(_fields(UnionResolver(*parts)))
            case "slurm_resolver":
                environ = dict(call["env"])
                slurm = SlurmClusterResolver(**call["kwargs"], environ=environ)
                own = {
                    "get_task_info": list(slurm.get_task_info()),
                    "cuda_visible_devices": environ.get(VISIBLE, ""),
                }
                return Outcome(_fields(slurm) | own)
            case "kubernetes_resolver":
                return Outcome(_fields(KubernetesClusterResolver(**call["kwargs"], list_pods=_pods(call))))
            case "cluster_spec":
                return Outcome(_spec_fields(ClusterSpec(call["cluster"])))
            case "expand_hostlist":
                return Outcome({"result": expand_hostlist(call["text"])})
            case "expand_tasks_per_node":
                return Outcome({"result": expand_tasks_per_node(call["text"])})
        raise Skip(f"unknown program {call['op']}")
    except Skip:
        raise
    except Exception as error:
        return Outcome(Raised(error))


def _simple(call: Mapping[str, Json]) -> SimpleClusterResolver:
    return SimpleClusterResolver(ClusterSpec(call["cluster"]), **call.get("kwargs", {}))


def _pods(call: Mapping[str, Json]) -> Callable[[str], list[Pod]] | None:
    if "pods" not in call:
        return None
    return lambda selector: [Pod(*pod) for pod in call["pods"].get(selector, [])]


def _fields(resolver: ClusterResolver) -> dict[str, Any]:
    return {
        "cluster_spec": _told(lambda: _plain(resolver.cluster_spec())),
        "task_type": _told(lambda: resolver.task_type),
        "task_id": _told(lambda: resolver.task_id),
        "rpc_layer": _told(lambda: resolver.rpc_layer),
        "environment": _told(lambda: resolver.environment),
        "num_accelerators": _told(resolver.num_accelerators),
        "master": _told(resolver.master),
        "master_worker_0": _told(lambda: resolver.master("worker", 0)),
        "master_worker_0_grpc": _told(lambda: resolver.master("worker", 0, "grpc")),
        "master_worker_9": _told(lambda: resolver.master("worker", 9)),
        "master_nosuch_0": _told(lambda: resolver.master("nosuch", 0)),
    }


def _spec_fields(spec: ClusterSpec) -> dict[str, Any]:
    return {
        "as_dict": _plain(spec),
        "jobs": spec.jobs,
        "bool": bool(spec),
        "num_tasks": {job: spec.num_tasks(job) for job in spec.jobs},
        "task_indices": {job: spec.task_indices(job) for job in spec.jobs},
        "job_tasks": {job: spec.job_tasks(job) for job in spec.jobs},
        "task_address_worker_0": _told(lambda: spec.task_address("worker", 0)),
        "task_address_worker_9": _told(lambda: spec.task_address("worker", 9)),
        "num_tasks_nosuch": _told(lambda: spec.num_tasks("nosuch")),
    }


def _plain(spec: ClusterSpec) -> Json:
    return json.loads(json.dumps(spec.as_dict()))


def _told(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except Exception as error:
        return Raised(error)


# -- where pipedist deviates -----------------------------------------------------------------------

REFUSED: Json = {"error": "ValueError", "message": "refused when the resolver is made"}


def _is_index(value: Json) -> bool:
    return type(value) is int and value >= 0


def _tf_config_is_right(text: str, kwargs: Mapping[str, Json]) -> bool:
    """Return whether TF_CONFIG describes a cluster, and one of its tasks if it names one."""
    try:
        config = json.loads(text)
    except ValueError:
        return False
    if not isinstance(config, dict):
        return False
    cluster, task = config.get("cluster", {}), config.get("task", {})
    if not isinstance(cluster, dict) or not isinstance(task, dict):
        return False
    jobs: dict[str, set[int]] = {}
    for job, tasks in cluster.items():
        if not isinstance(tasks, list | dict) or not tasks:
            return False
        if isinstance(tasks, dict) and not all(re.fullmatch("[0-9]+", key) for key in tasks):
            return False
        if not all(isinstance(a, str) for a in (tasks.values() if isinstance(tasks, dict) else tasks)):
            return False
        jobs[job] = set(map(int, tasks)) if isinstance(tasks, dict) else set(range(len(tasks)))
    for key in ("rpc_layer", "session_master"):
        if not isinstance(config.get(key), str | None):
            return False
    kind, index = task.get("type"), task.get("index")
    if not isinstance(kind, str | None):
        return False
    if isinstance(index, str) and re.fullmatch("[0-9]+", index):
        index = int(index)
    if index is not None and not _is_index(index):
        return False
    kind = kind if kwargs.get("task_type") is None else kwargs["task_type"]
    index = index if kwargs.get("task_id") is None else kwargs["task_id"]
    if index is not None and not _is_index(index):
        return False
    if not jobs or (kind is None and index is None):
        return True
    if kind is None or index is None:
        return False
    return index in jobs[kind] if kind in jobs else kind == "evaluator"


def _tf_config(case: Case, recorded: Json) -> Json:
    call = case.call
    if call["op"] != "tf_config_resolver" or "TF_CONFIG" not in call["env"]:
        return recorded
    return recorded if _tf_config_is_right(call["env"]["TF_CONFIG"], call["kwargs"]) else REFUSED


def _accelerators(case: Case, recorded: Json) -> Json:
    told = recorded.get("num_accelerators")
    if case.call["op"] == "tf_config_resolver" and isinstance(told, dict) and "error" in told:
        return {**recorded, "num_accelerators": {}}
    return recorded


def _union(case: Case, recorded: Json) -> Json:
    """Addresses that a job has already are not taken twice."""
    if case.call["op"] != "union_resolver" or "cluster_spec" not in recorded:
        return recorded
    merged: dict[str, dict[int, str]] = {}
    repeated = False
    clusters = [part["cluster"] for part in case.call["parts"]]
    gaps = {
        job
        for cluster in clusters
        for job, tasks in cluster.items()
        if isinstance(tasks, dict) and sorted(map(int, tasks)) != list(range(len(tasks)))
    }
    for cluster in clusters:
        for job, tasks in cluster.items():
            mine = merged.setdefault(job, {})
            items = tasks.items() if isinstance(tasks, dict) else enumerate(tasks)
            for index, address in items:
                if job in gaps:
                    repeated = repeated or int(index) in mine
                    if mine.setdefault(int(index), address) != address:
                        return recorded
                elif address not in mine.values():
                    mine[len(mine)] = address
                else:
                    repeated = True
    if not repeated:
        return recorded
    plain = {
        job: {str(i): a for i, a in tasks.items()} if job in gaps else list(tasks.values())
        for job, tasks in merged.items()
    }
    layer = case.call["kwargs"].get("rpc_layer")
    nosuch = {"error": "ValueError", "message": "no such job"}
    changed = {**recorded, "cluster_spec": plain, "master_nosuch_0": nosuch}
    return changed | _workers(merged.get("worker"), layer)


def _first_task(case: Case, recorded: Json) -> Json:
    """A union that is told to be task 0 is."""
    if case.call["op"] != "union_resolver" or case.call["kwargs"].get("task_id") != 0 or "error" in recorded:
        return recorded
    return {**recorded, "task_id": 0}


def _simple_checked(case: Case, recorded: Json) -> Json:
    """What a simple resolver is told must make sense."""
    if case.call["op"] != "simple_resolver" or "error" in recorded:
        return recorded
    kwargs = case.call["kwargs"]
    if not isinstance(kwargs.get("num_accelerators", {}), dict):
        return {"error": "TypeError", "message": "expected a mapping"}
    return recorded if kwargs.get("task_id") is None or _is_index(kwargs["task_id"]) else REFUSED


def _workers(tasks: Mapping[int, str] | None, layer: str | None) -> dict[str, Json]:
    def at(index: int, own: str | None) -> Json:
        if tasks is None or index not in tasks:
            return {"error": "ValueError", "message": "no such task"}
        return f"{own}://{tasks[index]}" if own else tasks[index]

    return {
        "master_worker_0": at(0, layer),
        "master_worker_0_grpc": at(0, "grpc"),
        "master_worker_9": at(9, layer),
    }


def _slurm_tasks(call: Mapping[str, Json]) -> list[tuple[str, int]] | None:
    """Return each host and its number of tasks, in Slurm's order; None where the two don't go together."""
    given = call["kwargs"].get("tasks_per_node")
    if isinstance(given, dict):
        return list(given.items())
    hosts = call["scontrol_hosts"] or expand_hostlist(call["env"]["SLURM_STEP_NODELIST"])
    if given is not None:
        return [(host, given) for host in hosts]
    counts: list[int] = []
    for count, times in re.findall(r"([0-9]+)(?:\(x([0-9]+)\))?", call["env"]["SLURM_STEP_TASKS_PER_NODE"]):
        counts += [int(count)] * int(times or 1)
    return list(zip(hosts, counts, strict=True)) if len(hosts) == len(counts) else None


def _slurm(case: Case, recorded: Json) -> Json:
    """Without GPUs it works; what contradicts itself is refused; hosts are not sorted by their names."""
    call = case.call
    if call["op"] != "slurm_resolver" or "cluster_spec" not in recorded:
        return recorded
    tasks, rank = _slurm_tasks(call), int(call["env"]["SLURM_PROCID"])
    if tasks is None or not 0 <= rank < sum(count for _, count in tasks):
        return REFUSED
    per_node, per_task = call["kwargs"].get("gpus_per_node") or 0, call["kwargs"].get("gpus_per_task")
    gpus = (per_node // max(count for _, count in tasks) if per_task is None else per_task) if per_node else 0
    if gpus and tasks == sorted(tasks):
        return recorded
    base = call["kwargs"].get("port_base", 8888)
    addresses = [f"{host}:{base + i}" for host, count in tasks for i in range(count)]
    place = [i for _, count in tasks for i in range(count)][rank]
    devices = ",".join(str(place * gpus + gpu) for gpu in range(gpus))
    sets = gpus and call["kwargs"].get("auto_set_gpu", True)
    cluster: dict[str, list[str]] = {}
    own: tuple[str, int] = ("", 0)
    first = 0
    for job, count in sorted((call["kwargs"].get("jobs") or {"worker": len(addresses)}).items()):
        cluster[job] = addresses[first : first + count]
        if first <= rank < first + count:
            own = (job, rank - first)
        first += count
    layer = call["kwargs"].get("rpc_layer", "grpc")
    address = cluster[own[0]][own[1]]
    return {
        **recorded,
        "cluster_spec": cluster,
        "task_type": own[0],
        "task_id": own[1],
        "num_accelerators": {"GPU": gpus},
        "get_task_info": list(own),
        "master": f"{layer}://{address}" if layer else address,
        "master_nosuch_0": {"error": "ValueError", "message": "no such job"},
        "cuda_visible_devices": devices if sets else call["env"].get(VISIBLE, ""),
    } | _workers(dict(enumerate(cluster["worker"])) if "worker" in cluster else None, layer)


def _backwards(case: Case, recorded: Json) -> Json:
    if case.call["op"] != "expand_hostlist" or "error" in recorded:
        return recorded
    ranges = re.findall(r"[\[,]([0-9]+)-([0-9]+)(?=[\],])", case.call["text"])
    return REFUSED if any(int(a) > int(b) for a, b in ranges) else recorded


def _empty_jobs(case: Case, recorded: Json) -> Json:
    """A job without tasks has none; TensorFlow's `job_tasks` raises a ValueError for it (`max` of nothing)."""
    jobs = case.call.get("cluster")
    if case.call["op"] != "cluster_spec" or not isinstance(jobs, dict) or all(jobs.values()):
        return recorded
    if not all(isinstance(tasks, list | dict) for tasks in jobs.values()):
        return recorded
    own = {
        job: [tasks.get(i) for i in range(max(tasks, default=-1) + 1)]
        for job, tasks in _numbered(jobs).items()
    }
    told = recorded.get("job_tasks", recorded)
    if told.get("error") == "ValueError" and "as_dict" in recorded:
        return {**recorded, "job_tasks": own}
    if told.get("error") == "ValueError":  # all that TensorFlow told is the error of `job_tasks`
        nosuch = {"error": "ValueError", "message": "no such job or task"}
        numbered = _numbered(jobs)
        return {
            "as_dict": {
                job: own[job] if tasks and None not in own[job] else {str(i): a for i, a in tasks.items()}
                for job, tasks in numbered.items()
            },
            "jobs": list(jobs),
            "bool": bool(jobs),
            "num_tasks": {job: len(tasks) for job, tasks in numbered.items()},
            "task_indices": {job: sorted(tasks) for job, tasks in numbered.items()},
            "job_tasks": own,
            "task_address_worker_0": numbered.get("worker", {}).get(0, nosuch),
            "task_address_worker_9": numbered.get("worker", {}).get(9, nosuch),
            "num_tasks_nosuch": nosuch,
        }
    errors = {job: own[job] if isinstance(tasks, dict) else tasks for job, tasks in told.items()}
    return {**recorded, "job_tasks": errors} if "as_dict" in recorded else recorded


def _numbered(jobs: Mapping[str, Json]) -> dict[str, dict[int, str]]:
    """Return the tasks of each job by number."""
    return {
        job: {
            int(i): address for i, address in (tasks.items() if isinstance(tasks, dict) else enumerate(tasks))
        }
        for job, tasks in jobs.items()
    }


def _unknown_argument(case: Case, recorded: Json) -> Json:
    """As of every Python function, an argument that a union does not have is a TypeError."""
    if case.call["op"] != "union_resolver" or set(case.call["kwargs"]) <= UNION_ARGUMENTS:
        return recorded
    return {"error": "TypeError", "message": "unexpected keyword argument"}


DEVIATIONS = (
    Deviation("cluster_resolver: TF_CONFIG is checked when the resolver is made", 53, _tf_config),
    Deviation("cluster_resolver: accelerators are what the resolver was told", 53, _accelerators),
    Deviation("cluster_resolver: a union drops duplicate addresses", 53, _union),
    Deviation("cluster_resolver: an unknown argument of a union is a TypeError", 53, _unknown_argument),
    Deviation("cluster_resolver: a union can be task 0", 53, _first_task),
    Deviation("cluster_resolver: a simple resolver's numbers are checked", 53, _simple_checked),
    Deviation(
        "cluster_resolver: Slurm works without GPUs, in Slurm's order, and not in contradictions", 53, _slurm
    ),
    Deviation("cluster_resolver: a range of hosts that runs backwards is refused", 53, _backwards),
    Deviation("cluster_resolver: a job without tasks has none", 53, _empty_jobs),
)
