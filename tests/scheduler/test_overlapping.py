"""Scenarios of calls that only wait: leases that overlap, sized by their number, not by time."""

from __future__ import annotations

from collections import Counter

import pytest

from pipedist.errors import LocalProtocolError
from pipedist.scheduler import PassSettings
from pipedist.scheduler import commands as cmd
from pipedist.scheduler import events as ev
from tests.simulation.scenario import Scenario, assigns

FEW = PassSettings(replicas=1, pulled=False, at_once=6, concurrency=6)


def held(leases: list[cmd.SendAssign]) -> Counter[str]:
    return Counter(dict.fromkeys((), 0)) + Counter(
        {w: sum(x.hi - x.lo for x in leases if x.worker == w) for w in {x.worker for x in leases}}
    )


def test_workers_get_their_share_of_the_calls_at_once_each_call_alone() -> None:
    scenario = Scenario().with_workers("w0", "w1").with_pass(FEW)
    leases = assigns(scenario.setup(ev.StepsAvailable(1, 0, 20, 1)))
    assert held(leases) == {"w0": 3, "w1": 3}
    assert [x.hi - x.lo for x in leases] == [1] * 6
    assert all(x.overlaps for x in leases)


def test_a_call_is_reported_in_any_order_and_the_next_one_takes_its_place() -> None:
    scenario = Scenario().with_workers("w0").with_pass(FEW)
    leases = assigns(scenario.setup(ev.StepsAvailable(1, 0, 20, 1)))
    assert [x.lo for x in leases] == [0, 1, 2, 3, 4, 5]
    [following] = assigns(scenario.setup(ev.CallsDone("w0", 0, leases[4].lease, 4, 5, 10**9)))
    assert (following.worker, following.lo) == ("w0", 6)
    scenario(ev.CallsDone("w0", 0, leases[4].lease, 4, 5, 10**9), cmd.DropResults("w0", leases[4].lease))


def test_the_number_of_calls_does_not_depend_on_their_time() -> None:
    """A call of 200 ms, or of 60 s: a worker has 32 of them from the beginning, if no total is given."""
    scenario = Scenario().with_workers("w0", "w1")
    scenario.with_pass(PassSettings(replicas=1, pulled=False, at_once=32))
    leases = assigns(scenario.setup(ev.StepsAvailable(1, 0, 200, 1)))
    assert held(leases) == {"w0": 32, "w1": 32}
    [one] = assigns(scenario.at(60.0).setup(ev.CallsDone("w1", 0, leases[1].lease, 1, 2, 60 * 10**9)))
    assert one.worker == "w1"


def test_few_calls_are_spread_over_the_workers() -> None:
    scenario = Scenario().with_workers("w0", "w1", "w2")
    scenario.with_pass(PassSettings(replicas=1, pulled=False, at_once=32))
    assert held(assigns(scenario.setup(ev.StepsAvailable(1, 0, 6, 1)))) == {"w0": 2, "w1": 2, "w2": 2}


def test_a_worker_that_joins_late_gets_its_share() -> None:
    scenario = Scenario().with_workers("w0")
    scenario.setup(ev.WorkerExpected("w1")).clear()
    scenario.with_pass(FEW)
    assert held(assigns(scenario.setup(ev.StepsAvailable(1, 0, 20, 1)))) == {"w0": 3}
    assert held(assigns(scenario.setup(ev.WorkerJoined("w1", 0)))) == {"w1": 3}


def test_a_worker_that_does_not_start_leaves_its_share_to_others() -> None:
    scenario = Scenario().with_workers("w0")
    scenario.setup(ev.WorkerExpected("w1")).clear()
    scenario.with_pass(FEW)
    scenario.setup(ev.StepsAvailable(1, 0, 20, 1))
    assert held(assigns(scenario.at(60.0).setup(ev.Tick()))) == {"w0": 3}


def quotas(out: list[cmd.Command]) -> dict[str, tuple[int, ...]]:
    return {x.worker: x.calls for x in out if isinstance(x, cmd.SendQuota)}


