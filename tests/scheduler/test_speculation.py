"""Playbooks of second attempts: when they begin, which one counts, and what they never do."""

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
    """Return a story at 3.0 s: three calls have come back, of a second each, and w0 executes call 3 alone.

    What it executes is lease 4, of the last call.
    """
    play = Scenario(limits).with_workers("w0").with_pass(settings)
    play.setup(ev.StepsAvailable(1, 0, 4, 1))
    for call in range(3):
        play.at(call + 1.0).setup(ev.CallsDone("w0", 0, call + 1, call, call + 1, 10**9))
    return play.with_workers(*(workers or ("w1",)))


def second(play: Scenario) -> cmd.SendAssign:
    """Let the time pass until a second attempt of call 3 begins, and return it."""
    deadline = play.scheduler.deadline()
    assert deadline is not None
    [attempt] = assigns(play.at(deadline).setup(ev.Tick()))
    return attempt


def test_a_call_that_takes_too_long_is_executed_again_by_who_is_idle() -> None:
    play = begun()
    deadline = play.scheduler.deadline()
    assert deadline == pytest.approx(3.0 + 2.0, rel=1 / 8)
    play.at(deadline - 0.01)(ev.Tick())
    play.at(deadline)(ev.Tick(), cmd.SendBind("w1", 1), cmd.SendAssign("w1", 5, 1, 3, 4, 0, twin=4))
    assert play.scheduler.deadline() is None, "one second attempt is enough"


def test_the_second_attempt_counts_if_it_is_first() -> None:
    play = begun()
    second(play)
    play(
        ev.CallsDone("w1", 0, 5, 3, 4, 10**9),
        cmd.SendCancel("w0", 4),
        cmd.AcceptResults(1, 3, 4, "w1"),
        cmd.StepsReady(1, 3, 4),
    )
    play(ev.CallsDone("w0", 0, 4, 3, 4, 10**9), cmd.DropResults("w0", 4))


def test_the_first_attempt_counts_if_it_is_first() -> None:
    play = begun()
    second(play)
    play(
        ev.CallsDone("w0", 0, 4, 3, 4, 10**9),
        cmd.SendCancel("w1", 5),
        cmd.AcceptResults(1, 3, 4, "w0"),
        cmd.StepsReady(1, 3, 4),
    )
    play(ev.CallsDone("w1", 0, 5, 3, 4, 10**9), cmd.DropResults("w1", 5))
    play(ev.CallFailed("w1", 0, 5, 3), cmd.DropResults("w1", 5))


def test_who_may_be_stuck_is_given_nothing_until_it_has_heard() -> None:
    play = begun()
    second(play)
    play.setup(ev.CallsDone("w1", 0, 5, 3, 4, 10**9), ev.StepsAvailable(1, 4, 6, 1))
    assert [lease.worker for lease in assigns(play.setup(ev.StepsAvailable(1, 6, 8, 1)))] == []
    play.setup(ev.CancelConfirmed("w0", 0, 3))
    play.setup(ev.CancelConfirmed("w0", 7, 4))
    assert play.scheduler._members.ready == 1, "another lease's, and another life's, say nothing"
    [lease] = assigns(play.setup(ev.CancelConfirmed("w0", 0, 4)))
    assert lease.worker == "w0"


def test_who_is_stuck_and_lost_is_replaced_and_nobody_is_charged() -> None:
    play = begun()
    second(play)
    play.setup(ev.CallsDone("w1", 0, 5, 3, 4, 10**9))
    play(ev.WorkerLost("w0", 0, "signal 9", running=(4, 3)), cmd.StartWorker("w0", 1))
    play(ev.WorkerJoined("w0", 1))
    play(ev.CancelConfirmed("w0", 1, 4))
    assert play.scheduler._members.ready == 2


@pytest.mark.parametrize("fails_first", ["w0", "w1"])
def test_what_one_of_two_attempts_raises_counts_for_nothing(fails_first: str) -> None:
    play = begun()
    second(play)
    leases = {"w0": 4, "w1": 5}
    other = "w1" if fails_first == "w0" else "w0"
    play(
        ev.CallFailed(fails_first, 0, leases[fails_first], 3),
        cmd.SendCancel(fails_first, leases[fails_first]),
    )
    assert play.scheduler.deadline() is None, "nobody is idle"
    play(
        ev.CallsDone(other, 0, leases[other], 3, 4, 10**9),
        cmd.AcceptResults(1, 3, 4, other),
        cmd.StepsReady(1, 3, 4),
    )


