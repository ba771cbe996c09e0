"""A JobSet for Kubernetes (jobset.x-k8s.io/v1alpha2): a job of the driver, and one of the workers.

The workers' pods need the image alone: code travels from the driver, and so do shards that they can't
read. Keys are a Secret that the user makes; workers get a copy without the scheduler's own secret.
"""

from __future__ import annotations

import os
import re
import shlex
from typing import Any

from pipedist.cluster.templates.request import Request
from pipedist.errors import UsageError
from pipedist.protocol.code_archive import CodeTooLarge, take
from pipedist.transport.keys import workers_file

PORT = 5555
API_VERSION = "jobset.x-k8s.io/v1alpha2"
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_KEYS = "/pipedist/keys"
_SPEC = "/pipedist/spec"
_OUT = "/pipedist/out"
_ONLY_OWNER = 0o400
_RESTARTS_MAX = 3
CONFIG_BYTES_MAX = 1 << 20
"""What a ConfigMap holds."""
_NO_CONFIG_KEY = re.compile(r"[^-._a-zA-Z0-9]+")
_TOLD_MAX = 5


def prepare(
    request: Request, *, namespace: str, spec: str | None, key_file: str = "cluster.key"
) -> list[str]:
    """Return the commands that make what the manifest refers to.

    Args:
        spec: path of the spec, whose modules are beside it; None: they are in the image.

    Raises:
        UsageError: there is more beside the spec than a ConfigMap holds.
    """
    at = f"kubectl --namespace {namespace}"
    commands = [
        f"pipedist keys new --output {key_file}",
        f"{at} create secret generic {request.name}-keys --from-file=cluster.key={key_file} "
        f"--from-file=worker.key={workers_file(key_file)}",
    ]
    if spec is not None:
        files, without = _beside(os.path.abspath(spec))
        sources = " ".join(f"--from-file={shlex.quote(each)}" for each in files)
        commands.append(f"{at} create configmap {request.name}-spec {sources}")
        if without:
            commands.append(f"(without {without}: what is needed, by --spec-in-image PATH)")
    return commands


def config_key(name: str) -> str:
    """Return what a file is called in a ConfigMap."""
    return _NO_CONFIG_KEY.sub("-", name)


def _beside(spec: str) -> tuple[list[str], str]:
    """Return what goes into the ConfigMap, `PATH` or `KEY=PATH`, and what of the spec's folder does not.

    Each file by name: a folder as a whole would bring the cluster's keys with it, if they are there.
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
            f"the files in {folder} have {size:,} bytes, and a ConfigMap holds {CONFIG_BYTES_MAX:,}: keep "
            "data elsewhere, or put all into the image: --spec-in-image PATH"
        )
    if len(without) > _TOLD_MAX:
        without[_TOLD_MAX:] = [f"{len(without) - _TOLD_MAX} more"]
    _, _, left = found.text.partition("; without ")
    return taken, ", ".join([*without, *([left] if left else [])])


def jobset(
    request: Request,
    *,
    image: str,
    namespace: str,
    spec: str,
    in_image: bool,
    claim: str | None = None,
) -> dict[str, Any]:
    """Return the manifest.

    Args:
        image: has pipedist, and the packages that the functions import.
        spec: name of the spec's file; with `in_image`, its path there.
        in_image: the image has the spec and its modules; else they come from a ConfigMap.
        claim: a PersistentVolumeClaim where outputs and journal go, so that a restarted driver resumes;
            None: they are gone with the pod.

    Raises:
        UsageError: a name is none that Kubernetes takes.
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
    out: dict[str, Any] = {"name": "out", "emptyDir": {}}
    if claim:
        out = {"name": "out", "persistentVolumeClaim": {"claimName": claim}}
    volumes = [_secret(request.name, "cluster.key"), out]
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
    """Return a volume with one key file, that its owner alone can read: others are refused."""
    items = [{"key": key, "path": key, "mode": _ONLY_OWNER}]
    return {"name": "keys", "secret": {"secretName": f"{name}-keys", "items": items}}
