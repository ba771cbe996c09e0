"""Scenarios of calls: leases, retries, failures, and the visibility of steps."""

from __future__ import annotations

import pytest

from pipedist.errors import LocalProtocolError
from pipedist.scheduler import PassSettings, SchedulerLimits
from pipedist.scheduler import commands as cmd
from pipedist.scheduler import events as ev
from tests.simulation.scenario import Scenario, assigns

PLAIN = PassSettings(replicas=1, pulled=False)
MS, SECOND = 10**6, 10**9


def ranges(commands: list[cmd.Command]) -> list[tuple[str, int, int, int]]:
    return [(x.worker, x.lo, x.hi, x.attempt) for x in assigns(commands)]


# -- leases ------------------------------------------------------------------------------


def test_leases_grow_with_results_and_are_divided_fairly() -> None:
    scenario = Scenario(SchedulerLimits(bundle_growth=8)).with_workers("w0").with_pass(PLAIN)
    assert ranges(scenario.setup(ev.StepsAvailable(1, 0, 100, 1))) == [("w0", 0, 1, 0)]
    came = scenario.setup(ev.CallsDone("w0", 0, 1, 0, 1, 1000))
    assert ranges(came) == [("w0", 1, 9, 0), ("w0", 9, 17, 0)], "8 times as many, and one in advance"
    came = scenario.setup(ev.CallsDone("w0", 0, 2, 1, 9, 8000))
    assert ranges(came) == [("w0", 17, 59, 0)], "64 times, but half of what waits at most"


def test_long_calls_are_sent_alone_and_not_in_advance() -> None:
    scenario = Scenario().with_workers("w0").with_pass(PLAIN)
    scenario.setup(ev.StepsAvailable(1, 0, 100, 1))
    assert ranges(scenario.setup(ev.CallsDone("w0", 0, 1, 0, 1, SECOND))) == [("w0", 1, 2, 0)]


def test_a_lease_takes_about_its_time_and_has_its_limits() -> None:
    limits = SchedulerLimits(bundle_s=0.01, bundle_growth=1000, bundle_calls_max=50)
    scenario = Scenario(limits).with_workers("w0").with_pass(PLAIN)
    scenario.setup(ev.StepsAvailable(1, 0, 10_000, 1))
    assert ranges(scenario.setup(ev.CallsDone("w0", 0, 1, 0, 1, 2 * MS)))[0] == ("w0", 1, 6, 0)
    for _ in range(30):  # a worker that reports a duration of 0
        [lease, *_] = assigns(scenario.setup(ev.CallsDone("w0", 0, *running(scenario), 0)))
    assert lease.hi - lease.lo == 50


def running(scenario: Scenario) -> tuple[int, int, int]:
    """Return (lease, lo, hi) of the calls that w0 runs."""
    members = scenario.scheduler._members
    lease = members.leases[members.workers["w0"].leases[0]]
    return lease.id, lease.next, lease.hi


def test_calls_without_duration_do_not_overflow() -> None:
    scenario = Scenario().with_workers("w0").with_pass(PLAIN)
    scenario.setup(ev.StepsAvailable(1, 0, 10, 1), ev.CallsDone("w0", 0, 1, 0, 1, 1))
    for step in range(10, 3000):
        scenario.scheduler.handle(ev.StepsAvailable(1, step, step + 1, 1), 0.0)
        scenario.scheduler.handle(ev.CallsDone("w0", 0, *running(scenario), 0), 0.0)
    scenario.scheduler.validate()


def test_input_bytes_limit_the_size_of_a_lease() -> None:
    scenario = Scenario(SchedulerLimits(bundle_bytes_max=4000)).with_workers("w0").with_pass(PLAIN)
    scenario.setup(ev.StepsAvailable(1, 0, 100, 1, bytes=100_000))
    assert ranges(scenario.setup(ev.CallsDone("w0", 0, 1, 0, 1, 1000)))[0] == ("w0", 1, 5, 0)


