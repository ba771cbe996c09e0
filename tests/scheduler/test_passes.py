"""Playbooks of passes: the valve, holding, closing, turns and priorities."""

from __future__ import annotations

from pipedist.scheduler import PassSettings, SchedulerLimits
from pipedist.scheduler import commands as cmd
from pipedist.scheduler import events as ev
from tests.simulation.scenario import Scenario, assigns

PULLED = PassSettings(replicas=1)
UNASKED = PassSettings(replicas=1, pulled=False)
SECOND = 10**9


# -- the valve ---------------------------------------------------------------------------


def test_the_first_step_is_asked_for_alone_then_as_many_as_keep_workers_busy() -> None:
    play = Scenario()
    play(ev.PassOpened(1, PULLED), cmd.RequestSteps(1, 1))
    play(ev.StepsAvailable(1, 0, 1, 1), cmd.RequestSteps(1, 4))
    play(ev.StepsAvailable(1, 1, 5, 1))
    play(ev.StepsEnded(1))


def test_the_valve_by_steps() -> None:
    play = Scenario(SchedulerLimits(steps_in_flight_max=3)).with_workers("w0")
    play(ev.PassOpened(1, PULLED), cmd.RequestSteps(1, 1))
    play(
        ev.StepsAvailable(1, 0, 1, 1),
        cmd.SendBind("w0", 1),
        cmd.SendAssign("w0", 1, 1, 0, 1, 0),
        cmd.RequestSteps(1, 2),
    )
    play(ev.StepsAvailable(1, 1, 3, 1))
    play(
        ev.CallsDone("w0", 0, 1, 0, 1, SECOND),
        cmd.AcceptResults(1, 0, 1, "w0"),
        cmd.StepsReady(1, 0, 1),
        cmd.SendAssign("w0", 2, 1, 1, 2, 0),
    )
    play(ev.StepsConsumed(1, 1), cmd.RequestSteps(1, 1))


def test_the_valve_by_input_bytes_counts_what_is_promised() -> None:
    play = Scenario(SchedulerLimits(bytes_in_flight_max=100))
    play(ev.PassOpened(1, PULLED), cmd.RequestSteps(1, 1))
    play(ev.StepsAvailable(1, 0, 1, 1, bytes=40), cmd.RequestSteps(1, 1))
    play(ev.HeartbeatReceived("nobody", 0))
    play(ev.StepsAvailable(1, 1, 2, 1, bytes=40))


def test_one_step_always_fits() -> None:
    play = Scenario(SchedulerLimits(bytes_in_flight_max=100)).with_workers("w0")
    play(ev.PassOpened(1, PULLED), cmd.RequestSteps(1, 1))
    play.setup(ev.StepsAvailable(1, 0, 1, 1, bytes=500))
    play(
        ev.CallsDone("w0", 0, 1, 0, 1, SECOND, bytes=900),
        cmd.AcceptResults(1, 0, 1, "w0"),
        cmd.StepsReady(1, 0, 1),
    )
    play(ev.StepsConsumed(1, 1, bytes=900), cmd.RequestSteps(1, 1))


def test_the_valve_by_result_bytes_counts_what_is_to_come() -> None:
    play = Scenario(SchedulerLimits(bytes_in_flight_max=100)).with_workers("w0")
    play.setup(ev.PassOpened(1, PULLED), ev.StepsAvailable(1, 0, 1, 1))
    play(ev.StepsAvailable(1, 1, 5, 1))
    play.setup(ev.CallsDone("w0", 0, 1, 0, 1, SECOND, bytes=30))
    play(ev.StepsConsumed(1, 1, bytes=30))  # 4 steps in flight, which will be 120 bytes
    play.setup(ev.CallsDone("w0", 0, 2, 1, 2, SECOND, bytes=30))
    play(ev.StepsConsumed(1, 2, bytes=30))  # 3 steps: 90, and 10 are less than one
    play.setup(ev.CallsDone("w0", 0, 3, 2, 3, SECOND, bytes=30))
    play(ev.StepsConsumed(1, 3, bytes=30), cmd.RequestSteps(1, 1))


def test_a_reader_that_stands_still_holds_the_valve() -> None:
    play = Scenario().with_workers("w0")
    play.setup(ev.PassOpened(1, PULLED), ev.StepsAvailable(1, 0, 1, 1), ev.StepsAvailable(1, 1, 5, 1))
    for lease in range(1, 6):
        came = play.setup(ev.CallsDone("w0", 0, lease, lease - 1, lease, SECOND))
        assert not [c for c in came if isinstance(c, cmd.RequestSteps)]
    play(ev.StepsConsumed(1, 4), cmd.RequestSteps(1, 4))


# -- holding and closing -----------------------------------------------------------------


def test_a_held_pass_issues_nothing_and_says_once_when_it_is_quiet() -> None:
    play = Scenario().with_workers("w0", "w1")
    play.setup(ev.PassOpened(1, PULLED), ev.StepsAvailable(1, 0, 1, 1), ev.StepsAvailable(1, 1, 9, 1))
    play(ev.PassDraining(1))
    play(ev.CallsDone("w0", 0, 1, 0, 1, SECOND), cmd.AcceptResults(1, 0, 1, "w0"), cmd.StepsReady(1, 0, 1))
    play(ev.StepsConsumed(1, 1))
    play(ev.WorkerLost("w1", 0, "signal 9"), cmd.PassDrained(1), cmd.StartWorker("w1", 1))
    play(ev.WorkerJoined("w1", 1))
    play(ev.PassDraining(1))


