"""Scenarios of quarantine after permanent failures: probes, the rest, all elements."""

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
    """Return a scenario in which call 0 has failed permanently, under lease 1 of w0."""
    scenario = Scenario(LIMITS).with_workers(*(workers or ("w0",))).with_pass(settings)
    scenario.setup(ev.StepsAvailable(1, 0, 1, 1))
    scenario(raised(1), cmd.SizeCall(1, 0))
    return scenario


def test_halves_are_probed_then_the_rest_counts_without_the_culprits() -> None:
    scenario = suspected()
    scenario(ev.CallSized(1, 0, 4), probe(2, 0, 2))
    scenario(raised(2), probe(3, 0, 1))
    scenario(done(3), probe(4, 1, 2))
    scenario(raised(4), probe(5, 2, 4))
    scenario(done(5), cmd.SendAssign("w0", 6, 1, 0, 1, 1, ((0, 1), (2, 4))))
    scenario(
        done(6),
        cmd.CallsQuarantined(1, 0, 1, ((1, NO),), remains=True),
        cmd.AcceptResults(1, 0, 1, "w0"),
        cmd.StepsReady(1, 0, 1),
    )


def test_both_halves_are_probed_concurrently_by_idle_workers() -> None:
    scenario = suspected("w0", "w1")
    scenario(ev.CallSized(1, 0, 2), cmd.SendBind("w1", 1), probe(2, 0, 1, worker="w1"), probe(3, 1, 2))


def test_a_probe_never_waits_behind_a_lease() -> None:
    scenario = Scenario(LIMITS).with_workers("w0").with_pass(PLAIN)
    scenario.setup(ev.StepsAvailable(1, 0, 50, 1), done(1))  # short calls: a lease waits in advance
    first, second = (
        scenario.scheduler._members.leases[i] for i in scenario.scheduler._members.workers["w0"].leases
    )
    scenario.setup(raised(first.id, first.lo), ev.CallSized(1, first.lo, 2))
    held = [scenario.scheduler._members.leases[i] for i in scenario.scheduler._members.workers["w0"].leases]
    assert [x.id for x in held] == [first.id, second.id]
    assert not any(x.probe for x in held)


def test_a_subset_is_probed_once_and_an_element_with_retries() -> None:
    scenario = suspected()
    scenario(ev.CallSized(1, 0, 4), probe(2, 0, 2))
    scenario(raised(2, retries=3), probe(3, 0, 1))
    scenario(raised(3, retries=1), probe(4, 0, 1, attempt=1))
    scenario(done(4), probe(5, 1, 2))


def test_one_death_does_not_make_a_culprit() -> None:
    scenario = suspected("w0", settings=PassSettings(1, pulled=False, quarantine=True))
    scenario.setup(ev.CallSized(1, 0, 2), ev.WorkerLost("w0", 0, "signal 9"))
    [again] = assigns(scenario.setup(ev.WorkerJoined("w0", 1)))
    assert again == probe(3, 0, 1, attempt=1)


def test_all_elements_may_be_culprits() -> None:
    scenario = suspected()
    scenario.setup(ev.CallSized(1, 0, 2), raised(2))
    scenario(raised(3), cmd.CallsQuarantined(1, 0, 1, ((0, NO), (1, NO))), cmd.StepsReady(1, 0, 1))


def test_the_only_element_of_a_shard_is_the_culprit_without_a_probe() -> None:
    scenario = suspected()
    scenario(ev.CallSized(1, 0, 1), cmd.CallsQuarantined(1, 0, 1, ((0, NO),)), cmd.StepsReady(1, 0, 1))


def whole(why: str) -> cmd.CallsQuarantined:
    return cmd.CallsQuarantined(1, 0, 1, (), cmd.Cause("s", f"ValueError: no (not separable: {why})"))


def test_all_elements_are_quarantined_if_none_fails_alone() -> None:
    scenario = suspected()
    scenario.setup(ev.CallSized(1, 0, 2), done(2))
    scenario(done(3), cmd.SendAssign("w0", 4, 1, 0, 1, 1))
    scenario(raised(4), whole("no element fails alone"), cmd.StepsReady(1, 0, 1))


def test_nothing_is_quarantined_if_no_element_fails_alone_and_all_pass_together() -> None:
    scenario = suspected()
    scenario.setup(ev.CallSized(1, 0, 2), done(2), done(3))
    scenario(done(4), cmd.AcceptResults(1, 0, 1, "w0"), cmd.StepsReady(1, 0, 1))


def test_culprits_that_are_named_only_at_last_are_skipped() -> None:
    scenario = suspected()
    scenario.setup(ev.CallSized(1, 0, 2), done(2), done(3))
    scenario(raised(4, culprits=((1, "ValueError: no"),)), cmd.SendAssign("w0", 5, 1, 0, 1, 2, ((0, 1),)))
    scenario(
        done(5),
        cmd.CallsQuarantined(1, 0, 1, ((1, NO),), remains=True),
        cmd.AcceptResults(1, 0, 1, "w0"),
        cmd.StepsReady(1, 0, 1),
    )


