"""The coordinator's timer fires in time, and moving it later re-arms nothing."""

from __future__ import annotations

import asyncio
import time

import pytest

from pipedist.coordinator.coordinator import Timer


@pytest.mark.asyncio
async def test_it_fires_once_and_not_before_its_time() -> None:
    fired: asyncio.Queue[float] = asyncio.Queue()
    timer = Timer(lambda: fired.put_nowait(time.monotonic()))
    due = time.monotonic() + 0.05
    timer.set(due)
    assert await asyncio.wait_for(fired.get(), 60.0) >= due - 0.01
    assert fired.empty()


@pytest.mark.asyncio
async def test_a_moved_timer_fires_at_its_new_time() -> None:
    fired: asyncio.Queue[float] = asyncio.Queue()
    timer = Timer(lambda: fired.put_nowait(time.monotonic()))
    timer.set(time.monotonic() + 0.02)
    later = time.monotonic() + 0.1
    timer.set(later)
    assert await asyncio.wait_for(fired.get(), 60.0) >= later - 0.01
    timer.set(time.monotonic() + 3600.0)
    timer.set(time.monotonic() + 0.01)
    await asyncio.wait_for(fired.get(), 60.0)


@pytest.mark.asyncio
async def test_moving_it_later_re_arms_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    armed: list[float] = []
    call_later = loop.call_later
    monkeypatch.setattr(
        loop, "call_later", lambda delay, *rest: (armed.append(delay), call_later(delay, *rest))[1]
    )
    timer = Timer(lambda: None)
    for moves in range(100):
        timer.set(time.monotonic() + 100.0 + moves)
        timer.set(None)
    assert len(armed) == 1
    timer.cancel()


@pytest.mark.asyncio
async def test_a_cleared_or_cancelled_timer_does_not_fire() -> None:
    fired: list[None] = []
    timer = Timer(lambda: fired.append(None))
    timer.set(time.monotonic() + 0.01)
    timer.set(None)
    await asyncio.sleep(0.05)
    timer.set(time.monotonic() + 0.01)
    timer.cancel()
    await asyncio.sleep(0.05)
    assert fired == []
