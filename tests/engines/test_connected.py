"""What engines have in common that are reached over a connection; what is theirs is not needed."""

from __future__ import annotations

import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from pipedist.launchers import engines, ray_keeper
from pipedist.launchers.engines import ConnectedEngine, Watchers
from pipedist.launchers.hosted import Terms
from pipedist.launchers.ray_keeper import RayKeeper
from pipedist.launchers.ray_placing import Room

PATIENCE_S = 60.0
"""Bounds a hang, and nothing else."""


class DeafEngine(ConnectedEngine):
    """One that does not answer any more when its workers are to be ended."""

    is_connected = False

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


def test_a_keeper_that_fails_ends_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is detached: nobody else would end it, nor what belongs to it."""
    ended: list[Any] = []
    is_killed = threading.Event()
    ray: Any = ModuleType("ray")

    def wait(*_: object, **__: object) -> None:
        raise RuntimeError("out of order")

    def kill(actor: object, *, no_restart: bool) -> None:
        ended.append((actor, no_restart))
        is_killed.set()

    ray.wait, ray.kill = wait, kill
    ray.get_runtime_context = lambda: SimpleNamespace(current_actor="itself")
    host = SimpleNamespace(left=SimpleNamespace(remote=object))
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(ray_keeper, "make_group", lambda _room: "room")
    monkeypatch.setattr(ray_keeper, "make_host", lambda *_: host)
    monkeypatch.setattr(ray_keeper, "end_hosts", lambda *what: ended.append(what))
    monkeypatch.setattr(threading, "excepthook", lambda _args: None)
    RayKeeper(Room(1, {"CPU": 1}, "pack"), Terms("tcp://127.0.0.1:1", ""), False, 60.0)
    assert is_killed.wait(PATIENCE_S)
    assert ended == [([host], "room"), ("itself", True)]
