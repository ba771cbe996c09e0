"""Scenarios of workers: joining, dying, replacement, heartbeats."""

from __future__ import annotations

import pytest

from pipedist.errors import LocalProtocolError
from pipedist.scheduler import PassSettings, Scheduler, SchedulerLimits
from pipedist.scheduler import commands as cmd
from pipedist.scheduler import events as ev
from tests.simulation.scenario import Scenario, ScenarioError, assigns

PUSHED = PassSettings(replicas=1, pulled=False)
"""Steps are available without a request, which keeps the scenarios short."""


def test_a_failing_scenario_shows_the_events_and_the_difference() -> None:
    scenario = Scenario()
    with pytest.raises(ScenarioError) as caught:
        scenario(ev.WorkerExpected("w0"), cmd.StartWorker("w1", 0))
    text = str(caught.value)
    assert ">> WorkerExpected(worker='w0')" in text
    assert "-StartWorker(worker='w1', incarnation=0)" in text
    assert "+StartWorker(worker='w0', incarnation=0)" in text


def test_a_worker_starts_joins_and_is_bound_to_a_pass_once() -> None:
    scenario = Scenario()
    scenario(ev.WorkerExpected("w0"), cmd.StartWorker("w0", 0))
    scenario(ev.PassOpened(1, PUSHED))
    scenario(ev.StepsAvailable(1, 0, 2, 1))
    scenario(ev.WorkerJoined("w0", 0), cmd.SendBind("w0", 1), cmd.SendAssign("w0", 1, 1, 0, 1, 0))
    scenario(
        ev.CallsDone("w0", 0, 1, 0, 1, 10**9),
        cmd.AcceptResults(1, 0, 1, "w0"),
        cmd.StepsReady(1, 0, 1),
        cmd.SendAssign("w0", 2, 1, 1, 2, 0),
    )


def test_a_worker_that_dies_is_replaced_and_only_the_running_call_is_charged() -> None:
    scenario = Scenario().with_workers("w0").with_pass(PUSHED)
    scenario.setup(ev.StepsAvailable(1, 0, 1, 1), ev.CallsDone("w0", 0, 1, 0, 1, 1000))
    leases = assigns(scenario.setup(ev.StepsAvailable(1, 1, 17, 1)))
    assert [(x.lo, x.hi) for x in leases] == [(1, 9), (9, 13)]
    scenario(
        ev.CallsDone("w0", 0, 2, 1, 3, 2000),
        cmd.AcceptResults(1, 1, 3, "w0"),
        cmd.StepsReady(1, 1, 3),
    )
    scenario(ev.WorkerLost("w0", 0, "signal 9 (SIGKILL)"), cmd.StartWorker("w0", 1))
    commands = scenario.setup(ev.WorkerJoined("w0", 1))
    assert commands[:2] == [cmd.SendBind("w0", 1), cmd.SendAssign("w0", 4, 1, 3, 4, 1)]
    assert commands[2:] == [cmd.SendAssign("w0", 5, 1, 4, 9, 0)]


@pytest.mark.parametrize(
    ("running", "assigned"),
    [
        ((1, 2), [(0, 2, 0), (2, 3, 1), (3, 8, 0)]),  # the finished calls before it were not reported
        ((1, 7), [(0, 7, 0), (7, 8, 1)]),
        ((1, 8), [(0, 8, 0)]),  # not a call of the lease
        ((9, 0), [(0, 8, 0)]),  # of a lease that has ended
        (None, [(0, 1, 1), (1, 8, 0)]),
    ],
)
def test_the_call_that_was_running_is_charged(
    running: tuple[int, int] | None, assigned: list[tuple[int, int, int]]
) -> None:
    scenario = Scenario().with_workers("w0").with_pass(PUSHED)
    scenario.setup(ev.StepsAvailable(1, 0, 1, 1), ev.CallsDone("w0", 0, 1, 0, 1, 1000))
    held = assigns(scenario.setup(ev.StepsAvailable(1, 1, 17, 1)))[0]
    assert (held.lo, held.hi) == (1, 9)
    at = None if running is None else (running[0] - 1 + held.lease, held.lo + running[1])
    scenario(ev.WorkerLost("w0", 0, "signal 11", running=at), cmd.StartWorker("w0", 1))
    due = list(scenario.scheduler._passes[1].todo)
    found = [(t.lo - held.lo, t.hi - held.lo, t.attempt) for t in due]
    assert found[: len(assigned) - 1] == assigned[:-1]
    lo, hi, attempt = found[len(assigned) - 1]
    assert (lo, attempt) == (assigned[-1][0], assigned[-1][2])
    assert hi >= assigned[-1][1]  # what had not been assigned follows