def test_a_held_pass_on_which_nothing_runs_is_quiet_at_once() -> None:
    play = Scenario().with_pass(UNASKED)
    play(ev.PassDraining(1), cmd.PassDrained(1))


def test_a_held_and_failing_pass_becomes_quiet_too() -> None:
    """What is lost there is beyond the failed step, so nothing waits again: it is quiet all the same."""
    play = Scenario().with_workers("w0", "w1").with_pass(UNASKED)
    play.setup(ev.StepsAvailable(1, 0, 2, 1), ev.CallsDone("w1", 0, 2, 1, 2, 1000))
    play.setup(ev.StepsAvailable(1, 2, 4, 1))  # w1 runs [2, 3) and has [3, 4) in advance
    play(ev.PassDraining(1))
    play(ev.WorkerLost("w0", 0, "it was asked to", graceful=True), cmd.StartWorker("w0", 1))
    play(ev.CallFailed("w1", 0, 3, 2), cmd.SendCancel("w1", 4), cmd.PassDrained(1))


def test_a_worker_lost_beyond_the_failed_step_of_a_held_pass_makes_it_quiet() -> None:
    play = Scenario().with_workers("w0", "w1").with_pass(UNASKED)
    play.setup(ev.StepsAvailable(1, 0, 2, 1), ev.CallsDone("w1", 0, 2, 1, 2, 1000))
    play.setup(ev.StepsAvailable(1, 2, 40, 1))  # w1 runs [2, 10)
    play.setup(ev.WorkerLost("w0", 0, "it was asked to", graceful=True), ev.PassDraining(1))
    play.setup(ev.CallFailed("w1", 0, 3, 2))
    play(ev.WorkerLost("w1", 0, "signal 9"), cmd.PassDrained(1), cmd.StartWorker("w1", 1))


def test_a_pass_closed_in_mid_flight_leaves_nothing_behind() -> None:
    play = Scenario().with_workers("w0", "w1").with_pass(UNASKED)
    play.setup(ev.StepsAvailable(1, 0, 9, 1))
    play(
        ev.PassClosed(1),
        cmd.SendCancel("w0", 1),
        cmd.SendCancel("w1", 2),
        cmd.SendUnbind("w0", 1),
        cmd.SendUnbind("w1", 1),
    )
    play(ev.CallsDone("w0", 0, 1, 0, 1, SECOND), cmd.DropResults("w0", 1))
    play(ev.CallFailed("w1", 0, 2, 1), cmd.DropResults("w1", 2))
    for late in (
        ev.PassClosed(1),
        ev.PassDraining(1),
        ev.StepsAvailable(1, 9, 10, 1),
        ev.StepsConsumed(1, 3),
        ev.StepsEnded(1),
    ):
        play(late)


# -- several passes ----------------------------------------------------------------------


def test_passes_of_one_priority_take_turns() -> None:
    play = Scenario().with_pass(UNASKED, 1).with_pass(UNASKED, 2)
    play.setup(ev.StepsAvailable(1, 0, 9, 1), ev.StepsAvailable(2, 0, 9, 1))
    play.with_workers("w0")
    turns = []
    for _ in range(4):
        lease = next(iter(play.scheduler._members.leases.values()))
        turns.append(lease.pass_id)
        play.setup(ev.CallsDone("w0", 0, lease.id, lease.lo, lease.hi, SECOND))
    assert turns == [1, 2, 1, 2]


def test_a_pass_of_long_calls_has_its_turn_beside_one_of_short_calls() -> None:
    """Looking for a lease to send in advance is no turn."""
    play = Scenario().with_pass(UNASKED, 1).with_pass(UNASKED, 2).with_workers("w0", "w1")
    play.setup(ev.StepsAvailable(1, 0, 1, 1), ev.CallsDone("w0", 0, 1, 0, 1, SECOND))
    play.setup(ev.StepsAvailable(2, 0, 1, 1), ev.CallsDone("w1", 0, 2, 0, 1, 1000))
    came = play.setup(ev.StepsAvailable(1, 1, 100, 1), ev.StepsAvailable(2, 1, 1000, 1))
    came = []
    for _ in range(8):  # w1 is quick, whatever it gets
        members = play.scheduler._members
        lease = members.leases[members.workers["w1"].leases[0]]
        took = 1000 if lease.pass_id == 2 else SECOND
        came += play.setup(ev.CallsDone("w1", 0, lease.id, lease.next, lease.hi, took))
    assert {x.pass_id for x in assigns(came)} == {1, 2}


def test_a_lower_number_goes_first() -> None:
    play = Scenario().with_pass(UNASKED, 1).with_pass(PassSettings(1, pulled=False, priority=0), 2)
    play.setup(ev.StepsAvailable(1, 0, 2, 1), ev.StepsAvailable(2, 0, 2, 1))
    play.with_workers("w0")
    order = []
    for _ in range(4):
        lease = next(iter(play.scheduler._members.leases.values()))
        order.append(lease.pass_id)
        play.setup(ev.CallsDone("w0", 0, lease.id, lease.lo, lease.hi, SECOND))
    assert order == [2, 2, 1, 1]
