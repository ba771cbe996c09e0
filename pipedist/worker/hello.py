"""What a worker process says about itself when it asks to join."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

import numpy as np

from pipedist.messages import WIRE_VERSION, Hello
from pipedist.version import __version__


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
        traits=cpu_traits(),
        holds=holds,
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


def cpu_model() -> str:
    """Return the processor's model, for people."""
    return _cpu_lines().get("model name") or os.uname().machine


def cpu_traits() -> tuple[str, ...]:
    """Return what numeric libraries choose their code by: two processes with the same get the same bits.

    NumPy chooses by the features that it finds (and that NPY_DISABLE_CPU_FEATURES leaves); OpenBLAS by
    architecture, vendor, on ARM the part, and OPENBLAS_CORETYPE.
    """
    lines = _cpu_lines()
    arm = [lines[key] for key in ("CPU implementer", "CPU part") if key in lines]
    forced = os.environ.get("OPENBLAS_CORETYPE")
    return (
        os.uname().machine,
        *([lines["vendor_id"]] if "vendor_id" in lines else []),
        *(["/".join(arm)] if arm else []),
        *([f"OPENBLAS_CORETYPE={forced}"] if forced else []),
        *sorted(name for name, there in _features().items() if there),
    )


def _features() -> Mapping[str, bool]:
    """Return which features NumPy found; nothing where it does not say."""
    for module in ("numpy._core._multiarray_umath", "numpy.core._multiarray_umath"):
        found = getattr(sys.modules.get(module), "__cpu_features__", None)
        if isinstance(found, dict):
            return found
    return {}


def _cpu_lines() -> dict[str, str]:
    """Return what the kernel says of the first processor."""
    lines: dict[str, str] = {}
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                key, colon, value = line.partition(":")
                if not colon:
                    break
                lines[key.strip()] = value.strip()
    except OSError:
        return {}
    return lines
