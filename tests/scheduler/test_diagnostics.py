"""Scenarios of runs that do not continue: each reason is reported."""

from __future__ import annotations

from pipedist.scheduler import PassSettings, SchedulerLimits
from pipedist.scheduler import events as ev
from pipedist.scheduler.diagnostics import WAITS_MAX, Reason, Wait
from tests.simulation.scenario import Scenario

PLAIN = PassSettings(replicas=2, pulled=False)
LIMITS = SchedulerLimits(backoff_s=10.0, bundle_s=1000.0)


def waits(scenario: Scenario) -> dict[Reason, list[Wait]]:
    """Return what the scheduler waits for, by reason; and check that the question changes nothing."""
    before = scenario.scheduler.deadline()
    found: dict[Reason, list[Wait]] = {}
    for wait in scenario.scheduler.why(scenario.now).waits:
        found.setdefault(wait.reason, []).append(wait)
    assert scenario.scheduler.deadline() == before
    scenario.scheduler.validate()
    return found


def begun(
    *workers: str, settings: PassSettings = PLAIN, steps: int = 2, limits: SchedulerLimits = LIMITS
) -> Scenario:
    scenario = Scenario(limits).with_workers(*workers).with_pass(settings)
    scenario.setup(ev.StepsAvailable(1, 0, steps, 2))
    return scenario


def test_running_calls_have_a_worker_and_a_duration() -> None:
    scenario = begun("w0", "w1").at(5.0)
    assert waits(scenario)[Reason.RUNNING] == [
        Wait(1, Reason.RUNNING, 0, 1, 0, "w0", 5.0, lease=1),
        Wait(1, Reason.RUNNING, 1, 2, 0, "w1", 5.0, lease=2),
    ]
    scenario.setup(ev.CallsDone("w0", 0, 1, 0, 1, 10**9))
    scenario.at(7.0)
    why = scenario.scheduler.why(7.0)
    assert (why.silent_s, why.ready, why.busy) == (2.0, 2, 2)
    assert [(x.worker, x.for_s) for x in waits(scenario)[Reason.RUNNING]] == [("w1", 7.0), ("w0", 2.0)]


def test_calls_that_wait_for_a_free_worker() -> None:
    [wait] = waits(begun("w0"))[Reason.FREE_WORKER]
    assert (wait.lo, wait.hi, wait.text) == (1, 4, "the only worker is busy")


def test_calls_behind_another_one_of_their_lease() -> None:
    scenario = begun("w0", steps=4)
    scenario.at(1.0).setup(ev.CallsDone("w0", 0, 1, 0, 1, 10**9))
    found = waits(scenario)
    assert [(x.lo, x.hi) for x in found[Reason.RUNNING]] == [(1, 2)]
    assert [(x.lo, x.hi, x.worker) for x in found[Reason.QUEUED]] == [(2, 5, "w0")]


def test_calls_without_any_worker() -> None:
    scenario = Scenario(LIMITS).with_pass(PLAIN)
    scenario.setup(ev.StepsAvailable(1, 0, 1, 2))
    assert "no worker has joined" in waits(scenario)[Reason.JOINING_WORKER][0].text
    scenario.setup(ev.WorkerExpected("w0"))
    assert "none has joined, 1 to be started" in waits(scenario)[Reason.STARTING_WORKER][0].text
    assert scenario.scheduler.why(0.0).starting == ("w0",)


def test_calls_of_which_all_workers_are_in_cancelled_calls() -> None:
    scenario = begun("w0", "w1")
    scenario.setup(ev.PassClosed(1), ev.PassOpened(2, PLAIN), ev.StepsAvailable(2, 0, 1, 2))
    [wait] = waits(scenario)[Reason.FREE_WORKER]
    assert wait.text == "all 2 workers are in cancelled calls, until these return"


def test_calls_that_back_off() -> None:
    scenario = begun("w0", steps=1)
    for lease in (1, 2):
        scenario.setup(ev.CallFailed("w0", 0, lease, 0, retries=3))
    [wait] = waits(scenario.at(4.0))[Reason.BACKOFF]
    assert (wait.lo, wait.attempt, wait.text) == (0, 2, "it raised; its retry is in 6.0 s")