def test_all_elements_are_quarantined_if_the_rest_still_fails() -> None:
    scenario = suspected()
    scenario.setup(ev.CallSized(1, 0, 2), raised(2))
    scenario(done(3), cmd.SendAssign("w0", 4, 1, 0, 1, 1, ((1, 2),)))
    scenario(raised(4), whole("the rest still fails"), cmd.StepsReady(1, 0, 1))


def cleared_of_named(**pass_: Any) -> Scenario:
    """Return a scenario in which call 0, of 4 elements, is executed without element 1, which its stage named."""
    scenario = Scenario(LIMITS).with_workers("w0").with_pass(PassSettings(1, pulled=False, **pass_))
    scenario.setup(ev.StepsAvailable(1, 0, 1, 1), raised(1, culprits=((1, "ValueError: no"),)))
    scenario(ev.CallSized(1, 0, 4), cmd.SendAssign("w0", 2, 1, 0, 1, 1, ((0, 1), (2, 4))))
    return scenario


def test_culprits_that_the_next_stage_names_are_skipped_too() -> None:
    scenario = cleared_of_named()
    scenario(
        raised(2, culprits=((2, "ValueError: no"),)),  # the third one of the rest
        cmd.SendAssign("w0", 3, 1, 0, 1, 2, ((0, 1), (2, 3))),
    )
    scenario(
        done(3),
        cmd.CallsQuarantined(1, 0, 1, ((1, NO), (3, NO)), remains=True),
        cmd.AcceptResults(1, 0, 1, "w0"),
        cmd.StepsReady(1, 0, 1),
    )


def test_the_next_stage_may_name_all_other_elements() -> None:
    scenario = cleared_of_named()
    named = tuple((at, "ValueError: no") for at in range(3))
    scenario(
        raised(2, culprits=named),
        cmd.CallsQuarantined(1, 0, 1, tuple((at, NO) for at in range(4))),
        cmd.StepsReady(1, 0, 1),
    )


def test_the_call_is_bisected_if_the_next_stage_names_no_culprits() -> None:
    scenario = cleared_of_named(quarantine_max=2)
    scenario(raised(2), cmd.SizeCall(1, 0))
    scenario(ev.CallSized(1, 0, 4), probe(3, 0, 2))
    scenario(raised(3, culprits=((1, "ValueError: no"),)), probe(4, 0, 1))
    scenario(done(4), probe(5, 1, 2))
    scenario(raised(5, culprits=((0, "ValueError: no"),)), probe(6, 2, 4))
    scenario(raised(6), probe(7, 2, 3))
    scenario(done(7), probe(8, 3, 4))
    scenario(raised(8), cmd.SendAssign("w0", 9, 1, 0, 1, 2, ((0, 1), (2, 3))))
    scenario(raised(9), whole("the rest still fails"), cmd.StepsReady(1, 0, 1))


def test_the_rest_fails_if_the_next_stage_does_not_quarantine() -> None:
    scenario = cleared_of_named()
    scenario(ev.CallFailed("w0", 0, 2, 0), cmd.StepFailed(1, 0, (cmd.Failure(0, 2, "w0"),)))
    assert not scenario.scheduler._passes[1].searches.cleared


def test_elements_that_cannot_be_separated_are_quarantined_together() -> None:
    scenario = suspected()
    scenario(
        ev.CallSized(1, 0, 0), whole("its elements can't be executed separately"), cmd.StepsReady(1, 0, 1)
    )


def test_a_failure_without_quarantine_makes_no_culprit() -> None:
    scenario = suspected()
    scenario.setup(ev.CallSized(1, 0, 2), ev.CallFailed("w0", 0, 2, 0))
    scenario(ev.CallFailed("w0", 0, 3, 0), cmd.SendAssign("w0", 4, 1, 0, 1, 1))
    scenario(ev.CallFailed("w0", 0, 4, 0), cmd.StepFailed(1, 0, (cmd.Failure(0, 2, "w0"),)))


def test_an_earlier_failure_of_the_pass_ends_the_search() -> None:
    scenario = Scenario(LIMITS).with_workers("w0", "w1").with_pass(PLAIN)
    scenario.setup(ev.StepsAvailable(1, 0, 2, 1), raised(2, 1, "w1"), ev.CallSized(1, 1, 8))
    scenario(
        ev.CallFailed("w0", 0, 1, 0),
        cmd.SendCancel("w1", 3),
        cmd.StepFailed(1, 0, (cmd.Failure(0, 1, "w0"),)),
    )
    assert not scenario.scheduler._passes[1].searches.calls


def test_a_draining_pass_is_drained_during_a_search() -> None:
    scenario = suspected()
    scenario(ev.PassDraining(1), cmd.PassDrained(1))
    scenario(ev.CallSized(1, 0, 4))


