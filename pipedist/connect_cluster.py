"""A cluster whose workers dial in: `pipedist worker --connect ENDPOINT --key-file FILE`."""

from __future__ import annotations

import os
import sys
from contextlib import AsyncExitStack
from typing import Self

from pipedist.coordinator import Coordinator
from pipedist.errors import UsageError
from pipedist.local_cluster import Cluster, dial_in
from pipedist.scheduler import Limits
from pipedist.transport.keys import ServerKeys, read_key_file, write_key_file

LISTEN = "tcp://127.0.0.1:*"
"""Where workers dial in, if nothing else is said: this host alone, any free port."""


class ConnectCluster(Cluster):
    """Waits for workers that dial in over TCP, with the cluster's keys.

    Args:
        listen: `tcp://ADDRESS:PORT`; None: `LISTEN`.
        key_file: the cluster's keys; made (mode 0600) where there is no such file.
        workers: how many are expected, for the plan and the size of what is issued in advance.
        limits: the scheduler's bounds.

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
    ) -> None:
        if key_file is None:
            raise UsageError("workers that dial in need keys: say `cluster: {key_file: FILE}`")
        super().__init__(workers)
        self._listen = listen or LISTEN
        self._key_file = os.fspath(key_file)
        self._limits = limits

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        print(  # noqa: T201 - how to join is what the user must know now
            f"waiting for workers: pipedist worker --connect {self.coordinator.endpoint} "
            f"--key-file {self._key_file}",
            file=sys.stderr,
        )
        return self

    def _make(self, stack: AsyncExitStack) -> Coordinator:
        return dial_in(self._listen, self._keys(), self._limits)

    def _keys(self) -> ServerKeys:
        exists = os.path.exists(self._key_file)
        keys = read_key_file(self._key_file) if exists else write_key_file(self._key_file)
        if keys.server is None:
            raise UsageError(f"key file {self._key_file} is made for workers: it lacks `server_secret`")
        return keys.server
