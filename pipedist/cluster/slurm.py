"""A batch script for Slurm: the driver runs on the first node, workers on all; keys are created for the job."""

from __future__ import annotations

import re
import shlex

from msgspec import Struct

from pipedist.cluster.base import WORKERS_MAX
from pipedist.errors import UsageError
from pipedist.spec import Spec

_NO_NAME = re.compile(r"[^a-z0-9-]+")
_NAME_CHARACTERS_MAX = 40


class JobRequest(Struct, frozen=True):
    """The resources of a run."""

    name: str  # lower-case letters, digits and "-", at most 40
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


_TIME = re.compile(r"\d+(-\d+(:\d+){0,2}|(:\d+){0,2})")

_SCRIPT = r"""set -euo pipefail

spec=@spec@

# A private folder for the job's keys, on a file system that all nodes share: users that can read them can join.
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
