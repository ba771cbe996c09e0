"""The model test: hundreds of small seeded worlds, one large one, and bugs planted to test the test."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from pipedist.scheduler import PassSettings, Scheduler, SchedulerLimits, dealing, gangs, outcomes
from pipedist.scheduler import commands as cmd
from pipedist.scheduler import events as ev
from pipedist.scheduler.assignment import Assigner
from pipedist.scheduler.bisection import Bisection, CulpritSearches, Death, Probe
from pipedist.scheduler.gang_scheduling import GangGroups
from pipedist.scheduler.leases import GangAttempt, Lease, RaisedCall, Worker
from pipedist.scheduler.membership import Membership
from pipedist.scheduler.outcomes import Outcomes
from pipedist.scheduler.passes import Pass
from pipedist.scheduler.quarantine import Quarantine
from pipedist.scheduler.queues import BackoffQueue, RangeSet, Todo, TodoQueue
from pipedist.scheduler.transitions import GANG_TRANSITIONS, GangState
from tests.scheduler.books import Violation
from tests.scheduler.world import World

SEEDS = 300


def play_small_worlds(first: int, last: int) -> None:
    for seed in range(first, last):
        World(seed).run()


@pytest.mark.parametrize("first", range(0, SEEDS, 50))
def test_small_worlds(first: int) -> None:
    play_small_worlds(first, first + 50)


# -- planted bugs ------------------------------------------------------------------------

Plant = Callable[[pytest.MonkeyPatch], None]
BUGS: dict[str, Plant] = {}


def bug(plant: Plant) -> Plant:
    BUGS[plant.__name__] = plant
    return plant


def wrapped(patch: pytest.MonkeyPatch, owner: type, name: str, new: Callable[..., Any]) -> None:
    """Replace a method by `new(original, self, ...)`."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda *a, **k: new(original, *a, **k))


@bug
def news_of_an_old_incarnation_count(patch: pytest.MonkeyPatch) -> None:
    def lost(original: Any, self: Scheduler, event: ev.WorkerLost) -> None:
        now = self._members.workers[event.worker].incarnation
        original(self, ev.WorkerLost(event.worker, now, event.cause, event.graceful))

    wrapped(patch, Scheduler, "_on_worker_lost", lost)
    patch.setitem(_handlers(), ev.WorkerLost, Scheduler._on_worker_lost)


@bug
def heartbeats_of_an_old_incarnation_count(patch: pytest.MonkeyPatch) -> None:
    def heard(self: Scheduler, event: ev.HeartbeatReceived) -> None:
        self._members.hear(self._members.workers[event.worker], self._now)

    patch.setitem(_handlers(), ev.HeartbeatReceived, heard)


@bug
def results_count_without_a_lease(patch: pytest.MonkeyPatch) -> None:
    def held(original: Any, self: Scheduler, name: str, inc: int, lease: int, lo: int, hi: int) -> Any:
        if lease in self._members.leases:
            known = self.__dict__.setdefault("known", {})
            known[lease] = self._members.leases[lease]
            return original(self, name, inc, lease, lo, hi)
        return self.__dict__.get("known", {}).get(lease) or original(self, name, inc, lease, lo, hi)

    wrapped(patch, Scheduler, "_held_lease", held)


@bug
def a_report_with_a_gap_counts(patch: pytest.MonkeyPatch) -> None:
    def held(self: Scheduler, name: str, inc: int, lease: int, lo: int, hi: int) -> Lease | None:
        if self._members.current(name, inc) is None or lease not in self._members.leases:
            self._out.append(cmd.DropResults(name, lease))
            return None
        return self._members.leases[lease]

    patch.setattr(Scheduler, "_held_lease", held)


@bug
def a_retry_is_lost(patch: pytest.MonkeyPatch) -> None:
    def wait(original: Any, self: Pass, lo: int, hi: int, attempt: int) -> None:
        if attempt < 2:
            original(self, lo, hi, attempt)

    wrapped(patch, Pass, "wait", wait)


@bug
def one_retry_too_few(patch: pytest.MonkeyPatch) -> None:
    def blame(
        original: Any, self: Outcomes, pass_: Pass, lo: int, hi: int, raised: Sequence[RaisedCall]
    ) -> None:
        first, trouble = raised[0], pass_.histories.get(lo)
        last = trouble is not None and trouble.raised[first.cause.stage] + 1 == first.retries
        original(self, pass_, lo, hi, [replace(x, retries=0) for x in raised] if last else raised)

    wrapped(patch, Outcomes, "_retry_or_fail", blame)


