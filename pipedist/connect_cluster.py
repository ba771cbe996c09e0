"""A cluster whose workers dial in: `pipedist worker --connect ENDPOINT --key-file FILE`."""

from __future__ import annotations

import os
import sys
from contextlib import AsyncExitStack
from typing import Self

from pipedist.coordinator import Coordinator
from pipedist.errors import UsageError
from pipedist.local_cluster import Cluster
from pipedist.scheduler import Limits
from pipedist.transport.keys import ServerKeys, read_key_file, write_key_file
from pipedist.transport.router import Router
from pipedist.worker.hello import boot_id

LISTEN = "tcp://127.0.0.1:*"
"""Where workers dial in, if nothing else is said: this host alone, any free port."""


class ConnectCluster(Cluster):
    """Waits for workers that dial in over TCP, with the cluster's keys.

    Args:
        listen: `tcp://ADDRESS:PORT`; None: `LISTEN`.
        key_file: the cluster's keys; made (mode 0600) where there is no such file.
        workers: how many are expected, for the plan and the size of what is issued in advance.
        limits: the scheduler's bounds.
        force: let workers in that run other versions of Python, NumPy or pipedist, or have another type of
            processor: results may differ in their last bits.

    Raises:
        UsageError: there is no key file; (on entering) it can't be used, or the endpoint can't be bound,
            or the cluster is open already.
    """

    def __init__(
        self,
        *,
        listen: str | None = None,
        key_file: str | os.PathLike[str] | None = None,
        workers: int = 1,
        limits: Limits | None = None,
        force: bool = False,
    ) -> None:
        if key_file is None:
            raise UsageError("workers that dial in need keys: say `cluster: {key_file: FILE}`")
        super().__init__(workers)
        self._listen = listen or LISTEN
        self._key_file = os.fspath(key_file)
        self._limits = limits
        self._force = force

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        _tell(
            f"waiting for workers: pipedist worker --connect {self.coordinator.endpoint} "
            f"--key-file {self._key_file}"
        )
        return self

    def _make(self, stack: AsyncExitStack) -> Coordinator:
        return dial_in_coordinator(self._listen, server_keys(self._key_file), self._limits, force=self._force)


def dial_in_coordinator(
    listen: str, keys: ServerKeys, limits: Limits | None = None, *, force: bool = False
) -> Coordinator:
    """Return a coordinator, not open, whose workers all dial in.

    Args:
        listen: `tcp://ADDRESS:PORT`.
        keys: of the cluster.
        limits, force: as for `ConnectCluster`.
    """
    return Coordinator(
        router_factory=lambda on_message, on_reject, on_lost: Router(
            listen, keys=keys, on_message=on_message, on_reject=on_reject, on_lost=on_lost
        ),
        launcher_factory=None,
        workers=(),
        limits=limits,
        dial_in=True,
        boot=boot_id(),
        force=force,
        tell=_tell,
    )


def server_keys(key_file: str) -> ServerKeys:
    """Return the keys of who schedules; where there is no such file, it is made.

    Raises:
        UsageError: the file can't be used, or is made for workers alone.
    """
    keys = read_key_file(key_file) if os.path.exists(key_file) else write_key_file(key_file)
    if keys.server is None:
        raise UsageError(f"key file {key_file} is made for workers: it lacks `server_secret`")
    return keys.server


def _tell(text: str) -> None:
    print(text, file=sys.stderr)  # noqa: T201 - who may join, and how, is what the user must know now
