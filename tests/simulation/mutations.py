"""Mutations: each removes a protection of the scheduler, or plants a defect, to test the simulations.

A test applies one mutation at a time, and the simulations must find it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from pipedist.scheduler import Scheduler, SchedulerLimits, assignment, gang_scheduling, outcomes
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
from pipedist.scheduler.quotas import Quotas
from pipedist.scheduler.transitions import GANG_TRANSITIONS, GangState

Mutation = Callable[[pytest.MonkeyPatch], None]
MUTATIONS: dict[str, Mutation] = {}


def mutation(apply: Mutation) -> Mutation:
    MUTATIONS[apply.__name__] = apply
    return apply


def wrapped(patch: pytest.MonkeyPatch, owner: type, name: str, new: Callable[..., Any]) -> None:
    """Replace a method by `new(original, self, ...)`."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda *a, **k: new(original, *a, **k))


@mutation
def exit_of_an_old_incarnation_counts(patch: pytest.MonkeyPatch) -> None:
    def lost(original: Any, self: Scheduler, event: ev.WorkerLost) -> None:
        now = self._members.workers[event.worker].incarnation
        original(self, ev.WorkerLost(event.worker, now, event.cause, event.graceful))

    wrapped(patch, Scheduler, "_on_worker_lost", lost)
    patch.setitem(_handlers(), ev.WorkerLost, Scheduler._on_worker_lost)


@mutation
def heartbeats_of_an_old_incarnation_count(patch: pytest.MonkeyPatch) -> None:
    def heard(self: Scheduler, event: ev.HeartbeatReceived) -> None:
        worker = self._members.workers.get(event.worker)
        if worker is not None:
            self._members.record_heartbeat(worker)

    patch.setitem(_handlers(), ev.HeartbeatReceived, heard)


@mutation
def results_count_without_a_lease(patch: pytest.MonkeyPatch) -> None:
    def valid_lease(original: Any, self: Scheduler, name: str, inc: int, lease: int, lo: int, hi: int) -> Any:
        if lease in self._members.leases:
            known = self.__dict__.setdefault("known", {})
            known[lease] = self._members.leases[lease]
            return original(self, name, inc, lease, lo, hi)
        return self.__dict__.get("known", {}).get(lease) or original(self, name, inc, lease, lo, hi)

    wrapped(patch, Scheduler, "_valid_lease", valid_lease)


@mutation
def report_with_a_gap_counts(patch: pytest.MonkeyPatch) -> None:
    def valid_lease(self: Scheduler, name: str, inc: int, lease: int, lo: int, hi: int) -> Lease | None:
        if self._members.current(name, inc) is None or lease not in self._members.leases:
            self._out.append(cmd.DropResults(name, lease))
            return None
        return self._members.leases[lease]

    patch.setattr(Scheduler, "_valid_lease", valid_lease)


@mutation
def retry_is_lost(patch: pytest.MonkeyPatch) -> None:
    def wait(original: Any, self: Pass, lo: int, hi: int, attempt: int) -> None:
        if attempt < 2:
            original(self, lo, hi, attempt)

    wrapped(patch, Pass, "wait", wait)


@mutation
def one_retry_too_few(patch: pytest.MonkeyPatch) -> None:
    def retry_or_fail(
        original: Any, self: Outcomes, pass_: Pass, lo: int, hi: int, raised: Sequence[RaisedCall]
    ) -> None:
        first, history = raised[0], pass_.histories.get(lo)
        last = history is not None and history.raised[first.cause.stage] + 1 == first.retries
        original(self, pass_, lo, hi, [replace(x, retries=0) for x in raised] if last else raised)

    wrapped(patch, Outcomes, "_retry_or_fail", retry_or_fail)


@mutation
def worker_of_an_ended_pass_is_not_suspended(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Membership, "suspend", lambda self, worker, lease: None)


@mutation
def suspended_worker_is_never_resumed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Membership, "resume", lambda self, worker: None)