def test_a_graceful_leave_charges_no_call() -> None:
    scenario = Scenario().with_workers("w0").with_pass(PUSHED)
    scenario(ev.StepsAvailable(1, 0, 1, 1), cmd.SendBind("w0", 1), cmd.SendAssign("w0", 1, 1, 0, 1, 0))
    scenario(ev.WorkerLost("w0", 0, "it was asked to", graceful=True), cmd.StartWorker("w0", 1))
    scenario(ev.WorkerJoined("w0", 1), cmd.SendBind("w0", 1), cmd.SendAssign("w0", 2, 1, 0, 1, 0))


def test_a_death_under_a_cancelled_call_is_not_charged_to_the_next_one() -> None:
    scenario = Scenario().with_workers("w0").with_pass(PUSHED, 1).with_pass(PUSHED, 2)
    for pass_id in (1, 2):
        scenario.setup(ev.StepsAvailable(pass_id, 0, 1, 1), ev.CallsDone("w0", 0, pass_id, 0, 1, 1000))
    scenario(ev.StepsAvailable(1, 1, 2, 1), cmd.SendAssign("w0", 3, 1, 1, 2, 0))
    scenario(ev.StepsAvailable(2, 1, 2, 1), cmd.SendAssign("w0", 4, 2, 1, 2, 0))
    scenario(ev.PassClosed(1), cmd.SendCancel("w0", 3), cmd.SendUnbind("w0", 1))
    scenario(ev.WorkerLost("w0", 0, "signal 9"), cmd.StartWorker("w0", 1))
    scenario(ev.WorkerJoined("w0", 1), cmd.SendBind("w0", 2), cmd.SendAssign("w0", 5, 2, 1, 2, 0))
    scenario(ev.WorkerLost("w0", 1, "signal 9"), cmd.StartWorker("w0", 2))
    scenario(ev.WorkerJoined("w0", 2), cmd.SendBind("w0", 2), cmd.SendAssign("w0", 6, 2, 1, 2, 1))


def test_no_call_waits_behind_a_call_of_an_ended_pass() -> None:
    """The worker may hang in it: it gets calls again after it confirms the cancellation."""
    scenario = Scenario().with_workers("w0", "w1").with_pass(PUSHED, 1)
    scenario.setup(ev.StepsAvailable(1, 0, 1, 1))
    scenario(ev.PassClosed(1), cmd.SendCancel("w0", 1), cmd.SendUnbind("w0", 1))
    scenario.with_pass(PUSHED, 2)
    scenario(ev.StepsAvailable(2, 0, 2, 1), cmd.SendBind("w1", 2), cmd.SendAssign("w1", 2, 2, 0, 1, 0))
    assert scenario.scheduler.why(1.0).suspended == ("w0",)
    scenario(ev.CancelConfirmed("w0", 0, 1), cmd.SendBind("w0", 2), cmd.SendAssign("w0", 3, 2, 1, 2, 0))


def test_no_call_waits_behind_a_gang_of_an_ended_pass() -> None:
    gang = PassSettings(2, pulled=False, gang=True)
    scenario = Scenario().with_workers("w0", "w1", "w2").with_pass(gang, 1)
    scenario.setup(ev.StepsAvailable(1, 0, 1, 2))
    scenario.setup(ev.PassClosed(1))
    assert scenario.scheduler.why(1.0).suspended == ("w0", "w1")
    scenario.with_pass(gang, 2).setup(ev.StepsAvailable(2, 0, 1, 2))
    [lease] = scenario.scheduler._members.leases.values()
    assert (lease.worker, lease.lo, lease.hi) == ("w2", 0, 2), "it is made by those who are there"


