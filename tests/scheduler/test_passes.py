"""Scenarios of passes: requested steps, draining, closing, turns and priorities."""

from __future__ import annotations

from pipedist.scheduler import PassSettings, SchedulerLimits
from pipedist.scheduler import commands as cmd
from pipedist.scheduler import events as ev
from tests.simulation.scenario import Scenario, assigns

PULLED = PassSettings(replicas=1)
PUSHED = PassSettings(replicas=1, pulled=False)
SECOND = 10**9


# -- requested steps ---------------------------------------------------------------------------


def test_the_first_step_is_requested_alone_then_enough_for_all_workers() -> None:
    scenario = Scenario()
    scenario(ev.PassOpened(1, PULLED), cmd.RequestSteps(1, 1))
    scenario(ev.StepsAvailable(1, 0, 1, 1), cmd.RequestSteps(1, 4))
    scenario(ev.StepsAvailable(1, 1, 5, 1))
    scenario(ev.StepsEnded(1))


def test_the_limit_of_steps_in_flight() -> None:
    scenario = Scenario(SchedulerLimits(steps_in_flight_max=3)).with_workers("w0")
    scenario(ev.PassOpened(1, PULLED), cmd.RequestSteps(1, 1))
    scenario(
        ev.StepsAvailable(1, 0, 1, 1),
        cmd.SendBind("w0", 1),
        cmd.SendAssign("w0", 1, 1, 0, 1, 0),
        cmd.RequestSteps(1, 2),
    )
    scenario(ev.StepsAvailable(1, 1, 3, 1))
    scenario(
        ev.CallsDone("w0", 0, 1, 0, 1, SECOND),
        cmd.AcceptResults(1, 0, 1, "w0"),
        cmd.StepsReady(1, 0, 1),
        cmd.SendAssign("w0", 2, 1, 1, 2, 0),
    )
    scenario(ev.StepsConsumed(1, 1), cmd.RequestSteps(1, 1))


def test_the_limit_of_bytes_includes_requested_inputs() -> None:
    scenario = Scenario(SchedulerLimits(bytes_in_flight_max=100))
    scenario(ev.PassOpened(1, PULLED), cmd.RequestSteps(1, 1))
    scenario(ev.StepsAvailable(1, 0, 1, 1, bytes=40), cmd.RequestSteps(1, 1))
    scenario(ev.HeartbeatReceived("unknown", 0))
    scenario(ev.StepsAvailable(1, 1, 2, 1, bytes=40))


def test_one_step_always_fits() -> None:
    scenario = Scenario(SchedulerLimits(bytes_in_flight_max=100)).with_workers("w0")
    scenario(ev.PassOpened(1, PULLED), cmd.RequestSteps(1, 1))
    scenario.setup(ev.StepsAvailable(1, 0, 1, 1, bytes=500))
    scenario(
        ev.CallsDone("w0", 0, 1, 0, 1, SECOND, bytes=900),
        cmd.AcceptResults(1, 0, 1, "w0"),
        cmd.StepsReady(1, 0, 1),
    )
    scenario(ev.StepsConsumed(1, 1, bytes=900), cmd.RequestSteps(1, 1))


def test_the_limit_of_bytes_includes_expected_results() -> None:
    scenario = Scenario(SchedulerLimits(bytes_in_flight_max=100)).with_workers("w0")
    scenario.setup(ev.PassOpened(1, PULLED), ev.StepsAvailable(1, 0, 1, 1))
    scenario(ev.StepsAvailable(1, 1, 5, 1))
    scenario.setup(ev.CallsDone("w0", 0, 1, 0, 1, SECOND, bytes=30))
    scenario(ev.StepsConsumed(1, 1, bytes=30))  # 4 steps in flight, which will be 120 bytes
    scenario.setup(ev.CallsDone("w0", 0, 2, 1, 2, SECOND, bytes=30))
    scenario(ev.StepsConsumed(1, 2, bytes=30))  # 3 steps: 90, and 10 are less than one
    scenario.setup(ev.CallsDone("w0", 0, 3, 2, 3, SECOND, bytes=30))
    scenario(ev.StepsConsumed(1, 3, bytes=30), cmd.RequestSteps(1, 1))


def test_a_reader_that_stops_consuming_stops_requests() -> None:
    scenario = Scenario().with_workers("w0")
    scenario.setup(ev.PassOpened(1, PULLED), ev.StepsAvailable(1, 0, 1, 1), ev.StepsAvailable(1, 1, 5, 1))
    for lease in range(1, 6):
        came = scenario.setup(ev.CallsDone("w0", 0, lease, lease - 1, lease, SECOND))
        assert not [c for c in came if isinstance(c, cmd.RequestSteps)]
    scenario(ev.StepsConsumed(1, 4), cmd.RequestSteps(1, 4))


# -- draining and closing -----------------------------------------------------------------


def test_a_draining_pass_assigns_nothing_and_reports_once_when_it_is_drained() -> None:
    scenario = Scenario().with_workers("w0", "w1")
    scenario.setup(ev.PassOpened(1, PULLED), ev.StepsAvailable(1, 0, 1, 1), ev.StepsAvailable(1, 1, 9, 1))
    scenario(ev.PassDraining(1))
    scenario(
        ev.CallsDone("w0", 0, 1, 0, 1, SECOND), cmd.AcceptResults(1, 0, 1, "w0"), cmd.StepsReady(1, 0, 1)
    )
    scenario(ev.StepsConsumed(1, 1))
    scenario(ev.WorkerLost("w1", 0, "signal 9"), cmd.PassDrained(1), cmd.StartWorker("w1", 1))
    scenario(ev.WorkerJoined("w1", 1))
    scenario(ev.PassDraining(1))