@pytest.mark.parametrize("how", ["raised", "lost", "not sent"])
def test_a_second_attempt_that_came_to_nothing_is_followed_by_another(how: str) -> None:
    limits = SchedulerLimits(speculation_s_min=1.0, speculation_reports_min=3, speculation_attempts_max=2)
    play = begun(limits=limits)
    twin = second(play)
    for left in (1, 0):
        match how:
            case "raised":
                play(ev.CallFailed("w1", 0, twin.lease, 3), cmd.SendCancel("w1", twin.lease))
                came = play.setup(ev.CancelConfirmed("w1", 0, twin.lease))
            case "lost":
                incarnation = play.scheduler._members.workers["w1"].incarnation
                play.setup(ev.WorkerLost("w1", incarnation, "signal 9", running=(twin.lease, 3)))
                came = play.setup(ev.WorkerJoined("w1", incarnation + 1))
            case _:
                play(ev.LeaseNotSent(twin.lease), cmd.SendCancel("w1", twin.lease))
                came = play.setup(ev.CancelConfirmed("w1", 0, twin.lease))
        if left:
            [twin] = assigns(came)
            assert (twin.worker, twin.twin, twin.attempt) == ("w1", 4, 0), "nobody is charged"
    assert not assigns(came)
    assert play.scheduler.deadline() is None, "two were enough"
    play.setup(ev.CallsDone("w0", 0, 4, 3, 4, 10**9))


def test_a_second_attempt_that_goes_on_alone_has_its_own_time() -> None:
    play = begun()
    play.at(9.0)
    play.setup(ev.Tick())
    play.at(9.5).setup(ev.WorkerLost("w0", 0, "signal 9", running=(4, 3)))
    came = play.at(10.0).setup(ev.WorkerJoined("w0", 1))
    assert not assigns(came), "it has run for a second"
    deadline = play.scheduler.deadline()
    assert deadline == pytest.approx(9.0 + 2.0, rel=1 / 8)
    [third] = assigns(play.at(deadline).setup(ev.Tick()))
    assert (third.worker, third.twin) == ("w0", 5)
    play(
        ev.CallsDone("w0", 1, third.lease, 3, 4, 10**9),
        cmd.SendCancel("w1", 5),
        cmd.AcceptResults(1, 3, 4, "w0"),
        cmd.StepsReady(1, 3, 4),
    )


def test_the_next_call_of_a_lease_has_its_own_second_attempts() -> None:
    limits = SchedulerLimits(
        speculation_s_min=1.0, speculation_reports_min=3, speculation_attempts_max=1, bundle_s=1000.0
    )
    play = Scenario(limits).with_workers("w0").with_pass(TWICE)
    play.setup(ev.StepsAvailable(1, 0, 9, 1))
    play.at(1.0).setup(ev.CallsDone("w0", 0, 1, 0, 1, 10**9))
    play.at(2.0).setup(ev.CallsDone("w0", 0, 2, 1, 2, 10**9))
    play.with_workers("w1")
    members = play.scheduler._members
    while others := [x for x in members.leases.values() if x.id != 2 and x.worker == "w1"]:
        play.setup(ev.CallsDone("w1", 0, others[0].id, others[0].next, others[0].hi, 10**9))
    twin = second(play)
    play.setup(ev.CallFailed("w1", 0, twin.lease, 2))
    assert not assigns(play.setup(ev.CancelConfirmed("w1", 0, twin.lease)))
    play.setup(ev.CallsDone("w0", 0, 2, 2, 3, 10**9))
    assert second(play).lo == 3


def test_an_attempt_that_fails_twice_over_is_one_attempt() -> None:
    play = begun()
    second(play)
    play.setup(ev.CallFailed("w0", 0, 4, 3, retries=1), ev.CancelConfirmed("w0", 0, 4))
    [again] = assigns(play.setup(ev.CallFailed("w1", 0, 5, 3, retries=1)))
    assert again.attempt == 1
    play(
        ev.CallFailed(again.worker, 0, again.lease, 3, retries=1),
        cmd.StepFailed(1, 3, (cmd.Failure(3, 2, again.worker),)),
    )


def test_the_next_attempt_may_be_executed_twice_again() -> None:
    play = begun()
    second(play)
    play.setup(ev.CallFailed("w0", 0, 4, 3, retries=1), ev.CancelConfirmed("w0", 0, 4))
    [again] = assigns(play.setup(ev.CallFailed("w1", 0, 5, 3, retries=1)))
    twin = second(play)
    assert (twin.twin, twin.attempt, twin.lo) == (again.lease, 1, 3)


