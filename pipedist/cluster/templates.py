"""Scripts for batch systems: Slurm, Kubernetes. Nothing is submitted.

Slurm: the driver runs on the first node, workers on all; keys are created for the job.

Kubernetes (jobset.x-k8s.io/v1alpha2): one job for the driver, and one for the workers. Worker pods need only the
image: the driver sends the code, and the shards that workers can't read. The user creates a Secret with the keys;
workers get a copy without the server's secret.
"""

from __future__ import annotations

import os
import re
import shlex
from typing import Any

from msgspec import Struct

from pipedist.cluster.base import WORKERS_MAX
from pipedist.errors import UsageError
from pipedist.protocol.code_archive import CodeTooLarge, take
from pipedist.spec import Spec
from pipedist.transport.keys import workers_file

_NO_NAME = re.compile(r"[^a-z0-9-]+")
_NAME_CHARACTERS_MAX = 40


class JobRequest(Struct, frozen=True):
    """The resources of a run in a batch system."""

    name: str  # lower-case letters, digits and "-", at most 40: valid in every batch system
    nodes: int
    workers_per_node: int
    threads: int  # BLAS and OpenMP threads of a worker, and the CPUs that are reserved for it
    gpus: int = 0  # number of GPUs of each node

    @classmethod
    def of(cls, spec: Spec, *, nodes: int, workers_per_node: int | None, gpus: int) -> JobRequest:
        """Return the request for a spec's run, with its workers divided among the nodes by default (1 for `auto`)."""
        if workers_per_node is None:
            wanted = spec.cluster.workers
            workers_per_node = 1 if wanted == "auto" else -(-wanted // nodes)
        if nodes * workers_per_node > WORKERS_MAX:
            raise UsageError(f"{nodes * workers_per_node} workers are too many: the maximum is {WORKERS_MAX}")
        if gpus % workers_per_node:
            raise UsageError(
                f"{gpus} GPUs of a node can't be divided evenly among {workers_per_node} workers. "
                "Set --workers-per-node."
            )
        name = _NO_NAME.sub("-", spec.name.lower()).strip("-")[:_NAME_CHARACTERS_MAX].strip("-") or "run"
        name = name if name[0].isalpha() else f"run-{name}"
        return cls(name, nodes, workers_per_node, spec.threads_per_replica, gpus)

    @property
    def workers(self) -> int:
        return self.nodes * self.workers_per_node

    @property
    def gpus_per_worker(self) -> int:
        return self.gpus // self.workers_per_node


# -- Slurm ------------------------------------------------------------------------------------

_TIME = re.compile(r"\d+(-\d+(:\d+){0,2}|(:\d+){0,2})")

_SCRIPT = r"""set -euo pipefail

spec=@spec@

# A folder for the job's keys, on a file system that all nodes share: users that can read them can join.
umask 077
keys=$(mktemp -d "${PIPEDIST_SHARED:-$PWD}/.pipedist-keys.XXXXXX")
run=''
stopping=''
trap 'rm -rf -- "$keys"' EXIT
# Slurm sends TERM before the time limit: the run finishes its running calls, and can be resumed.
trap 'stopping=1; if [[ -n "$run" ]]; then kill -TERM "$run" || true; fi' TERM
pipedist keys new --output "$keys/cluster.key" >/dev/null

read -r first < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
port=@port@
resume=()
if [[ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]]; then resume=(--resume); fi

srun --overlap --nodes=1 --ntasks=1 --cpus-per-task=1 --nodelist="$first" \
  pipedist run "$spec" --cluster "connect:tcp://*:$port" --key-file "$keys/cluster.key" \
  --workers @workers@ ${resume[@]+"${resume[@]}"} &
run=$!
srun --overlap --nodes=@nodes@ --ntasks=@workers@ --ntasks-per-node=@per_node@ \
  --cpus-per-task=@threads@ @gpus@--kill-on-bad-exit=0 \
  pipedist worker --connect "tcp://$first:$port" --key-file "$keys/cluster.worker.key" --threads @threads@ &
workers=$!

code=0
wait "$run" || code=$?
if [[ -n "$stopping" ]]; then  # the signal has ended `wait`, but not the run
  code=0
  wait "$run" || code=$?
fi
# The run has sent Stop to its workers; some may have joined too late to get it.
kill -TERM "$workers" 2>/dev/null || true
wait "$workers" || true
exit "$code"
"""


def slurm_script(request: JobRequest, spec: str, *, time: str, port: int | None = None) -> str:
    """Return a batch script, for `sbatch`.

    Args:
        spec: absolute path of the spec, on a file system that the first node sees.
        time: time limit of the job in Slurm's format: "minutes", "hours:minutes:seconds", "days-hours".
        port: the port on which the driver listens; None: derived from the job's number.
    """
    if not _TIME.fullmatch(time):
        raise UsageError(f"--time {time!r}: expected MINUTES, HH:MM:SS or DAYS-HH:MM:SS")
    head = [
        "#!/bin/bash",
        "# Submit it from the folder for the outputs: sbatch [--partition=P] [--account=A] FILE.",
        "# `pipedist` must be on the PATH of all nodes, or activate its environment here.",
        f"#SBATCH --job-name={request.name}",
        f"#SBATCH --nodes={request.nodes}",
        f"#SBATCH --ntasks-per-node={request.workers_per_node}",
        f"#SBATCH --cpus-per-task={request.threads}",
        *([f"#SBATCH --gpus-per-node={request.gpus}"] if request.gpus else []),
        f"#SBATCH --time={time}",
        "#SBATCH --signal=B:TERM@60",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
    ]
    text = _SCRIPT
    for name, value in {
        "port": "$((20000 + SLURM_JOB_ID % 10000))" if port is None else str(port),
        "workers": str(request.workers),
        "nodes": str(request.nodes),
        "per_node": str(request.workers_per_node),
        "threads": str(request.threads),
        "gpus": f"--gpus-per-task={request.gpus_per_worker} " if request.gpus else "",
        "spec": shlex.quote(spec),  # last, because a path may contain a placeholder
    }.items():
        text = text.replace(f"@{name}@", value)
    return "\n".join(head) + "\n" + text


# -- Kubernetes -------------------------------------------------------------------------------

PORT = 5555
API_VERSION = "jobset.x-k8s.io/v1alpha2"
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_KEYS = "/pipedist/keys"
_SPEC = "/pipedist/spec"
_OUT = "/pipedist/out"
_ONLY_OWNER = 0o400
_RESTARTS_MAX = 3
CONFIG_BYTES_MAX = 1 << 20  # maximum size of a ConfigMap
_NO_CONFIG_KEY = re.compile(r"[^-._a-zA-Z0-9]+")
_LISTED_MAX = 5


def jobset_commands(
    request: JobRequest, *, namespace: str, spec: str | None, key_file: str = "cluster.key"
) -> list[str]:
    """Return the commands that create the objects of the manifest; a `spec` of None is in the image."""
    at = f"kubectl --namespace {namespace}"
    commands = [
        f"pipedist keys new --output {key_file}",
        f"{at} create secret generic {request.name}-keys --from-file=cluster.key={key_file} "
        f"--from-file=worker.key={workers_file(key_file)}",
    ]
    if spec is not None:
        files, without = _config_files(os.path.abspath(spec))
        sources = " ".join(f"--from-file={shlex.quote(each)}" for each in files)
        commands.append(f"{at} create configmap {request.name}-spec {sources}")
        if without:
            commands.append(f"(without {without}; if one is needed, use --spec-in-image PATH)")
    return commands


def config_key(name: str) -> str:
    return _NO_CONFIG_KEY.sub("-", name)


def _config_files(spec: str) -> tuple[list[str], str]:
    """Return the ConfigMap's files, `PATH` or `KEY=PATH`, and skipped ones.

    Files are named one by one: the whole folder would include the cluster's keys, if they are there.
    """
    folder, own = os.path.split(spec)
    try:
        found = take(folder)
    except CodeTooLarge as error:
        raise UsageError(f"{error}; or put it into the image: --spec-in-image PATH") from None
    taken, without = [], []
    size = 0
    for name, content in zip(found.names, found.contents, strict=True):
        if name != own and (config_key(name) != name or "/" in name):
            without.append(name)
            continue
        size += len(content)
        path = os.path.join(folder, name)
        taken.append(path if config_key(name) == name and "=" not in path else f"{config_key(name)}={path}")
    if size > CONFIG_BYTES_MAX:
        raise UsageError(
            f"the files in {folder} have {size:,} bytes, but a ConfigMap holds {CONFIG_BYTES_MAX:,}. Move the "
            "data to another folder, or put all files into the image: --spec-in-image PATH"
        )
    if len(without) > _LISTED_MAX:
        without[_LISTED_MAX:] = [f"{len(without) - _LISTED_MAX} more"]
    _, _, left = found.text.partition("; without ")
    return taken, ", ".join([*without, *([left] if left else [])])


def jobset(
    request: JobRequest, *, image: str, namespace: str, spec: str, in_image: bool, claim: str | None = None
) -> dict[str, Any]:
    """Return the JobSet manifest.

    Args:
        image: an image with pipedist, and the packages that the functions import.
        spec: name of the spec's file; with `in_image`, its path in the image.
        in_image: the image has the spec and its modules; otherwise they come from a ConfigMap.
        claim: a PersistentVolumeClaim for outputs and journal, so that a restarted driver resumes; None: they are
            lost with the pod.
    """
    for what, name in (("--namespace", namespace), ("--claim", claim)):
        if name is not None and not _LABEL.fullmatch(name):
            raise UsageError(f"{what} {name!r}: expected lower-case letters, digits and '-'")
    at = spec if in_image else f"{_SPEC}/{config_key(spec)}"
    driver: dict[str, Any] = {
        "name": "driver",
        "image": image,
        "command": ["pipedist", "run", at],
        "args": [
            *("--cluster", f"connect:tcp://*:{PORT}", "--key-file", f"{_KEYS}/cluster.key"),
            *("--workers", str(request.workers), "--output", _OUT),
            *(["--resume"] if claim else []),
        ],
        "ports": [{"containerPort": PORT}],
        "resources": {"requests": {"cpu": "1"}},
        "volumeMounts": [_mount("keys", _KEYS), {"name": "out", "mountPath": _OUT}],
    }
    out = {"persistentVolumeClaim": {"claimName": claim}} if claim else {"emptyDir": {}}
    volumes = [_secret(request.name, "cluster.key"), {"name": "out", **out}]
    if not in_image:
        driver["volumeMounts"].append(_mount("spec", _SPEC))
        volumes.append({"name": "spec", "configMap": {"name": f"{request.name}-spec"}})
    # a pod's name in the JobSet's own domain: JOBSET-JOB-INDEX-POD.SUBDOMAIN
    address = f"{request.name}-driver-0-0.{request.name}"
    resources: dict[str, Any] = {"requests": {"cpu": str(request.threads)}}
    if request.gpus:
        resources["limits"] = {"nvidia.com/gpu": str(request.gpus_per_worker)}
    worker = {
        "name": "worker",
        "image": image,
        "command": ["pipedist", "worker"],
        "args": [
            *("--connect", f"tcp://{address}:{PORT}", "--key-file", f"{_KEYS}/worker.key"),
            *("--threads", str(request.threads)),
        ],
        "resources": resources,
        "volumeMounts": [_mount("keys", _KEYS)],
    }
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {
            "matchLabels": {
                "jobset.sigs.k8s.io/jobset-name": request.name,
                "jobset.sigs.k8s.io/replicatedjob-name": "workers",
            }
        },
    }
    workers_pod = _pod(worker, [_secret(request.name, "worker.key")], restart="OnFailure")
    workers_pod["topologySpreadConstraints"] = [spread]
    return {
        "apiVersion": API_VERSION,
        "kind": "JobSet",
        "metadata": {"name": request.name, "namespace": namespace},
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": request.name},
            "successPolicy": {"operator": "All", "targetReplicatedJobs": ["driver"]},
            "failurePolicy": {"maxRestarts": _RESTARTS_MAX},
            "replicatedJobs": [
                _job("driver", 1, _pod(driver, volumes, restart="Never"), backoff=0),
                _job("workers", request.workers, workers_pod, backoff=_RESTARTS_MAX * request.workers),
            ],
        },
    }


def _job(name: str, pods: int, pod: dict[str, Any], *, backoff: int) -> dict[str, Any]:
    job = {
        "completionMode": "Indexed",
        "parallelism": pods,
        "completions": pods,
        "backoffLimit": backoff,
        "template": {"spec": pod},
    }
    return {"name": name, "replicas": 1, "template": {"spec": job}}


def _pod(container: dict[str, Any], volumes: list[dict[str, Any]], *, restart: str) -> dict[str, Any]:
    return {
        "restartPolicy": restart,
        "automountServiceAccountToken": False,
        "containers": [container],
        "volumes": volumes,
    }


def _mount(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "mountPath": path, "readOnly": True}


def _secret(name: str, key: str) -> dict[str, Any]:
    """Return a volume with one key file that only its owner can read."""
    items = [{"key": key, "path": key, "mode": _ONLY_OWNER}]
    return {"name": "keys", "secret": {"secretName": f"{name}-keys", "items": items}}