def test_a_draining_pass_without_running_calls_is_drained_immediately() -> None:
    scenario = Scenario().with_pass(PUSHED)
    scenario(ev.PassDraining(1), cmd.PassDrained(1))


def test_a_draining_and_failing_pass_is_drained_too() -> None:
    """The lost calls are beyond the failed step, so none waits again; the pass is drained all the same."""
    scenario = Scenario().with_workers("w0", "w1").with_pass(PUSHED)
    scenario.setup(ev.StepsAvailable(1, 0, 2, 1), ev.CallsDone("w1", 0, 2, 1, 2, 1000))
    scenario.setup(ev.StepsAvailable(1, 2, 4, 1))  # w1 runs [2, 3) and has [3, 4) in advance
    scenario(ev.PassDraining(1))
    scenario(ev.WorkerLost("w0", 0, "it was asked to", graceful=True), cmd.StartWorker("w0", 1))
    scenario(ev.CallFailed("w1", 0, 3, 2), cmd.SendCancel("w1", 4), cmd.PassDrained(1))


def test_a_worker_lost_beyond_the_failed_step_drains_a_draining_pass() -> None:
    scenario = Scenario().with_workers("w0", "w1").with_pass(PUSHED)
    scenario.setup(ev.StepsAvailable(1, 0, 2, 1), ev.CallsDone("w1", 0, 2, 1, 2, 1000))
    scenario.setup(ev.StepsAvailable(1, 2, 40, 1))  # w1 runs [2, 10)
    scenario.setup(ev.WorkerLost("w0", 0, "it was asked to", graceful=True), ev.PassDraining(1))
    scenario.setup(ev.CallFailed("w1", 0, 3, 2))
    scenario(ev.WorkerLost("w1", 0, "signal 9"), cmd.PassDrained(1), cmd.StartWorker("w1", 1))


def test_a_pass_closed_with_running_calls_is_forgotten() -> None:
    scenario = Scenario().with_workers("w0", "w1").with_pass(PUSHED)
    scenario.setup(ev.StepsAvailable(1, 0, 9, 1))
    scenario(
        ev.PassClosed(1),
        cmd.SendCancel("w0", 1),
        cmd.SendCancel("w1", 2),
        cmd.SendUnbind("w0", 1),
        cmd.SendUnbind("w1", 1),
    )
    scenario(ev.CallsDone("w0", 0, 1, 0, 1, SECOND), cmd.DropResults("w0", 1))
    scenario(ev.CallFailed("w1", 0, 2, 1), cmd.DropResults("w1", 2))
    for late in (
        ev.PassClosed(1),
        ev.PassDraining(1),
        ev.StepsAvailable(1, 9, 10, 1),
        ev.StepsConsumed(1, 3),
        ev.StepsEnded(1),
    ):
        scenario(late)


# -- several passes ----------------------------------------------------------------------


def test_passes_of_one_priority_take_turns() -> None:
    scenario = Scenario().with_pass(PUSHED, 1).with_pass(PUSHED, 2)
    scenario.setup(ev.StepsAvailable(1, 0, 9, 1), ev.StepsAvailable(2, 0, 9, 1))
    scenario.with_workers("w0")
    turns = []
    for _ in range(4):
        lease = next(iter(scenario.scheduler._members.leases.values()))
        turns.append(lease.pass_id)
        scenario.setup(ev.CallsDone("w0", 0, lease.id, lease.lo, lease.hi, SECOND))
    assert turns == [1, 2, 1, 2]


def test_a_pass_of_long_calls_gets_turns_beside_one_of_short_calls() -> None:
    """Looking for a lease to send in advance does not count as a turn."""
    scenario = Scenario().with_pass(PUSHED, 1).with_pass(PUSHED, 2).with_workers("w0", "w1")
    scenario.setup(ev.StepsAvailable(1, 0, 1, 1), ev.CallsDone("w0", 0, 1, 0, 1, SECOND))
    scenario.setup(ev.StepsAvailable(2, 0, 1, 1), ev.CallsDone("w1", 0, 2, 0, 1, 1000))
    came = scenario.setup(ev.StepsAvailable(1, 1, 100, 1), ev.StepsAvailable(2, 1, 1000, 1))
    came = []
    for _ in range(8):  # w1 is fast
        members = scenario.scheduler._members
        lease = members.leases[members.workers["w1"].leases[0]]
        took = 1000 if lease.pass_id == 2 else SECOND
        came += scenario.setup(ev.CallsDone("w1", 0, lease.id, lease.next, lease.hi, took))
    assert {x.pass_id for x in assigns(came)} == {1, 2}


def test_a_lower_priority_number_is_first() -> None:
    scenario = Scenario().with_pass(PUSHED, 1).with_pass(PassSettings(1, pulled=False, priority=0), 2)
    scenario.setup(ev.StepsAvailable(1, 0, 2, 1), ev.StepsAvailable(2, 0, 2, 1))
    scenario.with_workers("w0")
    order = []
    for _ in range(4):
        lease = next(iter(scenario.scheduler._members.leases.values()))
        order.append(lease.pass_id)
        scenario.setup(ev.CallsDone("w0", 0, lease.id, lease.lo, lease.hi, SECOND))
    assert order == [2, 2, 1, 1]
