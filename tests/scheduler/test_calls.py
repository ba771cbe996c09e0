"""Playbooks of calls: leases, retries, failures, and what becomes visible when."""

from __future__ import annotations

import msgspec
import pytest

from pipedist.errors import LocalProtocolError
from pipedist.scheduler import PassSettings, SchedulerLimits
from pipedist.scheduler import commands as cmd
from pipedist.scheduler import events as ev
from tests.simulation.scenario import Scenario, assigns

PLAIN = PassSettings(replicas=1, pulled=False)
LENIENT = msgspec.structs.replace(PLAIN, fail_fast=False)
MS, SECOND = 10**6, 10**9


def ranges(commands: list[cmd.Command]) -> list[tuple[str, int, int, int]]:
    return [(x.worker, x.lo, x.hi, x.attempt) for x in assigns(commands)]


# -- leases ------------------------------------------------------------------------------


def test_leases_grow_with_what_came_back_and_are_shared_fairly() -> None:
    play = Scenario(SchedulerLimits(bundle_growth=8)).with_workers("w0").with_pass(PLAIN)
    assert ranges(play.setup(ev.StepsAvailable(1, 0, 100, 1))) == [("w0", 0, 1, 0)]
    came = play.setup(ev.CallsDone("w0", 0, 1, 0, 1, 1000))
    assert ranges(came) == [("w0", 1, 9, 0), ("w0", 9, 17, 0)], "8 times as many, and one in advance"
    came = play.setup(ev.CallsDone("w0", 0, 2, 1, 9, 8000))
    assert ranges(came) == [("w0", 17, 59, 0)], "64 times, but half of what waits at most"


def test_long_calls_travel_alone_and_never_in_advance() -> None:
    play = Scenario().with_workers("w0").with_pass(PLAIN)
    play.setup(ev.StepsAvailable(1, 0, 100, 1))
    assert ranges(play.setup(ev.CallsDone("w0", 0, 1, 0, 1, SECOND))) == [("w0", 1, 2, 0)]


def test_a_lease_takes_about_its_time_and_has_its_limits() -> None:
    limits = SchedulerLimits(bundle_s=0.01, bundle_growth=1000, bundle_calls_max=50)
    play = Scenario(limits).with_workers("w0").with_pass(PLAIN)
    play.setup(ev.StepsAvailable(1, 0, 10_000, 1))
    assert ranges(play.setup(ev.CallsDone("w0", 0, 1, 0, 1, 2 * MS)))[0] == ("w0", 1, 6, 0)
    for _ in range(30):  # a worker that says its calls take no time at all
        [lease, *_] = assigns(play.setup(ev.CallsDone("w0", 0, *running(play), 0)))
    assert lease.hi - lease.lo == 50


def running(play: Scenario) -> tuple[int, int, int]:
    """Return (lease, lo, hi) of what w0 runs."""
    members = play.scheduler._members
    lease = members.leases[members.workers["w0"].leases[0]]
    return lease.id, lease.next, lease.hi


def test_calls_that_take_no_time_for_ever_overflow_nothing() -> None:
    play = Scenario().with_workers("w0").with_pass(PLAIN)
    play.setup(ev.StepsAvailable(1, 0, 10, 1), ev.CallsDone("w0", 0, 1, 0, 1, 1))
    for step in range(10, 3000):
        play.scheduler.handle(ev.StepsAvailable(1, step, step + 1, 1), 0.0)
        play.scheduler.handle(ev.CallsDone("w0", 0, *running(play), 0), 0.0)
    play.scheduler.validate()


def test_inputs_that_travel_bound_the_size_of_a_lease() -> None:
    play = Scenario(SchedulerLimits(bundle_bytes_max=4000)).with_workers("w0").with_pass(PLAIN)
    play.setup(ev.StepsAvailable(1, 0, 100, 1, bytes=100_000))
    assert ranges(play.setup(ev.CallsDone("w0", 0, 1, 0, 1, 1000)))[0] == ("w0", 1, 5, 0)


