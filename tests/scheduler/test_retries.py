"""Scenarios of retries: backoff, and timeouts."""

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
    """Return a scenario whose first call w0 executes, under lease 1."""
    scenario = Scenario(LIMITS).with_workers(*(workers or ("w0",))).with_pass(PLAIN)
    scenario.setup(ev.StepsAvailable(1, 0, steps, 1))
    return scenario


def assign(lease: int, lo: int = 0, *, attempt: int, worker: str = "w0") -> cmd.SendAssign:
    return cmd.SendAssign(worker, lease, 1, lo, lo + 1, attempt)


# -- backoff ---------------------------------------------------------------------------------


def test_backoffs_grow_up_to_a_limit() -> None:
    assert [backoff_after_s(n, LIMITS) for n in range(1, 8)] == [0.0, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    assert backoff_after_s(10**6, LIMITS) == 1.0


def test_the_first_retry_is_immediate_and_later_ones_back_off() -> None:
    scenario = begun()
    scenario(ev.CallFailed("w0", 0, 1, 0, retries=3), assign(2, attempt=1))
    scenario.at(5.0)(ev.CallFailed("w0", 0, 2, 0, retries=3))
    assert scenario.scheduler.deadline() == pytest.approx(5.1)
    scenario.at(5.09)(ev.Tick())
    scenario.at(5.1)(ev.Tick(), assign(3, attempt=2))
    assert scenario.scheduler.deadline() is None
    scenario.at(6.0)(ev.CallFailed("w0", 0, 3, 0, retries=3))
    assert scenario.scheduler.deadline() == pytest.approx(6.2)


def test_each_stage_of_a_call_has_its_own_retries() -> None:
    scenario = begun()
    scenario(ev.CallFailed("w0", 0, 1, 0, retries=1, stage="first"), assign(2, attempt=1))
    scenario(ev.CallFailed("w0", 0, 2, 0, retries=1, stage="second"), assign(3, attempt=2))
    told = scenario.setup(ev.CallFailed("w0", 0, 3, 0, retries=1, stage="second"))
    assert [c for c in told if isinstance(c, cmd.StepFailed)] == [
        cmd.StepFailed(1, 0, (cmd.Failure(0, 3, "w0"),))
    ]


def test_other_calls_are_assigned_during_a_backoff_and_any_event_ends_it() -> None:
    scenario = begun("w0", "w1")
    scenario.setup(ev.CallFailed("w0", 0, 1, 0, retries=2), ev.CallFailed("w1", 0, 2, 0, retries=2))
    [other] = assigns(scenario.setup(ev.StepsAvailable(1, 1, 2, 1)))
    assert other.lo == 1
    scenario.at(1.0)
    [again] = assigns(scenario.setup(ev.StepsAvailable(1, 2, 3, 1)))[:1]
    assert (again.lo, again.attempt) == (0, 2), "it goes before what was offered later"


def test_deaths_need_no_backoff() -> None:
    scenario = begun("w0", "w1")
    for lease, worker in enumerate(["w0", "w1"], start=1):
        [again] = assigns(scenario.setup(ev.WorkerLost(worker, 0, "signal 9"), ev.WorkerJoined(worker, 1)))
        assert again.attempt == lease


def test_backoffs_end_with_their_pass() -> None:
    scenario = begun()
    scenario.setup(ev.CallFailed("w0", 0, 1, 0, retries=2), ev.CallFailed("w0", 0, 2, 0, retries=2))
    scenario(ev.PassClosed(1), cmd.SendUnbind("w0", 1))
    assert scenario.scheduler.deadline() is None


def test_backoffs_beyond_a_failed_step_end() -> None:
    scenario = begun("w0", "w1", steps=2)
    scenario.setup(ev.CallFailed("w1", 0, 2, 1, retries=9), ev.CallFailed("w1", 0, 3, 1, retries=9))
    assert scenario.scheduler.deadline() is not None
    scenario.setup(ev.CallFailed("w0", 0, 1, 0))
    assert scenario.scheduler.deadline() is None


def test_a_gang_backs_off_as_a_whole() -> None:
    scenario = Scenario(LIMITS).with_workers("w0").with_pass(PassSettings(2, pulled=False, gang=True))
    scenario.setup(ev.StepsAvailable(1, 0, 1, 2))
    for lease in (1, 2):
        scenario.setup(ev.CallFailed("w0", 0, lease, 0, retries=5), ev.CallsDone("w0", 0, lease, 1, 2, 1))
    assert scenario.scheduler.deadline() == pytest.approx(0.1)
    [gang] = [c for c in scenario.at(0.1).setup(ev.Tick()) if isinstance(c, cmd.SendGang)]
    assert (gang.attempt, gang.parts[0].lo, gang.parts[0].hi) == (2, 0, 2)


# -- timeouts ------------------------------------------------------------------


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


def test_a_timeout_counts_as_an_exception() -> None:
    scenario = begun("w0", "w1", steps=2)
    scenario(
        lost(1, 0),
        cmd.SendCancel("w1", 2),
        cmd.StepFailed(1, 0, (cmd.Failure(0, 1, "w0"),)),
        cmd.StartWorker("w0", 1),
    )


def test_a_timeout_is_retried() -> None:
    scenario = begun("w0", "w1")
    scenario(
        lost(1, 0, retries=1),
        cmd.StartWorker("w0", 1),
        cmd.SendBind("w1", 1),
        assign(2, attempt=1, worker="w1"),
    )


def test_timeouts_are_not_charged_as_deaths() -> None:
    scenario = begun()
    for life in range(10):
        scenario.at(100.0 * life).setup(lost(life + 1, 0, life, retries=99), ev.WorkerJoined("w0", life + 1))
        for again in assigns(scenario.at(100.0 * life + 50.0).setup(ev.Tick())):
            assert again.attempt == life + 1


def test_a_timeout_does_not_charge_other_calls_of_the_lease() -> None:
    scenario = begun(steps=100)
    scenario.setup(ev.CallsDone("w0", 0, 1, 0, 1, 1000))
    scenario.setup(lost(2, 4, retries=1), ev.WorkerJoined("w0", 1))
    todo = [tuple(x) for x in scenario.scheduler._passes[1].todo]
    running = [(x.lo, x.hi, x.attempt) for x in scenario.scheduler._members.leases.values()]
    of = {c: a for lo, hi, a in (*todo, *running) for c in range(lo, hi)}
    assert of.pop(4) == 1
    assert set(of.values()) == {0}
    assert set(of) == set(range(1, 100)) - {4}


def test_a_timeout_of_a_call_that_has_just_ended_charges_no_call() -> None:
    scenario = begun(steps=2)
    scenario.setup(ev.WorkerLost("w0", 0, "signal 9", running=(0, 0)), ev.WorkerJoined("w0", 1))
    assert not scenario.scheduler._passes[1].histories
