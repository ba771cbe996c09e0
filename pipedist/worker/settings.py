"""What a worker process is started with; for whoever starts one, without what executes calls."""

from __future__ import annotations

from msgspec import Struct


class WorkerSettings(Struct, frozen=True):
    """What a worker process is started with.

    Args:
        endpoint: the scheduler's.
        worker: the worker's name in the cluster.
        incarnation: counts its lives.
        key_file: path of the CURVE keys, "" where the endpoint needs none.
        threads: BLAS and OpenMP threads that the environment was set to.
        join_s: how long the scheduler may take to answer, seconds.
        tells: it says on stderr that it has joined, or waits.
        visible: the GPUs that it sees, as CUDA_VISIBLE_DEVICES names them; None: what whoever starts it does.
        gpus: how many it owns; a fraction where it shares one.
        code_root: where copies of the scheduler's code folders are kept; "": nowhere beyond its life.
        task: role and index of the program that it belongs to, "worker/1"; "": of none.
    """

    endpoint: str
    worker: str
    incarnation: int
    key_file: str = ""
    threads: int = 1
    join_s: float = 30.0
    tells: bool = False
    visible: str | None = None
    gpus: float = 0.0
    code_root: str = ""
    task: str = ""
