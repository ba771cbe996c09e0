"""Platform identity: the properties by which numeric libraries select code, and so the bits of results."""

from __future__ import annotations

import os
import platform
import resource
import sys
from collections.abc import Mapping
from functools import cache

import numpy as np
from msgspec import Struct

from pipedist._version import __version__


class Platform(Struct, frozen=True):
    """Properties besides code and inputs that can change the bits of a result."""

    python: str
    numpy: str
    pipedist: str
    cpu: str  # model, for messages
    traits: tuple[str, ...]  # architecture, vendor, CPU features: numeric libraries select code by them

    @classmethod
    def here(cls) -> Platform:
        cpu = _cpu_lines().get("model name") or os.uname().machine
        return cls(platform.python_version(), np.__version__, __version__, cpu, cpu_traits())


def differences(there: Platform, here: Platform, *, called: str, same_processor: bool = False) -> list[str]:
    """Return the differences between two platforms that can change bits, as phrases.

    `called` names `here` in the phrases: "numpy 1.0 (the run 2.0)".
    """
    pairs = {
        "python": (_minor(there.python), _minor(here.python)),
        "numpy": (there.numpy, here.numpy),
        "pipedist": (there.pipedist, here.pipedist),
    }
    differing = [f"{name} {a} ({called} {b})" for name, (a, b) in pairs.items() if a != b]
    if not same_processor and there.traits != here.traits:
        only_there = [trait for trait in there.traits if trait not in here.traits]
        only_here = [trait for trait in here.traits if trait not in there.traits]
        parts = [f"with {' '.join(only_there)}"] if only_there else []
        parts += [f"without {' '.join(only_here)}"] if only_here else []
        differing.append(f"another processor type, {there.cpu}, {' and '.join(parts)} ({called}: {here.cpu})")
    return differing


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def cpu_traits() -> tuple[str, ...]:
    """Return the properties by which numeric libraries select code.

    NumPy uses the CPU features that it detects (except those in NPY_DISABLE_CPU_FEATURES); OpenBLAS the
    architecture, the vendor, on ARM the part, and OPENBLAS_CORETYPE.
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
    """Return the CPU features that NumPy detected; empty if it does not list them."""
    found = getattr(sys.modules.get("numpy._core._multiarray_umath"), "__cpu_features__", None)
    return found if isinstance(found, dict) else {}


@cache  # read for model and traits, and again for each joining worker
def _cpu_lines() -> Mapping[str, str]:
    """Return the fields of the first processor in /proc/cpuinfo."""
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


def kernel_boot() -> str:
    """Return an id of the boot of this host's kernel; "" without one (macOS)."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def peak_memory_bytes() -> int:
    """Return the largest resident memory of this process so far."""
    return process_usage()[0]


def process_usage() -> tuple[int, int]:
    """Return the largest resident memory of this process, in bytes, and its processor time in nanoseconds."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    peak = usage.ru_maxrss if sys.platform == "darwin" else usage.ru_maxrss * 1024
    return peak, int((usage.ru_utime + usage.ru_stime) * 1e9)
