"""Scenarios of second attempts: when they start, which one counts, and what they must not do."""

from __future__ import annotations

import pytest

from pipedist.errors import LocalProtocolError
from pipedist.scheduler import PassSettings, SchedulerLimits
from pipedist.scheduler import commands as cmd
from pipedist.scheduler import events as ev
from pipedist.scheduler.leases import Lease
from pipedist.scheduler.stragglers import Durations, Stragglers
from tests.simulation.scenario import Scenario, assigns

LIMITS = SchedulerLimits(speculation_s_min=1.0, speculation_reports_min=3, deaths_max=2)
TWICE = PassSettings(replicas=1, pulled=False, speculation=2.0)


def begun(*workers: str, settings: PassSettings = TWICE, limits: SchedulerLimits = LIMITS) -> Scenario:
    """Return a scenario at 3.0 s: three calls of 1 s have results, and w0 executes only call 3.

    Lease 4 contains the last call.
    """
    scenario = Scenario(limits).with_workers("w0").with_pass(settings)
    scenario.setup(ev.StepsAvailable(1, 0, 4, 1))
    for call in range(3):
        scenario.at(call + 1.0).setup(ev.CallsDone("w0", 0, call + 1, call, call + 1, 10**9))
    return scenario.with_workers(*(workers or ("w1",)))


def second(scenario: Scenario) -> cmd.SendAssign:
    """Advance the time until a second attempt of call 3 starts, and return it."""
    deadline = scenario.scheduler.deadline()
    assert deadline is not None
    [attempt] = assigns(scenario.at(deadline).setup(ev.Tick()))
    return attempt


def test_a_slow_call_gets_a_second_attempt_on_an_idle_worker() -> None:
    scenario = begun()
    deadline = scenario.scheduler.deadline()
    assert deadline == pytest.approx(3.0 + 2.0, rel=1 / 8)
    scenario.at(deadline - 0.01)(ev.Tick())
    scenario.at(deadline)(ev.Tick(), cmd.SendBind("w1", 1), cmd.SendAssign("w1", 5, 1, 3, 4, 0, twin=4))
    assert scenario.scheduler.deadline() is None, "one second attempt is enough"


def test_the_second_attempt_counts_if_it_is_first() -> None:
    scenario = begun()
    second(scenario)
    scenario(
        ev.CallsDone("w1", 0, 5, 3, 4, 10**9),
        cmd.SendCancel("w0", 4),
        cmd.AcceptResults(1, 3, 4, "w1"),
        cmd.StepsReady(1, 3, 4),
    )
    scenario(ev.CallsDone("w0", 0, 4, 3, 4, 10**9), cmd.DropResults("w0", 4))


def test_the_first_attempt_counts_if_it_is_first() -> None:
    scenario = begun()
    second(scenario)
    scenario(
        ev.CallsDone("w0", 0, 4, 3, 4, 10**9),
        cmd.SendCancel("w1", 5),
        cmd.AcceptResults(1, 3, 4, "w0"),
        cmd.StepsReady(1, 3, 4),
    )
    scenario(ev.CallsDone("w1", 0, 5, 3, 4, 10**9), cmd.DropResults("w1", 5))
    scenario(ev.CallFailed("w1", 0, 5, 3), cmd.DropResults("w1", 5))


def test_the_slow_worker_is_suspended_until_it_confirms_the_cancellation() -> None:
    scenario = begun()
    second(scenario)
    scenario.setup(ev.CallsDone("w1", 0, 5, 3, 4, 10**9), ev.StepsAvailable(1, 4, 6, 1))
    assert [lease.worker for lease in assigns(scenario.setup(ev.StepsAvailable(1, 6, 8, 1)))] == []
    scenario.setup(ev.CancelConfirmed("w0", 0, 3))
    scenario.setup(ev.CancelConfirmed("w0", 7, 4))
    assert scenario.scheduler._members.ready == 1, "another lease's, and another life's, say nothing"
    [lease] = assigns(scenario.setup(ev.CancelConfirmed("w0", 0, 4)))
    assert lease.worker == "w0"