@mutation
def retries_of_stages_are_counted_together(patch: pytest.MonkeyPatch) -> None:
    def retry_or_fail(
        original: Any, self: Outcomes, pass_: Pass, lo: int, hi: int, raised: Sequence[RaisedCall]
    ) -> None:
        together = [replace(x, cause=replace(x.cause, stage="")) for x in raised]
        original(self, pass_, lo, hi, together)

    wrapped(patch, Outcomes, "_retry_or_fail", retry_or_fail)


@mutation
def deaths_use_up_retries(patch: pytest.MonkeyPatch) -> None:
    def retry_or_fail(original: Any, self: Outcomes, pass_: Pass, lo: int, *rest: Any) -> None:
        history = pass_.histories.get(lo)
        if history is not None:
            history.raised[rest[-1][0].cause.stage] += history.deaths
            history.deaths = 0
        original(self, pass_, lo, *rest)

    wrapped(patch, Outcomes, "_retry_or_fail", retry_or_fail)


@mutation
def permanent_failure_is_retried(patch: pytest.MonkeyPatch) -> None:
    def retry_or_fail(
        original: Any, self: Outcomes, pass_: Pass, lo: int, hi: int, raised: Sequence[RaisedCall]
    ) -> None:
        original(self, pass_, lo, hi, [replace(x, retries=2) for x in raised])

    wrapped(patch, Outcomes, "_retry_or_fail", retry_or_fail)


@mutation
def every_lease_of_a_lost_worker_is_charged(patch: pytest.MonkeyPatch) -> None:
    wrapped(patch, Outcomes, "lost", lambda o, self, lease, death, blamed: o(self, lease, death, lease.next))


@mutation
def no_call_is_charged_with_a_death(patch: pytest.MonkeyPatch) -> None:
    wrapped(patch, Outcomes, "lost", lambda o, self, lease, death, blamed: o(self, lease, death, None))


@mutation
def cancelled_call_is_ignored_by_the_charge(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Membership, "cancel", Membership.revoke)


@mutation
def last_call_of_a_lost_lease_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    def lost(original: Any, self: Outcomes, lease: Lease, death: Death, blamed: int | None) -> None:
        if lease.gang is None and lease.hi - lease.next > 1:
            self._passes[lease.pass_id].leased -= 1
            lease.hi -= 1
        original(self, lease, death, blamed)

    wrapped(patch, Outcomes, "lost", lost)


@mutation
def lost_calls_wait_beyond_the_failed_step(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Pass, "wait", lambda self, lo, hi, attempt: self.todo.put(lo, hi, attempt))


@mutation
def replacement_has_the_old_incarnation(patch: pytest.MonkeyPatch) -> None:
    def lose(
        original: Any, self: Scheduler, worker: Worker, death: Death, *, replace: bool = True, **how: Any
    ) -> None:
        original(self, worker, death, replace=False, **how)
        if worker.managed and replace:
            self._out.append(cmd.StartWorker(worker.name, worker.incarnation))

    wrapped(patch, Scheduler, "_lose", lose)


@mutation
def limit_of_steps_in_flight_is_ignored(patch: pytest.MonkeyPatch) -> None:
    wrapped(patch, Pass, "steps_wanted", lambda o, self, limits, workers: o(self, limits, workers) and 4)


@mutation
def limit_of_bytes_in_flight_is_ignored(patch: pytest.MonkeyPatch) -> None:
    def wanted(original: Any, self: Pass, limits: SchedulerLimits, workers: int) -> Any:
        return original(self, SchedulerLimits(steps_in_flight_max=limits.steps_in_flight_max), workers)

    wrapped(patch, Pass, "steps_wanted", wanted)


