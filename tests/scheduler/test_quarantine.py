"""Playbooks of calls that failed for good and cost their guilty elements: probes, the rest, the whole."""

from __future__ import annotations

from typing import Any

import pytest

from pipedist.scheduler import PassSettings, SchedulerLimits
from pipedist.scheduler import commands as cmd
from pipedist.scheduler import events as ev
from tests.simulation.scenario import Scenario, assigns

PLAIN = PassSettings(replicas=1, pulled=False)
LIMITS = SchedulerLimits(deaths_max=2)
NO = cmd.Cause("s", "ValueError: no")


def raised(lease: int, call: int = 0, worker: str = "w0", **how: object) -> ev.CallFailed:
    return ev.CallFailed(worker, 0, lease, call, quarantine=True, stage="s", text="ValueError: no", **how)  # type: ignore[arg-type]


def done(lease: int, call: int = 0, worker: str = "w0") -> ev.CallsDone:
    return ev.CallsDone(worker, 0, lease, call, call + 1, 1000, 10)


def probe(lease: int, a: int, b: int, *, attempt: int = 0, worker: str = "w0") -> cmd.SendAssign:
    return cmd.SendAssign(worker, lease, 1, 0, 1, attempt, ((a, b),))


def suspected(*workers: str, settings: PassSettings = PLAIN) -> Scenario:
    """Return a story in which call 0 has failed for good, under lease 1 of w0."""
    play = Scenario(LIMITS).with_workers(*(workers or ("w0",))).with_pass(settings)
    play.setup(ev.StepsAvailable(1, 0, 1, 1))
    play(raised(1), cmd.SizeCall(1, 0))
    return play


def test_halves_are_tried_then_the_rest_counts_without_the_guilty() -> None:
    play = suspected()
    play(ev.CallSized(1, 0, 4), probe(2, 0, 2))
    play(raised(2), probe(3, 0, 1))
    play(done(3), probe(4, 1, 2))
    play(raised(4), probe(5, 2, 4))
    play(done(5), cmd.SendAssign("w0", 6, 1, 0, 1, 1, ((0, 1), (2, 4))))
    play(
        done(6),
        cmd.CallsQuarantined(1, 0, 1, ((1, NO),), remains=True),
        cmd.AcceptResults(1, 0, 1, "w0"),
        cmd.StepsReady(1, 0, 1),
    )


def test_both_halves_are_tried_at_a_time_by_idle_workers_alone() -> None:
    play = suspected("w0", "w1")
    play(ev.CallSized(1, 0, 2), cmd.SendBind("w1", 1), probe(2, 0, 1, worker="w1"), probe(3, 1, 2))


def test_a_probe_never_waits_behind_a_lease() -> None:
    play = Scenario(LIMITS).with_workers("w0").with_pass(PLAIN)
    play.setup(ev.StepsAvailable(1, 0, 50, 1), done(1))  # short calls: a lease waits in advance
    first, second = (play.scheduler._members.leases[i] for i in play.scheduler._members.workers["w0"].leases)
    play.setup(raised(first.id, first.lo), ev.CallSized(1, first.lo, 2))
    held = [play.scheduler._members.leases[i] for i in play.scheduler._members.workers["w0"].leases]
    assert [x.id for x in held] == [first.id, second.id]
    assert not any(x.probe for x in held)


def test_a_larger_subset_is_tried_once_and_an_element_as_often_as_a_call() -> None:
    play = suspected()
    play(ev.CallSized(1, 0, 4), probe(2, 0, 2))
    play(raised(2, retries=3), probe(3, 0, 1))
    play(raised(3, retries=1), probe(4, 0, 1, attempt=1))
    play(done(4), probe(5, 1, 2))


def test_an_element_is_not_guilty_of_one_death() -> None:
    play = suspected("w0", settings=PassSettings(1, pulled=False, quarantine=True))
    play.setup(ev.CallSized(1, 0, 2), ev.WorkerLost("w0", 0, "signal 9"))
    [again] = assigns(play.setup(ev.WorkerJoined("w0", 1)))
    assert again == probe(3, 0, 1, attempt=1)


def test_all_may_be_guilty_and_then_nothing_remains() -> None:
    play = suspected()
    play.setup(ev.CallSized(1, 0, 2), raised(2))
    play(raised(3), cmd.CallsQuarantined(1, 0, 1, ((0, NO), (1, NO))), cmd.StepsReady(1, 0, 1))


def test_a_shard_of_one_element_is_guilty_without_a_probe() -> None:
    play = suspected()
    play(ev.CallSized(1, 0, 1), cmd.CallsQuarantined(1, 0, 1, ((0, NO),)), cmd.StepsReady(1, 0, 1))


def whole(why: str) -> cmd.CallsQuarantined:
    return cmd.CallsQuarantined(1, 0, 1, (), cmd.Cause("s", f"ValueError: no (not separable: {why})"))


def test_if_no_element_fails_alone_all_of_them_are_set_aside() -> None:
    play = suspected()
    play.setup(ev.CallSized(1, 0, 2), done(2))
    play(done(3), whole("no element fails alone"), cmd.StepsReady(1, 0, 1))


