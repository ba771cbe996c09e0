"""A cluster whose workers dial in, with `pipedist worker`."""

from __future__ import annotations

import math
import os
import shlex
from contextlib import AsyncExitStack
from typing import Self

import anyio

from pipedist.cluster.base import Cluster, dial_in, print_notice
from pipedist.coordinator import Coordinator
from pipedist.core.gpus import VISIBLE, Supply
from pipedist.errors import UsageError
from pipedist.scheduler import SchedulerLimits
from pipedist.transport.keys import ServerKeys, read_key_file, workers_file, write_key_file

_ANY_ADDRESS = ("tcp://0.0.0.0:", "tcp://[::]:")  # of endpoints that are bound to every address
REJOIN_S = 60.0  # how long workers wait for a scheduler to come back, by default, seconds
GATHER_S = 5.0  # how long a resumed run waits for workers, which may hold finished results, seconds
_LOOPBACK_HOSTS = frozenset({"localhost", "127.0.0.1", "::1", "[::1]"})
LISTEN = "tcp://127.0.0.1:*"  # where workers dial in by default: this host only, any free port


class ConnectCluster(Cluster):
    """Workers that dial in over TCP, with the cluster's keys.

    Args:
        listen: `tcp://ADDRESS:PORT`; None: loopback, any free port.
        key_file: the cluster's keys, made by `pipedist keys new`. If `listen` is a loopback address, a missing
            file is created (mode 0600).
        workers: the number that is expected; the plan and the number of calls that are assigned in advance
            depend on it.
        limits: the scheduler's bounds.
        threads_per_replica: BLAS and OpenMP threads of each worker; a worker with another number is rejected,
            because results could differ in their last bits.
        rejoin_s: how long workers keep finished results, and wait for the run to be resumed, when this
            process is gone, seconds.
        gpus_per_worker: GPUs that calls will need, for the join command that is printed. A worker owns those
            in its CUDA_VISIBLE_DEVICES.
        force: accept workers with other versions of Python, NumPy or pipedist, or another type of processor:
            results may differ in their last bits.

    Raises:
        UsageError: `key_file` is missing; (on entering) it can't be used, the endpoint can't be bound, or the
            cluster is open already.

    Example:
        async with pipedist.ConnectCluster(listen="tcp://10.0.0.1:5555", key_file="cluster.key") as cluster:
            async with pipedist.open("spec.yaml", cluster=cluster) as run:
                result = await run.results()
    """

    def __init__(
        self,
        *,
        listen: str | None = None,
        key_file: str | os.PathLike[str] | None = None,
        workers: int = 1,
        limits: SchedulerLimits | None = None,
        threads_per_replica: int = 1,
        rejoin_s: float = REJOIN_S,
        gpus_per_worker: float = 0,
        force: bool = False,
    ) -> None:
        if key_file is None:
            raise UsageError(
                "`key_file` is missing: workers that dial in need keys. Add `cluster: {key_file: FILE}`."
            )
        super().__init__(workers, Supply(None, (), "workers that dial in bring them"))
        self._gpus = math.ceil(gpus_per_worker)
        self._listen = listen or LISTEN
        self._key_file = os.fspath(key_file)
        self._limits = limits
        self._threads = threads_per_replica
        self._rejoin_s = rejoin_s
        self._force = force

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        endpoint = self.coordinator.endpoint
        if endpoint.startswith(_ANY_ADDRESS):
            endpoint = f"tcp://{os.uname().nodename}:{endpoint.rpartition(':')[2]}"
        without_secret = workers_file(self._key_file)
        key_file = str(without_secret) if without_secret.exists() else self._key_file
        visible = f"{VISIBLE}={','.join(map(str, range(self._gpus)))} " if self._gpus else ""
        threads = f" --threads {self._threads}" if self._threads != 1 else ""
        print_notice(
            f"waiting for workers: {visible}pipedist worker --connect {shlex.quote(endpoint)} "
            f"--key-file {shlex.quote(key_file)}{threads}"
        )
        return self

    def _make(self, stack: AsyncExitStack) -> Coordinator:
        return dial_in(
            self._listen,
            server_keys(self._key_file, self._listen),
            self._limits,
            force=self._force,
            rejoin_s=self._rejoin_s,
            threads=self._threads,
        )

    async def gather(self) -> None:
        """Wait up to 5 s for the workers that are expected.

        Those that kept results dial in at once.
        """
        with anyio.move_on_after(min(GATHER_S, self._rejoin_s)):
            await self.coordinator.wait_ready(self.workers)


def server_keys(key_file: str, listen: str) -> ServerKeys:
    """Return the server's keys in a key file; create the file if it is missing and `listen` is a loopback address.

    For other hosts it is not created: their workers have other keys already if its name is wrong, and should get a
    file without the run's secret.
    """
    if os.path.exists(key_file):
        keys = read_key_file(key_file)
    elif is_loopback(listen.removeprefix("tcp://").rpartition(":")[0]):
        keys = write_key_file(key_file)
    else:
        raise UsageError(
            f"key file {key_file} does not exist, and other hosts can reach {listen}. Create it with "
            f"`pipedist keys new --output {shlex.quote(key_file)}`, and copy {workers_file(key_file).name} to the "
            "hosts of workers."
        )
    if keys.server is None:
        raise UsageError(
            f"key file {key_file} is for workers: it lacks `server_secret`. Use the run's key file."
        )
    return keys.server


def is_loopback(host: str) -> bool:
    """Return whether only processes of this host can reach an address."""
    return host in _LOOPBACK_HOSTS or host.startswith("127.")
