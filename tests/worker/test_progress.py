"""The record that the parent process reads: the running call, its stage, and its time limit."""

from __future__ import annotations

import asyncio
import os
import selectors
import time
from collections.abc import Iterator
from contextlib import closing

import pytest
from msgspec.structs import replace

from pipedist.protocol.program import Shards
from pipedist.worker.execution import PassExecutor
from pipedist.worker.lease_run import LeaseRun, PersistentLoop
from pipedist.worker.progress import NO_CALL, CallProgress, Running, StageClock, Stepped, Stops, end_of
from tests.worker.fake_scheduler import program

SECOND = 10**9


@pytest.fixture
def progress() -> Iterator[CallProgress]:
    made = CallProgress()
    yield made
    made.close()


def later() -> int:
    """Half a minute from now."""
    return time.monotonic_ns() + 30 * SECOND


def test_a_call_and_its_stage_are_read_while_they_run(progress: CallProgress) -> None:
    assert progress.read() is None
    begin = progress.of_lease(7)
    begin(41)
    assert progress.read() == Running(7, 41, 1)
    progress.clock.enter(2)
    assert progress.read() == Running(7, 41, 2)
    begin(42)
    assert progress.read() == Running(7, 42, 1)
    progress.idle()
    assert progress.read() is None


def test_a_function_is_overdue_after_its_time_and_only_while_it_runs(progress: CallProgress) -> None:
    progress.of_lease(7)(41)
    assert progress.overdue(later()) is None, "it has no time limit"
    progress.clock.start(41, 2, 10 * SECOND)
    assert progress.overdue(time.monotonic_ns()) is None
    overdue = progress.overdue(later())
    assert overdue is not None
    assert overdue.running == (7, 41, 2)
    progress.clock.stop(41)
    assert progress.overdue(later()) is None


def test_time_in_which_the_parent_process_was_stopped_does_not_count(progress: CallProgress) -> None:
    progress.of_lease(7)(41)
    stops, now_ns = Stops(), time.monotonic_ns()
    stops.look(now_ns - 60 * SECOND)
    stops.look(now_ns)
    progress.clock.start(41, 1, 3 * SECOND)
    for second in (0, 1, 601, 601.5, 602, 602.5, 603.4):
        stops.look(now_ns + int(second * SECOND))
        assert progress.overdue(now_ns + int(second * SECOND), stops) is None
    assert progress.overdue(now_ns + int(605 * SECOND), stops) is not None


def test_time_in_which_the_worker_was_stopped_does_not_count_for_async_functions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 1000.0

    def select(_selector: object, timeout: float) -> list[object]:
        nonlocal now_s
        now_s += timeout + (
            600 if timeout and now_s == 1000.0 else 0
        )  # stopped once, in the middle of a wait
        return []

    async def call() -> int:
        async with asyncio.timeout(60):
            return await asyncio.sleep(30, 5)

    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    monkeypatch.setattr(selectors.DefaultSelector, "select", select)
    with closing(PersistentLoop()) as loop:
        assert loop.run(call()) == 5
    assert 1630 <= now_s < 1632


def test_time_in_which_a_thread_holds_the_lock_of_the_interpreter_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 1000.0

    def select(_selector: object, timeout: float) -> list[object]:
        nonlocal now_s
        now_s += timeout + (5 if timeout and now_s == 1000.0 else 0)  # late once, while a thread computes
        return []

    async def call() -> int:
        async with asyncio.timeout(60):
            return await asyncio.sleep(30, 5)

    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    monkeypatch.setattr(time, "process_time", lambda: now_s)
    monkeypatch.setattr(selectors.DefaultSelector, "select", select)
    with closing(PersistentLoop()) as loop:
        assert loop.run(call()) == 5
    assert 1030 <= now_s < 1032


def test_a_process_killed_for_a_function_that_has_just_ended_blames_no_call(progress: CallProgress) -> None:
    progress.of_lease(7)(41)
    progress.clock.start(41, 1, SECOND)
    overdue = progress.overdue(later())
    assert end_of(progress, overdue) == (Running(7, 41, 1), True)
    progress.clock.stop(41)
    assert end_of(progress, overdue) == (NO_CALL, False)
    progress.clock.start(41, 1, SECOND)
    assert end_of(progress, overdue) == (NO_CALL, False), "it runs again, since later"
    assert end_of(progress, None) == (Running(7, 41, 1), False)