def test_a_lease_never_contains_absent_calls_of_a_short_step() -> None:
    scenario = Scenario().with_workers("w0").with_pass(PassSettings(replicas=4, pulled=False))
    scenario.setup(ev.StepsAvailable(1, 0, 1, 4))
    for call in range(4):
        scenario.setup(ev.CallsDone("w0", 0, *running(scenario)[:2], call + 1, 1000))
    came = scenario.setup(
        ev.StepsAvailable(1, 1, 2, 3), ev.StepsAvailable(1, 2, 3, 0), ev.StepsAvailable(1, 3, 4, 4)
    )
    assert all(x.hi - x.lo <= 4 and x.lo % 4 < 3 for x in assigns(came))
    scenario.setup(ev.CallsDone("w0", 0, *running(scenario), 1000))
    while scenario.scheduler._members.workers["w0"].leases:
        came = scenario.setup(ev.CallsDone("w0", 0, *running(scenario), 1000))
    assert cmd.StepsReady(1, 3, 4) in came


def test_two_workers_share_fairly_and_the_longest_idle_is_first() -> None:
    scenario = Scenario().with_workers("w0", "w1").with_pass(PLAIN)
    assert ranges(scenario.setup(ev.StepsAvailable(1, 0, 4, 1))) == [("w0", 0, 1, 0), ("w1", 1, 2, 0)]
    scenario.setup(ev.CallsDone("w1", 0, 2, 1, 2, SECOND))
    scenario.setup(ev.CallsDone("w1", 0, 3, 2, 3, SECOND), ev.CallsDone("w1", 0, 4, 3, 4, SECOND))
    scenario.setup(ev.CallsDone("w0", 0, 1, 0, 1, SECOND))
    assert ranges(scenario.setup(ev.StepsAvailable(1, 4, 5, 1))) == [("w1", 4, 5, 0)]


# -- results -----------------------------------------------------------------------------


def test_steps_are_visible_when_all_results_have_arrived() -> None:
    scenario = Scenario().with_workers("w0").with_pass(PassSettings(replicas=2, pulled=False))
    scenario.setup(ev.StepsAvailable(1, 0, 1, 2), ev.CallsDone("w0", 0, 1, 0, 1, 1000))
    scenario.setup(ev.CallsDone("w0", 0, 2, 1, 2, 1000))
    assert ranges(scenario.setup(ev.StepsAvailable(1, 1, 5, 2)))[0] == ("w0", 2, 6, 0)
    scenario(ev.CallsDone("w0", 0, 3, 2, 3, 1000), cmd.AcceptResults(1, 2, 3, "w0"))
    scenario(
        ev.CallsDone("w0", 0, 3, 3, 5, 1000),
        cmd.AcceptResults(1, 3, 5, "w0"),
        cmd.StepsReady(1, 1, 2),
    )


def test_steps_that_complete_out_of_order_are_visible_in_order() -> None:
    scenario = Scenario().with_workers("w0", "w1", "w2").with_pass(PLAIN)
    scenario.setup(ev.StepsAvailable(1, 0, 3, 1), ev.StepsEnded(1))
    scenario(ev.CallsDone("w2", 0, 3, 2, 3, SECOND), cmd.AcceptResults(1, 2, 3, "w2"))
    scenario(ev.CallsDone("w1", 0, 2, 1, 2, SECOND), cmd.AcceptResults(1, 1, 2, "w1"))
    scenario(
        ev.CallsDone("w0", 0, 1, 0, 1, SECOND),
        cmd.AcceptResults(1, 0, 1, "w0"),
        cmd.StepsReady(1, 0, 3),
        cmd.PassComplete(1),
    )


