"""Scenarios of gangs: all calls of a step at once or not at all, and retried as a whole."""

from __future__ import annotations

import msgspec
import pytest

from pipedist.errors import LocalProtocolError
from pipedist.protocol.messages import spans
from pipedist.scheduler import PassSettings, SchedulerLimits
from pipedist.scheduler import commands as cmd
from pipedist.scheduler import events as ev
from pipedist.scheduler.commands import GangAssignment
from tests.simulation.scenario import Scenario, assigns

RUN = PassSettings(replicas=2, ordered=False, pulled=False, gang=True)
"""The settings of `Strategy.run`."""
SPEC = PassSettings(replicas=2, pulled=False, gang=True)
PLAIN = PassSettings(replicas=1, pulled=False)
MS, SECOND = 10**6, 10**9


def gangs(commands: list[cmd.Command]) -> list[cmd.SendGang]:
    return [c for c in commands if isinstance(c, cmd.SendGang)]


def spread(gang: cmd.SendGang) -> list[tuple[str, int, int]]:
    return [(x.worker, x.lo, x.hi) for x in gang.parts]


def done(scenario: Scenario, gang: cmd.SendGang, took_ns: int = SECOND) -> list[cmd.Command]:
    """Report the results of all members of a gang, and return the commands."""
    incarnations = {name: w.incarnation for name, w in scenario.scheduler._members.workers.items()}
    return scenario.setup(
        *[ev.CallsDone(w, incarnations[w], lease, lo, hi, took_ns) for w, lease, lo, hi in gang.parts]
    )


def opened(settings: PassSettings, *workers: str, limits: SchedulerLimits | None = None) -> Scenario:
    return Scenario(limits).with_workers(*workers).with_pass(settings)


# -- all or nothing ------------------------------------------------------------------------


def test_a_gang_is_sent_as_a_whole_and_counts_as_a_whole() -> None:
    scenario = opened(SPEC, "w0", "w1")
    scenario(
        ev.StepsAvailable(1, 0, 1, 2),
        cmd.SendBind("w0", 1),
        cmd.SendBind("w1", 1),
        cmd.SendGang(1, 1, 0, (GangAssignment("w0", 1, 0, 1), GangAssignment("w1", 2, 1, 2))),
    )
    scenario(ev.CallsDone("w1", 0, 2, 1, 2, SECOND), cmd.StashResults(1, 1, 2, "w1"))
    scenario(
        ev.CallsDone("w0", 0, 1, 0, 1, SECOND),
        cmd.StashResults(1, 0, 1, "w0"),
        cmd.GangEnded(1, counts=True, aborted=False),
        cmd.StepsReady(1, 0, 1),
    )
    scenario(ev.StepsEnded(1), cmd.PassComplete(1))


@pytest.mark.parametrize(
    ("replicas", "workers", "expected"),
    [
        (1, 2, [(0, 1)]),
        (2, 1, [(0, 2)]),
        (2, 3, [(0, 1), (1, 2)]),
        (5, 2, [(0, 3), (3, 5)]),
        (7, 3, [(0, 3), (3, 5), (5, 7)]),
        (4, 4, [(0, 1), (1, 2), (2, 3), (3, 4)]),
    ],
)
def test_replicas_are_divided_in_blocks_among_all_workers(
    replicas: int, workers: int, expected: list[tuple[int, int]]
) -> None:
    names = [f"w{i}" for i in range(workers)]
    scenario = opened(msgspec.structs.replace(RUN, replicas=replicas), *names)
    [gang] = gangs(scenario.setup(ev.StepsAvailable(1, 0, 1, replicas)))
    assert spread(gang) == [(f"w{i}", *chunk) for i, chunk in enumerate(expected)]
    assert spans(replicas, min(replicas, workers)) == tuple(expected)


def test_members_are_in_the_order_of_their_names_w2_before_w10() -> None:
    scenario = opened(msgspec.structs.replace(RUN, replicas=3), "w10", "w2", "far")
    [gang] = gangs(scenario.setup(ev.StepsAvailable(1, 0, 1, 3)))
    assert [part.worker for part in gang.parts] == ["w2", "far", "w10"]