def test_a_lease_never_spans_the_missing_calls_of_a_short_step() -> None:
    play = Scenario().with_workers("w0").with_pass(PassSettings(replicas=4, pulled=False))
    play.setup(ev.StepsAvailable(1, 0, 1, 4))
    for call in range(4):
        play.setup(ev.CallsDone("w0", 0, *running(play)[:2], call + 1, 1000))
    came = play.setup(
        ev.StepsAvailable(1, 1, 2, 3), ev.StepsAvailable(1, 2, 3, 0), ev.StepsAvailable(1, 3, 4, 4)
    )
    assert all(x.hi - x.lo <= 4 and x.lo % 4 < 3 for x in assigns(came))
    play.setup(ev.CallsDone("w0", 0, *running(play), 1000))
    while play.scheduler._members.workers["w0"].leases:
        came = play.setup(ev.CallsDone("w0", 0, *running(play), 1000))
    assert cmd.StepsReady(1, 3, 4) in came


def test_two_workers_deal_fairly_and_the_longest_idle_is_first() -> None:
    play = Scenario().with_workers("w0", "w1").with_pass(PLAIN)
    assert ranges(play.setup(ev.StepsAvailable(1, 0, 4, 1))) == [("w0", 0, 1, 0), ("w1", 1, 2, 0)]
    play.setup(ev.CallsDone("w1", 0, 2, 1, 2, SECOND))
    play.setup(ev.CallsDone("w1", 0, 3, 2, 3, SECOND), ev.CallsDone("w1", 0, 4, 3, 4, SECOND))
    play.setup(ev.CallsDone("w0", 0, 1, 0, 1, SECOND))
    assert ranges(play.setup(ev.StepsAvailable(1, 4, 5, 1))) == [("w1", 4, 5, 0)]


# -- results -----------------------------------------------------------------------------


def test_results_come_in_parts_and_steps_show_when_they_are_whole() -> None:
    play = Scenario().with_workers("w0").with_pass(PassSettings(replicas=2, pulled=False))
    play.setup(ev.StepsAvailable(1, 0, 1, 2), ev.CallsDone("w0", 0, 1, 0, 1, 1000))
    play.setup(ev.CallsDone("w0", 0, 2, 1, 2, 1000))
    assert ranges(play.setup(ev.StepsAvailable(1, 1, 5, 2)))[0] == ("w0", 2, 6, 0)
    play(ev.CallsDone("w0", 0, 3, 2, 3, 1000), cmd.AcceptResults(1, 2, 3, "w0"))
    play(
        ev.CallsDone("w0", 0, 3, 3, 5, 1000),
        cmd.AcceptResults(1, 3, 5, "w0"),
        cmd.StepsReady(1, 1, 2),
    )


def test_steps_that_are_done_out_of_order_show_in_order() -> None:
    play = Scenario().with_workers("w0", "w1", "w2").with_pass(PLAIN)
    play.setup(ev.StepsAvailable(1, 0, 3, 1), ev.StepsEnded(1))
    play(ev.CallsDone("w2", 0, 3, 2, 3, SECOND), cmd.AcceptResults(1, 2, 3, "w2"))
    play(ev.CallsDone("w1", 0, 2, 1, 2, SECOND), cmd.AcceptResults(1, 1, 2, "w1"))
    play(
        ev.CallsDone("w0", 0, 1, 0, 1, SECOND),
        cmd.AcceptResults(1, 0, 1, "w0"),
        cmd.StepsReady(1, 0, 3),
        cmd.PassComplete(1),
    )


def test_an_unordered_pass_shows_each_step_when_it_is_done() -> None:
    settings = PassSettings(replicas=2, ordered=False, fail_fast=False, pulled=False)
    play = Scenario().with_workers("w0", "w1", "w2").with_pass(settings)
    play.setup(ev.StepsAvailable(1, 0, 1, 2), ev.StepsAvailable(1, 1, 2, 1))
    play(ev.CallsDone("w2", 0, 3, 2, 3, SECOND), cmd.AcceptResults(1, 2, 3, "w2"), cmd.StepsReady(1, 1, 2))
    play(
        ev.CallFailed("w1", 0, 2, 1),
    )
    play(
        ev.CallsDone("w0", 0, 1, 0, 1, SECOND),
        cmd.AcceptResults(1, 0, 1, "w0"),
        cmd.StepFailed(1, 0, (cmd.Failure(1, 1, "w1"),)),
    )
    play(ev.StepsAvailable(1, 2, 4, 0), cmd.StepsReady(1, 2, 3), cmd.StepsReady(1, 3, 4))
    play(ev.PassClosed(1), cmd.SendUnbind("w0", 1), cmd.SendUnbind("w1", 1), cmd.SendUnbind("w2", 1))