def test_an_unordered_pass_reports_each_step_when_it_completes() -> None:
    settings = PassSettings(replicas=2, ordered=False, pulled=False)
    scenario = Scenario().with_workers("w0", "w1", "w2").with_pass(settings)
    scenario.setup(ev.StepsAvailable(1, 0, 1, 2), ev.StepsAvailable(1, 1, 2, 1))
    scenario(
        ev.CallsDone("w2", 0, 3, 2, 3, SECOND), cmd.AcceptResults(1, 2, 3, "w2"), cmd.StepsReady(1, 1, 2)
    )
    scenario(
        ev.CallFailed("w1", 0, 2, 1),
    )
    scenario(
        ev.CallsDone("w0", 0, 1, 0, 1, SECOND),
        cmd.AcceptResults(1, 0, 1, "w0"),
        cmd.StepFailed(1, 0, (cmd.Failure(1, 1, "w1"),)),
    )
    scenario(ev.StepsAvailable(1, 2, 4, 0), cmd.StepsReady(1, 2, 3), cmd.StepsReady(1, 3, 4))
    scenario(ev.PassClosed(1), cmd.SendUnbind("w0", 1), cmd.SendUnbind("w1", 1), cmd.SendUnbind("w2", 1))


def test_empty_steps_and_passes() -> None:
    scenario = Scenario().with_pass(PLAIN, 1).with_pass(PLAIN, 2)
    scenario(ev.StepsEnded(1), cmd.PassComplete(1))
    scenario(ev.StepsAvailable(2, 0, 3, 0), cmd.StepsReady(2, 0, 3))
    scenario(ev.StepsAvailable(2, 3, 3, 1))
    scenario(ev.StepsEnded(2), cmd.PassComplete(2))
    scenario(ev.PassClosed(2))


# -- failures ----------------------------------------------------------------------------


def test_a_call_that_raises_is_retried_before_later_ones() -> None:
    scenario = Scenario().with_workers("w0").with_pass(PLAIN)
    scenario.setup(ev.StepsAvailable(1, 0, 1, 1), ev.CallsDone("w0", 0, 1, 0, 1, 1000))
    scenario.setup(ev.StepsAvailable(1, 1, 41, 1))
    scenario.setup(ev.CallsDone("w0", 0, 2, 1, 4, 1000))
    scenario(ev.CallFailed("w0", 0, 2, 4, retries=1))
    came = scenario.setup(ev.CallsDone("w0", 0, 2, 5, 9, 1000))
    assert cmd.AcceptResults(1, 5, 9, "w0") in came
    assert ranges(came) == [("w0", 4, 5, 1)]
    scenario.setup(ev.CallsDone("w0", 0, *running(scenario), 8000))
    came = scenario.setup(ev.CallsDone("w0", 0, *running(scenario), 1000))
    assert cmd.StepsReady(1, 4, 17) in came


def test_retries_exhausted() -> None:
    scenario = Scenario().with_workers("w0").with_pass(PLAIN)
    scenario.setup(ev.StepsAvailable(1, 0, 5, 1))
    scenario(ev.CallFailed("w0", 0, 1, 0, retries=1), cmd.SendAssign("w0", 2, 1, 0, 1, 1))
    scenario(
        ev.CallFailed("w0", 0, 2, 0, retries=1),
        cmd.StepFailed(1, 0, (cmd.Failure(0, 2, "w0"),)),
    )
    scenario(ev.StepsAvailable(1, 5, 9, 1))
    scenario(ev.StepsEnded(1))


def test_a_permanent_failure_is_not_retried() -> None:
    scenario = Scenario().with_workers("w0").with_pass(PLAIN)
    scenario.setup(ev.StepsAvailable(1, 0, 5, 1))
    scenario(
        ev.CallFailed("w0", 0, 1, 0),
        cmd.StepFailed(1, 0, (cmd.Failure(0, 1, "w0"),)),
    )


def test_a_stage_without_retries_fails_a_call_that_another_stage_retried() -> None:
    scenario = Scenario().with_workers("w0").with_pass(PLAIN)
    scenario.setup(ev.StepsAvailable(1, 0, 5, 1))
    scenario(ev.CallFailed("w0", 0, 1, 0, retries=5), cmd.SendAssign("w0", 2, 1, 0, 1, 1))
    scenario(
        ev.CallFailed("w0", 0, 2, 0, retries=0),
        cmd.StepFailed(1, 0, (cmd.Failure(0, 2, "w0"),)),
    )