def test_a_gang_waits_for_idle_workers_and_other_calls_wait_for_it() -> None:
    scenario = opened(RUN, "w0", "w1").with_pass(PLAIN, 2)
    scenario.setup(ev.StepsAvailable(2, 0, 1, 1), ev.CallsDone("w0", 0, 1, 0, 1, SECOND))  # long calls
    assert len(assigns(scenario.setup(ev.StepsAvailable(2, 1, 2, 1)))) == 1  # one worker runs call 1
    scenario(ev.StepsAvailable(1, 0, 1, 2))
    scenario(ev.StepsAvailable(2, 2, 9, 1))  # a worker is idle, but it is the gang's turn
    came = scenario.setup(ev.CallsDone("w1", 0, 2, 1, 2, SECOND))
    assert spread(*gangs(came)) == [("w0", 0, 1), ("w1", 1, 2)]
    assert assigns(came) == []
    came = scenario.setup(ev.CallsDone("w0", 0, 3, 0, 1, SECOND))
    assert [(x.worker, x.lo) for x in assigns(came)] == [("w0", 2)], "others have their turn then"


def test_gangs_and_calls_take_turns() -> None:
    scenario = opened(RUN, "w0", "w1").with_pass(PLAIN, 2)
    scenario.setup(ev.StepsAvailable(1, 0, 9, 2), ev.StepsAvailable(2, 0, 99, 1))
    turns = []
    for _ in range(12):
        members = scenario.scheduler._members
        lease = min(members.leases.values(), key=lambda x: x.id)
        came = scenario.setup(ev.CallsDone(lease.worker, 0, lease.id, lease.lo, lease.hi, SECOND))
        turns += ["gang"] * len(gangs(came)) + ["call"] * len(assigns(came))
    assert "gang gang" not in " ".join(turns)
    assert turns.count("gang") >= 3


def test_a_gang_uses_fewer_workers_if_some_are_lost() -> None:
    scenario = opened(RUN, "w0", "w1").with_pass(PLAIN, 2)
    scenario.setup(ev.StepsAvailable(2, 0, 1, 1), ev.StepsAvailable(1, 0, 1, 2))
    came = scenario.setup(ev.WorkerLost("w0", 0, "signal 9"))
    assert spread(*gangs(came)) == [("w1", 0, 2)]


# -- retries as a whole ---------------------------------------------------------------------


def test_a_gang_whose_worker_dies_is_retried_and_charged_once() -> None:
    scenario = opened(msgspec.structs.replace(SPEC, replicas=3), "w0", "w1", "w2")
    scenario.setup(ev.StepsAvailable(1, 0, 1, 3))
    scenario(ev.CallsDone("w2", 0, 3, 2, 3, SECOND), cmd.StashResults(1, 2, 3, "w2"))
    scenario(
        ev.WorkerLost("w1", 0, "signal 9"),
        cmd.SendCancel("w0", 1),
        cmd.GangEnded(1, counts=False, aborted=True),
        cmd.StartWorker("w1", 1),
        cmd.SendGang(2, 1, 1, (GangAssignment("w0", 4, 0, 2), GangAssignment("w2", 5, 2, 3))),
    )
    scenario(
        ev.CallsDone("w0", 0, 1, 0, 1, SECOND), cmd.DropResults("w0", 1)
    )  # before it read the cancellation
    scenario.setup(ev.CallsDone("w0", 0, 4, 0, 2, SECOND))
    scenario(
        ev.CallsDone("w2", 0, 5, 2, 3, SECOND),
        cmd.StashResults(2, 2, 3, "w2"),
        cmd.GangEnded(2, counts=True, aborted=False),
        cmd.StepsReady(1, 0, 1),
    )