def test_empty_steps_and_passes() -> None:
    play = Scenario().with_pass(PLAIN, 1).with_pass(PLAIN, 2)
    play(ev.StepsEnded(1), cmd.PassComplete(1))
    play(ev.StepsAvailable(2, 0, 3, 0), cmd.StepsReady(2, 0, 3))
    play(ev.StepsAvailable(2, 3, 3, 1))
    play(ev.StepsEnded(2), cmd.PassComplete(2))
    play(ev.PassClosed(2))


# -- failures ----------------------------------------------------------------------------


def test_a_call_that_raises_is_tried_again_before_any_later_one() -> None:
    play = Scenario().with_workers("w0").with_pass(PLAIN)
    play.setup(ev.StepsAvailable(1, 0, 1, 1), ev.CallsDone("w0", 0, 1, 0, 1, 1000))
    play.setup(ev.StepsAvailable(1, 1, 41, 1))
    play.setup(ev.CallsDone("w0", 0, 2, 1, 4, 1000))
    play(ev.CallFailed("w0", 0, 2, 4, retries=1))
    came = play.setup(ev.CallsDone("w0", 0, 2, 5, 9, 1000))
    assert cmd.AcceptResults(1, 5, 9, "w0") in came
    assert ranges(came) == [("w0", 4, 5, 1)]
    play.setup(ev.CallsDone("w0", 0, *running(play), 8000))
    came = play.setup(ev.CallsDone("w0", 0, *running(play), 1000))
    assert cmd.StepsReady(1, 4, 17) in came


def test_retries_exhausted() -> None:
    play = Scenario().with_workers("w0").with_pass(PLAIN)
    play.setup(ev.StepsAvailable(1, 0, 5, 1))
    play(ev.CallFailed("w0", 0, 1, 0, retries=1), cmd.SendAssign("w0", 2, 1, 0, 1, 1))
    play(
        ev.CallFailed("w0", 0, 2, 0, retries=1),
        cmd.StepFailed(1, 0, (cmd.Failure(0, 2, "w0"),)),
    )
    play(ev.StepsAvailable(1, 5, 9, 1))
    play(ev.StepsEnded(1))


def test_what_another_attempt_can_not_help_is_not_tried_again() -> None:
    play = Scenario().with_workers("w0").with_pass(PLAIN)
    play.setup(ev.StepsAvailable(1, 0, 5, 1))
    play(
        ev.CallFailed("w0", 0, 1, 0),
        cmd.StepFailed(1, 0, (cmd.Failure(0, 1, "w0"),)),
    )


def test_a_stage_that_is_not_retried_fails_a_call_that_another_stage_had_tried_again() -> None:
    play = Scenario().with_workers("w0").with_pass(PLAIN)
    play.setup(ev.StepsAvailable(1, 0, 5, 1))
    play(ev.CallFailed("w0", 0, 1, 0, retries=5), cmd.SendAssign("w0", 2, 1, 0, 1, 1))
    play(
        ev.CallFailed("w0", 0, 2, 0, retries=0),
        cmd.StepFailed(1, 0, (cmd.Failure(0, 2, "w0"),)),
    )


def test_the_pass_of_a_lease_is_told_to_its_holder_only() -> None:
    play = Scenario().with_workers("w0", "w1").with_pass(PLAIN)
    play.setup(ev.StepsAvailable(1, 0, 1, 1))
    assert play.scheduler.pass_of("w0", 1) == 1
    assert play.scheduler.pass_of("w1", 1) is None
    assert play.scheduler.pass_of("w0", 2) is None


