"""The simulation of the machines: a share of the release suite, and mutations that it must find."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import pytest

from pipedist.errors import UsageError
from pipedist.protocol import messages
from pipedist.scheduler import Scheduler, leases, passes, transitions
from pipedist.scheduler import commands as cmd
from pipedist.scheduler import events as ev
from pipedist.scheduler.assignment import Assigner
from pipedist.scheduler.leases import Lease, Worker
from pipedist.scheduler.membership import Membership
from pipedist.scheduler.outcomes import Outcomes
from pipedist.scheduler.passes import Pass
from pipedist.scheduler.speculation import Speculation
from pipedist.testing import Faults, SimulationFailure
from pipedist.worker import events as worker_events
from pipedist.worker import machine
from pipedist.worker.machine import WorkerMachine
from tests.simulation.__main__ import main
from tests.simulation.mutations import MUTATIONS
from tests.simulation.simulation import Simulation
from tests.simulation.simulation_suite import RELEASE_SIZES, SimulationSuite
from tests.simulation.workloads import ALWAYS

SEEDS = 300

SLOW_CALLS = Faults(slow=0.1, crash=0.02, error=0.2)


@pytest.mark.parametrize(
    ("workers", "calls", "seeds"), [(5, 40, 200), (20, 200, 20), (100, 1_000, 2)], ids=lambda n: str(n)
)
def test_a_share_of_the_release_suite(workers: int, calls: int, seeds: int) -> None:
    suite = SimulationSuite(workers, calls)
    suite.run(range(seeds))
    assert suite.seeds == seeds
    if workers == 5:  # all faults occur
        network = {"drop", "duplicate", "delay", "reorder", "cut", "partition"}
        processes = {"crash", "pause", "slow", "leave", "rejoin", "failed start"}
        assert network | processes <= set(suite.counts)
    assert f"{seeds} seeds of {workers} workers x {calls} calls: no violation" in str(suite)


def test_the_size_of_the_release_suite() -> None:
    assert [(s.seeds, s.workers, s.calls) for s in RELEASE_SIZES] == [
        (22_000, 5, 40),
        (1_500, 20, 200),
        (50, 100, 1_000),
        (5, 1_000, 10_000),
    ]


def test_one_seed_is_one_order_of_events() -> None:
    def outcome(seed: int) -> tuple[object, ...]:
        simulation = Simulation(seed)
        simulation.run()
        return simulation.time.now, simulation.events, simulation.counts, [str(x) for x in simulation.story]

    assert outcome(11) == outcome(11)
    assert outcome(11) != outcome(12)


def test_checks_do_not_change_the_simulation() -> None:
    ends = []
    for check_every in (1, 1000):
        simulation = Simulation(13, check_every=check_every)
        simulation.run()
        ends.append((simulation.time.now, simulation.events))
    assert ends[0] == ends[1]


@pytest.mark.parametrize(
    "kind", ["drop", "duplicate", "delay", "reorder", "cut", "partition", "crash", "pause"]
)
def test_each_kind_of_fault_alone(kind: str) -> None:
    counts = 0
    for seed in range(20):
        simulation = Simulation(seed, faults=Faults.of({kind: 0.2}))
        simulation.run()
        counts += simulation.counts[kind]
        assert set(simulation.counts) <= {kind}
    assert counts > 0


def test_every_transition_and_fate_occurs(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[object] = set()

    def next_state(subject: str, table: Any, state: Any, what: Any) -> Any:
        seen.add((state, what))
        return transitions.next_state(subject, table, state, what)

    monkeypatch.setattr(leases, "next_state", next_state)
    monkeypatch.setattr(passes, "next_state", next_state)
    fates: set[str] = set()
    ends: set[str] = set()
    for seed in range(SEEDS):
        simulation = Simulation(seed)
        few_faults = simulation.limits.deaths_max < ALWAYS
        for fate in [fate for work in simulation.works.values() for fate in work.fates.values()]:
            how = fate.poison.how if fate.poison is not None else ""
            counts = {"kills": fate.kills, "raises": fate.raises, "hangs": fate.hangs, f"poison {how}": how}
            fates |= {name for name, count in counts.items() if count}
            if few_faults and fate.kills >= ALWAYS:
                fates.add("kills each worker")
        simulation.run()
        for record in simulation.driver.model.passes.values():
            ends.add(record.end)
            for command in record.quarantined.values():
                ends.add("culprits" if command.culprits else "all quarantined")
    tables = (transitions.WORKER_TRANSITIONS, transitions.PASS_TRANSITIONS, transitions.GANG_TRANSITIONS)
    assert seen == {key for table in tables for key in table}
    assert fates == {
        *("kills", "raises", "hangs", "kills each worker"),
        *("poison raises", "poison kills", "poison takes too long"),
    }
    assert ends == {"complete", "failed", "closed", "drained", "culprits", "all quarantined"}


# -- mutations -------------------------------------------------------------------------------

Mutation = Callable[[pytest.MonkeyPatch], None]


def cancelled_lease_continues(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(machine._HANDLERS, messages.Cancel, lambda self, event, now: [])


def ended_pass_is_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(machine._HANDLERS, messages.Unbind, lambda self, event, now: [])


def reported_call_is_executed_again(patch: pytest.MonkeyPatch) -> None:
    def finished(self: WorkerMachine, event: Any, now: float) -> list[Any]:
        commands = original(self, event, now)
        active = self._leases.active
        if active is not None and active.next < active.hi:
            active.next = event.lo
        return commands

    original = WorkerMachine._on_calls_finished
    patch.setitem(machine._HANDLERS, worker_events.CallsFinished, finished)


WORKER_MUTATIONS: list[Mutation] = [
    cancelled_lease_continues,
    ended_pass_is_kept,
    reported_call_is_executed_again,
]


def first_failure(scheduler: type[Scheduler] = Scheduler, faults: Faults | None = None) -> str:
    for seed in range(SEEDS):
        try:
            Simulation(seed, scheduler=scheduler, faults=faults).run()
        except SimulationFailure as failure:
            is_broken = isinstance(failure.__cause__, TypeError | AttributeError)
            assert not is_broken, "the mutation itself is broken"
            return str(failure)
    return ""


@pytest.mark.parametrize("mutate", [*MUTATIONS.values(), *WORKER_MUTATIONS], ids=lambda m: m.__name__)
def test_a_mutation_is_found(mutate: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch)
    failure = first_failure()
    assert failure, f"not found in {SEEDS} seeds"
    assert re.search(r"^reproduce: python -m tests.simulation .*--seed \d+$", failure, re.MULTILINE)


def test_the_printed_command_reproduces_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    MUTATIONS["steps_become_visible_out_of_order"](monkeypatch)
    failure = first_failure()
    command = failure.splitlines()[-1].partition("tests.simulation ")[2].split()
    assert main(command) == 1
    assert capsys.readouterr().out.strip() == failure
    monkeypatch.undo()
    assert main(command) == 0


def test_a_custom_scheduler() -> None:
    class Forgetful(Scheduler):
        def deadline(self) -> float | None:
            return None

    assert "the deadline is None" in first_failure(scheduler=Forgetful)


# -- second attempts ------------------------------------------------------------------------------


def both_attempts_count(patch: pytest.MonkeyPatch) -> None:
    """The superseded lease is not cancelled, and its results count too."""

    def reported(self: Speculation, pass_: Pass, lease: Lease, now: float) -> None:
        if lease.twin is not None:
            lease.twin.twin = lease.twin = None
        original(self, pass_, lease, now)

    original = Speculation.reported
    patch.setattr(Speculation, "reported", reported)


def results_of_the_superseded_attempt_count(patch: pytest.MonkeyPatch) -> None:
    """They replace the first results."""
    superseded: dict[int, int] = {}

    def withdraw(self: Speculation, pass_: Pass, lease: Lease) -> None:
        superseded[lease.id] = pass_.id
        withdrew(self, pass_, lease)

    def valid_lease(self: Scheduler, name: str, inc: int, lease: int, lo: int, hi: int) -> Lease | None:
        if lease in superseded and lease not in self._members.leases:
            self._out.append(cmd.AcceptResults(superseded[lease], lo, hi, name))
        return was_valid(self, name, inc, lease, lo, hi)

    withdrew, was_valid = Speculation.withdraw, Scheduler._valid_lease
    patch.setattr(Speculation, "withdraw", withdraw)
    patch.setattr(Scheduler, "_valid_lease", valid_lease)


def superseded_lease_is_kept(patch: pytest.MonkeyPatch) -> None:
    """Its lease stays valid, so that its later reports count."""

    def withdraw(self: Speculation, pass_: Pass, lease: Lease) -> None:
        self._assigner._out.append(cmd.SendCancel(lease.worker, lease.id))
        if lease.twin is not None:
            lease.twin.twin = lease.twin = None

    patch.setattr(Speculation, "withdraw", withdraw)


def error_of_one_attempt_is_charged(patch: pytest.MonkeyPatch) -> None:
    def raised(self: Outcomes, lease: Lease, event: ev.CallFailed) -> None:
        if lease.twin is not None:
            self.speculation.withdraw(self._passes[lease.pass_id], lease.twin)
        original(self, lease, event)

    original = Outcomes.raised
    patch.setattr(Outcomes, "raised", raised)


def error_of_one_attempt_requeues_the_call(patch: pytest.MonkeyPatch) -> None:
    def withdraw(self: Speculation, pass_: Pass, lease: Lease) -> None:
        original(self, pass_, lease)
        if lease.twin is not None:
            pass_.wait(lease.next, lease.hi, lease.attempt)

    original = Speculation.withdraw
    patch.setattr(Speculation, "withdraw", withdraw)


def calls_of_a_lost_twin_are_requeued(patch: pytest.MonkeyPatch) -> None:
    def lost(self: Outcomes, lease: Lease, *rest: Any) -> None:
        lease.twin = None
        original(self, lease, *rest)

    original = Outcomes.lost
    patch.setattr(Outcomes, "lost", lost)


def worker_of_a_superseded_lease_is_not_suspended(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Membership, "suspend", lambda self, worker, lease: None)


def worker_of_a_superseded_lease_is_never_resumed(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(_handlers(), ev.CancelConfirmed, lambda self, event: None)


def second_attempt_repeats_reported_calls(patch: pytest.MonkeyPatch) -> None:
    def assign_second_attempt(self: Assigner, pass_: Pass, lease: Lease, worker: Worker) -> Lease:
        lease.next, before = lease.lo, lease.next
        try:
            return original(self, pass_, lease, worker)
        finally:
            lease.next = before

    original = Assigner.assign_second_attempt
    patch.setattr(Assigner, "assign_second_attempt", assign_second_attempt)


def calls_behind_a_slow_call_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    def take_back(self: Speculation, lease: Lease) -> bool:
        members = self._members
        for id_ in members.workers[lease.worker].leases[1:]:
            other = members.leases[id_]
            self._cancel(self._passes[other.pass_id], other)
        return False

    patch.setattr(Speculation, "_take_back_behind", take_back)


def second_attempts_are_unlimited(patch: pytest.MonkeyPatch) -> None:
    """A call that raises, or kills its worker, gets one after the other."""

    def assign_second_attempt(self: Assigner, pass_: Pass, lease: Lease, worker: Worker) -> Lease:
        twin = original(self, pass_, lease, worker)
        lease.second_attempts = twin.second_attempts = 1
        return twin

    original = Assigner.assign_second_attempt
    patch.setattr(Assigner, "assign_second_attempt", assign_second_attempt)


def both_twins_are_watched(patch: pytest.MonkeyPatch) -> None:
    """The failed attempt is watched too."""

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


SPECULATION_MUTATIONS: list[Mutation] = [
    both_attempts_count,
    results_of_the_superseded_attempt_count,
    superseded_lease_is_kept,
    error_of_one_attempt_is_charged,
    error_of_one_attempt_requeues_the_call,
    calls_of_a_lost_twin_are_requeued,
    worker_of_a_superseded_lease_is_not_suspended,
    worker_of_a_superseded_lease_is_never_resumed,
    second_attempt_repeats_reported_calls,
    calls_behind_a_slow_call_are_forgotten,
    second_attempts_are_unlimited,
    both_twins_are_watched,
]


def _handlers() -> Any:
    return sys.modules["pipedist.scheduler.machine"].__dict__["_HANDLERS"]


def test_either_attempt_may_report_first() -> None:
    second = won = third = 0
    for seed in range(100):
        simulation = Simulation(seed, faults=SLOW_CALLS)
        simulation.run()
        second += simulation.driver.model.second_attempts
        third += simulation.driver.model.third_attempts
        won += simulation.driver.model.second_won
    assert 0 < won < second
    assert third > 0, "a second attempt failed, and was followed by another"


@pytest.mark.parametrize("mutate", SPECULATION_MUTATIONS, ids=lambda m: m.__name__)
def test_a_mutation_of_second_attempts_is_found(mutate: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch)
    failure = first_failure(faults=SLOW_CALLS)
    assert failure, f"not found in {SEEDS} seeds"


# -- the rates of faults ----------------------------------------------------------------------------------


def test_faults_are_parsed_as_they_are_printed() -> None:
    faults = Faults(drop=0.1, crash=0.05)
    assert str(faults) == "drop=0.1,crash=0.05"
    assert Faults.parse(str(faults)) == faults
    assert Faults.parse("none") == Faults() == Faults.parse(str(Faults()))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("crush=0.1", "did you mean 'crash'"),
        ("crash", "expected KIND=RATE"),
        ("crash=x", "expected KIND=RATE"),
        ("crash=0.1,crash=0.2", "each kind once"),
        ("crash=2", "expected a probability"),
        ("crash=nan", "expected a probability"),
    ],
)
def test_invalid_faults(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        Faults.parse(text)
