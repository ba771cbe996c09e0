"""The simulation of the machines: a share of the bar, and bugs planted to test the tester."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import pytest

from pipedist.errors import UsageError
from pipedist.scheduler import Scheduler
from pipedist.scheduler import commands as cmd
from pipedist.scheduler import events as ev
from pipedist.scheduler.assignment import Assigner
from pipedist.scheduler.leases import Lease, Worker
from pipedist.scheduler.membership import Membership
from pipedist.scheduler.outcomes import Outcomes
from pipedist.scheduler.passes import Pass
from pipedist.scheduler.speculation import Speculation
from pipedist.testing import Faults, Simulation, SimulationFailure
from pipedist.testing.__main__ import main
from pipedist.testing.campaign import BAR, Campaign
from pipedist.worker import machine
from pipedist.worker.machine import WorkerMachine
from tests.scheduler.test_model import BUGS

SEEDS = 300

OF_SLOW_CALLS = Faults(slow=0.1, crash=0.02, error=0.2)


@pytest.mark.parametrize(
    ("workers", "calls", "seeds"), [(5, 40, 400), (20, 200, 40), (100, 1_000, 2)], ids=lambda n: str(n)
)
def test_a_share_of_the_bar(workers: int, calls: int, seeds: int) -> None:
    campaign = Campaign(workers, calls)
    campaign.run(range(seeds))
    assert campaign.seeds == seeds
    if workers == 5:  # the faults do happen
        kinds = {"drop", "duplicate", "delay", "reorder", "cut", "partition", "crash", "pause", "slow"}
        assert kinds <= set(campaign.counts)
    assert f"{seeds} seeds of {workers} workers x {calls} calls: no violation" in str(campaign)


def test_the_bar_is_what_was_promised() -> None:
    assert [(s.seeds, s.workers, s.calls) for s in BAR] == [
        (20_000, 5, 40),
        (1_500, 20, 200),
        (50, 100, 1_000),
        (5, 1_000, 10_000),
    ]


def test_one_seed_is_one_story() -> None:
    def told(seed: int) -> tuple[object, ...]:
        simulation = Simulation(seed)
        simulation.run()
        return simulation.time.now, simulation.events, simulation.counts, [str(x) for x in simulation.story]

    assert told(11) == told(11)
    assert told(11) != told(12)


def test_checking_changes_nothing() -> None:
    ends = []
    for check_every in (1, 1000):
        simulation = Simulation(13, check_every=check_every)
        simulation.run()
        ends.append((simulation.time.now, simulation.events))
    assert ends[0] == ends[1]


@pytest.mark.parametrize(
    "kind", ["drop", "duplicate", "delay", "reorder", "cut", "partition", "crash", "pause"]
)
def test_each_kind_alone(kind: str) -> None:
    counts = 0
    for seed in range(20):
        simulation = Simulation(seed, faults=Faults.of({kind: 0.2}))
        simulation.run()
        counts += simulation.counts[kind]
        assert set(simulation.counts) <= {kind}
    assert counts > 0


# -- planted bugs -------------------------------------------------------------------------------

CAUGHT = [
    "news_of_an_old_incarnation_count",
    "heartbeats_of_an_old_incarnation_count",
    "results_count_without_a_lease",
    "a_report_with_a_gap_counts",
    "a_retry_is_lost",
    "one_retry_too_few",
    "deaths_use_up_retries",
    "what_can_not_be_helped_is_tried_again",
    "the_rest_of_a_lost_lease_is_forgotten",
    "the_rest_of_a_lost_lease_waits_beyond_the_failed_step",
    "a_replacement_has_the_old_incarnation",
    "the_valve_by_steps_is_ignored",
    "the_valve_by_bytes_is_ignored",
    "the_one_step_that_always_fits_does_not",
    "steps_show_out_of_order",
    "a_lease_spans_the_missing_calls_of_a_short_step",
    "a_failure_ends_earlier_steps_too",
    "a_failure_is_told_before_its_step_is_whole",
    "leases_outlive_their_pass",
    "a_held_pass_is_dealt",
    "quiet_is_said_too_early",
    "a_silent_worker_stays",
    "a_worker_is_told_of_a_pass_once_for_all_its_lives",
    "a_gang_is_begun_by_those_that_are_idle",
    "results_of_a_gang_count_one_by_one",
    "results_beside_an_error_count",
    "an_aborted_call_is_told_as_the_error",
    "only_the_lost_part_of_a_gang_is_tried_again",
    "the_other_members_of_a_lost_one_go_on",
    "a_gang_that_is_over_stays_with_its_group",
    "as_many_gangs_are_queued_as_there_are",
    "a_call_is_queued_behind_a_gang",
    "a_gang_is_queued_where_others_wait",
]
"""Of the bugs that the scheduler's own model test plants, those that show without an oracle of it."""

