"""Clusters whose workers an engine places: Ray, Dask."""

from __future__ import annotations

import os
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from pipedist.cluster.base import Cluster, dial_in, usable_cores
from pipedist.cluster.launchers.engines import PLACE_S, Engine, require
from pipedist.cluster.launchers.supervisor_process import JoinConfig
from pipedist.core.gpus import Supply
from pipedist.transport.keys import ClusterKeys, key_text, new_keys

if TYPE_CHECKING:
    from pipedist.coordinator import Coordinator
    from pipedist.scheduler import SchedulerLimits

_ANY_ADDRESS = ("0.0.0.0", "[::]", "*")


class EngineCluster(Cluster):
    """A coordinator with keys of its own, and an engine, not entered, that places workers.

    `listen`: None: the address that the engine's nodes reach, and any free port.
    """

    def __init__(
        self,
        workers: int,
        engine: Engine,
        listen: str | None,
        threads: int,
        limits: SchedulerLimits | None,
        *,
        force: bool,
    ) -> None:
        super().__init__(workers, Supply(None, (), "workers that are placed bring them"))
        self._force = force
        self._engine = engine
        self._listen = listen
        self._threads = threads
        self._limits = limits
        self._keys = new_keys()

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        try:
            keys = key_text(ClusterKeys(self._keys.client, server=None))
            endpoint = self.coordinator.endpoint
            address, _, port = endpoint.removeprefix("tcp://").rpartition(":")
            if address in _ANY_ADDRESS:
                endpoint = f"tcp://{self._engine.host}:{port}"
            join = JoinConfig(endpoint, keys, self._threads)
            await self._engine.start(join, self.coordinator.fail)
        except BaseException:
            await self.__aexit__(*sys.exc_info())
            raise
        return self

    async def _prepare(self, stack: AsyncExitStack) -> None:
        await stack.enter_async_context(self._engine)

    def _make(self, stack: AsyncExitStack) -> Coordinator:
        assert self._keys.server is not None  # they are new
        host = self._engine.host
        listen = self._listen or f"tcp://{f'[{host}]' if ':' in host else host}:*"
        return dial_in(listen, self._keys.server, self._limits, force=self._force)


class RayCluster(EngineCluster):
    """Workers placed by Ray, one in each actor, as long as `async with` lasts.

    Args:
        workers: the number of workers; None: the number of cores that this process may use. Ray reserves
            resources for all of them or for none.
        address: `local`: a Ray of the cluster's own, on this host; `auto`: the one that runs here or that
            RAY_ADDRESS names; `HOST:PORT`, `ray://HOST:PORT`; None: like `auto`, and `local` if there is
            none. If this process is connected to Ray already, that connection is used.
        placement: `pack`: on as few nodes as have the resources; `spread`: on as many.
        place_s: how long Ray may take to reserve the resources, seconds.
        listen: `tcp://ADDRESS:PORT`, where the workers dial in; None: this host as Ray knows it, any free
            port.
        threads_per_replica: BLAS and OpenMP threads of each worker, and the CPUs that Ray reserves for it.
        gpus_per_worker: GPUs that Ray reserves for each worker, which sees no others.
        code: the folder whose modules are sent to the nodes; None: nothing is sent. Functions that are
            given as objects are always sent.
        limits: the scheduler's bounds.
        force: as for `ConnectCluster`.

    Raises:
        UsageError: Ray is not installed, or a number is out of range; (on entering) Ray can't be reached,
            it lacks the resources, or the cluster is open already.

    Example:
        async with pipedist.RayCluster(workers=8, address="auto") as cluster:
            async with pipedist.open("spec.yaml", cluster=cluster) as run:
                result = await run.results()
    """

    def __init__(
        self,
        workers: int | None = None,
        *,
        address: str | None = None,
        placement: Literal["pack", "spread"] = "pack",
        place_s: float = PLACE_S,
        listen: str | None = None,
        threads_per_replica: int = 1,
        gpus_per_worker: float = 0,
        code: str | os.PathLike[str] | None = None,
        limits: SchedulerLimits | None = None,
        force: bool = False,
    ) -> None:
        from pipedist.cluster.launchers.ray import RayEngine

        workers = usable_cores() if workers is None else workers
        engine = RayEngine(
            address=address,
            workers=workers,
            cpus=threads_per_replica,
            gpus=gpus_per_worker,
            placement=placement,
            place_s=place_s,
            code=None if code is None else Path(code),
        )
        super().__init__(workers, engine, listen, threads_per_replica, limits, force=force)


class DaskCluster(EngineCluster):
    """Workers placed by Dask, one beside each of its own, in `async with`.

    Args:
        workers: the number of workers that are expected, and of Dask workers that a `local` one has; None:
            the number of cores that this process may use.
        address: `local`: Dask workers of the cluster's own, in this process; `tcp://HOST:PORT`, or another
            address that a Dask client takes; None: the address in Dask's configuration
            (DASK_SCHEDULER_ADDRESS), and `local` if it has none.
        place_s: how long Dask may take to reply, and to have a worker, seconds.
        listen: `tcp://ADDRESS:PORT`, where the workers dial in; None: this host on its route to Dask's
            scheduler, any free port.
        threads_per_replica: BLAS and OpenMP threads of each worker.
        limits: the scheduler's bounds.
        force: as for `ConnectCluster`.

    Raises:
        UsageError: Dask is not installed, or a number is out of range; (on entering) Dask's scheduler can't
            be reached, it has no worker in time, or the cluster is open already.

    Example:
        async with pipedist.DaskCluster(address="tcp://10.0.0.1:8786") as cluster:
            async with pipedist.open("spec.yaml", cluster=cluster) as run:
                result = await run.results()
    """

    def __init__(
        self,
        workers: int | None = None,
        *,
        address: str | None = None,
        place_s: float = PLACE_S,
        listen: str | None = None,
        threads_per_replica: int = 1,
        limits: SchedulerLimits | None = None,
        force: bool = False,
    ) -> None:
        require("distributed", "dask")
        from pipedist.cluster.launchers.dask import DaskEngine

        workers = usable_cores() if workers is None else workers
        engine = DaskEngine(address=address, workers=workers, place_s=place_s)
        super().__init__(workers, engine, listen, threads_per_replica, limits, force=force)
