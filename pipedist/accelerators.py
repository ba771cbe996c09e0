"""Which GPUs this machine has, and which of them each of its workers owns.

Nothing is loaded for it that would read CUDA_VISIBLE_DEVICES for good: the driver is asked (`nvidia-smi`,
or the files in /proc where there is no such tool), and what CUDA_VISIBLE_DEVICES leaves of its answer is
what there is. It is asked only where a spec needs GPUs.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Final

from msgspec import Struct

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
"""Which GPUs the CUDA libraries of a process see, and in which order."""

GPUS_MAX: Final = 64
"""How many GPUs one call may need."""

_DRIVER: Final = "/proc/driver/nvidia/gpus"
_TOOL_S: Final = 30.0
"""How long `nvidia-smi` may take: it loads the driver, where nothing else has."""

_TPU_SIGNS: Final = ("TPU_NAME", "TPU_WORKER_ID", "TPU_ACCELERATOR_TYPE")


class Found(Struct, frozen=True):
    """The GPUs that there are for the workers of this machine.

    Args:
        gpus: as CUDA_VISIBLE_DEVICES names them: "0", "GPU-8932f937".
        how: how that is known, for people.
    """

    gpus: tuple[str, ...]
    how: str


class Supply(Struct, frozen=True):
    """The GPUs of a cluster's workers.

    Args:
        owned: how many each worker owns, a fraction where it shares one; None: not known before they join.
        gpus: what they were taken from.
        how: how that is known, for people.
    """

    owned: tuple[float, ...] | None
    gpus: tuple[str, ...]
    how: str


def found(environment: Mapping[str, str] | None = None) -> Found:
    """Return the GPUs that a process with this environment may use.

    Args:
        environment: None: this process's.
    """
    environ = os.environ if environment is None else environment
    count, asked = installed(environ)
    visible = environ.get(VISIBLE)
    if count == 0:
        said = f", though {VISIBLE} is {visible!r}" if visible else ""
        sign = next((name for name in _TPU_SIGNS if environ.get(name)), "")
        tpu = f"; {sign} is set, but a TPU is no GPU" if sign else ""
        return Found((), f"{asked}{said}{tpu}")
    if visible is None:
        return Found(tuple(map(str, range(count))), asked)
    return Found(_seen(visible, count), f"{asked}, of which {VISIBLE}={visible!r} lets this process see")


def named(environment: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return the GPUs that a worker owns which was started by hand: what CUDA_VISIBLE_DEVICES names.

    Without that variable it owns none: several workers of a machine would all own the same.

    Args:
        environment: None: this process's.
    """
    environ = os.environ if environment is None else environment
    return found(environ).gpus if environ.get(VISIBLE) else ()


def installed(environment: Mapping[str, str]) -> tuple[int, str]:
    """Return how many NVIDIA GPUs the driver has, and how that is known, for people.

    Args:
        environment: its PATH says where `nvidia-smi` is.
    """
    import shutil  # most processes never ask

    tool = shutil.which("nvidia-smi", path=environment.get("PATH", ""))
    if tool is not None:
        import subprocess

        try:
            listed = subprocess.run(
                [tool, "--list-gpus"], capture_output=True, text=True, timeout=_TOOL_S, check=True
            )
        except (OSError, subprocess.SubprocessError) as error:
            return 0, f"{tool} fails: {error}"
        return sum(line.startswith("GPU ") for line in listed.stdout.splitlines()), f"{tool} lists them"
    try:
        return len(os.listdir(_DRIVER)), f"{_DRIVER} lists them"
    except OSError:
        return 0, f"there is no nvidia-smi on the PATH, and no {_DRIVER}"


def owned(gpus: tuple[str, ...], each: float, workers: int) -> tuple[tuple[str, ...], ...]:
    """Return what each worker owns.

    Args:
        gpus: what there is.
        each: how many a worker is to own; a fraction: as many share one as it fits in.
        workers: how many there are.

    Returns:
        As many GPUs for the first workers as there are enough for; () for the others.
    """
    if each >= 1:
        size = math.ceil(each)
        groups = [gpus[at : at + size] for at in range(0, len(gpus) - size + 1, size)]
    else:
        sharers = math.floor(1 / each + 1e-9)
        groups = [(gpu,) for _ in range(sharers) for gpu in gpus]  # a second one only when all have one
    return tuple(groups[:workers]) + ((),) * max(0, workers - len(groups))


def supply(found: Found, each: float, workers: int) -> Supply:
    """Return what the workers of this machine own; see `owned`."""
    shares = tuple(each if gpus else 0.0 for gpus in owned(found.gpus, each, workers))
    return Supply(shares, found.gpus, found.how)


def spelled(gpus: float) -> str:
    """Return a number of GPUs for people: "1 GPU", "0.5 GPUs"."""
    return f"{gpus:g} GPU" + ("" if gpus == 1 else "s")


def _seen(visible: str, count: int) -> tuple[str, ...]:
    """Return what CUDA makes of the variable: what comes after an entry that is no device is not seen."""
    seen: list[str] = []
    for text in (part.strip() for part in visible.split(",")):
        if text.isdecimal():
            if int(text) >= count:
                break
        elif not text.startswith(("GPU-", "MIG-")):
            break
        seen.append(text)
    return tuple(dict.fromkeys(seen))
