"""Playbooks of calls that are tried again: rests between attempts, and calls that took too long."""

from __future__ import annotations

import pytest

from pipedist.scheduler import PassSettings, SchedulerLimits
from pipedist.scheduler import commands as cmd
from pipedist.scheduler import events as ev
from pipedist.scheduler.queues import backoff_after_s
from tests.simulation.scenario import Scenario, assigns

PLAIN = PassSettings(replicas=1, pulled=False)
LIMITS = SchedulerLimits(backoff_s=0.1, backoff_s_max=1.0)


def begun(*workers: str, steps: int = 1) -> Scenario:
    """Return a story whose first call w0 executes, under lease 1."""
    play = Scenario(LIMITS).with_workers(*(workers or ("w0",))).with_pass(PLAIN)
    play.setup(ev.StepsAvailable(1, 0, steps, 1))
    return play


def assign(lease: int, lo: int = 0, *, attempt: int, worker: str = "w0") -> cmd.SendAssign:
    return cmd.SendAssign(worker, lease, 1, lo, lo + 1, attempt)


# -- rests ---------------------------------------------------------------------------------


def test_rests_grow_up_to_a_limit() -> None:
    assert [backoff_after_s(n, LIMITS) for n in range(1, 8)] == [0.0, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    assert backoff_after_s(10**6, LIMITS) == 1.0


def test_the_first_retry_comes_at_once_and_later_ones_after_a_rest() -> None:
    play = begun()
    play(ev.CallFailed("w0", 0, 1, 0, retries=3), assign(2, attempt=1))
    play.at(5.0)(ev.CallFailed("w0", 0, 2, 0, retries=3))
    assert play.scheduler.deadline() == pytest.approx(5.1)
    play.at(5.09)(ev.Tick())
    play.at(5.1)(ev.Tick(), assign(3, attempt=2))
    assert play.scheduler.deadline() is None
    play.at(6.0)(ev.CallFailed("w0", 0, 3, 0, retries=3))
    assert play.scheduler.deadline() == pytest.approx(6.2)


def test_each_stage_of_a_call_has_its_own_retries() -> None:
    play = begun()
    play(ev.CallFailed("w0", 0, 1, 0, retries=1, stage="first"), assign(2, attempt=1))
    play(ev.CallFailed("w0", 0, 2, 0, retries=1, stage="second"), assign(3, attempt=2))
    told = play.setup(ev.CallFailed("w0", 0, 3, 0, retries=1, stage="second"))
    assert [c for c in told if isinstance(c, cmd.StepFailed)] == [
        cmd.StepFailed(1, 0, (cmd.Failure(0, 3, "w0"),))
    ]


def test_others_are_dealt_while_a_call_rests_and_any_event_rouses_it() -> None:
    play = begun("w0", "w1")
    play.setup(ev.CallFailed("w0", 0, 1, 0, retries=2), ev.CallFailed("w1", 0, 2, 0, retries=2))
    [other] = assigns(play.setup(ev.StepsAvailable(1, 1, 2, 1)))
    assert other.lo == 1
    play.at(1.0)
    [again] = assigns(play.setup(ev.StepsAvailable(1, 2, 3, 1)))[:1]
    assert (again.lo, again.attempt) == (0, 2), "it goes before what was offered later"


def test_deaths_need_no_rest() -> None:
    play = begun("w0", "w1")
    for lease, worker in enumerate(["w0", "w1"], start=1):
        [again] = assigns(play.setup(ev.WorkerLost(worker, 0, "signal 9"), ev.WorkerJoined(worker, 1)))
        assert again.attempt == lease


def test_what_rests_is_forgotten_with_its_pass() -> None:
    play = begun()
    play.setup(ev.CallFailed("w0", 0, 1, 0, retries=2), ev.CallFailed("w0", 0, 2, 0, retries=2))
    play(ev.PassClosed(1), cmd.SendUnbind("w0", 1))
    assert play.scheduler.deadline() is None


def test_what_rests_beyond_a_failed_step_is_forgotten() -> None:
    play = begun("w0", "w1", steps=2)
    play.setup(ev.CallFailed("w1", 0, 2, 1, retries=9), ev.CallFailed("w1", 0, 3, 1, retries=9))
    assert play.scheduler.deadline() is not None
    play.setup(ev.CallFailed("w0", 0, 1, 0))
    assert play.scheduler.deadline() is None


def test_a_gang_rests_as_a_whole() -> None:
    play = Scenario(LIMITS).with_workers("w0").with_pass(PassSettings(2, pulled=False, gang=True))
    play.setup(ev.StepsAvailable(1, 0, 1, 2))
    for lease in (1, 2):
        play.setup(ev.CallFailed("w0", 0, lease, 0, retries=5), ev.CallsDone("w0", 0, lease, 1, 2, 1))
    assert play.scheduler.deadline() == pytest.approx(0.1)
    [gang] = [c for c in play.at(0.1).setup(ev.Tick()) if isinstance(c, cmd.SendGang)]
    assert (gang.attempt, gang.parts[0].lo, gang.parts[0].hi) == (2, 0, 2)


# -- calls that took too long ------------------------------------------------------------------


def lost(lease: int, call: int, incarnation: int = 0, **how: object) -> ev.WorkerLost:
    return ev.WorkerLost(
        "w0",
        incarnation,
        "timed out",
        running=(lease, call),
        stage="s",
        timed_out=True,
        **how,  # type: ignore[arg-type]
    )


def test_a_call_that_took_too_long_counts_as_one_that_raised() -> None:
    play = begun("w0", "w1", steps=2)
    play(
        lost(1, 0),
        cmd.SendCancel("w1", 2),
        cmd.StepFailed(1, 0, (cmd.Failure(0, 1, "w0"),)),
        cmd.StartWorker("w0", 1),
    )


def test_a_call_that_took_too_long_has_its_retries() -> None:
    play = begun("w0", "w1")
    play(
        lost(1, 0, retries=1),
        cmd.StartWorker("w0", 1),
        cmd.SendBind("w1", 1),
        assign(2, attempt=1, worker="w1"),
    )


def test_timeouts_are_not_charged_as_deaths() -> None:
    play = begun()
    for life in range(10):
        play.at(100.0 * life).setup(lost(life + 1, 0, life, retries=99), ev.WorkerJoined("w0", life + 1))
        for again in assigns(play.at(100.0 * life + 50.0).setup(ev.Tick())):
            assert again.attempt == life + 1


def test_the_other_calls_of_the_lease_lose_no_attempt() -> None:
    play = begun(steps=100)
    play.setup(ev.CallsDone("w0", 0, 1, 0, 1, 1000))
    play.setup(lost(2, 4, retries=1), ev.WorkerJoined("w0", 1))
    todo = [tuple(x) for x in play.scheduler._passes[1].todo]
    running = [(x.lo, x.hi, x.attempt) for x in play.scheduler._members.leases.values()]
    of = {c: a for lo, hi, a in (*todo, *running) for c in range(lo, hi)}
    assert of.pop(4) == 1
    assert set(of.values()) == {0}
    assert set(of) == set(range(1, 100)) - {4}


def test_who_was_ended_for_a_call_that_was_over_just_then_blames_nobody() -> None:
    play = begun(steps=2)
    play.setup(ev.WorkerLost("w0", 0, "signal 9", running=(0, 0)), ev.WorkerJoined("w0", 1))
    assert not play.scheduler._passes[1].histories