@mutation
def one_step_does_not_always_fit(patch: pytest.MonkeyPatch) -> None:
    def wanted(original: Any, self: Pass, limits: SchedulerLimits, workers: int) -> Any:
        full = self.input_bytes + self.result_bytes + self.step_bytes > limits.bytes_in_flight_max / 10
        return 0 if full and self.offered else original(self, limits, workers)

    wrapped(patch, Pass, "steps_wanted", wanted)


@mutation
def consumed_results_stay_in_flight(patch: pytest.MonkeyPatch) -> None:
    def consumed(self: Scheduler, event: ev.StepsConsumed) -> None:
        self._passes[event.pass_id].consumed = event.before

    patch.setitem(_handlers(), ev.StepsConsumed, consumed)


@mutation
def steps_become_visible_out_of_order(patch: pytest.MonkeyPatch) -> None:
    def end_from(self: RangeSet, x: int) -> int:
        return max([x, *(hi for _, hi in self)])

    patch.setattr(RangeSet, "end_from", end_from)


@mutation
def lease_contains_absent_calls_of_a_short_step(patch: pytest.MonkeyPatch) -> None:
    def offer(original: Any, self: Pass, first: int, last: int, parts: int, *rest: Any) -> None:
        original(self, first, last, self.settings.replicas if parts else 0, *rest)

    wrapped(patch, Pass, "offer", offer)


@mutation
def retries_wait_at_the_end(patch: pytest.MonkeyPatch) -> None:
    def put(self: TodoQueue, lo: int, hi: int, attempt: int) -> None:
        if lo < hi:
            self._items.append(Todo(lo, hi, attempt))
            self.calls += hi - lo

    patch.setattr(TodoQueue, "put", put)


@mutation
def failure_ends_earlier_steps_too(patch: pytest.MonkeyPatch) -> None:
    def fail(original: Any, self: Pass, lo: int, hi: int, failures: Any) -> None:
        original(self, lo, hi, failures)
        if self.last_step is not None:
            self.last_step = max(0, self.last_step - 1)

    wrapped(patch, Pass, "fail", fail)