def test_a_suspended_worker_that_is_lost_is_replaced_without_a_charge() -> None:
    scenario = begun()
    second(scenario)
    scenario.setup(ev.CallsDone("w1", 0, 5, 3, 4, 10**9))
    scenario(ev.WorkerLost("w0", 0, "signal 9", running=(4, 3)), cmd.StartWorker("w0", 1))
    scenario(ev.WorkerJoined("w0", 1))
    scenario(ev.CancelConfirmed("w0", 1, 4))
    assert scenario.scheduler._members.ready == 2


@pytest.mark.parametrize("fails_first", ["w0", "w1"])
def test_an_error_of_one_of_two_attempts_does_not_count(fails_first: str) -> None:
    scenario = begun()
    second(scenario)
    leases = {"w0": 4, "w1": 5}
    other = "w1" if fails_first == "w0" else "w0"
    scenario(
        ev.CallFailed(fails_first, 0, leases[fails_first], 3),
        cmd.SendCancel(fails_first, leases[fails_first]),
    )
    assert scenario.scheduler.deadline() is None, "no worker is idle"
    scenario(
        ev.CallsDone(other, 0, leases[other], 3, 4, 10**9),
        cmd.AcceptResults(1, 3, 4, other),
        cmd.StepsReady(1, 3, 4),
    )


@pytest.mark.parametrize("how", ["raised", "lost", "not sent"])
def test_a_failed_second_attempt_is_followed_by_another(how: str) -> None:
    limits = SchedulerLimits(speculation_s_min=1.0, speculation_reports_min=3, speculation_attempts_max=2)
    scenario = begun(limits=limits)
    twin = second(scenario)
    for left in (1, 0):
        match how:
            case "raised":
                scenario(ev.CallFailed("w1", 0, twin.lease, 3), cmd.SendCancel("w1", twin.lease))
                came = scenario.setup(ev.CancelConfirmed("w1", 0, twin.lease))
            case "lost":
                incarnation = scenario.scheduler._members.workers["w1"].incarnation
                scenario.setup(ev.WorkerLost("w1", incarnation, "signal 9", running=(twin.lease, 3)))
                came = scenario.setup(ev.WorkerJoined("w1", incarnation + 1))
            case _:
                scenario(ev.LeaseNotSent(twin.lease), cmd.SendCancel("w1", twin.lease))
                came = scenario.setup(ev.CancelConfirmed("w1", 0, twin.lease))
        if left:
            [twin] = assigns(came)
            assert (twin.worker, twin.twin, twin.attempt) == ("w1", 4, 0), "no call is charged"
    assert not assigns(came)
    assert scenario.scheduler.deadline() is None, "two were enough"
    scenario.setup(ev.CallsDone("w0", 0, 4, 3, 4, 10**9))


def test_a_second_attempt_that_continues_alone_has_its_own_start_time() -> None:
    scenario = begun()
    scenario.at(9.0)
    scenario.setup(ev.Tick())
    scenario.at(9.5).setup(ev.WorkerLost("w0", 0, "signal 9", running=(4, 3)))
    came = scenario.at(10.0).setup(ev.WorkerJoined("w0", 1))
    assert not assigns(came), "it has run for a second"
    deadline = scenario.scheduler.deadline()
    assert deadline == pytest.approx(9.0 + 2.0, rel=1 / 8)
    [third] = assigns(scenario.at(deadline).setup(ev.Tick()))
    assert (third.worker, third.twin) == ("w0", 5)
    scenario(
        ev.CallsDone("w0", 1, third.lease, 3, 4, 10**9),
        cmd.SendCancel("w1", 5),
        cmd.AcceptResults(1, 3, 4, "w0"),
        cmd.StepsReady(1, 3, 4),
    )


def test_the_next_call_of_a_lease_has_its_own_second_attempts() -> None:
    limits = SchedulerLimits(
        speculation_s_min=1.0, speculation_reports_min=3, speculation_attempts_max=1, bundle_s=1000.0
    )
    scenario = Scenario(limits).with_workers("w0").with_pass(TWICE)
    scenario.setup(ev.StepsAvailable(1, 0, 9, 1))
    scenario.at(1.0).setup(ev.CallsDone("w0", 0, 1, 0, 1, 10**9))
    scenario.at(2.0).setup(ev.CallsDone("w0", 0, 2, 1, 2, 10**9))
    scenario.with_workers("w1")
    members = scenario.scheduler._members
    while others := [x for x in members.leases.values() if x.id != 2 and x.worker == "w1"]:
        scenario.setup(ev.CallsDone("w1", 0, others[0].id, others[0].next, others[0].hi, 10**9))
    twin = second(scenario)
    scenario.setup(ev.CallFailed("w1", 0, twin.lease, 2))
    assert not assigns(scenario.setup(ev.CancelConfirmed("w1", 0, twin.lease)))
    scenario.setup(ev.CallsDone("w0", 0, 2, 2, 3, 10**9))
    assert second(scenario).lo == 3


