"""What runs inside a Dask worker."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from distributed.diagnostics.plugin import WorkerPlugin

from pipedist.launchers.engines import GRACE_S
from pipedist.launchers.hosted import HostedWorker, Terms

if TYPE_CHECKING:
    from distributed import Worker


class DaskPlugin(WorkerPlugin):
    """Keeps one worker of pipedist, as long as its Dask worker lives.

    Args:
        name: of the plugin, and of the topic on which it tells that the worker has left.
        endpoint, keys, threads: see `Terms`.
    """

    def __init__(self, name: str, endpoint: str, keys: str, threads: int) -> None:
        self.name = name
        self._terms = (endpoint, keys, threads)
        self._hosted: HostedWorker | None = None

    def setup(self, worker: Worker) -> None:
        """Start the worker; called where the plugin is registered, and where a Dask worker joins later."""

        def tell(how: str) -> None:
            event = {"worker": worker.address, "how": how}
            worker.loop.add_callback(worker.log_event, self.name, event)

        self._hosted = HostedWorker(Terms(*self._terms), tell)

    async def teardown(self, worker: Any) -> None:
        """End the worker; called where the plugin is removed, and where a Dask worker leaves."""
        if self._hosted is not None:
            await asyncio.to_thread(self._hosted.close, GRACE_S)