def test_deaths_are_no_retries() -> None:
    play = Scenario().with_workers("w0").with_pass(PLAIN)
    play.setup(ev.StepsAvailable(1, 0, 1, 1), ev.WorkerLost("w0", 0, "signal 9"))
    play(ev.WorkerJoined("w0", 1), cmd.SendBind("w0", 1), cmd.SendAssign("w0", 2, 1, 0, 1, 1))
    play(ev.CallFailed("w0", 1, 2, 0, retries=1), cmd.SendAssign("w0", 3, 1, 0, 1, 2))
    play(
        ev.CallFailed("w0", 1, 3, 0, retries=1),
        cmd.StepFailed(1, 0, (cmd.Failure(0, 3, "w0"),)),
    )


@pytest.mark.parametrize("first", ["lower", "higher"])
def test_the_lowest_failing_step_is_told_whatever_came_first(first: str) -> None:
    play = Scenario().with_workers("w0", "w1", "w2", "w3").with_pass(PLAIN)
    play.setup(ev.StepsAvailable(1, 0, 6, 1))
    lower, higher = ev.CallFailed("w1", 0, 2, 1), ev.CallFailed("w2", 0, 3, 2)
    if first == "lower":
        play(lower, cmd.SendCancel("w2", 3), cmd.SendCancel("w3", 4))
        play(higher, cmd.DropResults("w2", 3))
    else:
        play(higher, cmd.SendCancel("w3", 4))
        play(lower)
    play(
        ev.CallsDone("w0", 0, 1, 0, 1, SECOND),
        cmd.AcceptResults(1, 0, 1, "w0"),
        cmd.StepsReady(1, 0, 1),
        cmd.StepFailed(1, 1, (cmd.Failure(1, 1, "w1"),)),
    )


def test_a_failed_step_is_told_when_all_its_calls_are_over_with_the_lowest_first() -> None:
    play = Scenario().with_workers("w0", "w1", "w2").with_pass(PassSettings(replicas=3, pulled=False))
    play.setup(ev.StepsAvailable(1, 0, 1, 3))
    play(ev.CallFailed("w2", 0, 3, 2))
    play(ev.CallFailed("w0", 0, 1, 0))
    play(
        ev.CallsDone("w1", 0, 2, 1, 2, SECOND),
        cmd.AcceptResults(1, 1, 2, "w1"),
        cmd.StepFailed(1, 0, (cmd.Failure(0, 1, "w0"), cmd.Failure(2, 1, "w2"))),
    )


def test_a_call_beyond_the_failed_step_is_not_tried_again() -> None:
    play = Scenario().with_workers("w0", "w1").with_pass(PLAIN)
    play.setup(ev.StepsAvailable(1, 0, 2, 1), ev.CallsDone("w1", 0, 2, 1, 2, 1000))
    play.setup(ev.StepsAvailable(1, 2, 40, 1))  # w1 runs [2, 10), w0 still runs call 0
    play(ev.CallsDone("w1", 0, 3, 2, 4, 1000), cmd.AcceptResults(1, 2, 4, "w1"))
    play(ev.CallFailed("w1", 0, 3, 4), cmd.SendCancel("w1", 4))
    play(ev.CallFailed("w1", 0, 3, 5, retries=1))
    play(ev.WorkerLost("w1", 0, "signal 9"), cmd.StartWorker("w1", 1))
    play(ev.WorkerJoined("w1", 1))
    play(
        ev.CallsDone("w0", 0, 1, 0, 1, SECOND),
        cmd.AcceptResults(1, 0, 1, "w0"),
        cmd.StepsReady(1, 0, 4),
        cmd.StepFailed(1, 4, (cmd.Failure(4, 1, "w1"),)),
    )