def test_two_failed_executions_of_one_attempt_are_one_attempt() -> None:
    scenario = begun()
    second(scenario)
    scenario.setup(ev.CallFailed("w0", 0, 4, 3, retries=1), ev.CancelConfirmed("w0", 0, 4))
    [again] = assigns(scenario.setup(ev.CallFailed("w1", 0, 5, 3, retries=1)))
    assert again.attempt == 1
    scenario(
        ev.CallFailed(again.worker, 0, again.lease, 3, retries=1),
        cmd.StepFailed(1, 3, (cmd.Failure(3, 2, again.worker),)),
    )


def test_the_next_attempt_may_be_executed_twice_again() -> None:
    scenario = begun()
    second(scenario)
    scenario.setup(ev.CallFailed("w0", 0, 4, 3, retries=1), ev.CancelConfirmed("w0", 0, 4))
    [again] = assigns(scenario.setup(ev.CallFailed("w1", 0, 5, 3, retries=1)))
    twin = second(scenario)
    assert (twin.twin, twin.attempt, twin.lo) == (again.lease, 1, 3)


def test_deaths_under_two_attempts_are_one_death() -> None:
    scenario = begun()
    second(scenario)
    scenario(ev.WorkerLost("w0", 0, "signal 9", running=(4, 3)), cmd.StartWorker("w0", 1))
    assert scenario.scheduler.deadline() is None
    scenario(ev.WorkerLost("w1", 0, "signal 9", running=(5, 3)), cmd.StartWorker("w1", 1))
    [again] = assigns(scenario.setup(ev.WorkerJoined("w0", 1)))
    assert again.attempt == 1, "of two deaths that fail a call, it has had one"


def test_no_second_attempt_while_other_calls_wait() -> None:
    scenario = begun()
    scenario.at(100.0)
    leases = assigns(scenario.setup(ev.StepsAvailable(1, 4, 20, 1)))
    assert leases
    assert not any(lease.twin for lease in leases)
    assert scenario.scheduler.deadline() is None, "no worker is idle"


def test_no_second_attempt_before_enough_reports() -> None:
    limits = SchedulerLimits(speculation_s_min=1.0, speculation_reports_min=4)
    scenario = begun(limits=limits)
    assert scenario.scheduler.deadline() is None
    scenario.at(1e6)(ev.Tick())


def test_short_calls_get_no_second_attempt_within_the_minimum() -> None:
    limits = SchedulerLimits(speculation_s_min=50.0, speculation_reports_min=3)
    assert begun(limits=limits).scheduler.deadline() == pytest.approx(53.0)


@pytest.mark.parametrize("how", ["off", "held"])
def test_no_second_attempts(how: str) -> None:
    scenario = begun(settings=TWICE if how == "held" else PassSettings(replicas=1, pulled=False))
    if how == "held":
        scenario(ev.PassDraining(1))
    assert scenario.scheduler.deadline() is None
    scenario.at(1e6)(ev.Tick())


def test_a_gang_gets_no_second_attempt() -> None:
    with pytest.raises(LocalProtocolError, match="of no gang"):
        PassSettings(2, gang=True, speculation=2.0)
    with pytest.raises(LocalProtocolError, match="1 and more"):
        PassSettings(2, speculation=0.5)


