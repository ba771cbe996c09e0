"""Scenarios of calls that need GPUs: only workers with GPUs get them, and no other call waits for them."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipedist.scheduler import PassSettings
from pipedist.scheduler import commands as cmd
from pipedist.scheduler import events as ev
from tests.simulation.scenario import Scenario, assigns

ON_GPU = PassSettings(replicas=1, pulled=False, gpus=1.0)
PLAIN = PassSettings(replicas=1, pulled=False)
SECOND = 10**9


def opened(workers: Mapping[str, float], *passes: PassSettings) -> Scenario:
    scenario = Scenario()
    for name, gpus in workers.items():
        scenario.setup(ev.WorkerExpected(name), ev.WorkerJoined(name, 0, gpus=gpus))
    for number, settings in enumerate(passes, 1):
        scenario.setup(ev.PassOpened(number, settings))
    return scenario


def test_only_a_worker_that_owns_a_gpu_gets_a_call_that_needs_one() -> None:
    scenario = opened({"w0": 0, "w1": 1, "w2": 0}, ON_GPU)
    scenario(ev.StepsAvailable(1, 0, 3, 1), cmd.SendBind("w1", 1), cmd.SendAssign("w1", 1, 1, 0, 1, 0))
    scenario(
        ev.CallsDone("w1", 0, 1, 0, 1, SECOND),
        cmd.AcceptResults(1, 0, 1, "w1"),
        cmd.StepsReady(1, 0, 1),
        cmd.SendAssign("w1", 2, 1, 1, 2, 0),
    )


def test_calls_wait_until_a_worker_with_a_gpu_joins() -> None:
    scenario = opened({"w0": 0}, ON_GPU)
    scenario(ev.StepsAvailable(1, 0, 1, 1))
    scenario.setup(ev.WorkerExpected("w1"))
    scenario(ev.WorkerJoined("w1", 0, gpus=2), cmd.SendBind("w1", 1), cmd.SendAssign("w1", 1, 1, 0, 1, 0))


def test_after_a_death_the_call_goes_to_another_worker_with_a_gpu() -> None:
    scenario = opened({"w0": 0, "w1": 1}, ON_GPU)
    scenario.setup(ev.StepsAvailable(1, 0, 1, 1))
    assert assigns(scenario.setup(ev.WorkerLost("w1", 0, "signal 9"))) == []
    [again] = assigns(scenario.setup(ev.WorkerJoined("w1", 1, gpus=1)))
    assert (again.worker, again.lo, again.hi, again.attempt) == ("w1", 0, 1, 1)


def test_half_a_gpu_is_not_enough_for_a_call_that_needs_one() -> None:
    half = PassSettings(replicas=1, pulled=False, gpus=0.5)
    scenario = opened({"w0": 0.5, "w1": 0.5, "w2": 0}, ON_GPU, half)
    assert assigns(scenario.setup(ev.StepsAvailable(1, 0, 2, 1))) == []
    assert {a.worker for a in assigns(scenario.setup(ev.StepsAvailable(2, 0, 3, 1)))} == {"w0", "w1"}


def test_a_pass_without_gpus_does_not_wait_for_one_with_them() -> None:
    scenario = opened({"w0": 0, "w1": 1}, ON_GPU, PLAIN)
    scenario.setup(ev.StepsAvailable(1, 0, 2, 1))
    [plain] = assigns(scenario.setup(ev.StepsAvailable(2, 0, 1, 1)))
    assert (plain.worker, plain.pass_id) == ("w0", 2)


def test_a_call_without_gpus_prefers_workers_without_gpus() -> None:
    scenario = opened({"w0": 1, "w1": 0}, PLAIN, ON_GPU)
    assert [a.worker for a in assigns(scenario.setup(ev.StepsAvailable(1, 0, 1, 1)))] == ["w1"]
    assert [a.worker for a in assigns(scenario.setup(ev.StepsAvailable(2, 0, 1, 1)))] == ["w0"]


def test_workers_with_gpus_execute_other_calls_when_idle() -> None:
    scenario = opened({"w0": 1, "w1": 0}, PLAIN)
    assert {a.worker for a in assigns(scenario.setup(ev.StepsAvailable(1, 0, 2, 1)))} == {"w0", "w1"}


def test_short_calls_do_not_keep_the_owner_of_a_gpu_from_a_call_that_needs_it() -> None:
    """Else a worker that gets a lease in advance would never be idle."""
    scenario = opened({"w0": 1}, PassSettings(replicas=1, pulled=False, gpus=1.0, priority=0), PLAIN)
    leases = assigns(scenario.setup(ev.StepsAvailable(2, 0, 10_000, 1)))

    def done() -> None:
        first = leases.pop(0)
        calls = first.hi - first.lo
        report = ev.CallsDone("w0", 0, first.lease, first.lo, first.hi, calls * 10_000_000)
        leases.extend(assigns(scenario.setup(report)))

    done()
    assert len(leases) == 2, "one of them in advance"
    assert assigns(scenario.setup(ev.StepsAvailable(1, 0, 1, 1))) == []
    done()
    done()
    assert [lease.pass_id for lease in leases] == [1]


GANG = PassSettings(replicas=2, pulled=False, gang=True, gpus=1.0)


def test_a_gang_has_a_worker_with_gpus_for_each_replica() -> None:
    scenario = opened({"w0": 0, "w1": 1, "w2": 0, "w3": 1}, GANG)
    [gang] = [c for c in scenario.setup(ev.StepsAvailable(1, 0, 1, 2)) if isinstance(c, cmd.SendGang)]
    assert [(part.worker, part.lo, part.hi) for part in gang.parts] == [("w1", 0, 1), ("w3", 1, 2)]


def test_a_gang_without_enough_gpu_workers_waits_without_blocking_others() -> None:
    scenario = opened({"w0": 0, "w1": 1}, GANG, PLAIN)
    assert scenario.setup(ev.StepsAvailable(1, 0, 1, 2)) == []
    assert [a.worker for a in assigns(scenario.setup(ev.StepsAvailable(2, 0, 1, 1)))] == ["w0"]
    scenario.setup(ev.WorkerExpected("w2"))
    [gang] = [c for c in scenario.setup(ev.WorkerJoined("w2", 0, gpus=1)) if isinstance(c, cmd.SendGang)]
    assert [part.worker for part in gang.parts] == ["w1", "w2"]


@pytest.mark.parametrize("seconds", [0.001, 1.0])
@given(
    owned=st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0]), min_size=1, max_size=6),
    needs=st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0]), min_size=1, max_size=3),
    order=st.randoms(use_true_random=False),
)
def test_every_call_is_executed_by_a_worker_with_enough_gpus(
    seconds: float, owned: list[float], needs: list[float], order: object
) -> None:
    """In any order of reports; that a worker has enough GPUs for its leases is an invariant."""
    workers = {f"w{i}": gpus for i, gpus in enumerate(owned)}
    passes = [PassSettings(replicas=1, pulled=False, gpus=gpus) for gpus in needs]
    scenario = opened(workers, *passes)
    running: list[cmd.SendAssign] = []
    for number in range(1, len(passes) + 1):
        running += assigns(scenario.setup(ev.StepsAvailable(number, 0, 20, 1)))
    calls = dict.fromkeys(range(1, len(passes) + 1), 0)
    while running:
        firsts = {lease.worker: lease for lease in reversed(running)}  # a worker executes its leases in order
        lease = order.choice(sorted(firsts.values(), key=lambda lease: lease.lease))  # type: ignore[attr-defined]
        running.remove(lease)
        took_ns = int(seconds * SECOND) * (lease.hi - lease.lo)
        running += assigns(
            scenario.setup(ev.CallsDone(lease.worker, 0, lease.lease, lease.lo, lease.hi, took_ns))
        )
        calls[lease.pass_id] += lease.hi - lease.lo
    assert calls == {number: 20 if max(owned) >= gpus else 0 for number, gpus in enumerate(needs, 1)}