@bug
def who_may_hang_in_a_pass_that_is_over_is_given_work(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Membership, "lay_off", lambda self, worker, lease: None)


@bug
def who_has_heard_that_a_pass_is_over_stays_laid_off(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Membership, "take_on", lambda self, worker: None)


@bug
def the_retries_of_stages_are_counted_together(patch: pytest.MonkeyPatch) -> None:
    def blame(
        original: Any, self: Outcomes, pass_: Pass, lo: int, hi: int, raised: Sequence[RaisedCall]
    ) -> None:
        together = [replace(x, cause=replace(x.cause, stage="")) for x in raised]
        original(self, pass_, lo, hi, together)

    wrapped(patch, Outcomes, "_retry_or_fail", blame)


@bug
def deaths_use_up_retries(patch: pytest.MonkeyPatch) -> None:
    def blame(original: Any, self: Outcomes, pass_: Pass, lo: int, *rest: Any) -> None:
        trouble = pass_.histories.get(lo)
        if trouble is not None:
            trouble.raised[rest[-1][0].cause.stage] += trouble.deaths
            trouble.deaths = 0
        original(self, pass_, lo, *rest)

    wrapped(patch, Outcomes, "_retry_or_fail", blame)


@bug
def what_can_not_be_helped_is_tried_again(patch: pytest.MonkeyPatch) -> None:
    def blame(
        original: Any, self: Outcomes, pass_: Pass, lo: int, hi: int, raised: Sequence[RaisedCall]
    ) -> None:
        original(self, pass_, lo, hi, [replace(x, retries=2) for x in raised])

    wrapped(patch, Outcomes, "_retry_or_fail", blame)


@bug
def every_lease_of_a_lost_worker_is_blamed(patch: pytest.MonkeyPatch) -> None:
    wrapped(patch, Outcomes, "lost", lambda o, self, lease, cause, blamed: o(self, lease, cause, lease.next))


@bug
def nobody_is_blamed(patch: pytest.MonkeyPatch) -> None:
    wrapped(patch, Outcomes, "lost", lambda o, self, lease, cause, blamed: o(self, lease, cause, None))


@bug
def a_cancelled_call_is_forgotten_in_the_blame(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Membership, "cancel", Membership.revoke)


@bug
def the_rest_of_a_lost_lease_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    def lost(original: Any, self: Outcomes, lease: Lease, cause: str, blamed: int | None) -> None:
        if lease.gang is None and lease.hi - lease.next > 1:
            self._passes[lease.pass_id].leased -= 1
            lease.hi -= 1
        original(self, lease, cause, blamed)

    wrapped(patch, Outcomes, "lost", lost)


@bug
def the_rest_of_a_lost_lease_waits_beyond_the_failed_step(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Pass, "wait", lambda self, lo, hi, attempt: self.todo.put(lo, hi, attempt))


@bug
def a_replacement_has_the_old_incarnation(patch: pytest.MonkeyPatch) -> None:
    def lose(
        original: Any, self: Scheduler, worker: Worker, cause: str, *, replace: bool, **how: Any
    ) -> None:
        original(self, worker, cause, replace=False, **how)
        if worker.managed and replace:
            self._out.append(cmd.StartWorker(worker.name, worker.incarnation))

    wrapped(patch, Scheduler, "_lose", lose)


@bug
def the_valve_by_steps_is_ignored(patch: pytest.MonkeyPatch) -> None:
    wrapped(patch, Pass, "steps_wanted", lambda o, self, limits, workers: o(self, limits, workers) and 4)


@bug
def the_valve_by_bytes_is_ignored(patch: pytest.MonkeyPatch) -> None:
    def wanted(original: Any, self: Pass, limits: SchedulerLimits, workers: int) -> Any:
        return original(self, SchedulerLimits(steps_in_flight_max=limits.steps_in_flight_max), workers)

    wrapped(patch, Pass, "steps_wanted", wanted)


@bug
def the_one_step_that_always_fits_does_not(patch: pytest.MonkeyPatch) -> None:
    def wanted(original: Any, self: Pass, limits: SchedulerLimits, workers: int) -> Any:
        full = self.input_bytes + self.result_bytes + self.step_bytes > limits.bytes_in_flight_max / 10
        return 0 if full and self.offered else original(self, limits, workers)

    wrapped(patch, Pass, "steps_wanted", wanted)