def test_calls_queued_behind_a_slow_call_are_reassigned() -> None:
    limits = SchedulerLimits(
        speculation_s_min=1.0, speculation_reports_min=3, bundle_s=0.001, prefetch_below_s=10.0
    )
    scenario = Scenario(limits).with_workers("w0").with_pass(TWICE)
    scenario.setup(ev.StepsAvailable(1, 0, 3, 1))
    for call in range(3):
        scenario.at(call + 1.0).setup(ev.CallsDone("w0", 0, call + 1, call, call + 1, 10**9))
    sent = assigns(scenario.setup(ev.StepsAvailable(1, 3, 5, 1)))
    assert [(x.worker, x.lo) for x in sent] == [("w0", 3), ("w0", 4)], "the second one waits there"
    scenario.with_workers("w1")
    deadline = scenario.scheduler.deadline()
    assert deadline is not None
    (behind,) = assigns(scenario.at(deadline).setup(ev.Tick()))
    assert (behind.worker, behind.lo, behind.twin) == ("w1", 4, 0)
    came = scenario.setup(ev.CallsDone("w1", 0, behind.lease, 4, 5, 10**9))
    [twin] = assigns(came)
    assert (twin.worker, twin.lo, twin.twin) == ("w1", 3, sent[0].lease)
    assert not assigns(scenario.setup(ev.Tick()))


def test_calls_of_another_pass_are_reassigned_from_behind_an_early_hang() -> None:
    """A call hangs before its pass has enough reports for second attempts; the other pass goes on elsewhere."""
    limits = SchedulerLimits(
        speculation_s_min=1.0, speculation_reports_min=3, bundle_s=0.001, prefetch_below_s=10.0
    )
    scenario = Scenario(limits).with_workers("w0").with_pass(TWICE).with_pass(TWICE, 2)
    scenario.setup(ev.StepsAvailable(1, 0, 1, 1), ev.CallsDone("w0", 0, 1, 0, 1, 10**6))
    scenario.setup(ev.StepsAvailable(2, 0, 1, 1), ev.CallsDone("w0", 0, 2, 0, 1, 10**6))
    hung, behind = assigns(scenario.setup(ev.StepsAvailable(1, 1, 2, 1), ev.StepsAvailable(2, 1, 2, 1)))
    assert [(x.worker, x.pass_id) for x in (hung, behind)] == [("w0", 1), ("w0", 2)]
    scenario.with_workers("w1")
    assert scenario.scheduler.deadline() == 1.0
    came = scenario.at(1.0).setup(ev.Tick())
    assert cmd.SendCancel("w0", behind.lease) in came
    assert [(x.worker, x.pass_id, x.lo, x.twin) for x in assigns(came)] == [("w1", 2, 1, 0)]
    assert scenario.scheduler.deadline() is None, "the hung call gets no second attempt yet"
    assert assigns(scenario.setup(ev.StepsAvailable(2, 2, 3, 1)))[0].worker == "w1", "nothing behind the hang"


def test_a_draining_pass_is_drained_when_its_last_lease_is_reassigned() -> None:
    """It was queued behind a slow call of another pass; no later event would report that the pass is drained."""
    limits = SchedulerLimits(
        speculation_s_min=1.0, speculation_reports_min=3, bundle_s=0.001, prefetch_below_s=10.0
    )
    scenario = (
        Scenario(limits).with_workers("w0").with_pass(TWICE).with_pass(PassSettings(1, pulled=False), 2)
    )
    scenario.setup(ev.StepsAvailable(2, 0, 1, 1), ev.CallsDone("w0", 0, 1, 0, 1, 10**9))
    scenario.setup(ev.StepsAvailable(1, 0, 4, 1))
    for call in range(3):
        scenario.at(call + 1.0).setup(ev.CallsDone("w0", 0, call + 2, call, call + 1, 10**9))
    (behind,) = assigns(scenario.setup(ev.StepsAvailable(2, 1, 2, 1)))
    assert (behind.worker, behind.pass_id) == ("w0", 2), "behind the last call of pass 1"
    scenario.setup(ev.PassDraining(2))
    scenario.with_workers("w1")
    deadline = scenario.scheduler.deadline()
    assert deadline is not None
    came = scenario.at(deadline).setup(ev.Tick())
    assert cmd.SendCancel("w0", behind.lease) in came
    assert cmd.PassDrained(2) in came


