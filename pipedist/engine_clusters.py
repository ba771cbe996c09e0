"""Clusters whose workers an engine places: Ray, Dask."""

from __future__ import annotations

import json
import os
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, Self

import anyio

from pipedist.accelerators import Supply
from pipedist.errors import UsageError
from pipedist.launchers import whereabouts
from pipedist.launchers.engines import PLACE_S, Engine
from pipedist.launchers.hosted import JOIN_S, Terms
from pipedist.launchers.whereabouts import Succession, Whereabouts
from pipedist.local_cluster import GATHER_S, Cluster, dial_in, tell, usable_cores
from pipedist.transport.keys import ClusterKeys, key_text, new_keys
from pipedist.version import __version__

if TYPE_CHECKING:
    from pipedist.coordinator import Coordinator
    from pipedist.scheduler import Limits

_ANYWHERE = ("0.0.0.0", "[::]", "*")

POINTER: Final = "placed.json"
"""The file that says where the workers of a run find its next process."""


class EngineCluster(Cluster):
    """A coordinator that listens with keys of its own, and an engine whose workers dial in.

    Left in order, it leaves nothing behind. With `folder` and `rejoin_s`, where its process is killed, its
    workers keep what they have finished and wait; the next cluster with the same folder takes them over.

    Args:
        workers: how many are asked for, or expected.
        engine: not open.
        listen: `tcp://ADDRESS:PORT`; None: the address that the engine's nodes reach, and any free port.
        threads_per_replica: BLAS and OpenMP threads of each worker.
        limits: the scheduler's bounds.
        force: as for `ConnectCluster`.
        folder: the run's private one, where it says where its workers find it; nobody else may use it while
            this is open. None: there is none.
        rejoin_s: how long the workers wait for another process of the run, seconds; 0: they don't.
    """

    def __init__(
        self,
        workers: int | None,
        engine: Engine,
        *,
        listen: str | None,
        threads_per_replica: int,
        limits: Limits | None,
        force: bool = False,
        folder: Path | None = None,
        rejoin_s: float = 0.0,
    ) -> None:
        count = usable_cores() if workers is None else workers
        super().__init__(count, Supply(None, (), "workers that are placed bring them"))
        self._force = force
        self._engine = engine
        self._asked = listen
        self._listen = listen
        self._threads = threads_per_replica
        self._limits = limits
        self._keys: ClusterKeys = new_keys()
        self._rejoin_s = rejoin_s if folder is not None else 0.0
        self._pointer = folder.absolute() / POINTER if folder is not None and self._rejoin_s else None
        self._succession: Succession | None = None
        """Whose workers these are, where they outlive this process."""

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        try:
            client = ClusterKeys(self._keys.client, server=None)
            terms = Terms(
                self._dialled(), key_text(client), self._threads, join_s=max(JOIN_S, self._rejoin_s)
            )
            self._say_where()
            await self._engine.start(terms, self.coordinator.fail, self._succession)
        except BaseException:
            await self.__aexit__(*sys.exc_info())
            raise
        return self

    async def _prepare(self, stack: AsyncExitStack) -> None:
        if self._pointer is not None:
            stack.callback(self._forget, self._pointer)
        await stack.enter_async_context(self._engine)
        if self._pointer is not None:
            self._succession = await self._succeed(self._pointer)

    def _make(self, stack: AsyncExitStack) -> Coordinator:
        if self._keys.server is None:
            raise UsageError("a cluster listens with the server's keys")
        host = self._engine.host
        listen = self._listen or f"tcp://{f'[{host}]' if ':' in host else host}:*"
        return dial_in(listen, self._keys.server, self._limits, force=self._force, rejoin_s=self._rejoin_s)

    async def gather(self) -> None:
        """Wait a moment for the workers that have stayed."""
        if self._succession is not None and self._succession.life > 1:
            with anyio.move_on_after(min(GATHER_S, self._rejoin_s)):
                await self.coordinator.wait_ready(self._engine.placed)

    # -- from one process of a run to the next -----------------------------------------------------

    async def _succeed(self, pointer: Path) -> Succession:
        """Find out whether the workers of another process of the run can be taken over; end them if not."""
        left = whereabouts.read(pointer)
        if left is None:
            return whereabouts.first(self._rejoin_s)
        why = ""
        if left.placing != self._placing():
            why = "were placed on something else, or with other terms"
        elif fault := whereabouts.why_deaf(left.endpoint):
            why = f"can't find this one: it can't listen at {left.endpoint} ({fault})"
        if not why:
            self._keys, self._listen = left.keys, left.endpoint
            return left.succession.next(self._rejoin_s)
        tell(
            f"the workers of the killed process {why}: they are replaced, and what they have finished is "
            "done again"
        )
        await self._engine.dismiss(left.succession)
        return whereabouts.first(self._rejoin_s)

    def _placing(self) -> str:
        """Return what must be the same for a worker that was placed before to be as good as a new one."""
        engine = self._engine
        return json.dumps(
            [__version__, sys.version_info[:2], self._threads, self._asked, engine.host, engine.placing]
        )

    def _say_where(self) -> None:
        """Leave for the next process of the run what it needs to take the workers over."""
        if self._pointer is not None and self._succession is not None:
            left = Whereabouts(self._succession, self.coordinator.endpoint, self._keys, self._placing())
            whereabouts.write(self._pointer, left)

    def _forget(self, pointer: Path) -> None:
        """Leave nothing: the workers are gone. Where the engine could not be reached, they may wait on."""
        if self._succession is not None:
            whereabouts.remove(pointer)

    def _dialled(self) -> str:
        """Return the endpoint as a node dials it."""
        endpoint = self.coordinator.endpoint
        address, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        return f"tcp://{self._engine.host}:{port}" if address in _ANYWHERE else endpoint

    async def ready(self, count: int | None = None) -> None:
        """Return as soon as `count` workers have joined; None: as many as there are to be.

        Raises:
            WorkersLost: all have left.
        """
        await self.coordinator.wait_ready(self._workers if count is None else count)