def test_a_call_under_which_workers_keep_dying_fails() -> None:
    scenario = Scenario(SchedulerLimits(deaths_max=2)).with_workers("w0").with_pass(PUSHED)
    scenario.setup(
        ev.StepsAvailable(1, 0, 1, 1), ev.WorkerLost("w0", 0, "signal 11"), ev.WorkerJoined("w0", 1)
    )
    scenario(
        ev.WorkerLost("w0", 1, "signal 11"),
        cmd.StepFailed(1, 0, (cmd.Failure(0, 2, "w0", cause="signal 11"),)),
        cmd.StartWorker("w0", 2),
    )


def test_a_death_that_fails_a_call_removes_calls_of_later_steps() -> None:
    """The rest of the lost lease is beyond the failed step: it must not be assigned again."""
    scenario = Scenario(SchedulerLimits(deaths_max=1)).with_workers("w0").with_pass(PUSHED)
    scenario.setup(ev.StepsAvailable(1, 0, 1, 1), ev.CallsDone("w0", 0, 1, 0, 1, 1000))
    scenario.setup(ev.StepsAvailable(1, 1, 9, 1))
    scenario(
        ev.WorkerLost("w0", 0, "signal 11"),
        cmd.StepFailed(1, 1, (cmd.Failure(1, 1, "w0", cause="signal 11"),)),
        cmd.StartWorker("w0", 1),
    )
    scenario(ev.WorkerJoined("w0", 1))


def test_failed_starts_fail_the_cluster_and_a_join_resets_their_count() -> None:
    scenario = Scenario(SchedulerLimits(failed_starts_max=2))
    scenario.setup(ev.WorkerExpected("w0"), ev.WorkerExpected("w1"))
    scenario(ev.WorkerLost("w0", 0, "exit code 1"), cmd.StartWorker("w0", 1))
    scenario(ev.WorkerLost("w0", 0, "exit code 1, told twice"))
    scenario(ev.WorkerJoined("w1", 0))
    scenario(ev.WorkerLost("w0", 1, "exit code 1"), cmd.StartWorker("w0", 2))
    scenario(
        ev.WorkerLost("w0", 2, "exit code 1"),
        cmd.ClusterFailed("2 workers in a row died before they joined, the last one with exit code 1"),
    )


def test_a_later_incarnation_replaces_a_running_one() -> None:
    scenario = Scenario().with_pass(PUSHED)
    scenario(ev.WorkerJoined("far", 3, supervised=True))
    scenario.setup(ev.StepsAvailable(1, 0, 1, 1))
    scenario(
        ev.WorkerJoined("far", 4, supervised=True),
        cmd.EvictWorker("far", 3, "a later incarnation has joined"),
        cmd.SendBind("far", 1),
        cmd.SendAssign("far", 2, 1, 0, 1, 1),
    )
    scenario(ev.CallsDone("far", 3, 1, 0, 1, 1000), cmd.DropResults("far", 1))
    scenario(ev.CallsDone("far", 3, 2, 0, 1, 1000), cmd.DropResults("far", 2))
    scenario(ev.WorkerLost("far", 3, "its connection is gone"))


@pytest.mark.parametrize(
    ("incarnation", "reason"),
    [(0, "a later incarnation has joined"), (1, "this incarnation has joined already")],
)
def test_a_stale_incarnation_is_evicted(incarnation: int, reason: str) -> None:
    scenario = Scenario().with_workers("w0")
    scenario.setup(ev.WorkerLost("w0", 0, "signal 9"), ev.WorkerJoined("w0", 1))
    scenario(ev.WorkerJoined("w0", incarnation), cmd.EvictWorker("w0", incarnation, reason))


def test_a_supervised_worker_without_heartbeats_is_lost_and_may_return() -> None:
    scenario = Scenario(SchedulerLimits(heartbeat_timeout_s=10.0)).with_pass(PUSHED)
    scenario(ev.WorkerJoined("far", 0, supervised=True))
    scenario.at(3.0)(ev.WorkerJoined("near", 0, supervised=True))
    scenario.setup(ev.StepsAvailable(1, 0, 1, 1))
    assert scenario.scheduler.deadline() == 10.0
    scenario.at(7.1)(ev.HeartbeatReceived("far", 0))
    assert scenario.scheduler.deadline() == 13.0
    scenario.at(13.0)(ev.Tick(), cmd.EvictWorker("near", 0, "no heartbeat for 10 s"))
    scenario(ev.HeartbeatReceived("near", 0))
    scenario.at(17.1)(ev.Tick(), cmd.EvictWorker("far", 0, "no heartbeat for 10 s"))
    assert scenario.scheduler.deadline() is None
    scenario(
        ev.WorkerJoined("near", 1, supervised=True),
        cmd.SendBind("near", 1),
        cmd.SendAssign("near", 2, 1, 0, 1, 1),
    )