def test_a_range_continues_with_the_first_attempt_that_reports() -> None:
    limits = SchedulerLimits(
        speculation_s_min=1.0, speculation_reports_min=3, bundle_s=1000.0, prefetch_below_s=0.0
    )
    scenario = Scenario(limits).with_workers("w0").with_pass(TWICE)
    scenario.setup(ev.StepsAvailable(1, 0, 9, 1))
    scenario.at(1.0).setup(ev.CallsDone("w0", 0, 1, 0, 1, 10**9))
    slow = scenario.scheduler._members.leases[2]
    scenario.at(2.0).setup(ev.CallsDone("w0", 0, 2, 1, 2, 10**9))
    assert (slow.next, slow.hi) == (2, 5)
    scenario.with_workers("w1")
    while others := [x for x in scenario.scheduler._members.leases.values() if x is not slow]:
        scenario.setup(ev.CallsDone("w1", 0, others[0].id, others[0].next, others[0].hi, 10**9))
    twin = second(scenario)
    assert (twin.worker, twin.lo, twin.hi, twin.twin) == ("w1", 2, 5, slow.id)
    scenario.setup(ev.CallsDone("w0", 0, slow.id, 2, 3, 10**9))
    assert slow.twin is None
    assert slow.next == 3
    scenario.setup(ev.CancelConfirmed("w1", 0, twin.lease))
    again = second(scenario)
    assert (again.lo, again.hi) == (3, 5), "the next call may be slow too"


def test_closing_a_pass_cancels_both_attempts() -> None:
    scenario = begun()
    second(scenario)
    scenario(
        ev.PassClosed(1),
        cmd.SendCancel("w0", 4),
        cmd.SendCancel("w1", 5),
        cmd.SendUnbind("w0", 1),
        cmd.SendUnbind("w1", 1),
    )
    assert not scenario.scheduler._members.watched


def test_a_draining_pass_is_drained_when_one_of_two_attempts_reports() -> None:
    scenario = begun()
    second(scenario)
    scenario(ev.PassDraining(1))
    assert cmd.PassDrained(1) in scenario.setup(ev.CallsDone("w1", 0, 5, 3, 4, 10**9))


def test_a_second_attempt_that_cannot_be_sent_has_no_effect() -> None:
    scenario = begun()
    second(scenario)
    scenario(ev.LeaseNotSent(5), cmd.SendCancel("w1", 5))
    scenario.setup(ev.CallsDone("w0", 0, 4, 3, 4, 10**9))


def test_a_search_for_culprits_begins_once() -> None:
    scenario = begun()
    second(scenario)
    scenario(ev.CallFailed("w0", 0, 4, 3, quarantine=True), cmd.SendCancel("w0", 4))
    scenario(ev.CallFailed("w1", 0, 5, 3, quarantine=True), cmd.SizeCall(1, 3))
    scenario.setup(ev.CancelConfirmed("w0", 0, 4))
    probes = assigns(scenario.setup(ev.CallSized(1, 3, 2)))
    assert [probe.elements for probe in probes] == [((0, 1),), ((1, 2),)]
    assert scenario.scheduler.deadline() is None, "probes get no second attempt"
    scenario.at(1e6)(ev.Tick())


def test_the_longest_running_call_is_checked_first() -> None:
    running = Stragglers(2.0)
    leases = [Lease(id_, f"w{id_}", 1, id_, id_ + 1, 0, id_, 0.0, since=float(id_)) for id_ in range(4)]
    for lease in leases:
        running.begun(lease)
    for lease in leases[1:3]:
        running.over(lease)
    for lease in (leases[2], leases[1]):
        running.again(lease)
    assert [lease.id for lease in running.leases] == [0, 1, 2, 3]


# -- usual durations -------------------------------------------------------------------------------


def test_the_percentile_ignores_a_few_outliers() -> None:
    times = Durations()
    for place in range(200):
        times.add(1000.0 if place % 25 == 0 else 0.9)
    assert 0.9 <= times.upper_s <= 0.9 * 9 / 8
    for _ in range(100):
        times.add(1000.0)
    assert times.upper_s >= 1000.0


def test_invalid_durations_are_counted() -> None:
    times = Durations()
    for took_s in (0.0, -1.0, 1e-30, 1e30):
        times.add(took_s)
    assert times.count == 4
    assert times.upper_s >= 1e30


def test_a_call_that_ends_by_its_timeout_before_a_second_attempt_would_gets_none() -> None:
    for call_s_max, copied in ((2.9, False), (9.0, True)):
        settings = PassSettings(replicas=1, pulled=False, speculation=2.0, call_s_max=call_s_max)
        scenario = begun(settings=settings)
        deadline = scenario.scheduler.deadline()
        assert deadline is not None
        assert len(assigns(scenario.at(deadline).setup(ev.Tick()))) == copied
        assert scenario.scheduler.deadline() is None