@bug
def results_that_were_consumed_weigh_for_ever(patch: pytest.MonkeyPatch) -> None:
    def consumed(self: Scheduler, event: ev.StepsConsumed) -> None:
        self._passes[event.pass_id].consumed = event.before

    patch.setitem(_handlers(), ev.StepsConsumed, consumed)


@bug
def steps_show_out_of_order(patch: pytest.MonkeyPatch) -> None:
    def end_from(self: RangeSet, x: int) -> int:
        return max([x, *(hi for _, hi in self)])

    patch.setattr(RangeSet, "end_from", end_from)


@bug
def a_lease_spans_the_missing_calls_of_a_short_step(patch: pytest.MonkeyPatch) -> None:
    def offer(original: Any, self: Pass, first: int, last: int, parts: int, *rest: Any) -> None:
        original(self, first, last, self.settings.replicas if parts else 0, *rest)

    wrapped(patch, Pass, "offer", offer)


@bug
def retries_wait_at_the_end(patch: pytest.MonkeyPatch) -> None:
    def put(self: TodoQueue, lo: int, hi: int, attempt: int) -> None:
        if lo < hi:
            self._items.append(Todo(lo, hi, attempt))
            self.calls += hi - lo

    patch.setattr(TodoQueue, "put", put)


@bug
def a_failure_ends_earlier_steps_too(patch: pytest.MonkeyPatch) -> None:
    def fail(original: Any, self: Pass, lo: int, hi: int, failures: Any) -> None:
        original(self, lo, hi, failures)
        if self.last_step is not None:
            self.last_step = max(0, self.last_step - 1)

    wrapped(patch, Pass, "fail", fail)