def test_deaths_under_two_attempts_are_one_death() -> None:
    play = begun()
    second(play)
    play(ev.WorkerLost("w0", 0, "signal 9", running=(4, 3)), cmd.StartWorker("w0", 1))
    assert play.scheduler.deadline() is None
    play(ev.WorkerLost("w1", 0, "signal 9", running=(5, 3)), cmd.StartWorker("w1", 1))
    [again] = assigns(play.setup(ev.WorkerJoined("w0", 1)))
    assert again.attempt == 1, "of two deaths that fail a call, it has had one"


def test_nothing_is_executed_twice_while_anything_waits() -> None:
    play = begun()
    play.at(100.0)
    leases = assigns(play.setup(ev.StepsAvailable(1, 4, 20, 1)))
    assert leases
    assert not any(lease.twin for lease in leases)
    assert play.scheduler.deadline() is None, "nobody is idle"


def test_nothing_is_executed_twice_before_enough_is_known() -> None:
    limits = SchedulerLimits(speculation_s_min=1.0, speculation_reports_min=4)
    play = begun(limits=limits)
    assert play.scheduler.deadline() is None
    play.at(1e6)(ev.Tick())


def test_calls_that_are_short_get_no_second_attempt_within_the_least_time() -> None:
    limits = SchedulerLimits(speculation_s_min=50.0, speculation_reports_min=3)
    assert begun(limits=limits).scheduler.deadline() == pytest.approx(53.0)


@pytest.mark.parametrize("how", ["off", "held"])
def test_no_second_attempts(how: str) -> None:
    play = begun(settings=TWICE if how == "held" else PassSettings(replicas=1, pulled=False))
    if how == "held":
        play(ev.PassDraining(1))
    assert play.scheduler.deadline() is None
    play.at(1e6)(ev.Tick())


def test_a_gang_has_none() -> None:
    with pytest.raises(LocalProtocolError, match="of no gang"):
        PassSettings(2, gang=True, speculation=2.0)
    with pytest.raises(LocalProtocolError, match="1 and more"):
        PassSettings(2, speculation=0.5)


def test_what_waits_behind_a_slow_call_is_executed_elsewhere() -> None:
    limits = SchedulerLimits(
        speculation_s_min=1.0, speculation_reports_min=3, bundle_s=0.001, prefetch_below_s=10.0
    )
    play = Scenario(limits).with_workers("w0").with_pass(TWICE)
    play.setup(ev.StepsAvailable(1, 0, 3, 1))
    for call in range(3):
        play.at(call + 1.0).setup(ev.CallsDone("w0", 0, call + 1, call, call + 1, 10**9))
    sent = assigns(play.setup(ev.StepsAvailable(1, 3, 5, 1)))
    assert [(x.worker, x.lo) for x in sent] == [("w0", 3), ("w0", 4)], "the second one waits there"
    play.with_workers("w1")
    deadline = play.scheduler.deadline()
    assert deadline is not None
    (behind,) = assigns(play.at(deadline).setup(ev.Tick()))
    assert (behind.worker, behind.lo, behind.twin) == ("w1", 4, 0)
    came = play.setup(ev.CallsDone("w1", 0, behind.lease, 4, 5, 10**9))
    [twin] = assigns(came)
    assert (twin.worker, twin.lo, twin.twin) == ("w1", 3, sent[0].lease)
    assert not assigns(play.setup(ev.Tick()))


def test_a_held_pass_is_told_quiet_when_its_last_lease_is_taken_back() -> None:
    """It waited behind a slow call of another pass; nobody else would say that nothing of its own runs."""
    limits = SchedulerLimits(
        speculation_s_min=1.0, speculation_reports_min=3, bundle_s=0.001, prefetch_below_s=10.0
    )
    play = Scenario(limits).with_workers("w0").with_pass(TWICE).with_pass(PassSettings(1, pulled=False), 2)
    play.setup(ev.StepsAvailable(2, 0, 1, 1), ev.CallsDone("w0", 0, 1, 0, 1, 10**9))
    play.setup(ev.StepsAvailable(1, 0, 4, 1))
    for call in range(3):
        play.at(call + 1.0).setup(ev.CallsDone("w0", 0, call + 2, call, call + 1, 10**9))
    (behind,) = assigns(play.setup(ev.StepsAvailable(2, 1, 2, 1)))
    assert (behind.worker, behind.pass_id) == ("w0", 2), "behind the last call of pass 1"
    play.setup(ev.PassDraining(2))
    play.with_workers("w1")
    deadline = play.scheduler.deadline()
    assert deadline is not None
    came = play.at(deadline).setup(ev.Tick())
    assert cmd.SendCancel("w0", behind.lease) in came
    assert cmd.PassDrained(2) in came


