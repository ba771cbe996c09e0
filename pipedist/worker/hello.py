"""What a worker process says about itself when it asks to join."""

from __future__ import annotations

import os

from pipedist.core.platform_id import Platform
from pipedist.protocol.messages import WIRE_VERSION, Hello


def make_hello(
    worker: str,
    incarnation: int,
    kept: tuple[str, ...] = (),
    gpus: float = 0.0,
    holds: tuple[str, ...] = (),
    proof: str = "",
    threads: int = 1,
) -> Hello:
    """Return this process's Hello.

    Args:
        kept: finished calls that it offers.
        gpus: how many it owns.
        holds: digests of the code folders that there are copies of.
        proof: that the name is its own.
        threads: BLAS and OpenMP threads that it was started with.
    """
    ours = Platform.here()
    return Hello(
        worker=worker,
        incarnation=incarnation,
        pid=os.getpid(),
        host=os.uname().nodename,
        boot=boot_id(),
        wire=WIRE_VERSION,
        python=ours.python,
        numpy=ours.numpy,
        pipedist=ours.pipedist,
        cpu=ours.cpu,
        cached=kept,
        gpus=gpus,
        traits=ours.traits,
        code_digests=holds,
        proof=proof,
        threads=threads,
    )


def boot_id() -> str:
    """Return what processes have in common that see the same files: a running kernel, and what is mounted.

    Containers of one host have the same kernel, but not the same files. Where the kernel has no boot id
    (macOS), the host's name stands for it.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        root = os.stat("/")
        return f"{boot} {os.readlink('/proc/self/ns/mnt')} {root.st_dev}:{root.st_ino}"
    except OSError:
        return os.uname().nodename