@pytest.mark.parametrize(
    ("how", "attempt"),
    [
        ({"graceful": True}, 0),
        ({"running": (2, 1)}, 1),
        ({"running": (77, 1)}, 0),
        ({}, 1),
    ],
)
def test_only_a_death_that_the_gang_may_have_caused_is_charged(how: dict[str, object], attempt: int) -> None:
    scenario = opened(RUN, "w0", "w1")
    scenario.setup(ev.StepsAvailable(1, 0, 1, 2))
    [again] = gangs(scenario.setup(ev.WorkerLost("w1", 0, "gone", **how)))  # type: ignore[arg-type]
    assert (again.serial, again.attempt) == (2, attempt)


def test_the_death_of_a_member_after_its_report_has_no_effect() -> None:
    scenario = opened(RUN, "w0", "w1")
    scenario.setup(ev.StepsAvailable(1, 0, 1, 2), ev.CallsDone("w1", 0, 2, 1, 2, SECOND))
    scenario(ev.WorkerLost("w1", 0, "signal 9"), cmd.StartWorker("w1", 1))
    scenario(
        ev.CallsDone("w0", 0, 1, 0, 1, SECOND),
        cmd.StashResults(1, 0, 1, "w0"),
        cmd.GangEnded(1, counts=True, aborted=False),
        cmd.StepsReady(1, 0, 1),
    )


def test_a_gang_under_which_workers_keep_dying_fails() -> None:
    scenario = opened(RUN, "w0", limits=SchedulerLimits(deaths_max=2))
    scenario.setup(
        ev.StepsAvailable(1, 0, 1, 2), ev.WorkerLost("w0", 0, "signal 11"), ev.WorkerJoined("w0", 1)
    )
    scenario(
        ev.WorkerLost("w0", 1, "signal 11"),
        cmd.GangEnded(2, counts=False, aborted=True),
        cmd.StepFailed(1, 0, (cmd.Failure(0, 2, "w0", "signal 11"),)),
        cmd.StartWorker("w0", 2),
    )


def test_a_death_under_a_cancelled_member_is_not_charged_to_the_gang_that_is_first_then() -> None:
    scenario = opened(RUN, "w0", "w1")
    scenario.setup(ev.StepsAvailable(1, 0, 1, 2), ev.WorkerLost("w1", 0, "signal 9"))  # w0 is cancelled
    [again] = gangs(scenario.setup(ev.WorkerLost("w0", 0, "signal 9"), ev.WorkerJoined("w0", 1)))
    assert again.attempt == 1


# -- calls that raise ----------------------------------------------------------------------


@pytest.mark.parametrize("last", ["w0", "w1"])
def test_the_error_is_that_of_the_lowest_replica_that_was_not_aborted(last: str) -> None:
    scenario = opened(msgspec.structs.replace(RUN, replicas=4), "w0", "w1")
    scenario.setup(ev.StepsAvailable(1, 0, 1, 4))
    w0 = [
        ev.CallFailed("w0", 0, 1, 0, aborted=True),
        ev.CallFailed("w0", 0, 1, 1, aborted=True),
    ]
    w1 = [ev.CallFailed("w1", 0, 2, 2), ev.CallFailed("w1", 0, 2, 3)]
    *first, end = [*w1, *w0] if last == "w0" else [*w0, *w1]
    for event in first:
        scenario(event)  # the gang waits for the others
    scenario(
        end,
        cmd.GangEnded(1, counts=False, aborted=False),
        cmd.StepFailed(1, 0, (cmd.Failure(2, 1, "w1"), cmd.Failure(3, 1, "w1"))),
    )


def test_results_beside_an_error_are_dropped() -> None:
    scenario = opened(RUN, "w0", "w1")
    scenario.setup(ev.StepsAvailable(1, 0, 1, 2), ev.CallFailed("w0", 0, 1, 0))
    scenario(
        ev.CallsDone("w1", 0, 2, 1, 2, SECOND),
        cmd.StashResults(1, 1, 2, "w1"),
        cmd.GangEnded(1, counts=False, aborted=False),
        cmd.StepFailed(1, 0, (cmd.Failure(0, 1, "w0"),)),
    )


