"""A cluster of local workers that may outlive the process of their run, and wait for it to be resumed."""

from __future__ import annotations

import os
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

import anyio

from pipedist.errors import UsageError
from pipedist.launchers.lasting import LastingTerms, LastingWorkers
from pipedist.launchers.meeting import Meeting, meeting
from pipedist.local_cluster import GATHER_S, Cluster, dial_in, divided, tell
from pipedist.transport.config import SharedMemory

if TYPE_CHECKING:
    from pipedist.coordinator import Coordinator
    from pipedist.scheduler import Limits

POINTER: Final = "workers.json"
"""The file that says where the workers of a run wait."""


class LastingCluster(Cluster):
    """Worker processes on this host, for as long as `async with` lasts, and for a while if it is cut short.

    Left in order, it leaves nothing behind. Where its process is killed, its workers keep what they have
    finished and wait; the next cluster with the same folder takes them over.

    Args:
        workers: how many.
        folder: the run's private one, where it says where its workers wait; nobody else may use it
            while this is open.
        rejoin_s: how long the workers wait for another process of the run, seconds.
        threads_per_replica, limits, gpus_per_worker: as for `LocalCluster`.

    Raises:
        UsageError: a number makes no sense, there are not so many GPUs, or the system has no process
            descriptors; (on entering) no directory for sockets can be made, or the cluster is open already.
    """

    def __init__(
        self,
        workers: int,
        *,
        folder: Path,
        rejoin_s: float,
        threads_per_replica: int = 1,
        gpus_per_worker: float = 0,
        limits: Limits | None = None,
    ) -> None:
        if not hasattr(os, "pidfd_open"):
            raise UsageError(
                "`rejoin_s` with `launcher: local` needs Linux: without it, workers end with their run"
            )
        visible, supply = divided(gpus_per_worker, workers)
        super().__init__(workers, supply)
        owned = zip(visible, supply.owned or (), strict=True) if visible else [(None, 0.0)] * workers
        self._terms = [LastingTerms(threads_per_replica, seen, gpus) for seen, gpus in owned]
        self._pointer = folder.absolute() / POINTER
        self._rejoin_s = rejoin_s
        self._limits = limits
        self._shared_memory = SharedMemory.of_cluster(self._workers)
        self._place: Meeting | None = None
        self._keeper: LastingWorkers | None = None

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        if self._keeper is not None:
            self._keeper.start(self.coordinator.fail)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._keeper is not None:
            self._keeper.rest()
        await super().__aexit__(kind, error, trace)

    async def _prepare(self, stack: AsyncExitStack) -> None:
        self._place = stack.enter_context(meeting(self._pointer))
        self._keeper = LastingWorkers(self._place, self._terms, self._rejoin_s, tell)
        await stack.enter_async_context(self._keeper)

    def _make(self, stack: AsyncExitStack) -> Coordinator:
        if self._place is None:
            raise UsageError("a cluster is used inside `async with`")
        return dial_in(
            self._place.endpoint,
            None,
            self._limits,
            rejoin_s=self._rejoin_s,
            shared_memory=self._shared_memory,
        )

    async def gather(self) -> None:
        """Wait a moment for the workers that have stayed, and those beside them."""
        keeper = self._keeper
        if keeper is not None and keeper.stayed:
            with anyio.move_on_after(GATHER_S):
                await self.coordinator.wait_ready(max(self.workers, keeper.stayed))
        if keeper is not None:
            keeper.assembled()
