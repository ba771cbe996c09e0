"""Which devices this process sees, and what they are called here.

A CUDA library numbers the devices in CUDA_VISIBLE_DEVICES anew, and reads that when it is loaded.
So a worker that runs replicas which were assigned CUDA devices sees the union of these, set before
the first of its gangs imports anything of the user's. Where the union changes later (workers came
or went, so that others' replicas are now this one's) and such a library is loaded already, only a
new process can see the new devices.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, MutableMapping, Sequence
from typing import Final

from pipedist.core.gpus import VISIBLE
from pipedist.errors import UsageError

CPU: Final = "cpu"
"""What replicas compute on that were assigned no device."""

GPU: Final = "cuda:0"
"""The first of the GPUs that a worker owns: it sees no others, and they are numbered anew."""

LIBRARIES: Final = ("torch", "cupy", "jax", "numba.cuda", "tensorflow")
"""What reads the variable when it is loaded, or when it is first used: nobody can tell which."""


class DevicesUnseen(Exception):
    """This process can't see the devices of replicas that it is to run; a new one can."""


class Devices:
    """The devices of this process.

    Args:
        environment: where CUDA_VISIBLE_DEVICES is kept.
        loaded: names of loaded modules.
    """

    def __init__(
        self,
        environment: MutableMapping[str, str] = os.environ,
        loaded: Collection[str] = sys.modules,
    ) -> None:
        self._environment = environment
        self._loaded = loaded
        self._given = environment.get(VISIBLE)
        """What whoever started the worker lets it see; None: everything."""

    def show(self, devices: Sequence[str]) -> None:
        """Make the devices of this process's replicas visible; others than CUDA's always are.

        Args:
            devices: of its replicas, "cuda:1", "cpu:0".

        Raises:
            DevicesUnseen: a library has read what this process was to see before.
            UsageError: whoever started this process lets it see other devices only.
        """
        wanted = sorted({int(n) for kind, _, n in (d.partition(":") for d in devices) if kind == "cuda"})
        if not wanted:
            return
        texts = [str(number) for number in wanted]
        if self._given is not None:  # in the order of whoever started us, and no more than that
            missing = [text for text in texts if text not in _listed(self._given)]
            if missing:
                raise UsageError(
                    f"replicas were assigned cuda:{', cuda:'.join(missing)}, but this worker was started "
                    f"with {VISIBLE}={self._given}: name devices that it sees"
                )
            texts = [text for text in _listed(self._given) if text in texts]
        now = self._environment.get(VISIBLE)
        if now is not None and set(texts) <= set(_listed(now)) and self._readers():
            return
        visible = ",".join(texts)
        if now == visible:
            return
        if now != self._given and (readers := self._readers()):
            raise DevicesUnseen(
                f"it needs {VISIBLE}={visible}, but {', '.join(readers)} was loaded with {now}: "
                "a new process takes its place"
            )
        self._environment[VISIBLE] = visible

    def _readers(self) -> list[str]:
        return [name for name in LIBRARIES if name in self._loaded]

    def name_of(self, device: str) -> str:
        """Return the name, in this process, of a device.

        Args:
            device: as it was assigned: "cuda:3".
        """
        kind, _, number = device.partition(":")
        visible = _listed(self._environment.get(VISIBLE, ""))
        if kind == "cuda" and number in visible:
            return f"cuda:{visible.index(number)}"
        return device


def _listed(visible: str) -> list[str]:
    return [text.strip() for text in visible.split(",") if text.strip()]