def test_the_reported_call_decides_the_retries_of_the_whole_gang() -> None:
    scenario = opened(RUN, "w0", "w1")
    scenario.setup(ev.StepsAvailable(1, 0, 1, 2), ev.CallFailed("w1", 0, 2, 1, retries=1))
    scenario(
        ev.CallFailed("w0", 0, 1, 0, aborted=True),
        cmd.GangEnded(1, counts=False, aborted=False),
        cmd.SendGang(2, 1, 1, (GangAssignment("w0", 3, 0, 1), GangAssignment("w1", 4, 1, 2))),
    )
    scenario.setup(ev.CallFailed("w0", 0, 3, 0, retries=1))  # another call: the gang has no retry left
    scenario(
        ev.CallsDone("w1", 0, 4, 1, 2, SECOND),
        cmd.StashResults(2, 1, 2, "w1"),
        cmd.GangEnded(2, counts=False, aborted=False),
        cmd.StepFailed(1, 0, (cmd.Failure(0, 2, "w0"),)),
    )


def test_a_gang_aborted_without_a_cause_is_retried_a_limited_number_of_times() -> None:
    scenario = opened(RUN, "w0", limits=SchedulerLimits(deaths_max=2))
    scenario.setup(ev.StepsAvailable(1, 0, 1, 2), ev.CallFailed("w0", 0, 1, 0, aborted=True))
    [again] = gangs(scenario.setup(ev.CallFailed("w0", 0, 1, 1, aborted=True)))
    assert again.attempt == 1
    scenario.setup(ev.CallFailed("w0", 0, 2, 0, aborted=True))
    came = scenario.setup(ev.CallFailed("w0", 0, 2, 1, aborted=True))
    cause = "its gang was aborted, but none of its calls raised"
    assert came[-1] == cmd.StepFailed(1, 0, (cmd.Failure(0, 2, "w0", cause),))


def test_a_failed_step_ends_a_pass_and_cancels_what_was_sent_in_advance() -> None:
    scenario = opened(SPEC, "w0", "w1")
    [first] = gangs(scenario.setup(ev.StepsAvailable(1, 0, 1, 2)))
    done(scenario, first, took_ns=20 * MS)
    assert len(gangs(scenario.setup(ev.StepsAvailable(1, 1, 9, 2)))) == 3
    scenario.setup(ev.CallFailed("w0", 0, 3, 2))
    scenario(
        ev.CallsDone("w1", 0, 4, 3, 4, 1000),
        cmd.StashResults(2, 3, 4, "w1"),
        cmd.GangEnded(2, counts=False, aborted=False),
        cmd.SendCancel("w0", 5),
        cmd.SendCancel("w1", 6),
        cmd.GangEnded(3, counts=False, aborted=True),
        cmd.SendCancel("w0", 7),
        cmd.SendCancel("w1", 8),
        cmd.GangEnded(4, counts=False, aborted=True),
        cmd.StepFailed(1, 1, (cmd.Failure(2, 1, "w0"),)),
    )


def test_a_gang_that_cannot_be_sent_fails_its_step() -> None:
    scenario = opened(RUN, "w0", "w1")
    scenario.setup(ev.StepsAvailable(1, 0, 1, 2))
    scenario(
        ev.LeaseNotSent(2),
        cmd.SendCancel("w0", 1),
        cmd.SendCancel("w1", 2),
        cmd.GangEnded(1, counts=False, aborted=True),
        cmd.StepFailed(1, 0, (cmd.Failure(1, 1, "w1"),)),
    )
    scenario(ev.LeaseNotSent(2))


# -- in advance, and where -----------------------------------------------------------------