LIMITED = PassSettings(replicas=1, pulled=False, at_once=6, concurrency=6, limits=(4, 64))


def test_quotas_add_up_to_the_limit() -> None:
    scenario = Scenario().with_workers("w0", "w1", "w2").with_pass(LIMITED)
    out = scenario.setup(ev.StepsAvailable(1, 0, 20, 1))
    assert sorted(quotas(out).values()) == [(1, 21), (1, 21), (2, 22)]
    assert {x.sharing for x in out if isinstance(x, cmd.SendQuota)} == {3}


def test_a_worker_without_calls_leaves_its_quota_to_others_once_it_confirms() -> None:
    scenario = Scenario().with_workers("w0", "w1").with_pass(LIMITED)
    leases = assigns(scenario.setup(ev.StepsAvailable(1, 0, 2, 1)))
    out = scenario.setup(ev.CallsDone("w1", 0, leases[1].lease, 1, 2, 10))
    assert quotas(out) == {"w0": (2, 32), "w1": (0, 0)}
    assert quotas(scenario.setup(ev.QuotaConfirmed("w1", 0, 1, (0, 0)))) == {"w0": (4, 64)}


def test_a_worker_that_joins_gets_its_quota_when_others_have_confirmed_theirs() -> None:
    scenario = Scenario().with_workers("w0").with_pass(LIMITED)
    leases = assigns(scenario.setup(ev.StepsAvailable(1, 0, 20, 1)))
    assert len(leases) == 6
    scenario.with_workers("w1")
    out = scenario.setup(ev.CallsDone("w0", 0, leases[0].lease, 0, 1, 10))
    assert quotas(out) == {"w0": (2, 32), "w1": (0, 0)}
    assert quotas(scenario.setup(ev.QuotaConfirmed("w0", 0, 1, (2, 32)))) == {"w1": (2, 32)}
    assert quotas(scenario.setup(ev.WorkerLost("w0", 0, "signal 9"))) == {"w1": (4, 64)}


def test_a_lowered_quota_grows_only_after_its_confirmation() -> None:
    """If it grew, and became lower again, the first confirmation would be taken for the second one."""
    scenario = Scenario().with_workers("w0").with_pass(LIMITED)
    leases = assigns(scenario.setup(ev.StepsAvailable(1, 0, 20, 1)))
    scenario.with_workers("w1")
    [second] = assigns(scenario.setup(ev.CallsDone("w0", 0, leases[0].lease, 0, 1, 10)))
    assert second.worker == "w1"
    assert quotas(scenario.setup(ev.WorkerLost("w1", 0, "signal 9"))) == {"w0": (2, 32)}
    assert quotas(scenario.setup(ev.QuotaConfirmed("w0", 0, 1, (2, 32)))) == {"w0": (4, 64)}
    assert not quotas(
        scenario.setup(ev.QuotaConfirmed("w0", 1, 1, (0, 0)), ev.QuotaConfirmed("w0", 0, 9, ()))
    )


def test_calls_that_wait_are_given_back_when_their_pass_drains() -> None:
    scenario = Scenario().with_workers("w0", "w1").with_pass(LIMITED)
    leases = assigns(scenario.setup(ev.StepsAvailable(1, 0, 2, 1)))
    assert quotas(scenario.setup(ev.PassDraining(1))) == {"w0": (), "w1": ()}
    scenario(ev.CallFailed("w0", 0, leases[0].lease, 0, aborted=True))
    done = ev.CallsDone("w1", 0, leases[1].lease, 1, 2, 10)
    scenario(done, cmd.AcceptResults(1, 1, 2, "w1"), cmd.PassDrained(1))
    assert scenario.scheduler._passes[1].todo.calls == 1


def test_a_dead_worker_costs_its_calls_an_attempt_only_if_they_had_the_thread() -> None:
    scenario = Scenario().with_workers("w0").with_pass(FEW)
    leases = assigns(scenario.setup(ev.StepsAvailable(1, 0, 6, 1)))
    scenario.setup(ev.WorkerLost("w0", 0, "signal 11", running=(leases[3].lease, 3)))
    again = assigns(scenario.setup(ev.WorkerJoined("w0", 1)))
    assert [(x.lo, x.attempt) for x in again] == [(0, 0), (1, 0), (2, 0), (3, 1), (4, 0), (5, 0)]