def test_a_gang_is_quarantined_as_a_whole() -> None:
    scenario = Scenario(LIMITS).with_workers("w0").with_pass(PassSettings(2, pulled=False, gang=True))
    scenario.setup(ev.StepsAvailable(1, 0, 1, 2), done(1, 0))
    cause = cmd.Cause("s", "ValueError: no (a gang's step is all or nothing)")
    scenario(
        raised(1, 1),
        cmd.GangEnded(1, counts=False, aborted=False),
        cmd.CallsQuarantined(1, 0, 2, (), cause),
        cmd.StepsReady(1, 0, 1),
    )


def test_the_pass_decides_about_deaths_in_an_unknown_stage() -> None:
    settings = PassSettings(1, pulled=False, quarantine=True)
    scenario = Scenario(LIMITS).with_workers("w0", "w1").with_pass(settings)
    scenario.setup(ev.StepsAvailable(1, 0, 1, 1), ev.WorkerLost("w0", 0, "signal 11"))
    scenario(ev.WorkerLost("w1", 0, "signal 11"), cmd.SizeCall(1, 0), cmd.StartWorker("w1", 1))


@pytest.mark.parametrize("outside", [{"stage": "s", "quarantine": True}, {}], ids=["killed", "stage unknown"])
def test_a_death_that_came_from_outside_does_not_decide(outside: dict[str, Any]) -> None:
    """Most deaths of an element decide whether it is a culprit, and the reported cause."""
    scenario = Scenario(SchedulerLimits(deaths_max=3)).with_workers("w0").with_pass(PLAIN)
    scenario.setup(ev.StepsAvailable(1, 0, 1, 1), raised(1), ev.CallSized(1, 0, 2))
    for incarnation in range(2):
        scenario.setup(ev.WorkerLost("w0", incarnation, "exit code 9", stage="s", quarantine=True))
        [again] = assigns(scenario.setup(ev.WorkerJoined("w0", incarnation + 1)))
        assert again.elements == ((0, 1),)
    scenario.setup(ev.WorkerLost("w0", 2, "signal 9 (SIGKILL)", **outside))
    [other] = assigns(scenario.setup(ev.WorkerJoined("w0", 3)))
    [rest] = assigns(scenario.setup(ev.CallsDone("w0", 3, other.lease, 0, 1, 1000, 10)))
    assert rest.elements == ((1, 2),)
    told = scenario.setup(ev.CallsDone("w0", 3, rest.lease, 0, 1, 1000, 10))
    assert cmd.CallsQuarantined(1, 0, 1, ((0, cmd.Cause("s", "exit code 9")),), remains=True) in told


def test_calls_without_a_value_are_skipped_in_their_step() -> None:
    scenario = Scenario(LIMITS).with_workers("w0").with_pass(PassSettings(4, pulled=False))
    came = scenario.setup(ev.StepsAvailable(1, 0, 1, 3, skipped_replicas=(1,)))
    assert [(x.lo, x.hi) for x in assigns(came)] == [(0, 1)]
    [second] = assigns(scenario.setup(done(1)))
    assert (second.lo, second.hi) == (2, 3)
    scenario(done(2, 2), cmd.AcceptResults(1, 2, 3, "w0"), cmd.StepsReady(1, 0, 1))
    scenario(ev.StepsAvailable(1, 1, 2, 1, skipped_replicas=(0,)), cmd.StepsReady(1, 1, 2))


def test_culprits_that_are_not_in_the_rest_end_the_search() -> None:
    scenario = suspected()
    scenario.setup(ev.CallSized(1, 0, 2), done(2), done(3))
    scenario(
        raised(4, culprits=((9, "ValueError: no"),)), whole("the rest still fails"), cmd.StepsReady(1, 0, 1)
    )


@pytest.mark.parametrize("before", [0, 1])
def test_more_failing_elements_than_the_limit_end_the_pass_during_the_search(before: int) -> None:
    scenario = suspected(
        settings=PassSettings(1, pulled=False, quarantine_max=1 + before, quarantined=before)
    )
    scenario.setup(ev.CallSized(1, 0, 1024))
    lease = 2
    for _ in range(9):  # down to single elements
        scenario.setup(raised(lease))
        lease += 1
    scenario(raised(lease), probe(lease + 1, 1, 2))
    full = cmd.QuarantineFull(1, 2 + before, ((0, NO), (0, NO)))
    assert full in scenario.setup(raised(lease + 1))
    assert not any(
        isinstance(c, cmd.QuarantineFull) for c in scenario.setup(raised(lease + 2), raised(lease + 3))
    )
    scenario.setup(ev.PassClosed(1))


def test_elements_of_a_shard_that_is_quarantined_as_a_whole_are_counted_once() -> None:
    scenario = suspected(settings=PassSettings(1, pulled=False, quarantine_max=2))
    scenario.setup(ev.CallSized(1, 0, 2), raised(2), done(3))
    scenario(raised(4), whole("the rest still fails"), cmd.StepsReady(1, 0, 1))
    scenario(ev.ElementsQuarantined(1, 2))
    scenario(ev.ElementsQuarantined(1, 1), cmd.QuarantineFull(1, 3, ((0, NO), (0, NO))))