def test_pass_of_returns_a_pass_only_for_the_holder_of_the_lease() -> None:
    scenario = Scenario().with_workers("w0", "w1").with_pass(PLAIN)
    scenario.setup(ev.StepsAvailable(1, 0, 1, 1))
    assert scenario.scheduler.pass_of("w0", 1) == 1
    assert scenario.scheduler.pass_of("w1", 1) is None
    assert scenario.scheduler.pass_of("w0", 2) is None


def test_deaths_do_not_use_up_retries() -> None:
    scenario = Scenario().with_workers("w0").with_pass(PLAIN)
    scenario.setup(ev.StepsAvailable(1, 0, 1, 1), ev.WorkerLost("w0", 0, "signal 9"))
    scenario(ev.WorkerJoined("w0", 1), cmd.SendBind("w0", 1), cmd.SendAssign("w0", 2, 1, 0, 1, 1))
    scenario(ev.CallFailed("w0", 1, 2, 0, retries=1), cmd.SendAssign("w0", 3, 1, 0, 1, 2))
    scenario(
        ev.CallFailed("w0", 1, 3, 0, retries=1),
        cmd.StepFailed(1, 0, (cmd.Failure(0, 3, "w0"),)),
    )


@pytest.mark.parametrize("first", ["lower", "higher"])
def test_the_lowest_failing_step_is_reported_in_any_order_of_arrival(first: str) -> None:
    scenario = Scenario().with_workers("w0", "w1", "w2", "w3").with_pass(PLAIN)
    scenario.setup(ev.StepsAvailable(1, 0, 6, 1))
    lower, higher = ev.CallFailed("w1", 0, 2, 1), ev.CallFailed("w2", 0, 3, 2)
    if first == "lower":
        scenario(lower, cmd.SendCancel("w2", 3), cmd.SendCancel("w3", 4))
        scenario(higher, cmd.DropResults("w2", 3))
    else:
        scenario(higher, cmd.SendCancel("w3", 4))
        scenario(lower)
    scenario(
        ev.CallsDone("w0", 0, 1, 0, 1, SECOND),
        cmd.AcceptResults(1, 0, 1, "w0"),
        cmd.StepsReady(1, 0, 1),
        cmd.StepFailed(1, 1, (cmd.Failure(1, 1, "w1"),)),
    )


def test_a_failed_step_is_reported_when_all_its_calls_have_ended() -> None:
    scenario = Scenario().with_workers("w0", "w1", "w2").with_pass(PassSettings(replicas=3, pulled=False))
    scenario.setup(ev.StepsAvailable(1, 0, 1, 3))
    scenario(ev.CallFailed("w2", 0, 3, 2))
    scenario(ev.CallFailed("w0", 0, 1, 0))
    scenario(
        ev.CallsDone("w1", 0, 2, 1, 2, SECOND),
        cmd.AcceptResults(1, 1, 2, "w1"),
        cmd.StepFailed(1, 0, (cmd.Failure(0, 1, "w0"), cmd.Failure(2, 1, "w2"))),
    )


def test_a_call_beyond_the_failed_step_is_not_retried() -> None:
    scenario = Scenario().with_workers("w0", "w1").with_pass(PLAIN)
    scenario.setup(ev.StepsAvailable(1, 0, 2, 1), ev.CallsDone("w1", 0, 2, 1, 2, 1000))
    scenario.setup(ev.StepsAvailable(1, 2, 40, 1))  # w1 runs [2, 10), w0 still runs call 0
    scenario(ev.CallsDone("w1", 0, 3, 2, 4, 1000), cmd.AcceptResults(1, 2, 4, "w1"))
    scenario(ev.CallFailed("w1", 0, 3, 4), cmd.SendCancel("w1", 4))
    scenario(ev.CallFailed("w1", 0, 3, 5, retries=1))
    scenario(ev.WorkerLost("w1", 0, "signal 9"), cmd.StartWorker("w1", 1))
    scenario(ev.WorkerJoined("w1", 1))
    scenario(
        ev.CallsDone("w0", 0, 1, 0, 1, SECOND),
        cmd.AcceptResults(1, 0, 1, "w0"),
        cmd.StepsReady(1, 0, 4),
        cmd.StepFailed(1, 4, (cmd.Failure(4, 1, "w1"),)),
    )