@mutation
def failure_is_reported_before_its_step_is_complete(patch: pytest.MonkeyPatch) -> None:
    def fail(original: Any, self: Outcomes, pass_: Pass, lo: int, hi: int, failures: Any) -> None:
        original(self, pass_, lo, hi, failures)
        if lo in pass_.failures:
            self._out.append(cmd.StepFailed(pass_.id, lo // pass_.settings.replicas, tuple(failures)))

    wrapped(patch, Outcomes, "_fail", fail)


@mutation
def leases_outlive_their_pass(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Outcomes, "cancel", lambda self, pass_, from_call: None)


@mutation
def draining_pass_gets_workers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Pass, "has_assignable_calls", property(lambda self: self.todo.calls > 0))


@mutation
def drained_is_reported_too_early(patch: pytest.MonkeyPatch) -> None:
    def draining(self: Scheduler, event: ev.PassDraining) -> None:
        self._passes[event.pass_id].draining = self._passes[event.pass_id].drain_reported = True
        self._out.append(cmd.PassDrained(event.pass_id))

    patch.setitem(_handlers(), ev.PassDraining, draining)


@mutation
def worker_without_heartbeats_stays(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(_handlers(), ev.Tick, lambda self, event: None)


@mutation
def worker_is_bound_once_for_all_incarnations(patch: pytest.MonkeyPatch) -> None:
    def dismiss(original: Any, self: Membership, worker: Worker) -> Any:
        bound = set(worker.bound)
        held = original(self, worker)
        worker.bound = bound
        return held

    wrapped(patch, Membership, "dismiss", dismiss)


@mutation
def gang_is_divided_among_idle_workers_only(patch: pytest.MonkeyPatch) -> None:
    def idle(original: Any, self: GangGroups, members: Membership, *about: Any) -> Any:
        ready, members.ready = members.ready, min(members.ready, len(members.idle))
        try:
            return original(self, members, *about) if members.ready else None
        finally:
            members.ready = ready

    wrapped(patch, GangGroups, "idle", idle)


@mutation
def gang_starts_without_its_last_member(patch: pytest.MonkeyPatch) -> None:
    def parts(gang: GangAttempt) -> tuple[cmd.GangAssignment, ...]:
        return original(gang)[: max(1, len(gang.leases) - 1)]

    original = gang_scheduling.parts
    patch.setattr(assignment, "parts", parts)


@mutation
def results_of_a_gang_count_separately(patch: pytest.MonkeyPatch) -> None:
    def done(original: Any, self: Outcomes, lease: Lease, event: ev.CallsDone) -> None:
        original(self, lease, event)
        if lease.gang is not None:
            self._out.append(cmd.AcceptResults(lease.pass_id, event.lo, event.hi, event.worker))

    wrapped(patch, Outcomes, "done", done)


@mutation
def results_beside_an_error_count(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(GANG_TRANSITIONS, (GangState.ENDING, "all reported"), GangState.COMPLETE)


@mutation
def gang_ends_with_its_first_error(patch: pytest.MonkeyPatch) -> None:
    def raised(original: Any, self: Outcomes, lease: Lease, event: ev.CallFailed) -> None:
        original(self, lease, event)
        gang = lease.gang
        if gang is not None and gang.due > 0 and not event.aborted:
            self.break_up(self._passes[lease.pass_id], gang)
            self._retry_or_fail(self._passes[lease.pass_id], gang.lo, gang.hi, gang.at_fault)

    wrapped(patch, Outcomes, "raised", raised)


@mutation
def aborted_call_is_reported_as_the_error(patch: pytest.MonkeyPatch) -> None:
    def at_fault(self: GangAttempt) -> list[RaisedCall]:
        return sorted(self.raised, key=lambda x: x.call)

    patch.setattr(GangAttempt, "at_fault", property(at_fault))


@mutation
def first_error_to_arrive_is_reported(patch: pytest.MonkeyPatch) -> None:
    def retry_or_fail(
        original: Any, self: Outcomes, pass_: Pass, lo: int, hi: int, raised: Sequence[RaisedCall]
    ) -> None:
        most = max(x.retries for x in raised)
        original(self, pass_, lo, hi, [replace(x, retries=most) for x in raised])

    def at_fault(self: GangAttempt) -> list[RaisedCall]:
        return self.raised[:1]

    wrapped(patch, Outcomes, "_retry_or_fail", retry_or_fail)
    patch.setattr(GangAttempt, "at_fault", property(at_fault))


@mutation
def only_the_lost_part_of_a_gang_is_retried(patch: pytest.MonkeyPatch) -> None:
    def lost(original: Any, self: Outcomes, lease: Lease, death: Death, blamed: int | None) -> None:
        lease.gang = None
        original(self, lease, death, blamed)

    wrapped(patch, Outcomes, "lost", lost)


@mutation
def other_members_of_a_lost_one_continue(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Outcomes, "_cancel", lambda self, pass_, lease: None)


@mutation
def death_is_not_charged_to_a_gang(patch: pytest.MonkeyPatch) -> None:
    def lost(original: Any, self: Outcomes, lease: Lease, death: Death, blamed: int | None) -> None:
        original(self, lease, death, None if lease.gang is not None else blamed)

    wrapped(patch, Outcomes, "lost", lost)


@mutation
def queued_gangs_are_charged_too(patch: pytest.MonkeyPatch) -> None:
    def lost(original: Any, self: Outcomes, lease: Lease, death: Death, blamed: int | None) -> None:
        original(self, lease, death, lease.next if lease.gang is not None else blamed)

    wrapped(patch, Outcomes, "lost", lost)


@mutation
def ended_gang_stays_in_its_group(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GangGroups, "end", lambda self, group: None)


@mutation
def calls_overtake_a_waiting_gang(patch: pytest.MonkeyPatch) -> None:
    def next_pass(original: Any, self: Assigner, stuck: Any) -> Pass | None:
        turn: Pass | None = original(self, stuck)
        if turn is None or not turn.settings.gang or turn.groups.idle(self._members, turn.settings.replicas):
            return turn
        others = [p for p in self._waiting.values() if not p.settings.gang]
        return others[0] if others and self._members.idle else turn

    wrapped(patch, Assigner, "_next_pass", next_pass)


@mutation
def number_of_queued_gangs_is_unlimited(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Pass, "gangs_queued", lambda self, limits: 1000)


@mutation
def call_is_queued_behind_a_gang(patch: pytest.MonkeyPatch) -> None:
    def grant(original: Any, self: Membership, *args: Any, **known: Any) -> Any:
        *before, _expected_s, gang = args if len(args) == 7 else (*args, None)
        return original(self, *before, 0.001, gang, **known)

    wrapped(patch, Membership, "grant", grant)


@mutation
def gang_is_queued_behind_other_leases(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        gang_scheduling, "_works_for", lambda worker, group, members: worker.name in members.workers
    )


@mutation
def hanging_member_is_not_evicted(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(_handlers(), ev.GangStalled, lambda self, event: None)


@mutation
def any_worker_may_report_a_stalled_gang(patch: pytest.MonkeyPatch) -> None:
    def stalled(self: Scheduler, event: ev.GangStalled) -> None:
        for lease in list(self._members.leases.values()):
            if lease.id == event.lease and lease.gang is not None:
                for member in event.members:
                    worker = self._members.workers[lease.gang.leases[member].worker]
                    self._out.append(cmd.EvictWorker(worker.name, worker.incarnation, ""))
                    self._lose(worker, Death(""))

    patch.setitem(_handlers(), ev.GangStalled, stalled)


@mutation
def no_backoff(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(outcomes, "backoff_after_s", lambda raised, limits: 0.0)


@mutation
def deadline_ignores_backoffs(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BackoffQueue, "due", property(lambda self: None))


@mutation
def calls_back_off_beyond_the_failed_step(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BackoffQueue, "drop_from", lambda self, call: None)


@mutation
def timeout_is_charged_as_a_death(patch: pytest.MonkeyPatch) -> None:
    def lost(original: Any, self: Outcomes, lease: Lease, death: Death, blamed: int | None) -> None:
        original(self, lease, msgspec.structs.replace(death, timed_out=False), blamed)

    wrapped(patch, Outcomes, "lost", lost)


@mutation
def timeout_is_charged_to_the_first_call_of_the_lease(patch: pytest.MonkeyPatch) -> None:
    def lost(original: Any, self: Outcomes, lease: Lease, death: Death, blamed: int | None) -> None:
        original(self, lease, death, None if blamed is None else lease.next)

    wrapped(patch, Outcomes, "lost", lost)


@mutation
def result_of_a_probe_counts(patch: pytest.MonkeyPatch) -> None:
    def done(original: Any, self: Outcomes, lease: Lease, event: ev.CallsDone) -> None:
        original(self, lease, event)
        if lease.probe is not None:
            self._out.append(cmd.AcceptResults(lease.pass_id, event.lo, event.hi, event.worker))

    wrapped(patch, Outcomes, "done", done)


@mutation
def one_death_makes_a_culprit(patch: pytest.MonkeyPatch) -> None:
    def charge(original: Any, self: Outcomes, pass_: Pass, probe: Probe, worker: str, death: Death) -> None:
        probe.deaths = 99
        original(self, pass_, probe, worker, death)

    wrapped(patch, Outcomes, "_charge_probe", charge)


@mutation
def probe_of_a_lost_worker_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CulpritSearches, "wait", lambda self, probe: probe.tried or self.waiting.append(probe))


@mutation
def passed_probe_makes_the_next_element_a_culprit(patch: pytest.MonkeyPatch) -> None:
    def passed(original: Any, self: Bisection, span: tuple[int, int]) -> None:
        original(self, span)
        if span[1] - span[0] == 1 and span[1] < self.elements:
            self.culprits.setdefault(span[1], cmd.Cause("s", ""))

    wrapped(patch, Bisection, "passed", passed)


@mutation
def search_ends_with_the_first_culprit(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Bisection, "is_over", property(lambda self: bool(self.culprits) or not self.trying))


@mutation
def only_the_first_half_is_probed(patch: pytest.MonkeyPatch) -> None:
    def halves(original: Any, self: Bisection, span: tuple[int, int]) -> Any:
        spans = original(self, span)[:1]
        self.trying = {x for x in self.trying if x in spans or not span[0] <= x[0] < span[1]}
        return spans

    wrapped(patch, Bisection, "_halves", halves)


@mutation
def culprits_are_sent_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CulpritSearches, "elements_of", lambda self, call: ())


@mutation
def failing_rest_fails_the_pass(patch: pytest.MonkeyPatch) -> None:
    def give_up(original: Any, self: Outcomes, pass_: Pass, lo: int, *rest: Any, **known: Any) -> None:
        if lo in pass_.searches.cleared:
            pass_.searches.cleared.pop(lo)
            rest = (*rest[:-1], False)
        original(self, pass_, lo, *rest, **known)

    wrapped(patch, Outcomes, "_give_up", give_up)


@mutation
def call_without_quarantine_is_bisected(patch: pytest.MonkeyPatch) -> None:
    def give_up(original: Any, self: Outcomes, *rest: Any, **known: Any) -> None:
        original(self, *rest[:-1], True, **known)

    wrapped(patch, Outcomes, "_give_up", give_up)


@mutation
def only_the_first_call_of_a_gang_is_quarantined(patch: pytest.MonkeyPatch) -> None:
    def quarantine_all(original: Any, self: Quarantine, pass_: Pass, lo: int, hi: int, *rest: Any) -> None:
        original(self, pass_, lo, lo + 1 if pass_.settings.gang else hi, *rest)

    wrapped(patch, Quarantine, "quarantine_all", quarantine_all)


@mutation
def quotas_grow_before_others_have_confirmed_theirs(patch: pytest.MonkeyPatch) -> None:
    def hold(original: Any, self: Quotas, worker: Any, quota: Any) -> None:
        original(self, worker, quota if quota is None else self._sent[worker])

    wrapped(patch, Quotas, "_hold", hold)


@mutation
def calls_overlap_without_limit(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Assigner, "_calls_at_once", lambda self, pass_: 1000)


@mutation
def report_of_an_overlapping_lease_needs_its_turn(patch: pytest.MonkeyPatch) -> None:
    def grant(original: Any, self: Membership, *args: Any, overlaps: bool = False) -> Any:
        lease = original(self, *args, overlaps=overlaps)
        lease.overlaps = False
        return lease

    wrapped(patch, Membership, "grant", grant)


@mutation
def probes_are_queued_in_advance(patch: pytest.MonkeyPatch) -> None:
    def assign(original: Any, self: Assigner) -> None:
        original(self)
        for pass_ in [p for p in self._waiting.values() if p.has_assignable_calls and p.searches.waiting]:
            if (worker := self._members.busy_for(0.0, in_advance=True)) is not None:
                self._issue(worker, pass_)

    wrapped(patch, Assigner, "assign", assign)


@mutation
def probes_continue_after_the_search_ended(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Quarantine, "_stop_trying", lambda self, pass_, call: None)


@mutation
def searches_outlive_an_earlier_failure(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CulpritSearches, "forget_from", lambda self, call: None)


@mutation
def quarantine_is_not_reported(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Quarantine, "returned", lambda self, pass_, lo, hi: None)


def _handlers() -> Any:
    return sys.modules["pipedist.scheduler.machine"].__dict__["_HANDLERS"]