def test_short_gangs_are_queued_in_advance_as_many_as_take_the_time() -> None:
    scenario = opened(RUN, "w0", "w1", limits=SchedulerLimits(prefetch_below_s=0.05))
    [first] = gangs(scenario.setup(ev.StepsAvailable(1, 0, 1, 2)))
    done(scenario, first, took_ns=20 * MS)
    came = gangs(scenario.setup(ev.StepsAvailable(1, 1, 99, 2)))
    assert [g.serial for g in came] == [2, 3, 4], "one runs, two take 40 of 50 ms"
    assert all(
        spread(g) == [("w0", 2 * s, 2 * s + 1), ("w1", 2 * s + 1, 2 * s + 2)] for s, g in enumerate(came, 1)
    )
    scenario.setup(ev.CallsDone("w0", 0, 3, 2, 3, 20 * MS))  # its next one is queued already
    after = gangs(scenario.setup(ev.CallsDone("w1", 0, 4, 3, 4, 20 * MS)))
    assert [g.serial for g in after] == [5]


def test_queued_gangs_are_limited_and_long_gangs_are_not_queued() -> None:
    scenario = opened(RUN, "w0", "w1", limits=SchedulerLimits(gangs_queued_max=4))
    [first] = gangs(scenario.setup(ev.StepsAvailable(1, 0, 1, 2)))
    done(scenario, first, took_ns=0)
    assert len(gangs(scenario.setup(ev.StepsAvailable(1, 1, 99, 2)))) == 4
    scenario = opened(RUN, "w0", "w1")
    [first] = gangs(scenario.setup(ev.StepsAvailable(1, 0, 1, 2)))
    done(scenario, first, took_ns=SECOND)
    assert len(gangs(scenario.setup(ev.StepsAvailable(1, 1, 99, 2)))) == 1


def test_the_time_of_a_gang_is_that_of_its_slowest_member() -> None:
    scenario = opened(RUN, "w0", "w1")
    scenario.setup(ev.StepsAvailable(1, 0, 1, 2), ev.CallsDone("w0", 0, 1, 0, 1, 30 * MS))
    scenario.setup(ev.CallsDone("w1", 0, 2, 1, 2, 10 * MS))
    assert scenario.scheduler._passes[1].call_s == pytest.approx(0.03)


def test_two_groups_of_workers_have_gangs_at_the_same_time() -> None:
    scenario = opened(RUN, "w0", "w1", "w2", "w3")
    [first] = gangs(scenario.setup(ev.StepsAvailable(1, 0, 1, 2)))
    done(scenario, first, took_ns=20 * MS)
    came = gangs(scenario.setup(ev.StepsAvailable(1, 1, 99, 2)))
    where = [[part.worker for part in g.parts] for g in came]
    assert where == [["w0", "w1"], ["w2", "w3"]] * 3


def test_a_gang_goes_to_the_workers_of_the_one_before_it_then_to_the_longest_idle() -> None:
    scenario = opened(RUN, "w0", "w1", "w2", "w3")
    for step in range(3):
        [gang] = gangs(scenario.setup(ev.StepsAvailable(1, step, step + 1, 2)))
        assert [part.worker for part in gang.parts] == ["w0", "w1"]
        done(scenario, gang)
    scenario.setup(ev.WorkerLost("w0", 0, "signal 9"))
    [gang] = gangs(scenario.setup(ev.StepsAvailable(1, 3, 4, 2)))
    assert [part.worker for part in gang.parts] == ["w1", "w2"]


def test_a_worker_that_joins_becomes_a_member_of_the_next_gang() -> None:
    scenario = opened(RUN, "w0")
    [first] = gangs(scenario.setup(ev.StepsAvailable(1, 0, 1, 2)))
    done(scenario, first, took_ns=1000)
    before = gangs(scenario.setup(ev.StepsAvailable(1, 1, 99, 2)))
    assert len(before) == SchedulerLimits().gangs_queued_max
    assert gangs(scenario.with_workers("w1").setup(ev.HeartbeatReceived("w1", 0))) == []
    for gang in before[:-1]:
        assert gangs(done(scenario, gang, took_ns=1000)) == [], "those that were sent are finished first"
    after = gangs(done(scenario, before[-1], took_ns=1000))
    lo = 2 * (1 + len(before))
    assert spread(after[0]) == [("w0", lo, lo + 1), ("w1", lo + 1, lo + 2)]


