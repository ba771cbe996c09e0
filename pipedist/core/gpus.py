"""The GPUs of this machine, and their assignment to its workers.

No library that would read CUDA_VISIBLE_DEVICES permanently is loaded: the driver lists the GPUs
(`nvidia-smi`, or files in /proc without that tool), and CUDA_VISIBLE_DEVICES restricts the list. The
driver is queried only if a spec needs GPUs.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Final

from msgspec import Struct

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"  # selects and orders the GPUs visible to CUDA libraries
GPUS_MAX: Final = 64  # limit per call
_DRIVER: Final = "/proc/driver/nvidia/gpus"
_TOOL_S: Final = 30.0  # `nvidia-smi` loads the driver if it is not loaded yet
_TPU_SIGNS: Final = ("TPU_NAME", "TPU_WORKER_ID", "TPU_ACCELERATOR_TYPE")


class VisibleGpus(Struct, frozen=True):
    """The GPUs available to the workers of this machine."""

    gpus: tuple[str, ...]  # names as in CUDA_VISIBLE_DEVICES: "0", "GPU-8932f937"
    how: str  # origin of the list, for messages


class Supply(Struct, frozen=True):
    """The GPUs of a cluster's workers."""

    owned: tuple[float, ...] | None  # per worker, a fraction if shared; None: unknown until workers join
    gpus: tuple[str, ...]  # the GPUs that were divided
    how: str  # origin of the list, for messages


def found() -> VisibleGpus:
    """Return the GPUs that this process may use."""
    count, origin = installed(os.environ)
    visible = os.environ.get(VISIBLE)
    if count == 0:
        note = f", though {VISIBLE} is {visible!r}" if visible else ""
        sign = next((name for name in _TPU_SIGNS if os.environ.get(name)), "")
        tpu = f"; {sign} is set, but a TPU is no GPU" if sign else ""
        return VisibleGpus((), f"{origin}{note}{tpu}")
    if visible is None:
        return VisibleGpus(tuple(map(str, range(count))), origin)
    return VisibleGpus(_seen(visible, count), f"{origin}, restricted by {VISIBLE}={visible!r}")


def missing_devices(kind: str) -> str:
    """Return why this machine has no devices of a kind, "tpu" or "gpu"; "": it has some."""
    if kind == "gpu":
        gpus = found()
        return "" if gpus.gpus else f"there are none here ({gpus.how})"
    has_tpu = os.path.exists("/dev/accel0") or any(os.environ.get(name) for name in _TPU_SIGNS)
    return "" if has_tpu else "there are none here (no variable of a TPU VM, and no /dev/accel0)"


def named() -> tuple[str, ...]:
    """Return the GPUs of a worker started by hand: those in CUDA_VISIBLE_DEVICES.

    Without that variable it owns none, because several workers of a machine would own the same GPUs.
    """
    return found().gpus if os.environ.get(VISIBLE) else ()


def installed(environment: Mapping[str, str]) -> tuple[int, str]:
    """Return the number of NVIDIA GPUs of the driver, and the origin of that number, for messages."""
    import shutil  # rarely needed

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
    """Return the GPUs of each worker, in order; () if none is left. With `each` <= 1/2, workers share a GPU."""
    if each >= 1:
        size = math.ceil(each)
        groups = [gpus[at : at + size] for at in range(0, len(gpus) - size + 1, size)]
    else:
        sharers = math.floor(1 / each + 1e-9)
        groups = [(gpu,) for _ in range(sharers) for gpu in gpus]  # share a GPU only after all are used
    return tuple(groups[:workers]) + ((),) * max(0, workers - len(groups))


def supply(found: VisibleGpus, each: float, workers: int) -> Supply:
    """Return the GPUs of this machine's workers; see `owned`."""
    shares = tuple(each if gpus else 0.0 for gpus in owned(found.gpus, each, workers))
    return Supply(shares, found.gpus, found.how)


def spelled(gpus: float) -> str:
    """Return a number of GPUs as text: "1 GPU", "0.5 GPUs"."""
    return f"{gpus:g} GPU" + ("" if gpus == 1 else "s")


def _seen(visible: str, count: int) -> tuple[str, ...]:
    """Return the devices that CUDA sees: it ignores entries after the first invalid one."""
    seen: list[str] = []
    for text in (part.strip() for part in visible.split(",")):
        if text.isdecimal():
            if int(text) >= count:
                break
        elif not text.startswith(("GPU-", "MIG-")):
            break
        seen.append(text)
    return tuple(dict.fromkeys(seen))