def test_calls_whose_culprits_are_searched() -> None:
    scenario = begun("w0", steps=1)
    scenario.setup(ev.CallFailed("w0", 0, 1, 0, quarantine=True))
    assert "0 pending subsets" in waits(scenario)[Reason.SEARCH][0].text
    scenario.setup(ev.CallSized(1, 0, 8))
    found = waits(scenario)
    assert "2 pending subsets" in found[Reason.SEARCH][0].text
    assert [x.lo for x in found[Reason.FREE_WORKER]] == [0, 0], "its halves wait for a worker"


def test_a_gang_that_needs_more_workers_than_are_idle() -> None:
    scenario = begun("w0", "w1", steps=1)
    scenario.setup(ev.PassOpened(2, PassSettings(2, pulled=False, gang=True)), ev.StepsAvailable(2, 0, 1, 2))
    [wait] = waits(scenario)[Reason.GANG]
    assert (wait.pass_id, wait.lo, wait.hi) == (2, 0, 2)
    assert wait.text == "it needs 2 idle workers at once; 0 of 2 are idle"


def with_gpus(settings: PassSettings, **workers: float) -> Scenario:
    scenario = Scenario(LIMITS).with_pass(settings)
    for name, gpus in workers.items():
        scenario.setup(ev.WorkerExpected(name), ev.WorkerJoined(name, 0, gpus=gpus))
    scenario.setup(ev.StepsAvailable(1, 0, 3, settings.replicas))
    return scenario


def test_calls_that_no_worker_owns_gpus_for() -> None:
    settings = PassSettings(1, pulled=False, gpus=1.0)
    [wait] = waits(with_gpus(settings, w0=0.0))[Reason.JOINING_WORKER]
    assert (wait.lo, wait.hi, wait.text) == (0, 3, "no worker that owns 1 GPU has joined")
    scenario = with_gpus(settings, w0=0.5)
    scenario.setup(ev.WorkerExpected("w1"))
    [wait] = waits(scenario)[Reason.STARTING_WORKER]
    assert wait.text == "none that owns 1 GPU has joined, 1 to be started"
    [wait] = waits(with_gpus(settings, w0=0.0, w1=2.0))[Reason.FREE_WORKER]
    assert (wait.lo, wait.text) == (1, "the only worker that owns 1 GPU is busy")
    [wait] = waits(with_gpus(PassSettings(1, pulled=False, gpus=0.5), w0=0.5, w1=0.5, w2=0))[
        Reason.FREE_WORKER
    ]
    assert wait.text == "all 2 workers that own 0.5 GPUs are busy"


def test_a_gang_that_too_few_workers_own_gpus_for() -> None:
    settings = PassSettings(3, pulled=False, gang=True, gpus=1.0)
    [wait] = waits(with_gpus(settings, w0=0.0, w1=1.0, w2=1.0))[Reason.GANG]
    assert wait.text == "it needs 3 idle workers that own 1 GPU at once; 2 of 2 are idle"


def test_a_gang_whose_members_run() -> None:
    scenario = begun("w0", "w1", settings=PassSettings(2, pulled=False, gang=True), steps=1)
    scenario.setup(ev.CallsDone("w1", 0, 2, 1, 2, 10**9))
    [wait] = waits(scenario)[Reason.RUNNING]
    assert (wait.worker, wait.text) == ("w0", "in a gang of 2 workers, 1 of them not done")


def test_calls_that_wait_for_the_turn_of_a_gang() -> None:
    scenario = Scenario(LIMITS).with_workers("w0", "w1").with_pass(PassSettings(1, pulled=False))
    scenario.setup(ev.PassOpened(2, PassSettings(2, pulled=False, gang=True)))
    scenario.setup(
        ev.StepsAvailable(1, 0, 1, 1), ev.StepsAvailable(2, 0, 1, 2), ev.StepsAvailable(1, 1, 2, 1)
    )
    found = waits(scenario)
    assert found[Reason.GANG][0].pass_id == 2
    assert (found[Reason.TURN][0].pass_id, found[Reason.TURN][0].text) == (1, "pass 2 goes first")


