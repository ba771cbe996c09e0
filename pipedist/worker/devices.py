"""The devices that this process sees, and their names here.

A CUDA library renumbers the devices in CUDA_VISIBLE_DEVICES, which it reads when it is loaded. So a worker whose
replicas have CUDA devices sees the union of these; it sets the variable before its first gang imports a user's
module. If the union changes later (workers joined or left, so other replicas run here), and such a library is
loaded already, only a new process can see the new devices.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, MutableMapping, Sequence
from typing import Final

from pipedist.core.gpus import VISIBLE
from pipedist.errors import UsageError

CPU: Final = "cpu"  # the device of replicas without an assigned one
GPU: Final = "cuda:0"  # the first GPU that a worker owns; the worker sees no others, and they are renumbered

LIBRARIES: Final = ("torch", "cupy", "jax", "numba.cuda", "tensorflow")  # read it when loaded or first used


class DevicesUnseen(Exception):
    """This process cannot see the devices of its replicas; a new one can."""


class Devices:
    def __init__(
        self, environment: MutableMapping[str, str] = os.environ, loaded: Collection[str] = sys.modules
    ) -> None:
        self._environment = environment
        self._loaded = loaded
        self._initial = environment.get(VISIBLE)  # the worker was started with it; None: sees all

    def show(self, devices: Sequence[str]) -> None:
        """Make the CUDA devices of this process's replicas visible; others always are.

        Raise DevicesUnseen if a library has read an earlier value, UsageError if the process started without some of
        them.
        """
        wanted = sorted({int(n) for kind, _, n in (d.partition(":") for d in devices) if kind == "cuda"})
        if not wanted:
            return
        texts = [str(number) for number in wanted]
        if self._initial is not None:  # in the order of the initial value
            missing = [text for text in texts if text not in _listed(self._initial)]
            if missing:
                raise UsageError(
                    f"replicas were assigned cuda:{', cuda:'.join(missing)}, but this worker was started "
                    f"with {VISIBLE}={self._initial}: assign devices that it sees"
                )
            texts = [text for text in _listed(self._initial) if text in texts]
        now = self._environment.get(VISIBLE)
        if now is not None and set(texts) <= set(_listed(now)) and self._readers():
            return
        visible = ",".join(texts)
        if now == visible:
            return
        if now != self._initial and (readers := self._readers()):
            raise DevicesUnseen(
                f"it needs {VISIBLE}={visible}, but {', '.join(readers)} was loaded with {now}: "
                "a new process will replace it"
            )
        self._environment[VISIBLE] = visible

    def _readers(self) -> list[str]:
        return [name for name in LIBRARIES if name in self._loaded]

    def name_of(self, device: str) -> str:
        """Return the name, in this process, of an assigned device ("cuda:3")."""
        kind, _, number = device.partition(":")
        visible = _listed(self._environment.get(VISIBLE, ""))
        if kind == "cuda" and number in visible:
            return f"cuda:{visible.index(number)}"
        return device


def _listed(visible: str) -> list[str]:
    return [text.strip() for text in visible.split(",") if text.strip()]
