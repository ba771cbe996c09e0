"""What a worker process says about itself when it asks to join."""

from __future__ import annotations

import os

import numpy as np

from pipedist.messages import WIRE_VERSION, Hello
from pipedist.version import __version__


def make_hello(worker: str, incarnation: int, kept: tuple[str, ...] = (), gpus: float = 0.0) -> Hello:
    """Return this process's Hello.

    Args:
        kept: finished calls that it offers.
        gpus: how many it owns.
    """
    import platform

    return Hello(
        worker=worker,
        incarnation=incarnation,
        pid=os.getpid(),
        host=os.uname().nodename,
        boot=boot_id(),
        wire=WIRE_VERSION,
        python=platform.python_version(),
        numpy=np.__version__,
        pipedist=__version__,
        cpu=cpu_model(),
        kept=kept,
        gpus=gpus,
    )


def boot_id() -> str:
    """Return the running kernel's boot id: processes with the same one share this host's files.

    Where the kernel has none (macOS), the host's name stands for it.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return os.uname().nodename


def cpu_model() -> str:
    """Return the processor's model, as far as it may change bits."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        return os.uname().machine
    return os.uname().machine