def test_queued_gangs_of_a_lost_worker_are_retried_uncharged_and_in_order() -> None:
    scenario = opened(RUN, "w0", "w1")
    [first] = gangs(scenario.setup(ev.StepsAvailable(1, 0, 1, 2)))
    done(scenario, first, took_ns=20 * MS)
    scenario.setup(ev.StepsAvailable(1, 1, 4, 2))
    came = gangs(scenario.setup(ev.WorkerLost("w1", 0, "signal 9")))
    assert [(g.serial, g.attempt, g.parts[0].lo) for g in came] == [(5, 1, 2), (6, 0, 4), (7, 0, 6)]


def test_nothing_else_is_queued_behind_a_gang() -> None:
    """It would wait for the whole gang, while other workers may be idle sooner."""
    scenario = opened(RUN, "w0", "w1").with_pass(PLAIN, 2)
    scenario.setup(ev.StepsAvailable(2, 0, 1, 1), ev.CallsDone("w0", 0, 1, 0, 1, 1000))  # short calls
    scenario.setup(ev.StepsAvailable(1, 0, 1, 2))
    scenario(ev.StepsAvailable(2, 1, 9, 1))


# -- draining, closing ----------------------------------------------------------------------


def test_a_draining_gang_pass_finishes_its_running_gangs() -> None:
    scenario = opened(SPEC, "w0", "w1")
    scenario.setup(ev.StepsAvailable(1, 0, 9, 2))
    scenario(ev.PassDraining(1))
    scenario.setup(ev.CallsDone("w0", 0, 1, 0, 1, SECOND))
    scenario(
        ev.CallsDone("w1", 0, 2, 1, 2, SECOND),
        cmd.StashResults(1, 1, 2, "w1"),
        cmd.GangEnded(1, counts=True, aborted=False),
        cmd.StepsReady(1, 0, 1),
        cmd.PassDrained(1),
    )


def test_a_draining_gang_pass_that_loses_a_worker_is_drained() -> None:
    scenario = opened(SPEC, "w0", "w1")
    scenario.setup(ev.StepsAvailable(1, 0, 9, 2), ev.PassDraining(1))
    scenario(
        ev.WorkerLost("w1", 0, "signal 9"),
        cmd.SendCancel("w0", 1),
        cmd.GangEnded(1, counts=False, aborted=True),
        cmd.PassDrained(1),
        cmd.StartWorker("w1", 1),
    )


def test_a_pass_closed_in_the_middle_of_a_gang_cancels_the_members_that_run() -> None:
    scenario = opened(RUN, "w0", "w1")
    scenario.setup(ev.StepsAvailable(1, 0, 1, 2), ev.CallsDone("w1", 0, 2, 1, 2, SECOND))
    scenario(
        ev.PassClosed(1),
        cmd.SendCancel("w0", 1),
        cmd.GangEnded(1, counts=False, aborted=True),
        cmd.SendUnbind("w0", 1),
        cmd.SendUnbind("w1", 1),
    )
    scenario(ev.CallsDone("w0", 0, 1, 0, 1, SECOND), cmd.DropResults("w0", 1))


# -- members that do not join a collective --------------------------------------------------------------


def test_workers_of_members_that_miss_a_collective_are_evicted() -> None:
    scenario = opened(msgspec.structs.replace(RUN, replicas=3), "w0", "w1", "w2")
    scenario.setup(ev.StepsAvailable(1, 0, 1, 3))
    cause = "it did not join a collective of its gang: replica 0 waits at a.py:3"
    scenario(
        ev.GangStalled("w0", 0, 1, (1, 2), "replica 0 waits at a.py:3"),
        cmd.EvictWorker("w1", 0, cause),
        cmd.SendCancel("w0", 1),
        cmd.SendCancel("w2", 3),
        cmd.GangEnded(1, counts=False, aborted=True),
        cmd.StartWorker("w1", 1),
        cmd.EvictWorker("w2", 0, cause),
        cmd.StartWorker("w2", 1),
        cmd.SendGang(2, 1, 1, (GangAssignment("w0", 4, 0, 3),)),
    )


