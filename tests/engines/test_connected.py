"""The common behaviour of engines that are reached over a connection, without their libraries."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest

from pipedist.cluster.launchers import engines
from pipedist.cluster.launchers.engines import Engine, OnFailed, Watchers
from pipedist.cluster.launchers.supervisor_process import JoinConfig


class DeafEngine(Engine):
    """One that does not answer any more when its workers are to be ended."""

    is_connected = False

    async def start(self, join: JoinConfig, on_failed: OnFailed) -> None:
        raise NotImplementedError

    async def _connect(self) -> str:
        self.is_connected = True
        return "127.0.0.1"

    async def _withdraw(self) -> None:
        await anyio.sleep_forever()

    async def _disconnect(self) -> None:
        await anyio.lowlevel.checkpoint()
        self.is_connected = False


@pytest.mark.asyncio
async def test_the_connection_is_ended_also_where_the_workers_cannot_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engines, "CLOSE_S", 0.01)
    async with DeafEngine() as engine:
        assert engine.is_connected
    assert not engine.is_connected


@pytest.mark.asyncio
async def test_news_that_come_after_the_end_begin_nothing() -> None:
    async def never() -> None:
        raise AssertionError("nobody waits for it")

    async with Watchers() as watchers:
        pass
    watchers.start(never)
