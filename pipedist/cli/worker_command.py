"""The command `pipedist worker`: one worker process for a run that listens elsewhere."""

from __future__ import annotations


def execute(endpoint: str, key_file: str, threads: int, grace_s: float) -> int:
    """Execute replica calls until the run ends.

    Args:
        endpoint: where the run listens, "tcp://HOST:PORT".
        key_file: the cluster's keys; only who has them may join.
        threads: BLAS and OpenMP threads of the worker; the spec's `threads_per_replica`.
        grace_s: how long the running call may go on after SIGTERM, seconds.

    Returns:
        The exit code.
    """
    from pipedist.worker.supervisor import run_worker

    return run_worker(endpoint, key_file, threads=threads, leave_s=grace_s)