class RayCluster(EngineCluster):
    """Workers placed by Ray, one an actor, for as long as `async with` lasts.

    Args:
        workers: how many; None: as many as this process may use cores. Ray sets room aside for all of them
            or for none.
        address: `local`: a Ray of the cluster's own, on this host; `auto`: the one that runs here or that
            RAY_ADDRESS names; `HOST:PORT`, `ray://HOST:PORT`; None: like `auto`, and `local` where there is
            none. Where this process is connected to Ray already, that connection is used.
        placement: `pack`: on as few nodes as have room; `spread`: on as many.
        place_s: how long Ray may take to have room, seconds.
        listen: `tcp://ADDRESS:PORT`, where the workers dial in; None: this host as Ray knows it, any free
            port.
        threads_per_replica: BLAS and OpenMP threads of each worker, and the CPUs that Ray sets aside for it.
        gpus_per_worker: GPUs that Ray sets aside for each worker, which sees them and no others.
        code: the folder whose modules are sent to the nodes; None: nothing is sent. Functions that are
            given as objects travel by themselves.
        limits: the scheduler's bounds.
        force: as for `ConnectCluster`.
        folder: where it says where its workers find it, for the next cluster with this folder to take them
            over when this process was killed; nobody else may use it while this is open.
        rejoin_s: with `folder`, how long they keep their finished results and wait for that, seconds; then
            they end. Not with a Ray of the cluster's own.

    Raises:
        UsageError: Ray is not installed, or a number or `rejoin_s` makes no sense; (on entering) no Ray
            answers, it has no room in time, or the cluster is open already.
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
        limits: Limits | None = None,
        force: bool = False,
        folder: Path | None = None,
        rejoin_s: float = 0.0,
    ) -> None:
        from pipedist.launchers.ray_engine import RayEngine

        workers = usable_cores() if workers is None else workers
        engine = RayEngine(
            address=address,
            workers=workers,
            cpus=threads_per_replica,
            gpus=gpus_per_worker,
            placement=placement,
            place_s=place_s,
            code=None if code is None else Path(code),
            outlives=rejoin_s > 0,
        )
        super().__init__(
            workers,
            engine,
            listen=listen,
            threads_per_replica=threads_per_replica,
            limits=limits,
            force=force,
            folder=folder,
            rejoin_s=rejoin_s,
        )


class DaskCluster(EngineCluster):
    """Workers kept by Dask's, one each, for as long as `async with` lasts.

    Args:
        workers: how many are expected, and how many Dask workers a `local` one has; None: as many as this
            process may use cores.
        address: `local`: Dask workers of the cluster's own, in this process; `tcp://HOST:PORT`, or what else
            a Dask client takes; None: what Dask's configuration names (DASK_SCHEDULER_ADDRESS), and `local`
            where it names none.
        place_s: how long Dask may take to answer, and to have a worker, seconds.
        listen: `tcp://ADDRESS:PORT`, where the workers dial in; None: this host on its way to Dask's
            scheduler, any free port.
        threads_per_replica: BLAS and OpenMP threads of each worker.
        limits: the scheduler's bounds.
        force: as for `ConnectCluster`.
        folder: where it says where its workers find it, for the next cluster with this folder to take them
            over when this process was killed; nobody else may use it while this is open.
        rejoin_s: with `folder`, how long they keep their finished results and wait for that, seconds; then
            they end. Not with a Dask of the cluster's own.

    Raises:
        UsageError: Dask is not installed, or a number or `rejoin_s` makes no sense; (on entering) no Dask
            scheduler answers, it has no worker in time, or the cluster is open already.
    """

    def __init__(
        self,
        workers: int | None = None,
        *,
        address: str | None = None,
        place_s: float = PLACE_S,
        listen: str | None = None,
        threads_per_replica: int = 1,
        limits: Limits | None = None,
        force: bool = False,
        folder: Path | None = None,
        rejoin_s: float = 0.0,
    ) -> None:
        from pipedist.launchers.dask_engine import DaskEngine

        workers = usable_cores() if workers is None else workers
        engine = DaskEngine(address=address, workers=workers, place_s=place_s, outlives=rejoin_s > 0)
        super().__init__(
            workers,
            engine,
            listen=listen,
            threads_per_replica=threads_per_replica,
            limits=limits,
            force=force,
            folder=folder,
            rejoin_s=rejoin_s,
        )