def test_the_call_at_which_a_missing_member_hangs_is_charged_not_the_gang_behind_it() -> None:
    scenario = opened(RUN, "w0", "w1")
    [first] = gangs(scenario.setup(ev.StepsAvailable(1, 0, 1, 2)))
    done(scenario, first, took_ns=20 * MS)
    scenario.setup(ev.StepsAvailable(1, 1, 3, 2), ev.CallsDone("w1", 0, 4, 3, 4, 1000))  # w0 hangs in step 1
    came = gangs(scenario.setup(ev.GangStalled("w1", 0, 6, (0,), "")))
    assert [(g.parts[0].lo, g.attempt) for g in came] == [(2, 1), (4, 0)]


@pytest.mark.parametrize(
    "stale",
    [
        ev.GangStalled("w1", 0, 2, (0,), "its own part is over"),
        ev.GangStalled("w1", 0, 1, (1,), "another worker's lease"),
        ev.GangStalled("w0", 1, 1, (1,), "another incarnation"),
        ev.GangStalled("w0", 0, 77, (1,), "no lease"),
        ev.GangStalled("w0", 0, 1, (1,), "whose part is over"),
        ev.GangStalled("w0", 0, 1, (2, 99), "members that there are not"),
        ev.GangStalled("w0", 0, 1, (), "unknown"),
    ],
)
def test_a_stale_report_of_a_stalled_gang_is_ignored(stale: ev.GangStalled) -> None:
    scenario = opened(RUN, "w0", "w1")
    scenario.setup(ev.StepsAvailable(1, 0, 1, 2), ev.CallsDone("w1", 0, 2, 1, 2, SECOND))
    scenario(stale)


def test_a_reporting_member_whose_own_replica_hangs_is_evicted() -> None:
    scenario = opened(RUN, "w0")
    scenario.setup(ev.StepsAvailable(1, 0, 1, 2))
    cause = "it did not join a collective of its gang: replica 1 hangs"
    scenario(
        ev.GangStalled("w0", 0, 1, (0,), "replica 1 hangs"),
        cmd.EvictWorker("w0", 0, cause),
        cmd.GangEnded(1, counts=False, aborted=True),
        cmd.StartWorker("w0", 1),
    )


def test_an_ordinary_lease_does_not_stall() -> None:
    scenario = opened(PLAIN, "w0", "w1")
    scenario.setup(ev.StepsAvailable(1, 0, 2, 1))
    scenario(ev.GangStalled("w0", 0, 1, (0, 1), "nonsense"))


# -- requested steps -----------------------------------------------------------------------------


def test_steps_are_requested_for_all_groups() -> None:
    settings = msgspec.structs.replace(SPEC, pulled=True)
    scenario = Scenario(SchedulerLimits(gangs_queued_max=4)).with_workers("w0", "w1")
    scenario(ev.PassOpened(1, settings), cmd.RequestSteps(1, 1))
    came = scenario.setup(ev.StepsAvailable(1, 0, 1, 2))
    assert came[-1] == cmd.RequestSteps(1, 2)
    scenario.setup(ev.StepsAvailable(1, 1, 3, 2))
    [first] = gangs(came)
    came = done(scenario, first, took_ns=1000)
    assert came[-1] == cmd.RequestSteps(1, 3), "4 at the workers, one more, and the one that is not consumed"


def test_steps_of_a_gang_have_all_calls() -> None:
    scenario = Scenario().with_pass(SPEC)
    with pytest.raises(LocalProtocolError, match="begin at 0 with 2 calls"):
        scenario.setup(ev.StepsAvailable(1, 0, 1, 1))