@pytest.mark.parametrize("heard_at", [0.1, 0.3, 1e6 + 0.7, 86399.9])
def test_a_tick_at_the_deadline_is_late_enough(heard_at: float) -> None:
    """Otherwise the driver's timer would repeat at the same time forever."""
    scenario = Scenario(SchedulerLimits(heartbeat_timeout_s=0.7)).at(heard_at)
    scenario(ev.WorkerJoined("far", 0, supervised=True))
    deadline = scenario.scheduler.deadline()
    assert deadline is not None
    scenario.at(deadline)(ev.Tick(), cmd.EvictWorker("far", 0, "no heartbeat for 0.7 s"))


def test_workers_of_the_launcher_are_not_supervised() -> None:
    scenario = Scenario().with_workers("w0")
    assert scenario.scheduler.deadline() is None
    scenario.at(1e9)(ev.Tick())


def test_a_worker_is_expected_once() -> None:
    scheduler = Scheduler()
    scheduler.handle(ev.WorkerExpected("w0"), 0.0)
    with pytest.raises(LocalProtocolError, match="w0 is expected, but there is a worker of that name"):
        scheduler.handle(ev.WorkerExpected("w0"), 0.0)


def test_an_unknown_event_is_refused() -> None:
    with pytest.raises(LocalProtocolError, match="unknown event"):
        Scheduler().handle("surprise", 0.0)  # type: ignore[arg-type]


# -- reports that must not count ---------------------------------------------------------


def test_a_repeated_report_after_its_lease_is_dropped() -> None:
    scenario = Scenario().with_workers("w0").with_pass(PUSHED)
    scenario.setup(ev.StepsAvailable(1, 0, 1, 1), ev.CallsDone("w0", 0, 1, 0, 1, 1000))
    scenario(ev.CallsDone("w0", 0, 1, 0, 1, 1000), cmd.DropResults("w0", 1))
    scenario(ev.CallFailed("w0", 0, 1, 0), cmd.DropResults("w0", 1))
    scenario(ev.CallsDone("w0", 0, 77, 0, 1, 1000), cmd.DropResults("w0", 77))


def test_a_report_for_a_lease_of_another_worker_is_dropped() -> None:
    scenario = Scenario().with_workers("w0", "w1").with_pass(PUSHED)
    scenario.setup(ev.StepsAvailable(1, 0, 2, 1))
    scenario(ev.CallsDone("w1", 0, 1, 0, 1, 1000), cmd.DropResults("w1", 1))


@pytest.mark.parametrize(
    ("lease", "lo", "hi"),
    [
        pytest.param(2, 2, 3, id="a gap: a report was lost"),
        pytest.param(2, 0, 1, id="a call before the lease"),
        pytest.param(2, 1, 10, id="beyond the lease"),
        pytest.param(2, 1, 1, id="no call at all"),
        pytest.param(2, 3, 1, id="backwards"),
        pytest.param(3, 9, 10, id="the next lease before the first one is over"),
    ],
)
def test_a_report_out_of_order_evicts_the_worker(lease: int, lo: int, hi: int) -> None:
    scenario = Scenario().with_workers("w0").with_pass(PUSHED)
    scenario.setup(ev.StepsAvailable(1, 0, 1, 1), ev.CallsDone("w0", 0, 1, 0, 1, 1000))
    scenario.setup(ev.StepsAvailable(1, 1, 17, 1))
    why = f"it reported calls [{lo}, {hi}) of lease {lease}, expected [1, 9) of lease 2"
    scenario(
        ev.CallsDone("w0", 0, lease, lo, hi, 1000),
        cmd.DropResults("w0", lease),
        cmd.EvictWorker("w0", 0, why),
        cmd.StartWorker("w0", 1),
    )
    scenario(ev.CallsDone("w0", 0, 2, 1, 9, 1000), cmd.DropResults("w0", 2))