def test_a_pass_that_is_drained() -> None:
    scenario = begun("w0")
    scenario.setup(ev.PassDraining(1))
    assert [(x.lo, x.hi) for x in waits(scenario)[Reason.HELD]] == [(1, 4)]


def test_steps_that_are_not_available() -> None:
    scenario = Scenario(LIMITS).with_workers("w0").with_pass(PassSettings(2))
    [wait] = waits(scenario)[Reason.DATA]
    assert (wait.lo, wait.hi, wait.text) == (0, 2, "step 0 is not available")
    scenario.setup(ev.StepsAvailable(1, 0, 1, 2), ev.StepsEnded(1))
    assert Reason.DATA not in waits(scenario)


def test_steps_that_are_not_consumed() -> None:
    scenario = Scenario(SchedulerLimits(steps_in_flight_max=1)).with_workers("w0").with_pass(PassSettings(1))
    scenario.setup(ev.StepsAvailable(1, 0, 1, 1), ev.CallsDone("w0", 0, 1, 0, 1, 10**9))
    found = waits(scenario)
    assert [(x.lo, x.hi, x.text) for x in found[Reason.READER]] == [
        (0, 1, "1 complete steps were not consumed")
    ]
    assert set(found) == {Reason.READER}
    scenario.setup(ev.StepsConsumed(1, 1))
    assert set(waits(scenario)) == {Reason.DATA}


def test_an_earlier_step_that_is_not_complete() -> None:
    limits = SchedulerLimits(steps_in_flight_max=2, bundle_s=0.001, prefetch_below_s=0.0)
    scenario = Scenario(limits).with_workers("w0", "w1").with_pass(PassSettings(1))
    scenario.setup(
        ev.StepsAvailable(1, 0, 1, 1), ev.StepsAvailable(1, 1, 2, 1), ev.CallsDone("w1", 0, 2, 1, 2, 10**9)
    )
    [wait] = waits(scenario)[Reason.EARLIER_STEP]
    assert "before step 0 is complete" in wait.text


def test_a_call_with_two_attempts_and_a_suspended_worker() -> None:
    limits = SchedulerLimits(speculation_reports_min=1)
    scenario = Scenario(limits).with_workers("w0").with_pass(PassSettings(1, pulled=False, speculation=2.0))
    scenario.setup(ev.StepsAvailable(1, 0, 2, 1))
    scenario.at(1.0).setup(ev.CallsDone("w0", 0, 1, 0, 1, 10**9))
    scenario.with_workers("w1").at(50.0).setup(ev.Tick())
    found = waits(scenario)[Reason.RUNNING]
    assert [(x.worker, x.text) for x in found] == [
        ("w0", "it is executed on w1 too, because it takes long"),
        ("w1", "it is executed on w0 too, because it takes long"),
    ]
    scenario.setup(ev.CallsDone("w1", 0, 3, 1, 2, 10**9))
    assert scenario.scheduler.why(50.0).suspended == ("w0",)


def test_only_the_first_waits_of_many_are_listed() -> None:
    workers = [f"w{i}" for i in range(WAITS_MAX + 5)]
    found = waits(begun(*workers, steps=20))[Reason.RUNNING]
    assert len(found) == WAITS_MAX + 1
    assert (found[-1].lo, found[-1].hi, found[-1].text) == (WAITS_MAX, WAITS_MAX + 5, "5 more of this kind")


def test_an_idle_scheduler_waits_for_nothing() -> None:
    scenario = begun("w0", steps=1)
    scenario.setup(ev.StepsEnded(1), ev.CallsDone("w0", 0, 1, 0, 1, 1))
    lease = next(iter(scenario.scheduler._members.leases))
    scenario.setup(ev.CallsDone("w0", 0, lease, 1, 2, 1), ev.StepsConsumed(1, 1))
    assert waits(scenario) == {}