def test_if_the_rest_still_fails_all_of_them_are_set_aside() -> None:
    play = suspected()
    play.setup(ev.CallSized(1, 0, 2), raised(2))
    play(done(3), cmd.SendAssign("w0", 4, 1, 0, 1, 1, ((1, 2),)))
    play(raised(4), whole("the rest still fails"), cmd.StepsReady(1, 0, 1))


def test_elements_that_can_not_be_told_apart_are_set_aside_together() -> None:
    play = suspected()
    play(ev.CallSized(1, 0, 0), whole("its elements can't be tried apart"), cmd.StepsReady(1, 0, 1))


def test_a_failure_where_the_run_must_fail_makes_no_element_guilty() -> None:
    play = suspected()
    play.setup(ev.CallSized(1, 0, 2), ev.CallFailed("w0", 0, 2, 0))
    play(ev.CallFailed("w0", 0, 3, 0), whole("no element fails alone"), cmd.StepsReady(1, 0, 1))


def test_an_earlier_failure_of_the_pass_ends_the_search() -> None:
    play = Scenario(LIMITS).with_workers("w0", "w1").with_pass(PLAIN)
    play.setup(ev.StepsAvailable(1, 0, 2, 1), raised(2, 1, "w1"), ev.CallSized(1, 1, 8))
    play(
        ev.CallFailed("w0", 0, 1, 0),
        cmd.SendCancel("w1", 3),
        cmd.StepFailed(1, 0, (cmd.Failure(0, 1, "w0"),)),
    )
    assert not play.scheduler._passes[1].suspects.calls


def test_a_held_pass_is_quiet_while_it_has_suspects() -> None:
    play = suspected()
    play(ev.PassDraining(1), cmd.PassDrained(1))
    play(ev.CallSized(1, 0, 4))


def test_a_gang_is_set_aside_as_a_whole() -> None:
    play = Scenario(LIMITS).with_workers("w0").with_pass(PassSettings(2, pulled=False, gang=True))
    play.setup(ev.StepsAvailable(1, 0, 1, 2), done(1, 0))
    cause = cmd.Cause("s", "ValueError: no (a gang's step is all or nothing)")
    play(
        raised(1, 1),
        cmd.GangEnded(1, counts=False, aborted=False),
        cmd.CallsQuarantined(1, 0, 2, (), cause),
        cmd.StepsReady(1, 0, 1),
    )


def test_deaths_in_a_stage_that_nobody_knows_follow_the_pass() -> None:
    settings = PassSettings(1, pulled=False, quarantine=True)
    play = Scenario(LIMITS).with_workers("w0", "w1").with_pass(settings)
    play.setup(ev.StepsAvailable(1, 0, 1, 1), ev.WorkerLost("w0", 0, "signal 11"))
    play(ev.WorkerLost("w1", 0, "signal 11"), cmd.SizeCall(1, 0), cmd.StartWorker("w1", 1))


@pytest.mark.parametrize("outside", [{"stage": "s", "quarantine": True}, {}], ids=["killed", "stage unknown"])
def test_a_death_that_came_from_outside_does_not_decide(outside: dict[str, Any]) -> None:
    """Neither whether an element is guilty, nor what is told of it: most of its deaths do."""
    play = Scenario(SchedulerLimits(deaths_max=3)).with_workers("w0").with_pass(PLAIN)
    play.setup(ev.StepsAvailable(1, 0, 1, 1), raised(1), ev.CallSized(1, 0, 2))
    for incarnation in range(2):
        play.setup(ev.WorkerLost("w0", incarnation, "exit code 9", stage="s", quarantine=True))
        [again] = assigns(play.setup(ev.WorkerJoined("w0", incarnation + 1)))
        assert again.elements == ((0, 1),)
    play.setup(ev.WorkerLost("w0", 2, "signal 9 (SIGKILL)", **outside))
    [other] = assigns(play.setup(ev.WorkerJoined("w0", 3)))
    [rest] = assigns(play.setup(ev.CallsDone("w0", 3, other.lease, 0, 1, 1000, 10)))
    assert rest.elements == ((1, 2),)
    told = play.setup(ev.CallsDone("w0", 3, rest.lease, 0, 1, 1000, 10))
    assert cmd.CallsQuarantined(1, 0, 1, ((0, cmd.Cause("s", "exit code 9")),), remains=True) in told


def test_calls_without_a_value_are_left_out_of_their_step() -> None:
    play = Scenario(LIMITS).with_workers("w0").with_pass(PassSettings(4, pulled=False))
    came = play.setup(ev.StepsAvailable(1, 0, 1, 3, skipped_replicas=(1,)))
    assert [(x.lo, x.hi) for x in assigns(came)] == [(0, 1)]
    [second] = assigns(play.setup(done(1)))
    assert (second.lo, second.hi) == (2, 3)
    play(done(2, 2), cmd.AcceptResults(1, 2, 3, "w0"), cmd.StepsReady(1, 0, 1))
    play(ev.StepsAvailable(1, 1, 2, 1, skipped_replicas=(0,)), cmd.StepsReady(1, 1, 2))
