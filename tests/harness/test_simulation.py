"""The simulation of the machines: a share of the bar, and bugs planted to test the tester."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from pipedist.errors import UsageError
from pipedist.harness import Faults, Simulation, SimulationFailure
from pipedist.harness.__main__ import main
from pipedist.harness.campaign import BAR, Campaign
from pipedist.scheduler import Scheduler
from pipedist.worker import machine
from pipedist.worker.machine import WorkerMachine
from tests.scheduler.test_model import BUGS

SEEDS = 300


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
        if self._active is not None and self._active.next < self._active.hi:
            self._active.next = event.lo
        return commands

    original = WorkerMachine._on_finished
    patch.setitem(machine._HANDLERS, machine.Finished, finished)


OF_WORKERS: list[Plant] = [
    a_cancelled_lease_goes_on,
    a_pass_is_never_let_go,
    what_is_reported_is_executed_again,
]


def first_failure(scheduler: type[Scheduler] = Scheduler) -> str:
    for seed in range(SEEDS):
        try:
            Simulation(seed, scheduler=scheduler).run()
        except SimulationFailure as failure:
            return str(failure)
    return ""


@pytest.mark.parametrize("plant", [*(BUGS[name] for name in CAUGHT), *OF_WORKERS], ids=lambda p: p.__name__)
def test_a_planted_bug_is_caught(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    told = first_failure()
    assert told, f"{SEEDS} seeds did not see it"
    assert re.search(r"^play it again: python -m pipedist.harness .*--seed \d+$", told, re.MULTILINE)


def test_there_are_enough_bugs() -> None:
    assert len(set(CAUGHT)) >= 20


def test_a_failing_seed_fails_again_with_the_command_it_names(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    BUGS["steps_show_out_of_order"](monkeypatch)
    told = first_failure()
    command = told.splitlines()[-1].partition("pipedist.harness ")[2].split()
    assert main(command) == 1
    assert capsys.readouterr().out.strip() == told
    monkeypatch.undo()
    assert main(command) == 0


def test_a_scheduler_of_ones_own() -> None:
    class Forgetful(Scheduler):
        def deadline(self) -> float | None:
            return None

    assert "wait for ever" in first_failure(scheduler=Forgetful)


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