def test_a_lease_that_cannot_be_sent_fails_only_its_calls() -> None:
    settings = PassSettings(replicas=2, ordered=False, pulled=False)
    scenario = Scenario().with_workers("w0").with_pass(settings)
    scenario.setup(ev.StepsAvailable(1, 0, 1, 2), ev.CallsDone("w0", 0, 1, 0, 1, 1000))
    scenario.setup(ev.StepsAvailable(1, 1, 3, 2))  # lease 2: call 1, lease 3 in advance: calls 2 and 3
    assert [(x.id, x.lo, x.hi) for x in scenario.scheduler._members.leases.values()] == [(2, 1, 2), (3, 2, 4)]
    came = scenario.setup(ev.LeaseNotSent(3))
    assert came[0] == cmd.StepFailed(1, 1, (cmd.Failure(2, 1, "w0"), cmd.Failure(3, 1, "w0")))
    assert ranges(came) == [("w0", 4, 5, 0)]
    scenario(ev.LeaseNotSent(3))
    scenario(
        ev.CallsDone("w0", 0, 2, 1, 2, 1000),
        cmd.AcceptResults(1, 1, 2, "w0"),
        cmd.StepsReady(1, 0, 1),
        cmd.SendAssign("w0", 5, 1, 5, 6, 0),
    )


# -- mistakes of the driver ----------------------------------------------------------


def test_steps_must_be_offered_in_order_and_before_the_end() -> None:
    scenario = Scenario().with_pass(PLAIN, 1).with_pass(PLAIN, 2)
    with pytest.raises(LocalProtocolError, match=r"steps \[1, 2\) of 1 calls .* begin at 0"):
        scenario.setup(ev.StepsAvailable(1, 1, 2, 1))
    with pytest.raises(LocalProtocolError, match="at most 1 calls"):
        scenario.setup(ev.StepsAvailable(1, 0, 1, 2))
    scenario.setup(ev.StepsEnded(2))
    with pytest.raises(LocalProtocolError, match="after its end"):
        scenario.setup(ev.StepsAvailable(2, 0, 1, 1))
    with pytest.raises(LocalProtocolError, match="'ended' can't happen while complete"):
        scenario.setup(ev.StepsEnded(2))
    with pytest.raises(LocalProtocolError, match="pass 2 was opened twice"):
        scenario.setup(ev.PassOpened(2, PLAIN))


@pytest.mark.parametrize("settings", [{"replicas": 0}, {"replicas": 1, "ordered": False}])
def test_settings_that_contradict_each_other(settings: dict[str, int]) -> None:
    with pytest.raises(LocalProtocolError):
        PassSettings(**settings)  # type: ignore[arg-type]


def test_a_retried_call_is_sent_alone() -> None:
    """The next death must be charged to the call that caused it, not to one before it in its lease."""
    scenario = Scenario().with_workers("w0").with_pass(PLAIN)
    scenario.setup(ev.StepsAvailable(1, 0, 1, 1), ev.CallsDone("w0", 0, 1, 0, 1, 1000))
    scenario.setup(ev.StepsAvailable(1, 1, 3, 1))
    scenario.setup(ev.CallFailed("w0", 0, 2, 1, retries=1), ev.CallFailed("w0", 0, 3, 2, retries=1))
    assert ranges(scenario.setup(ev.StepsAvailable(1, 3, 40, 1))) == []
    leases = scenario.scheduler._members.leases.values()
    assert [(x.lo, x.hi, x.attempt) for x in leases] == [(1, 2, 1), (2, 3, 1)]
