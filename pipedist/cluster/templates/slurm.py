"""A batch script for Slurm: the scheduler on the first node, workers on all, keys made for the job."""

from __future__ import annotations

import re
import shlex

from pipedist.cluster.templates.request import Request
from pipedist.errors import UsageError

_TIME = re.compile(r"\d+(-\d+(:\d+){0,2}|(:\d+){0,2})")

_SCRIPT = r"""set -euo pipefail

spec=@spec@

# A folder of the job's keys, on a file system that all nodes share: who can read them may join.
umask 077
keys=$(mktemp -d "${PIPEDIST_SHARED:-$PWD}/.pipedist-keys.XXXXXX")
run=''
stopping=''
trap 'rm -rf -- "$keys"' EXIT
# Before the time is up, Slurm sends TERM: the run finishes what it has begun, and can be resumed.
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
if [[ -n "$stopping" ]]; then  # the signal has ended `wait`, and not the run
  code=0
  wait "$run" || code=$?
fi
# Workers were told to leave; some may have come too late to hear it.
kill -TERM "$workers" 2>/dev/null || true
wait "$workers" || true
exit "$code"
"""


def batch_script(request: Request, spec: str, *, time: str, port: int | None = None) -> str:
    """Return the script; it is submitted with `sbatch`.

    Args:
        spec: absolute path of the spec, on a file system that the first node sees.
        time: limit of the job, as Slurm writes it: "minutes", "hours:minutes:seconds", "days-hours".
        port: where the scheduler listens; None: one that follows from the job's number.

    Raises:
        UsageError: the time has another form.
    """
    if not _TIME.fullmatch(time):
        raise UsageError(f"--time {time!r}: expected MINUTES, HH:MM:SS or DAYS-HH:MM:SS")
    head = [
        "#!/bin/bash",
        "# Submit it from the folder where the outputs are to go: sbatch [--partition=P] [--account=A] FILE.",
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
        "spec": shlex.quote(spec),  # the last: a path may have anything in it
    }.items():
        text = text.replace(f"@{name}@", value)
    return "\n".join(head) + "\n" + text