def test_another_pass_is_executed_by_a_worker_whose_calls_only_wait() -> None:
    """Else a `combine` function would have to wait until all calls of a worker are over."""
    scenario = Scenario().with_workers("w0").with_pass(FEW)
    scenario.setup(ev.StepsAvailable(1, 0, 20, 1))
    scenario.with_pass(PassSettings(replicas=1, ordered=False, pulled=False), pass_id=2)
    [other] = assigns(scenario.setup(ev.StepsAvailable(2, 0, 3, 1)))
    assert (other.pass_id, other.worker, other.overlaps) == (2, "w0", False)
    assert assigns(scenario.setup(ev.CallsDone("w0", 0, 1, 0, 1, 10**9)))[0].pass_id == 1
    assert assigns(scenario.setup(ev.CallsDone("w0", 0, other.lease, 0, 1, 10**9)))[0].pass_id == 2


def test_steps_behind_one_that_hangs_are_requested() -> None:
    """Finished calls behind an incomplete step are not in flight."""
    scenario = Scenario().with_workers("w0")
    scenario.with_pass(PassSettings(replicas=1, at_once=4, concurrency=4))
    scenario.setup(ev.StepsAvailable(1, 0, 1, 1))
    offered = 1
    for _ in range(30):
        wanted = sum(x.count for x in scenario.setup(ev.Tick()) if isinstance(x, cmd.RequestSteps))
        scheduler = scenario.scheduler
        if (count := scheduler._passes[1].requested - offered) > 0:
            scenario.setup(ev.StepsAvailable(1, offered, offered + count, 1))
            offered += count
        for lease in list(scheduler._members.leases.values()):
            if lease.lo > 0:
                scenario.setup(ev.CallsDone("w0", 0, lease.id, lease.lo, lease.hi, 10**9))
        assert wanted >= 0
    assert offered > 60


def test_a_slow_call_gets_a_second_attempt_and_its_worker_keeps_its_other_calls() -> None:
    settings = PassSettings(replicas=1, pulled=False, at_once=4, speculation=2.0)
    scenario = Scenario().with_workers("w0").with_pass(settings)
    leases = assigns(scenario.setup(ev.StepsAvailable(1, 0, 5, 1)))
    for call in (0, 1, 2):
        leases += assigns(
            scenario.at(1.0).setup(ev.CallsDone("w0", 0, leases[call].lease, call, call + 1, 10**9))
        )
    scenario.with_workers("w1")
    due = scenario.scheduler.deadline()
    assert due is not None
    [second] = assigns(scenario.at(due).setup(ev.Tick()))
    assert (second.worker, second.lo, second.twin) == ("w1", 3, leases[3].lease)
    scenario.setup(ev.CallsDone("w1", 0, second.lease, 3, 4, 10**9))
    assert scenario.scheduler._members.workers["w0"].suspended == 0
    scenario.setup(ev.CallsDone("w0", 0, leases[4].lease, 4, 5, 10**9))


def test_a_gap_within_an_overlapping_lease_evicts_its_worker() -> None:
    scenario = Scenario().with_workers("w0").with_pass(PassSettings(replicas=1, pulled=False, at_once=32))
    [first] = assigns(scenario.setup(ev.StepsAvailable(1, 0, 1, 1)))
    out = scenario.setup(ev.CallsDone("w0", 0, first.lease, 1, 2, 10))
    assert any(isinstance(x, cmd.EvictWorker) for x in out)


@pytest.mark.parametrize(
    "wrong", [{"concurrency": 4}, {"limits": (1,)}, {"at_once": 4, "concurrency": 4, "speculation": 2.0}]
)
def test_settings_that_contradict_each_other_are_rejected(wrong: dict[str, float]) -> None:
    with pytest.raises(LocalProtocolError):
        PassSettings(replicas=1, **wrong)  # type: ignore[arg-type]