def test_a_range_goes_on_with_whoever_reports_first() -> None:
    limits = SchedulerLimits(
        speculation_s_min=1.0, speculation_reports_min=3, bundle_s=1000.0, prefetch_below_s=0.0
    )
    play = Scenario(limits).with_workers("w0").with_pass(TWICE)
    play.setup(ev.StepsAvailable(1, 0, 9, 1))
    play.at(1.0).setup(ev.CallsDone("w0", 0, 1, 0, 1, 10**9))
    slow = play.scheduler._members.leases[2]
    play.at(2.0).setup(ev.CallsDone("w0", 0, 2, 1, 2, 10**9))
    assert (slow.next, slow.hi) == (2, 5)
    play.with_workers("w1")
    while others := [x for x in play.scheduler._members.leases.values() if x is not slow]:
        play.setup(ev.CallsDone("w1", 0, others[0].id, others[0].next, others[0].hi, 10**9))
    twin = second(play)
    assert (twin.worker, twin.lo, twin.hi, twin.twin) == ("w1", 2, 5, slow.id)
    play.setup(ev.CallsDone("w0", 0, slow.id, 2, 3, 10**9))
    assert slow.twin is None
    assert slow.next == 3
    play.setup(ev.CancelConfirmed("w1", 0, twin.lease))
    again = second(play)
    assert (again.lo, again.hi) == (3, 5), "the next call may be slow too"


def test_a_pass_that_is_closed_takes_both_along() -> None:
    play = begun()
    second(play)
    play(
        ev.PassClosed(1),
        cmd.SendCancel("w0", 4),
        cmd.SendCancel("w1", 5),
        cmd.SendUnbind("w0", 1),
        cmd.SendUnbind("w1", 1),
    )
    assert not play.scheduler._members.watched


def test_a_held_pass_is_quiet_when_one_of_two_has_come_back() -> None:
    play = begun()
    second(play)
    play(ev.PassDraining(1))
    assert cmd.PassDrained(1) in play.setup(ev.CallsDone("w1", 0, 5, 3, 4, 10**9))


def test_a_second_attempt_that_can_not_be_sent_costs_nothing() -> None:
    play = begun()
    second(play)
    play(ev.LeaseNotSent(5), cmd.SendCancel("w1", 5))
    play.setup(ev.CallsDone("w0", 0, 4, 3, 4, 10**9))


def test_a_search_for_guilty_elements_begins_once() -> None:
    play = begun()
    second(play)
    play(ev.CallFailed("w0", 0, 4, 3, quarantine=True), cmd.SendCancel("w0", 4))
    play(ev.CallFailed("w1", 0, 5, 3, quarantine=True), cmd.SizeCall(1, 3))
    play.setup(ev.CancelConfirmed("w0", 0, 4))
    probes = assigns(play.setup(ev.CallSized(1, 3, 2)))
    assert [probe.elements for probe in probes] == [((0, 1),), ((1, 2),)]
    assert play.scheduler.deadline() is None, "probes get no second attempt"
    play.at(1e6)(ev.Tick())


def test_the_longest_silent_is_looked_at_first_whoever_comes_back() -> None:
    running = Stragglers(2.0)
    leases = [Lease(id_, f"w{id_}", 1, id_, id_ + 1, 0, id_, 0.0, since=float(id_)) for id_ in range(4)]
    for lease in leases:
        running.begun(lease)
    for lease in leases[1:3]:
        running.over(lease)
    for lease in (leases[2], leases[1]):
        running.again(lease)
    assert [lease.id for lease in running.leases] == [0, 1, 2, 3]


# -- what is usual -------------------------------------------------------------------------------


def test_what_is_usual_is_not_moved_by_a_few_that_are_not() -> None:
    times = Durations()
    for place in range(200):
        times.add(1000.0 if place % 25 == 0 else 0.9)
    assert 0.9 <= times.upper_s <= 0.9 * 9 / 8
    for _ in range(100):
        times.add(1000.0)
    assert times.upper_s >= 1000.0


def test_times_that_are_no_times_are_counted() -> None:
    times = Durations()
    for took_s in (0.0, -1.0, 1e-30, 1e30):
        times.add(took_s)
    assert times.count == 4
    assert times.upper_s >= 1e30
