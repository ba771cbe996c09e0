"""What runs inside Dask's scheduler: it ends a run's workers when nobody goes on with the run."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from distributed.diagnostics.plugin import SchedulerPlugin

if TYPE_CHECKING:
    from distributed import Scheduler

LATE_S = 5.0
"""How much longer than the workers themselves it waits, seconds."""


class DaskKeeper(SchedulerPlugin):
    """Removes the plugin of one process of a run, some time after that is gone.

    The workers leave by themselves; but a plugin that stayed would start one in each Dask worker to come.
    What the next process of the run has taken over by then is not that plugin's any more.

    Args:
        name: its own.
        plugin: the name of the plugin that keeps the workers.
        client: the id of the client that the process has.
        rejoin_s: how long the next process is waited for, seconds.
    """

    def __init__(self, name: str, plugin: str, client: str, rejoin_s: float) -> None:
        self.name = name
        self._plugin = plugin
        self._client = client
        self._wait_s = rejoin_s + LATE_S
        self._ending: asyncio.Task[None] | None = None

    def add_client(self, scheduler: Scheduler, client: str) -> None:
        """Take note that a client is there (again)."""
        if client == self._client and self._ending is not None:
            self._ending.cancel()
            self._ending = None

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """Take note that a client is gone."""
        if client == self._client and self._ending is None:
            self._ending = asyncio.get_running_loop().create_task(self._end(scheduler))

    async def close(self) -> None:
        """Do nothing more: the scheduler ends."""
        if self._ending is not None:
            self._ending.cancel()

    async def _end(self, scheduler: Scheduler) -> None:
        await asyncio.sleep(self._wait_s)
        with contextlib.suppress(ValueError):  # it is removed already
            await scheduler.unregister_worker_plugin(None, self._plugin)
        with contextlib.suppress(ValueError):
            scheduler.remove_plugin(self.name)