def test_time_that_a_replica_waits_for_others_does_not_count(progress: CallProgress) -> None:
    progress.of_lease(7)(0)
    progress.clock.start(0, 1, SECOND)
    begun = time.monotonic_ns()
    time.sleep(0.05)  # it uses that
    used = time.monotonic_ns() - begun
    progress.clock.pause(0)
    assert progress.overdue(later()) is None
    progress.clock.start(1, 1, 5 * SECOND)  # another replica runs meanwhile
    overdue = progress.overdue(later())
    assert overdue is not None
    assert overdue.running.call == 1
    progress.clock.stop(1)
    progress.clock.resume(0)
    resumed = time.monotonic_ns()
    overdue = progress.overdue(later())
    assert overdue is not None
    assert overdue.running.call == 0
    assert overdue.began_ns <= resumed - used, "what it had used before counts"


def test_the_running_function_is_recorded_else_the_first_that_is_due(progress: CallProgress) -> None:
    clock = progress.clock
    progress.of_lease(7)(0)
    clock.start(0, 1, 20 * SECOND)
    clock.start(1, 1, 10 * SECOND)
    clock.step(0)
    overdue = progress.overdue(later())
    assert overdue is not None
    assert overdue.running.call == 0
    clock.unstep()
    overdue = progress.overdue(later())
    assert overdue is not None
    assert overdue.running.call == 1
    progress.idle()
    assert progress.overdue(later()) is not None, "between two slices, calls that wait are under way"
    clock.stop(0)
    clock.stop(1)
    progress.idle()
    assert progress.read() is None


def test_an_awaitable_is_recorded_step_by_step() -> None:
    seen: list[str] = []

    class Clock(StageClock):
        def step(self, call: int) -> None:
            seen.append(f"step {call}")

        def unstep(self) -> None:
            seen.append("unstep")

    async def function() -> int:
        await asyncio.sleep(0)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise
        return 1

    async def main() -> None:
        assert await Stepped(asyncio.sleep(0, 5), Clock(), 0) == 5
        seen.clear()
        task = asyncio.ensure_future(_awaited(Stepped(function(), Clock(), 3)))
        while len(seen) < 4:  # noqa: ASYNC110 (turns of the loop are what is counted)
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(ZeroDivisionError):
            await Stepped(_raises(), Clock(), 4)

    asyncio.run(main())
    assert seen[:6] == ["step 3", "unstep", "step 3", "unstep", "step 3", "cancelled"]


async def _awaited(awaitable: Stepped) -> object:
    return await awaitable


async def _raises() -> None:
    raise ZeroDivisionError


def test_a_file_shares_the_record_with_a_process_that_was_not_forked() -> None:
    file = os.memfd_create("test")
    try:
        os.ftruncate(file, CallProgress.BYTES)
        mine = CallProgress(file)
        mine.idle()
        theirs = CallProgress(file)
        theirs.of_lease(3)(9)
        assert mine.read() == Running(3, 9, 1)
        mine.close()
        theirs.close()
    finally:
        os.close(file)


NOTED: list[tuple[int, int]] = []
"""(the value of a call, the call that is noted while its function has the thread)."""

READER: list[CallProgress] = []

TURNS: list[asyncio.Event] = []
"""By value of a call: it may look."""


async def looks_at_itself(x: int) -> int:
    """Look what is noted: the later calls first, while the earlier ones wait."""
    if not TURNS:
        TURNS.extend(asyncio.Event() for _ in range(8))
        TURNS[7].set()
    await TURNS[x].wait()
    overdue = READER[0].overdue(later())
    assert overdue is not None
    NOTED.append((x, overdue.running.call))
    TURNS[x - 1].set()
    return x


def test_the_overlapping_async_call_that_has_the_thread_is_recorded(progress: CallProgress) -> None:
    READER[:], NOTED[:], TURNS[:] = [progress], [], []
    plain = program(f"{__name__}:looks_at_itself")
    timed = replace(plain, stages=(replace(plain.stages[0], timeout_s=20.0),))
    executor = PassExecutor(timed, 1, progress.clock)
    done: list[object] = []
    with closing(PersistentLoop()) as loop:
        run = LeaseRun(executor, loop, Shards(values=list(range(8))), 0, 8, progress.of_lease(3))
        while len(done) < 8:
            assert run.advance(0.05, 2**20) is None
            done += run.take().outcomes
            progress.idle()
    assert [(x, x) for x in reversed(range(8))] == NOTED
    assert progress.read() is None
