"""What runs inside a Dask worker."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from distributed.diagnostics.plugin import WorkerPlugin

from pipedist.launchers.engines import GRACE_S
from pipedist.launchers.hosted import HostedWorker, Terms

if TYPE_CHECKING:
    from distributed import Worker


class DaskPlugin(WorkerPlugin):
    """Keeps one worker of pipedist, as long as its Dask worker lives.

    A plugin of a later process of the same run takes it over. Each has a name of its own: Dask would end the
    one before it began the other, and it sets up several in any order.

    Args:
        name: of the plugin, and of the topic on which it tells that the worker has left.
        terms: how the worker joins.
        run: whose worker it is, "" where nobody takes it over.
        life: the number of the run's process.
    """

    def __init__(self, name: str, terms: Terms, run: str = "", life: int = 0) -> None:
        self.name = name
        self._terms = terms
        self._run = run
        self._life = life
        self._hosted: HostedWorker | None = None

    def setup(self, worker: Worker) -> None:
        """Take over the worker that is there, or start one.

        Called where the plugin is registered, and where a Dask worker joins later.
        """

        def tell(how: str) -> None:
            event = {"worker": worker.address, "how": how}
            worker.loop.add_callback(worker.log_event, self.name, event)

        others = list(self._others(worker))
        if any(other._life > self._life for other in others):
            return  # theirs is here, and this plugin is about to be removed
        for other in others:
            if self._hosted is None:
                self._hosted = other.hand_over()
        if self._hosted is not None:
            self._hosted.report_to(tell)
        else:
            self._hosted = HostedWorker(self._terms, tell)

    def hand_over(self) -> HostedWorker | None:
        """Give up the worker; return it if it is there."""
        hosted = self._hosted
        if hosted is None or hosted.wait(0) is not None:
            return None
        self._hosted = None
        return hosted

    async def teardown(self, worker: Any) -> None:
        """End the worker; called where the plugin is removed, and where a Dask worker leaves."""
        if self._hosted is not None:
            await asyncio.to_thread(self._hosted.close, GRACE_S)

    def _others(self, worker: Worker) -> Iterator[DaskPlugin]:
        """Yield the plugins of other processes of the run."""
        for plugin in worker.plugins.values():
            if isinstance(plugin, DaskPlugin) and plugin is not self and self._run == plugin._run != "":
                yield plugin