Plant = Callable[[pytest.MonkeyPatch], None]


def a_cancelled_lease_goes_on(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(machine._HANDLERS, machine.Cancel, lambda self, event, now: [])


def a_pass_is_never_let_go(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(machine._HANDLERS, machine.Unbind, lambda self, event, now: [])


def what_is_reported_is_executed_again(patch: pytest.MonkeyPatch) -> None:
    def finished(self: WorkerMachine, event: Any, now: float) -> list[Any]:
        commands = original(self, event, now)
        active = self._leases.active
        if active is not None and active.next < active.hi:
            active.next = event.lo
        return commands

    original = WorkerMachine._on_calls_finished
    patch.setitem(machine._HANDLERS, machine.CallsFinished, finished)


OF_WORKERS: list[Plant] = [
    a_cancelled_lease_goes_on,
    a_pass_is_never_let_go,
    what_is_reported_is_executed_again,
]


def first_failure(scheduler: type[Scheduler] = Scheduler, faults: Faults | None = None) -> str:
    for seed in range(SEEDS):
        try:
            Simulation(seed, scheduler=scheduler, faults=faults).run()
        except SimulationFailure as failure:
            return str(failure)
    return ""


@pytest.mark.parametrize("plant", [*(BUGS[name] for name in CAUGHT), *OF_WORKERS], ids=lambda p: p.__name__)
def test_a_planted_bug_is_caught(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    told = first_failure()
    assert told, f"{SEEDS} seeds did not see it"
    assert re.search(r"^play it again: python -m pipedist.testing .*--seed \d+$", told, re.MULTILINE)


def test_there_are_enough_bugs() -> None:
    assert len(set(CAUGHT)) >= 20


def test_a_failing_seed_fails_again_with_the_command_it_names(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    BUGS["steps_show_out_of_order"](monkeypatch)
    told = first_failure()
    command = told.splitlines()[-1].partition("pipedist.testing ")[2].split()
    assert main(command) == 1
    assert capsys.readouterr().out.strip() == told
    monkeypatch.undo()
    assert main(command) == 0


def test_a_scheduler_of_ones_own() -> None:
    class Forgetful(Scheduler):
        def deadline(self) -> float | None:
            return None

    assert "wait for ever" in first_failure(scheduler=Forgetful)


# -- second attempts ------------------------------------------------------------------------------


def both_attempts_count(patch: pytest.MonkeyPatch) -> None:
    """The loser is not cancelled, and its results are taken for the lease's that has won."""

    def reported(self: Speculation, pass_: Pass, lease: Lease, now: float) -> None:
        if lease.twin is not None:
            lease.twin.twin = lease.twin = None
        original(self, pass_, lease, now)

    original = Speculation.reported
    patch.setattr(Speculation, "reported", reported)


def what_the_loser_says_counts_too(patch: pytest.MonkeyPatch) -> None:
    """Its result takes the place of the winner's."""
    losers: dict[int, int] = {}

    def withdraw(self: Speculation, pass_: Pass, lease: Lease) -> None:
        losers[lease.id] = pass_.id
        withdrew(self, pass_, lease)

    def held(self: Scheduler, name: str, inc: int, lease: int, lo: int, hi: int) -> Lease | None:
        if lease in losers and lease not in self._members.leases:
            self._out.append(cmd.AcceptResults(losers[lease], lo, hi, name))
        return was_held(self, name, inc, lease, lo, hi)

    withdrew, was_held = Speculation.withdraw, Scheduler._held_lease
    patch.setattr(Speculation, "withdraw", withdraw)
    patch.setattr(Scheduler, "_held_lease", held)


def the_loser_is_cancelled_by_name_only(patch: pytest.MonkeyPatch) -> None:
    """Its lease stays: what it reports later is a report of a lease that is held."""

    def withdraw(self: Speculation, pass_: Pass, lease: Lease) -> None:
        self._out.append(cmd.SendCancel(lease.worker, lease.id))
        if lease.twin is not None:
            lease.twin.twin = lease.twin = None

    patch.setattr(Speculation, "withdraw", withdraw)


def an_error_of_one_attempt_is_charged(patch: pytest.MonkeyPatch) -> None:
    def raised(self: Outcomes, lease: Lease, event: ev.CallFailed) -> None:
        if lease.twin is not None:
            self.speculation.withdraw(self._passes[lease.pass_id], lease.twin)
        original(self, lease, event)

    original = Outcomes.raised
    patch.setattr(Outcomes, "raised", raised)


def an_error_of_one_attempt_lets_the_call_wait_beside_the_other(patch: pytest.MonkeyPatch) -> None:
    def withdraw(self: Speculation, pass_: Pass, lease: Lease) -> None:
        original(self, pass_, lease)
        if lease.twin is not None:
            pass_.wait(lease.next, lease.hi, lease.attempt)

    original = Speculation.withdraw
    patch.setattr(Speculation, "withdraw", withdraw)


def the_calls_of_a_lost_twin_wait_once_more(patch: pytest.MonkeyPatch) -> None:
    def lost(self: Outcomes, lease: Lease, *rest: Any) -> None:
        lease.twin = None
        original(self, lease, *rest)

    original = Outcomes.lost
    patch.setattr(Outcomes, "lost", lost)


def who_may_be_stuck_is_given_more(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Membership, "lay_off", lambda self, worker, lease: None)


def who_was_stuck_is_never_given_more(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(_handlers(), ev.CancelConfirmed, lambda self, event: None)


def a_second_attempt_has_calls_of_its_own(patch: pytest.MonkeyPatch) -> None:
    def issue_again(self: Assigner, pass_: Pass, lease: Lease, worker: Worker) -> Lease:
        lease.next, before = lease.lo, lease.next
        try:
            return original(self, pass_, lease, worker)
        finally:
            lease.next = before

    original = Assigner.issue_again
    patch.setattr(Assigner, "issue_again", issue_again)


def what_waits_behind_a_slow_call_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    def take_back(self: Speculation, lease: Lease) -> bool:
        members = self._members
        for id_ in members.workers[lease.worker].leases[1:]:
            other = members.leases[id_]
            self._cancel(self._passes[other.pass_id], other)
        return False

    patch.setattr(Speculation, "_take_back_behind", take_back)


def second_attempts_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    """What raises, or kills its worker, gets one after the other."""

    def issue_again(self: Assigner, pass_: Pass, lease: Lease, worker: Worker) -> Lease:
        twin = original(self, pass_, lease, worker)
        lease.second_attempts = twin.second_attempts = 1
        return twin

    original = Assigner.issue_again
    patch.setattr(Assigner, "issue_again", issue_again)


def who_goes_on_alone_is_watched_though_it_is_a_twin(patch: pytest.MonkeyPatch) -> None:
    """The one that came to nothing is watched too."""

    def goes_on(self: Speculation, lease: Lease) -> None:
        original(self, lease)
        if lease.twin is not None:
            original(self, lease.twin)

    def failed(self: Speculation, pass_: Pass, lease: Lease) -> None:
        self.withdraw(pass_, lease)
        original(self, lease)

    original = Speculation.goes_on
    patch.setattr(Speculation, "goes_on", goes_on)
    patch.setattr(Speculation, "failed", failed)


OF_SECOND_ATTEMPTS: list[Plant] = [
    both_attempts_count,
    what_the_loser_says_counts_too,
    the_loser_is_cancelled_by_name_only,
    an_error_of_one_attempt_is_charged,
    an_error_of_one_attempt_lets_the_call_wait_beside_the_other,
    the_calls_of_a_lost_twin_wait_once_more,
    who_may_be_stuck_is_given_more,
    who_was_stuck_is_never_given_more,
    a_second_attempt_has_calls_of_its_own,
    what_waits_behind_a_slow_call_is_forgotten,
    second_attempts_are_not_counted,
    who_goes_on_alone_is_watched_though_it_is_a_twin,
]


def _handlers() -> Any:
    return sys.modules["pipedist.scheduler.machine"].__dict__["_HANDLERS"]


def test_second_attempts_happen_and_either_may_be_first() -> None:
    second = won = third = 0
    for seed in range(100):
        simulation = Simulation(seed, faults=OF_SLOW_CALLS)
        simulation.run()
        second += simulation.hub.books.second_attempts
        third += simulation.hub.books.third_attempts
        won += simulation.hub.books.second_won
    assert 0 < won < second
    assert third > 0, "one came to nothing, and was followed by another"


@pytest.mark.parametrize("plant", OF_SECOND_ATTEMPTS, ids=lambda p: p.__name__)
def test_a_planted_bug_in_second_attempts_is_caught(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    told = first_failure(faults=OF_SLOW_CALLS)
    assert told, f"{SEEDS} seeds did not see it"


# -- the faults ----------------------------------------------------------------------------------


def test_faults_are_read_as_they_are_written() -> None:
    faults = Faults(drop=0.1, crash=0.05)
    assert str(faults) == "drop=0.1,crash=0.05"
    assert Faults.parse(str(faults)) == faults
    assert Faults.parse("none") == Faults() == Faults.parse(str(Faults()))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("crush=0.1", "did you mean 'crash'"),
        ("crash", "expected KIND=RATE"),
        ("crash=x", "expected KIND=RATE"),
        ("crash=0.1,crash=0.2", "each kind once"),
        ("crash=2", "expected a probability"),
        ("crash=nan", "expected a probability"),
    ],
)
def test_wrong_faults(text: str, told: str) -> None:
    with pytest.raises(UsageError, match=re.escape(told)):
        Faults.parse(text)