@bug
def a_failure_is_told_before_its_step_is_whole(patch: pytest.MonkeyPatch) -> None:
    def fail(original: Any, self: Outcomes, pass_: Pass, lo: int, hi: int, failures: Any) -> None:
        original(self, pass_, lo, hi, failures)
        if lo in pass_.failures:
            self._out.append(cmd.StepFailed(pass_.id, lo // pass_.settings.replicas, tuple(failures)))

    wrapped(patch, Outcomes, "_fail", fail)


@bug
def leases_outlive_their_pass(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Outcomes, "cancel", lambda self, pass_, from_call: None)


@bug
def a_held_pass_is_dealt(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Pass, "deals", property(lambda self: self.todo.calls > 0))


@bug
def quiet_is_said_too_early(patch: pytest.MonkeyPatch) -> None:
    def held(self: Scheduler, event: ev.PassDraining) -> None:
        self._passes[event.pass_id].held = self._passes[event.pass_id].drain_reported = True
        self._out.append(cmd.PassDrained(event.pass_id))

    patch.setitem(_handlers(), ev.PassDraining, held)


@bug
def a_silent_worker_stays(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(_handlers(), ev.Tick, lambda self, event: None)


@bug
def a_worker_is_told_of_a_pass_once_for_all_its_lives(patch: pytest.MonkeyPatch) -> None:
    def dismiss(original: Any, self: Membership, worker: Worker) -> Any:
        bound = set(worker.bound)
        held = original(self, worker)
        worker.bound = bound
        return held

    wrapped(patch, Membership, "dismiss", dismiss)


@bug
def a_gang_is_spread_over_those_that_happen_to_be_idle(patch: pytest.MonkeyPatch) -> None:
    def idle(original: Any, self: GangGroups, members: Membership, replicas: int, gpus: float) -> Any:
        ready, members.ready = members.ready, min(members.ready, len(members.idle))
        try:
            return original(self, members, replicas, gpus) if members.ready else None
        finally:
            members.ready = ready

    wrapped(patch, GangGroups, "idle", idle)


@bug
def a_gang_is_begun_by_those_that_are_idle(patch: pytest.MonkeyPatch) -> None:
    def parts(gang: GangAttempt) -> tuple[cmd.GangAssignment, ...]:
        return original(gang)[: max(1, len(gang.leases) - 1)]

    original = gangs.parts
    patch.setattr(dealing, "parts", parts)


@bug
def results_of_a_gang_count_one_by_one(patch: pytest.MonkeyPatch) -> None:
    def done(original: Any, self: Outcomes, lease: Lease, event: ev.CallsDone) -> None:
        original(self, lease, event)
        if lease.gang is not None:
            self._out.append(cmd.AcceptResults(lease.pass_id, event.lo, event.hi, event.worker))

    wrapped(patch, Outcomes, "done", done)


@bug
def results_beside_an_error_count(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(GANG_TRANSITIONS, (GangState.ENDING, "all reported"), GangState.COMPLETE)


@bug
def a_gang_ends_with_its_first_error(patch: pytest.MonkeyPatch) -> None:
    def raised(original: Any, self: Outcomes, lease: Lease, event: ev.CallFailed) -> None:
        original(self, lease, event)
        gang = lease.gang
        if gang is not None and gang.due > 0 and not event.aborted:
            self.break_up(self._passes[lease.pass_id], gang)
            self._blame(self._passes[lease.pass_id], gang.lo, gang.hi, gang.at_fault)

    wrapped(patch, Outcomes, "raised", raised)


@bug
def an_aborted_call_is_told_as_the_error(patch: pytest.MonkeyPatch) -> None:
    def at_fault(self: GangAttempt) -> list[RaisedCall]:
        return sorted(self.raised, key=lambda x: x.call)

    patch.setattr(GangAttempt, "at_fault", property(at_fault))


@bug
def the_error_that_came_first_is_told(patch: pytest.MonkeyPatch) -> None:
    def blame(
        original: Any, self: Outcomes, pass_: Pass, lo: int, hi: int, raised: Sequence[RaisedCall]
    ) -> None:
        most = max(x.retries for x in raised)
        original(self, pass_, lo, hi, [replace(x, retries=most) for x in raised])

    def at_fault(self: GangAttempt) -> list[RaisedCall]:
        return self.raised[:1]

    wrapped(patch, Outcomes, "_retry_or_fail", blame)
    patch.setattr(GangAttempt, "at_fault", property(at_fault))


@bug
def only_the_lost_part_of_a_gang_is_tried_again(patch: pytest.MonkeyPatch) -> None:
    def lost(original: Any, self: Outcomes, lease: Lease, cause: str, blamed: int | None) -> None:
        lease.gang = None
        original(self, lease, cause, blamed)

    wrapped(patch, Outcomes, "lost", lost)


@bug
def the_other_members_of_a_lost_one_go_on(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Outcomes, "_cancel", lambda self, pass_, lease: None)


@bug
def a_death_is_not_charged_to_a_gang(patch: pytest.MonkeyPatch) -> None:
    def lost(original: Any, self: Outcomes, lease: Lease, cause: str, blamed: int | None) -> None:
        original(self, lease, cause, None if lease.gang is not None else blamed)

    wrapped(patch, Outcomes, "lost", lost)


@bug
def gangs_in_advance_are_charged_too(patch: pytest.MonkeyPatch) -> None:
    def lost(original: Any, self: Outcomes, lease: Lease, cause: str, blamed: int | None) -> None:
        original(self, lease, cause, lease.next if lease.gang is not None else blamed)

    wrapped(patch, Outcomes, "lost", lost)


@bug
def a_gang_that_is_over_stays_with_its_group(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GangGroups, "end", lambda self, group: None)


@bug
def nobody_waits_for_a_gang_to_have_its_workers(patch: pytest.MonkeyPatch) -> None:
    def whose_turn(original: Any, self: Assigner, stuck: Any) -> Pass | None:
        turn: Pass | None = original(self, stuck)
        if turn is None or not turn.settings.gang or turn.groups.idle(self._members, turn.settings.replicas):
            return turn
        others = [p for p in self._waiting.values() if not p.settings.gang]
        return others[0] if others and self._members.idle else turn

    wrapped(patch, Assigner, "_whose_turn", whose_turn)


@bug
def as_many_gangs_are_queued_as_there_are(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Pass, "gangs_queued", lambda self, limits: 1000)


@bug
def a_call_is_queued_behind_a_gang(patch: pytest.MonkeyPatch) -> None:
    def grant(original: Any, self: Membership, *args: Any) -> Any:
        *before, _expected_s, gang = args if len(args) == 7 else (*args, None)
        return original(self, *before, 0.001, gang)

    wrapped(patch, Membership, "grant", grant)


@bug
def a_gang_is_queued_where_others_wait(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(gangs, "_works_for", lambda worker, group, members: worker.name in members.workers)


@bug
def whoever_hangs_may_stay(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(_handlers(), ev.GangStalled, lambda self, event: None)


@bug
def anybody_may_say_that_a_gang_is_stalled(patch: pytest.MonkeyPatch) -> None:
    def stalled(self: Scheduler, event: ev.GangStalled) -> None:
        for lease in list(self._members.leases.values()):
            if lease.id == event.lease and lease.gang is not None:
                for member in event.members:
                    worker = self._members.workers[lease.gang.leases[member].worker]
                    self._out.append(cmd.EvictWorker(worker.name, worker.incarnation, ""))
                    self._lose(worker, "", graceful=False, replace=True)

    patch.setitem(_handlers(), ev.GangStalled, stalled)


@bug
def nobody_rests(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(outcomes, "rest_s", lambda raised, limits: 0.0)


@bug
def who_has_rested_is_not_roused_in_time(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BackoffQueue, "due", property(lambda self: None))


@bug
def calls_rest_beyond_the_failed_step(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BackoffQueue, "drop_from", lambda self, call: None)


@bug
def a_timeout_is_charged_as_a_death(patch: pytest.MonkeyPatch) -> None:
    def lost(original: Any, self: Outcomes, lease: Lease, death: Death, blamed: int | None) -> None:
        original(self, lease, msgspec.structs.replace(death, timed_out=False), blamed)

    wrapped(patch, Outcomes, "lost", lost)


@bug
def a_timeout_is_charged_to_the_first_call_of_the_lease(patch: pytest.MonkeyPatch) -> None:
    def lost(original: Any, self: Outcomes, lease: Lease, death: Death, blamed: int | None) -> None:
        original(self, lease, death, None if blamed is None else lease.next)

    wrapped(patch, Outcomes, "lost", lost)


@bug
def the_result_of_a_probe_counts(patch: pytest.MonkeyPatch) -> None:
    def done(original: Any, self: Outcomes, lease: Lease, event: ev.CallsDone) -> None:
        original(self, lease, event)
        if lease.probe is not None:
            self._out.append(cmd.AcceptResults(lease.pass_id, event.lo, event.hi, event.worker))

    wrapped(patch, Outcomes, "done", done)


@bug
def one_death_makes_an_element_guilty(patch: pytest.MonkeyPatch) -> None:
    def charge(original: Any, self: Outcomes, pass_: Pass, probe: Probe, worker: str, death: Death) -> None:
        probe.deaths = 99
        original(self, pass_, probe, worker, death)

    wrapped(patch, Outcomes, "_charge_probe", charge)


@bug
def a_probe_whose_worker_is_lost_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CulpritSearches, "wait", lambda self, probe: probe.tried or self.waiting.append(probe))


@bug
def what_passes_makes_the_other_half_guilty(patch: pytest.MonkeyPatch) -> None:
    def passed(original: Any, self: Bisection, span: tuple[int, int]) -> None:
        original(self, span)
        if span[1] - span[0] == 1 and span[1] < self.elements:
            self.culprits.setdefault(span[1], cmd.Cause("s", ""))

    wrapped(patch, Bisection, "passed", passed)


@bug
def the_search_ends_with_the_first_guilty_element(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Bisection, "is_over", property(lambda self: bool(self.culprits) or not self.trying))


@bug
def only_the_first_half_is_tried(patch: pytest.MonkeyPatch) -> None:
    def halves(original: Any, self: Bisection, span: tuple[int, int]) -> Any:
        spans = original(self, span)[:1]
        self.trying = {x for x in self.trying if x in spans or not span[0] <= x[0] < span[1]}
        return spans

    wrapped(patch, Bisection, "_halves", halves)


@bug
def the_guilty_are_sent_once_more(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CulpritSearches, "elements_of", lambda self, call: ())


@bug
def the_rest_that_still_fails_fails_the_pass(patch: pytest.MonkeyPatch) -> None:
    def give_up(original: Any, self: Outcomes, pass_: Pass, lo: int, *rest: Any, quarantine: bool) -> None:
        if lo in pass_.searches.cleared:
            pass_.searches.cleared.pop(lo)
            quarantine = False
        original(self, pass_, lo, *rest, quarantine=quarantine)

    wrapped(patch, Outcomes, "_give_up", give_up)


@bug
def a_call_that_may_fail_the_pass_is_bisected(patch: pytest.MonkeyPatch) -> None:
    def give_up(original: Any, self: Outcomes, *rest: Any, quarantine: bool) -> None:
        original(self, *rest, quarantine=True)

    wrapped(patch, Outcomes, "_give_up", give_up)


@bug
def a_gang_is_bisected(patch: pytest.MonkeyPatch) -> None:
    def set_aside(original: Any, self: Quarantine, pass_: Pass, lo: int, hi: int, *rest: Any) -> None:
        original(self, pass_, lo, lo + 1 if pass_.settings.gang else hi, *rest)

    wrapped(patch, Quarantine, "set_aside", set_aside)


@bug
def probes_are_queued_in_advance(patch: pytest.MonkeyPatch) -> None:
    def deal(original: Any, self: Assigner) -> None:
        original(self)
        for pass_ in [p for p in self._waiting.values() if p.deals and p.searches.waiting]:
            if (worker := self._members.thirsty_for(0.0)) is not None:
                self._issue(worker, pass_)

    wrapped(patch, Assigner, "deal", deal)


@bug
def probes_go_on_after_the_search_was_given_up(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Quarantine, "_stop_trying", lambda self, pass_, call: None)


@bug
def suspects_outlive_an_earlier_failure(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CulpritSearches, "forget_from", lambda self, call: None)


@bug
def what_is_set_aside_is_not_told(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Quarantine, "returned", lambda self, pass_, lo, hi: None)


def _handlers() -> Any:
    return sys.modules["pipedist.scheduler.machine"].__dict__["_HANDLERS"]


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_caught_within_300_small_worlds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BUGS[name](monkeypatch)
    with pytest.raises(Violation) as caught:
        play_small_worlds(0, SEEDS)
    assert not isinstance(caught.value.__cause__, TypeError | AttributeError), "the plant itself is broken"


# -- one large world ---------------------------------------------------------------------


def test_an_event_costs_the_same_with_a_thousand_workers() -> None:
    small, large = Crowd(100, 1_000), Crowd(1_000, 10_000)
    assert small.run() == 1_000
    assert large.run() == 10_000
    assert large.lines_per_event < 1.3 * small.lines_per_event
    assert large.commands_per_call < 4
    assert large.lines_max < 4 * small.lines_max


class Crowd:
    """Many workers, calls of a second each, no faults; counts lines of Python instead of time."""

    replicas = 10

    def __init__(self, workers: int, calls: int) -> None:
        self.scheduler = Scheduler()
        self.calls = calls
        self.workers = workers
        self.lines: list[int] = []
        self.commands = 0
        self._leases: list[cmd.SendAssign] = []

    def run(self) -> int:
        """Return how many calls were accepted."""
        settings = PassSettings(self.replicas)
        accepted = offered = 0
        todo: list[ev.Event] = [ev.PassOpened(1, settings)]
        for i in range(self.workers):
            todo += [ev.WorkerExpected(f"w{i}"), ev.WorkerJoined(f"w{i}", 0)]
        turn = 0
        while todo or self._leases:
            turn += 1
            for command in self._handle(todo.pop(0) if todo else self._report(turn), counted=turn % 20 == 0):
                match command:
                    case cmd.SendAssign():
                        self._leases.append(command)
                    case cmd.AcceptResults(_, lo, hi):
                        accepted += hi - lo
                    case cmd.StepsReady(_, _, last):
                        todo.append(ev.StepsConsumed(1, last))
                    case cmd.RequestSteps(_, count):
                        last = min(offered + count, self.calls // self.replicas)
                        if last > offered:
                            todo.append(ev.StepsAvailable(1, offered, last, self.replicas))
                        offered = last
        self.scheduler.validate()
        return accepted

    def _report(self, turn: int) -> ev.Event:
        """Let one of the running leases come back: in no order, and every tenth raises once."""
        place = turn * 7919 % len(self._leases)
        self._leases[place], self._leases[-1] = self._leases[-1], self._leases[place]
        lease = self._leases.pop()
        if lease.attempt == 0 and lease.lo % 10 == 3:
            return ev.CallFailed(lease.worker, 0, lease.lease, lease.lo, retries=1)
        return ev.CallsDone(lease.worker, 0, lease.lease, lease.lo, lease.hi, 10**9)

    def _handle(self, event: ev.Event, *, counted: bool) -> list[cmd.Command]:
        lines = 0

        def trace(frame: FrameType, what: str, argument: object) -> Any:
            nonlocal lines
            lines += what == "line"
            return trace

        before = sys.gettrace()
        if counted:
            sys.settrace(trace)
        try:
            commands = self.scheduler.handle(event, 0.0)
        finally:
            sys.settrace(before)
        if counted and isinstance(event, ev.CallsDone | ev.CallFailed):
            self.lines.append(lines)
        self.commands += len(commands)
        return commands

    @property
    def lines_per_event(self) -> float:
        return sum(self.lines) / len(self.lines)

    @property
    def lines_max(self) -> int:
        return max(self.lines)

    @property
    def commands_per_call(self) -> float:
        return self.commands / self.calls
