"""An engine without a library: the process of the test has its workers."""

from __future__ import annotations

import asyncio

import anyio.lowlevel
import anyio.to_thread

from pipedist.cluster.launchers.engines import Engine, OnFailed
from pipedist.cluster.launchers.supervisor_process import JoinConfig, SupervisorProcess

GONE_S = 60.0
"""How long workers may take to be gone: it bounds a hang."""


class HereEngine(Engine):
    """Has workers in this process.

    Args:
        count: how many.
        join: how they join, instead of as the cluster wants it.
    """

    def __init__(self, count: int, join: JoinConfig | None = None) -> None:
        super().__init__()
        self.supervisors: list[SupervisorProcess] = []
        self.joins: list[JoinConfig] = []
        self._count = count
        self._join = join

    async def start(self, join: JoinConfig, on_failed: OnFailed) -> None:
        self.joins.append(join)
        loop = asyncio.get_running_loop()

        def on_left(reason: str) -> None:
            loop.call_soon_threadsafe(on_failed, reason)

        for _ in range(self._count):
            self.supervisors.append(SupervisorProcess(self._join or join, on_left))

    async def _connect(self) -> str:
        return "127.0.0.1"

    async def _disconnect(self) -> None:
        await anyio.lowlevel.checkpoint()

    async def _withdraw(self) -> None:
        for each in self.supervisors:
            await anyio.to_thread.run_sync(each.close, GONE_S)