def test_without_fail_fast_only_the_failing_steps_fail() -> None:
    play = Scenario().with_workers("w0", "w1", "w2", "w3").with_pass(LENIENT)
    play.setup(ev.StepsAvailable(1, 0, 4, 1), ev.StepsEnded(1))
    play(ev.CallFailed("w3", 0, 4, 3))
    play(ev.CallFailed("w1", 0, 2, 1))
    play(ev.CallsDone("w2", 0, 3, 2, 3, SECOND), cmd.AcceptResults(1, 2, 3, "w2"))
    play(
        ev.CallsDone("w0", 0, 1, 0, 1, SECOND),
        cmd.AcceptResults(1, 0, 1, "w0"),
        cmd.StepsReady(1, 0, 1),
        cmd.StepFailed(1, 1, (cmd.Failure(1, 1, "w1"),)),
        cmd.StepsReady(1, 2, 3),
        cmd.StepFailed(1, 3, (cmd.Failure(3, 1, "w3"),)),
        cmd.PassComplete(1),
    )


def test_a_lease_that_can_not_be_sent_fails_its_calls_and_costs_nobody_anything() -> None:
    settings = PassSettings(replicas=2, ordered=False, fail_fast=False, pulled=False)
    play = Scenario().with_workers("w0").with_pass(settings)
    play.setup(ev.StepsAvailable(1, 0, 1, 2), ev.CallsDone("w0", 0, 1, 0, 1, 1000))
    play.setup(ev.StepsAvailable(1, 1, 3, 2))  # lease 2: call 1, lease 3 in advance: calls 2 and 3
    assert [(x.id, x.lo, x.hi) for x in play.scheduler._members.leases.values()] == [(2, 1, 2), (3, 2, 4)]
    came = play.setup(ev.LeaseNotSent(3))
    assert came[0] == cmd.StepFailed(1, 1, (cmd.Failure(2, 1, "w0"), cmd.Failure(3, 1, "w0")))
    assert ranges(came) == [("w0", 4, 5, 0)]
    play(ev.LeaseNotSent(3))
    play(
        ev.CallsDone("w0", 0, 2, 1, 2, 1000),
        cmd.AcceptResults(1, 1, 2, "w0"),
        cmd.StepsReady(1, 0, 1),
        cmd.SendAssign("w0", 5, 1, 5, 6, 0),
    )


# -- what the driver may not do ----------------------------------------------------------


def test_steps_are_offered_in_order_and_never_after_the_end() -> None:
    play = Scenario().with_pass(PLAIN, 1).with_pass(PLAIN, 2)
    with pytest.raises(LocalProtocolError, match=r"steps \[1, 2\) of 1 calls .* begin at 0"):
        play.setup(ev.StepsAvailable(1, 1, 2, 1))
    with pytest.raises(LocalProtocolError, match="at most 1 calls"):
        play.setup(ev.StepsAvailable(1, 0, 1, 2))
    play.setup(ev.StepsEnded(2))
    with pytest.raises(LocalProtocolError, match="after its end"):
        play.setup(ev.StepsAvailable(2, 0, 1, 1))
    with pytest.raises(LocalProtocolError, match="'ended' can't happen while complete"):
        play.setup(ev.StepsEnded(2))
    with pytest.raises(LocalProtocolError, match="pass 2 was opened twice"):
        play.setup(ev.PassOpened(2, PLAIN))


@pytest.mark.parametrize(
    "settings",
    [
        {"replicas": 0},
        {"replicas": 1, "ordered": False, "pulled": False},
        {"replicas": 1, "ordered": False, "fail_fast": False},
    ],
)
def test_settings_that_do_not_go_together(settings: dict[str, int]) -> None:
    with pytest.raises(LocalProtocolError):
        PassSettings(**settings)  # type: ignore[arg-type]


def test_a_call_that_was_tried_before_travels_alone() -> None:
    """So that the next death is charged to the call that caused it, not to one before it in its lease."""
    play = Scenario().with_workers("w0").with_pass(PLAIN)
    play.setup(ev.StepsAvailable(1, 0, 1, 1), ev.CallsDone("w0", 0, 1, 0, 1, 1000))
    play.setup(ev.StepsAvailable(1, 1, 3, 1))
    play.setup(ev.CallFailed("w0", 0, 2, 1, retries=1), ev.CallFailed("w0", 0, 3, 2, retries=1))
    assert ranges(play.setup(ev.StepsAvailable(1, 3, 40, 1))) == []
    leases = play.scheduler._members.leases.values()
    assert [(x.lo, x.hi, x.attempt) for x in leases] == [(1, 2, 1), (2, 3, 1)]
