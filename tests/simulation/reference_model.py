"""The reference model: an independent, simple model of what the scheduler must do.

The model sees the same events as the scheduler, and each of its commands. It keeps its own records of workers,
leases, gangs and passes, and never reads the scheduler's state, except to compare (`compare`).

* `handle` records an event and PREDICTS the commands that it must cause, exactly: workers started and
  evicted, results accepted, stashed and dropped, gangs ended.
* `check` verifies each other command: which worker gets which calls and when, what becomes visible, what fails.
* `finish_event` verifies the state after an event, and `compare` compares it with the scheduler's.
* `check_end` verifies the outcome of each pass.

A result has a value here: that of the call, or POISON if its lease was superseded before it arrived. POISON must
never count.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from pipedist.scheduler import Command, Event, Scheduler, SchedulerLimits
from pipedist.scheduler import commands as cmd
from pipedist.scheduler import events as ev
from tests.simulation.workloads import ALWAYS, Workload


class Violation(AssertionError):
    """The scheduler did something that it must not do, or did not do what it must."""


@dataclass(slots=True, eq=False)
class LeaseRecord:
    """One lease.

    Args:
        next: its first call that was not reported.
        serial: serial of its gang, or 0.
        probe: the span of elements that it tries, if its call is being bisected.
        is_void: its results do not count any more.
        twin: the other lease of the same calls, until one of them reports.
        second_attempts: number of second attempts of the call that it runs.
    """

    id: int
    worker: str
    incarnation: int
    pass_id: int
    next: int
    hi: int
    serial: int = 0
    probe: tuple[int, int] | None = None
    is_void: bool = False
    twin: LeaseRecord | None = None
    second_attempts: int = 0
    overlaps: bool = False


@dataclass(slots=True, eq=False)
class GangRecord:
    """One gang that has not ended."""

    pass_id: int
    parts: tuple[cmd.GangAssignment, ...]
    leases: list[LeaseRecord]
    reported: set[int] = field(default_factory=set)
    stashed: set[int] = field(default_factory=set)
    raised: list[ev.CallFailed] = field(default_factory=list)
    bytes: int = 0
    is_poisoned: bool = False
    is_broken: bool = False
    """A member was lost: the other leases are cancelled, and no other call is charged."""
    is_failed: bool = False
    """Too many workers died under it."""

    @property
    def lo(self) -> int:
        return self.parts[0].lo

    @property
    def hi(self) -> int:
        return self.parts[-1].hi

    @property
    def calls(self) -> set[int]:
        return set(range(self.lo, self.hi))

    @property
    def workers(self) -> tuple[str, ...]:
        return tuple(part.worker for part in self.parts)


@dataclass(slots=True, eq=False)
class WorkerRecord:
    """One worker name."""

    managed: bool
    incarnation: int = 0
    ready: bool = False
    supervised: bool = False
    heard_at: float = 0.0
    leases: list[LeaseRecord] = field(default_factory=list)
    bound: set[int] = field(default_factory=set)
    unsure: bool = False
    """A lease that it may have been running was cancelled: which call it runs is unknown."""
    suspended: int = 0
    """The cancelled lease that it may still run: it gets no calls until it confirms."""


Probe = tuple[int, tuple[int, int]]
"""A call and a span of its elements."""


@dataclass(slots=True, eq=False)
class PassRecord:
    """One pass."""

    work: Workload
    committed: bytearray
    """1 for each call whose result counts."""
    offered: int = 0
    requested: int = 0
    visible: int = 0
    """In an ordered pass, the steps before this one were reported."""
    consumed: int = 0
    result_bytes: int = 0
    """Bytes of results that were not consumed."""
    shown: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    waiting: set[int] = field(default_factory=set)
    """Offered calls that no worker has; the scheduler may forget those beyond a failed step."""
    raised: defaultdict[int, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """By call, the number of exceptions of each stage."""
    deaths: Counter[int] = field(default_factory=Counter)
    before: Counter[int] = field(default_factory=Counter)
    """Attempts of cleared calls with all elements."""
    backing_off: list[tuple[float, frozenset[int]]] = field(default_factory=list)
    """Calls that are retried, and the time from which on."""
    searched: set[int] = field(default_factory=set)
    """Calls that are being bisected."""
    probing: set[Probe] = field(default_factory=set)
    """Probes that a worker has."""
    probe_raised: Counter[tuple[int, tuple[int, int], str]] = field(default_factory=Counter)
    probes_backing_off: dict[Probe, float] = field(default_factory=dict)
    """Probes of one element that are retried, and the time from which on."""
    cleared: dict[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    """Calls that are executed without their culprits, and with which elements."""
    quarantined: dict[int, cmd.CallsQuarantined] = field(default_factory=dict)
    last_call: int = ALWAYS
    """Calls beyond this one are obsolete: a call of its step failed permanently."""
    passed_over: int = 0
    """How often another pass got a worker while this one waited."""
    is_opened: bool = False
    is_ended: bool = False
    """All steps were offered."""
    is_draining: bool = False
    is_drained: bool = False
    is_closed: bool = False
    end: str = ""
    """How it ended: "complete", "failed", "closed" or "drained"; "" while it runs."""

    @property
    def reported(self) -> int:
        """Number of steps that became visible or failed."""
        return len(self.shown) + len(self.failed)

    @property
    def held_bytes(self) -> int:
        """Bytes of inputs of steps that are not visible, and of results that are not consumed."""
        return (self.offered - self.reported) * self.work.step_bytes + self.result_bytes

    @property
    def is_assignable(self) -> bool:
        return not (self.is_draining or self.is_closed) and any(c <= self.last_call for c in self.waiting)

    @property
    def is_all_reported(self) -> bool:
        return self.reported >= self.work.needed

    def key(self, call: int) -> int:
        """Return the call that the attempts of a call are counted for: in a gang, its first."""
        return call - call % self.work.settings.replicas if self.work.settings.gang else call

    def attempts(self, call: int) -> int:
        call = self.key(call)
        return self.before[call] + self.raised[call].total() + self.deaths[call]

    def fail(self, call: int) -> None:
        """Record that a call failed permanently."""
        if self.work.settings.ordered:
            replicas = self.work.settings.replicas
            self.last_call = last = min(self.last_call, (call // replicas + 1) * replicas - 1)
            self.backing_off = [(due, calls) for due, calls in self.backing_off if min(calls) <= last]
            self._forget_probes(lambda call: call > last)

    def end_search(self, call: int) -> None:
        """Record that the bisection of a call ended."""
        self.searched.discard(call)
        self._forget_probes(lambda other: other == call)

    def _forget_probes(self, is_over: Callable[[int], bool]) -> None:
        self.probes_backing_off = {p: due for p, due in self.probes_backing_off.items() if not is_over(p[0])}

    def charge(
        self, call: int, event: ev.CallFailed | ev.WorkerLost, now: float, limits: SchedulerLimits
    ) -> None:
        """Record that a call, or a gang whose first call it is, raised or timed out in a stage."""
        raised = self.raised[call]
        raised[event.stage] += 1
        count = raised[event.stage]
        if count > event.retries:
            if not event.quarantine:
                self.fail(call)
            return
        if call > self.last_call:
            return
        calls = range(call, call + (self.work.settings.replicas if self.work.settings.gang else 1))
        if count == 1:
            self.waiting.update(calls)
        else:
            self.backing_off.append((now + backoff_s(count, limits), frozenset(calls)))

    def charge_probe(
        self, probe: Probe, event: ev.CallFailed | ev.WorkerLost, now: float, limits: SchedulerLimits
    ) -> None:
        """Record that a probe of one element raised or timed out."""
        self.probe_raised[*probe, event.stage] += 1
        count = self.probe_raised[*probe, event.stage]
        if 1 < count <= event.retries and probe[0] <= self.last_call:
            self.probes_backing_off[probe] = now + backoff_s(count, limits)

    def wake(self, now: float) -> bool:
        """Requeue the calls whose backoff has ended; return whether there were any."""
        if not self.backing_off and not self.probes_backing_off:
            return False
        woken: list[object] = [p for p, due in self.probes_backing_off.items() if due <= now]
        self.probes_backing_off = {p: due for p, due in self.probes_backing_off.items() if due > now}
        for due, calls in self.backing_off:
            if due <= now:
                woken.append(calls)
                self.waiting |= calls
        self.backing_off = [(due, calls) for due, calls in self.backing_off if due > now]
        return bool(woken)


def backoff_s(count: int, limits: SchedulerLimits) -> float:
    """Return the backoff after a number of exceptions."""
    return min(limits.backoff_s_max, limits.backoff_s * 2 ** (count - 2))


PREDICTED = {
    cmd.StartWorker,
    cmd.EvictWorker,
    cmd.AcceptResults,
    cmd.StashResults,
    cmd.GangEnded,
    cmd.DropResults,
}


class ReferenceModel:
    """Predicts and verifies the commands of one scheduler.

    Args:
        works: the passes.
        limits: the scheduler's limits.
    """

    def __init__(self, works: Iterable[Workload], limits: SchedulerLimits) -> None:
        self.limits = limits
        self.now = 0.0
        self.passes = {w.id: PassRecord(w, bytearray(w.steps * w.settings.replicas)) for w in works}
        self.workers: dict[str, WorkerRecord] = {}
        self.leases: dict[int, LeaseRecord] = {}
        """All leases ever, by id."""
        self.gangs: dict[int, GangRecord] = {}
        self._last_gang = 0
        self._ready = 0
        """Number of workers that are ready and not suspended."""
        self._speculates = any(w.settings.speculation for w in (p.work for p in self.passes.values()))
        self._reporting: ev.CallsDone | None = None
        """The report that is being handled."""
        self._superseded: LeaseRecord | None = None
        """One of two twins, which must be cancelled by the event that is being handled."""
        self._suspending: dict[str, int] = {}
        """By worker, the lease that it may still run and that was cancelled by this event."""
        self._cancelled_probes: list[LeaseRecord] = []
        """Probes that were cancelled by this event, because their search ended."""
        self.second_attempts = 0
        """Number of second attempts."""
        self.third_attempts = 0
        """Number of second attempts that followed a failed one of the same call."""
        self.second_won = 0
        """Number of second attempts that reported first."""

    def _must(self, holds: bool, text: str) -> None:
        if not holds:
            raise Violation(text)

    # -- events: records and predictions -----------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Command]:
        """Record an event, and return the commands of the kinds `PREDICTED` that it must cause."""
        self.now = now
        self._suspending.clear()
        predict = _PREDICTIONS.get(type(event))
        predicted = predict(self, event) if predict is not None else []
        for record in self.passes.values():
            if not record.is_closed:
                woken = record.wake(now)
                if isinstance(event, ev.Tick) and woken:
                    event = None  # type: ignore[assignment]  # it had an effect
        if isinstance(event, ev.Tick) and not predicted and not self._speculates:
            raise Violation("a Tick was requested, but has no effect")
        return predicted

    def compare_predicted(self, commands: Iterable[Command], predicted: list[Command]) -> None:
        """Verify that the scheduler's commands include exactly the predicted ones."""
        came = [c for c in commands if type(c) in PREDICTED]
        if came == predicted:
            return
        came, predicted = _comparable(came), _comparable(predicted)
        self._must(came == predicted, f"the scheduler wants {came}, expected {predicted}")

    def _on_worker_expected(self, event: ev.WorkerExpected) -> list[Command]:
        self.workers[event.worker] = WorkerRecord(managed=True)
        return [cmd.StartWorker(event.worker, 0)]

    def _on_joined(self, event: ev.WorkerJoined) -> list[Command]:
        name, incarnation = event.worker, event.incarnation
        worker = self.workers.setdefault(name, WorkerRecord(managed=False, incarnation=incarnation))
        if incarnation < worker.incarnation or (worker.ready and incarnation == worker.incarnation):
            return [_evict(name, incarnation)]
        predicted: list[Command] = []
        if worker.ready:
            predicted = [_evict(name, worker.incarnation)]
            self._lose(name, graceful=False)
        worker.ready, worker.incarnation = True, incarnation
        worker.supervised, worker.heard_at = event.supervised, self.now
        self._ready += 1
        return predicted

    def _on_heartbeat(self, event: ev.HeartbeatReceived) -> list[Command]:
        worker = self.workers.get(event.worker)
        if worker is not None and worker.ready and worker.incarnation == event.incarnation:
            worker.heard_at = self.now
        return []

    def _on_lost(self, event: ev.WorkerLost) -> list[Command]:
        worker = self.workers.get(event.worker)
        if worker is None or worker.incarnation != event.incarnation:
            return []
        if not (worker.ready or worker.managed):
            return []
        return self._lose(event.worker, graceful=event.graceful, event=event)

    def _on_tick(self, _event: ev.Tick) -> list[Command]:
        predicted: list[Command] = []
        for name, worker in self.workers.items():
            late = worker.heard_at + self.limits.heartbeat_timeout_s <= self.now
            if worker.supervised and worker.ready and late:
                predicted += [_evict(name, worker.incarnation), *self._lose(name, graceful=False)]
        return predicted

    def _on_pass_opened(self, event: ev.PassOpened) -> list[Command]:
        self.passes[event.pass_id].is_opened = True
        return []

    def _on_steps_available(self, event: ev.StepsAvailable) -> list[Command]:
        record = self.passes[event.pass_id]
        replicas = record.work.settings.replicas
        record.offered = event.last
        if not record.is_closed:
            for step in range(event.first, event.last):
                calls = set(range(step * replicas, step * replicas + event.parts))
                record.waiting |= calls - {step * replicas + hole for hole in event.skipped_replicas}
        return []

    def _on_steps_ended(self, event: ev.StepsEnded) -> list[Command]:
        self.passes[event.pass_id].is_ended = True
        return []

    def _on_steps_consumed(self, event: ev.StepsConsumed) -> list[Command]:
        record = self.passes[event.pass_id]
        record.consumed = max(record.consumed, event.before)
        record.result_bytes -= event.bytes
        return []

    def _on_draining(self, event: ev.PassDraining) -> list[Command]:
        self.passes[event.pass_id].is_draining = True
        return []

    def _on_closed(self, event: ev.PassClosed) -> list[Command]:
        record = self.passes[event.pass_id]
        record.is_closed = True
        record.end = record.end or "closed"
        return []

    def _on_cancel_confirmed(self, event: ev.CancelConfirmed) -> list[Command]:
        worker = self.workers.get(event.worker)
        if worker is not None and worker.incarnation == event.incarnation and worker.suspended == event.lease:
            self._ready += worker.suspended > 0
            worker.suspended, worker.unsure = 0, False
        return []

    def _on_call_sized(self, event: ev.CallSized) -> list[Command]:
        self.passes[event.pass_id].searched.add(event.call)
        return []

    def _on_report(self, event: ev.CallsDone | ev.CallFailed) -> list[Command]:
        is_done = isinstance(event, ev.CallsDone)
        if isinstance(event, ev.CallsDone):
            self._reporting = event
            lo, hi = event.lo, event.hi
        else:
            lo, hi = event.call, event.call + 1
        name, incarnation = event.worker, event.incarnation
        worker = self.workers.get(name)
        lease = self.leases.get(event.lease)
        if (
            worker is None
            or not worker.ready
            or worker.incarnation != incarnation
            or lease not in worker.leases
        ):
            return [cmd.DropResults(name, event.lease)]
        assert lease is not None
        is_running = lease.overlaps or lease is worker.leases[0]
        if not is_running or not lease.next == lo < hi <= lease.hi:
            return [
                cmd.DropResults(name, event.lease),
                _evict(name, incarnation),
                *self._lose(name, graceful=False),
            ]
        worker.unsure = worker.unsure and lease.overlaps
        twin = self._unpair(lease)
        if twin is not None and not is_done:
            self._superseded = lease  # the other attempt decides: the call is not charged
            return []
        self._superseded = twin
        if twin is not None:
            self.second_won += twin.id < lease.id
        lease.second_attempts = 0
        lease.next = hi
        if hi == lease.hi:
            worker.leases.remove(lease)
        if lease.serial:
            return self._on_gang_report(lease.serial, event, lo, hi)
        record = self.passes[lease.pass_id]
        if lease.probe is not None:
            record.probing.remove((hi - 1, lease.probe))
            if isinstance(event, ev.CallFailed) and _is_single(lease.probe):
                record.charge_probe((lo, lease.probe), event, self.now, self.limits)
            return []
        if isinstance(event, ev.CallFailed):
            record.charge(lo, event, self.now, self.limits)
            return []
        record.result_bytes += event.bytes
        return [cmd.AcceptResults(lease.pass_id, lo, hi, name)]

    def _on_gang_report(
        self, serial: int, event: ev.CallsDone | ev.CallFailed, lo: int, hi: int
    ) -> list[Command]:
        """Record the report of a gang's member; the last one decides how the gang ends."""
        gang = self.gangs[serial]
        gang.reported |= set(range(lo, hi))
        predicted: list[Command] = []
        if isinstance(event, ev.CallsDone):
            gang.bytes += event.bytes
            predicted.append(cmd.StashResults(serial, lo, hi, event.worker))
        else:
            gang.raised.append(event)
        if gang.reported != gang.calls:
            return predicted
        record = self.passes[gang.pass_id]
        if not gang.raised:
            record.result_bytes += gang.bytes
        elif causes := [x for x in gang.raised if not x.aborted]:
            record.charge(gang.lo, min(causes, key=lambda x: x.call), self.now, self.limits)
        else:  # aborted, but no call raised: charged like a death
            record.deaths[gang.lo] += 1
            if record.deaths[gang.lo] < self.limits.deaths_max:
                record.waiting |= gang.calls
            else:
                record.fail(gang.lo)
        return [*predicted, cmd.GangEnded(serial, counts=not gang.raised, aborted=False)]

    def _on_gang_stalled(self, event: ev.GangStalled) -> list[Command]:
        worker = self.workers.get(event.worker)
        if worker is None or not worker.ready or worker.incarnation != event.incarnation:
            return []
        lease = next((x for x in worker.leases if x.id == event.lease), None)
        if lease is None or not lease.serial:
            return []
        parts = self.gangs[lease.serial].parts
        predicted: list[Command] = []
        for part in [parts[m] for m in event.members if 0 <= m < len(parts)]:
            missing = self.workers[part.worker]
            if any(x.id == part.lease for x in missing.leases):
                predicted.append(_evict(part.worker, missing.incarnation))
                predicted += self._lose(part.worker, graceful=False)
        return predicted

    def _lose(self, name: str, *, graceful: bool, event: ev.WorkerLost | None = None) -> list[Command]:
        """Requeue the leases of a lost worker, charge the call that it was running, and replace it."""
        worker = self.workers[name]
        for place, lease in enumerate(worker.leases):
            call = lease.next if place == 0 and not graceful and not worker.unsure else None
            if event is not None and event.running is not None and not graceful:
                call = event.running[1] if event.running[0] == lease.id else None
            lease.is_void = True
            if self._unpair(lease) is None:
                self._lose_lease(self.passes[lease.pass_id], lease, call, event)
        self._ready -= worker.ready and not worker.suspended
        worker.leases, worker.bound = [], set()
        worker.unsure, worker.ready, worker.suspended = False, False, 0
        if not worker.managed:
            return []
        worker.incarnation += 1
        return [cmd.StartWorker(name, worker.incarnation)]

    def _lose_lease(
        self, record: PassRecord, lease: LeaseRecord, call: int | None, event: ev.WorkerLost | None
    ) -> None:
        timed_out = event if event is not None and event.timed_out else None
        if call is not None and not (lease.next <= call < lease.hi and call <= record.last_call):
            call = None
        if lease.probe is not None:
            record.probing.remove((lease.hi - 1, lease.probe))
            if timed_out is not None and call is not None and _is_single(lease.probe):
                record.charge_probe((lease.next, lease.probe), timed_out, self.now, self.limits)
            return
        if lease.serial:  # its calls wait again when the gang has ended
            gang = self.gangs[lease.serial]
            if call is not None and not gang.is_broken:
                record.deaths[gang.lo] += 1
                if record.deaths[gang.lo] >= self.limits.deaths_max:
                    gang.is_failed = True
                    record.fail(gang.lo)
            gang.is_broken = True
            return
        record.waiting.update(range(lease.next, lease.hi))
        if call is None:
            return
        if timed_out is not None:
            record.waiting.discard(call)
            record.charge(call, timed_out, self.now, self.limits)
            return
        record.deaths[call] += 1
        if record.deaths[call] >= self.limits.deaths_max:
            record.waiting.discard(call)
            if not record.work.settings.quarantine:
                record.fail(call)

    def _unpair(self, lease: LeaseRecord) -> LeaseRecord | None:
        """Separate a lease from its twin, if it has one, and return the twin."""
        twin, lease.twin = lease.twin, None
        if twin is not None:
            twin.twin = None
        return twin

    # -- commands: assigning ---------------------------------------------------------------------------

    def check(self, command: Command) -> None:
        """Verify a command before it is executed.

        Raises:
            Violation: the scheduler must not want it now.
        """
        verify = _CHECKS.get(type(command))
        if verify is not None:
            verify(self, command)

    def _on_bind(self, command: cmd.SendBind) -> None:
        bound = self.workers[command.worker].bound
        if command.pass_id in bound:
            raise Violation(f"{command.worker} is bound to pass {command.pass_id} twice")
        bound.add(command.pass_id)

    def _on_unbind(self, command: cmd.SendUnbind) -> None:
        self.workers[command.worker].bound.discard(command.pass_id)

    def _on_assign(self, command: cmd.SendAssign) -> None:
        worker, record = self.workers[command.worker], self.passes[command.pass_id]
        if command.lo in record.searched:
            self._check_probe(command, worker, record)
            return
        calls = range(command.lo, command.hi)
        if command.lo >= command.hi:
            raise Violation(f"{command} has no calls")
        last = command.lo if command.twin else command.hi - 1  # a second attempt has all calls of the first
        if last > record.last_call:
            raise Violation(f"calls beyond {record.last_call} are obsolete")
        if any(record.attempts(c) != command.attempt for c in calls):
            raise Violation(
                f"attempt {command.attempt} of calls that had {[record.attempts(c) for c in calls]} attempts"
            )
        elements = record.cleared.get(command.lo, ())
        if command.elements != elements:
            raise Violation(f"elements {command.elements} are sent, expected {elements}")
        if command.twin:
            self._check_second_attempt(command)
        else:
            waiting = record.waiting.issuperset(calls)
            if not waiting:
                raise Violation(f"calls {set(calls) - record.waiting} do not wait")
            first = min(record.waiting)
            if command.lo != first:
                raise Violation(f"calls from {command.lo} are assigned before call {first}")
            self._check_turn(record)
            record.waiting.difference_update(calls)
        ordered = [x for x in worker.leases if not x.overlaps]
        if at_once := record.work.settings.at_once:
            held = [x for x in worker.leases if x.pass_id == record.work.id]
            self._must(sum(x.hi - x.next for x in held) + len(calls) <= at_once, "too many calls overlap")
        elif len(ordered) >= 2:
            raise Violation(f"{command.worker} gets a third lease")
        elif ordered and record.work.call_s >= self.limits.prefetch_below_s:
            raise Violation("a long call is assigned in advance")
        lease = self._issue(command.worker, command.lease, record, command.lo, command.hi)
        if command.twin:
            lease.twin = self.leases[command.twin]
            lease.twin.twin = lease
            lease.second_attempts = lease.twin.second_attempts

    def _check_second_attempt(self, command: cmd.SendAssign) -> None:
        first = self.leases[command.twin]
        self.second_attempts += 1
        first.second_attempts += 1
        self.third_attempts += first.second_attempts > 1
        if first.second_attempts > self.limits.speculation_attempts_max:
            raise Violation(f"{first.second_attempts} second attempts of the call of {first}")
        if first.is_void or first.twin is not None or first.serial or first.worker == command.worker:
            raise Violation(f"lease {command.lease} is a second attempt of {first}")
        if (first.pass_id, first.next, first.hi) != (command.pass_id, command.lo, command.hi):
            raise Violation(f"lease {command.lease} is a second attempt, but not of the calls of {first}")
        if not self.passes[first.pass_id].work.settings.speculation:
            raise Violation(f"lease {command.lease} is a second attempt in a pass without speculation")
        if any(record.is_assignable for record in self.passes.values()):
            raise Violation(f"lease {command.lease} is a second attempt, but other calls wait")

    def _check_probe(self, command: cmd.SendAssign, worker: WorkerRecord, record: PassRecord) -> None:
        call, (span,) = command.lo, command.elements
        self._must(command.hi == call + 1 and call <= record.last_call, f"{command} is not a probe")
        self._must((call, span) not in record.probing, f"{span} of call {call} is tried twice at a time")
        self._must(
            (call, span) not in record.probes_backing_off, f"{span} of call {call} is still backing off"
        )
        is_busy = any(not x.overlaps for x in worker.leases)
        self._must(
            not is_busy or record.work.settings.at_once > 0,
            "a probe is assigned to a worker that is not idle",
        )
        self._check_turn(record)
        record.probing.add((call, span))
        self._issue(command.worker, command.lease, record, call, call + 1).probe = span

    def _on_gang(self, command: cmd.SendGang) -> None:
        record = self.passes[command.pass_id]
        gang = GangRecord(command.pass_id, command.parts, [])
        sizes = [part.hi - part.lo for part in gang.parts]
        replicas = record.work.settings.replicas
        if command.serial <= self._last_gang:
            raise Violation("the serials of gangs do not grow")
        self._last_gang = command.serial
        if gang.lo % replicas or sum(sizes) != replicas:
            raise Violation(f"{gang.parts} are not one step")
        if any(a.hi != b.lo for a, b in pairwise(gang.parts)):
            raise Violation(f"{gang.parts} have gaps")
        if max(sizes) - min(sizes) > 1 or min(sizes) < 1:
            raise Violation(f"replicas are divided unevenly: {sizes}")
        if len(sizes) != min(replicas, self._ready):
            raise Violation(f"{len(sizes)} members, with {self._ready} workers ready")
        if len(set(gang.workers)) != len(sizes):
            raise Violation(f"a worker is two members of {gang.parts}")
        if not gang.calls <= record.waiting:
            raise Violation(f"calls {gang.calls - record.waiting} do not wait")
        if gang.hi - 1 > record.last_call:
            raise Violation(f"calls beyond {record.last_call} are obsolete")
        first = min(record.waiting)
        if gang.lo != first:
            raise Violation(f"calls from {gang.lo} are assigned before call {first}")
        attempts = record.attempts(gang.lo)
        if command.attempt != attempts:
            raise Violation(f"attempt {command.attempt} of a gang that had {attempts} attempts")
        self._check_turn(record)
        workers = [self.workers[name] for name in gang.workers]
        if any(worker.leases for worker in workers):
            self._check_queued_gang(gang, record, workers)
        record.waiting -= gang.calls
        self.gangs[command.serial] = gang
        for name, lease, lo, hi in command.parts:
            gang.leases.append(self._issue(name, lease, record, lo, hi, command.serial))

    def _check_queued_gang(self, gang: GangRecord, record: PassRecord, workers: list[WorkerRecord]) -> None:
        ahead = [x for x in self.gangs.values() if x.pass_id == gang.pass_id and x.workers == gang.workers]
        self._must(len(ahead) < self.limits.gangs_queued_max, f"{len(ahead)} gangs are queued already")
        self._must(record.work.call_s < self.limits.prefetch_below_s, "a long gang is assigned in advance")
        known = {part.lease for x in ahead for part in x.parts}
        self._must(
            all(x.id in known for worker in workers for x in worker.leases),
            "a gang is queued behind other leases",
        )

    def _issue(
        self, name: str, id_: int, record: PassRecord, lo: int, hi: int, serial: int = 0
    ) -> LeaseRecord:
        """Record a new lease, with the checks for all kinds of leases."""
        worker, work = self.workers[name], record.work
        if not worker.ready:
            raise Violation(f"lease {id_} is assigned to {name}, which has not joined")
        if work.id not in worker.bound:
            raise Violation(f"lease {id_} is assigned to {name}, which is not bound to the pass")
        if worker.suspended:
            raise Violation(f"lease {id_} is assigned to {name}, which may still run a call")
        if id_ in self.leases:
            raise Violation(f"lease {id_} is assigned twice")
        if record.is_draining or record.is_closed or record.end:
            raise Violation(f"lease {id_}: pass {work.id} has ended")
        if 1 in record.committed[lo:hi]:
            raise Violation(f"calls [{lo}, {hi}) are assigned, but have results that count")
        if work.is_ragged:
            replicas = work.settings.replicas
            absent = [c for c in range(lo, hi) if c % replicas >= work.parts[c // replicas]]
            if absent:
                raise Violation(f"lease {id_} contains the calls {absent}, which do not exist")
        for held in worker.leases:
            if (held.serial > 0) != (serial > 0):
                raise Violation(f"lease {id_}: gangs and others in one queue at {name}")
        overlaps = work.settings.at_once > 0
        lease = LeaseRecord(id_, name, worker.incarnation, work.id, lo, hi, serial, overlaps=overlaps)
        self.leases[id_] = lease
        ordered = sum(not x.overlaps for x in worker.leases)
        worker.leases.insert(len(worker.leases) if overlaps else ordered, lease)
        return lease

    def _check_turn(self, record: PassRecord) -> None:
        """Verify that passes of the best priority take turns."""
        for other in self.passes.values():
            if other is record or not other.is_assignable or other.work.settings.at_once:
                continue  # one whose calls overlap may have as many as it may
            mine, its = record.work.settings.priority, other.work.settings.priority
            if mine > its:
                raise Violation(f"pass {other.work.id} has priority")
            if mine == its:
                other.passed_over += 1
                if other.passed_over >= len(self.passes):
                    raise Violation(f"pass {other.work.id} gets no turn")
        record.passed_over = 0

    # -- commands: cancelling ------------------------------------------------------------------------

    def _on_quota(self, command: cmd.SendQuota) -> None:
        record = self.passes[command.pass_id]
        self._must(not record.is_closed, f"{command} of a closed pass")
        self._must(
            len(command.calls) == (len(record.work.settings.limits) if command.sharing else 0), str(command)
        )

    def _on_cancel(self, command: cmd.SendCancel) -> None:
        lease, worker = self.leases[command.lease], self.workers[command.worker]
        if lease not in worker.leases:  # its worker was lost by the same event
            is_broken = lease.serial in self.gangs and self.gangs[lease.serial].is_broken
            if not is_broken:
                raise Violation(f"{lease} is cancelled, but not held")
            return
        record = self.passes[lease.pass_id]
        is_first = lease is worker.leases[0]
        is_obsolete = record.is_closed or record.end != "" or lease.next > record.last_call
        worker.unsure = worker.unsure or (is_first and not lease.overlaps)
        worker.leases.remove(lease)
        lease.is_void = True
        self._unpair(lease)
        if lease is self._superseded:
            if not worker.leases:
                self._suspend(worker, lease.id)
            return
        if is_obsolete:
            if is_first:
                self._suspending.setdefault(command.worker, lease.id)
            if not worker.leases and command.worker in self._suspending:
                self._suspend(worker, self._suspending[command.worker])
        elif lease.probe is not None:
            record.probing.discard((lease.hi - 1, lease.probe))
            self._cancelled_probes.append(lease)
        elif not lease.serial:  # requeued, because the call before it takes long
            if is_first or not self._speculates:
                raise Violation(f"{lease} is cancelled without a reason")
            record.waiting.update(range(lease.next, lease.hi))

    def _suspend(self, worker: WorkerRecord, lease: int) -> None:
        self._ready -= worker.ready and not worker.suspended
        worker.suspended = lease

    def _on_gang_ended(self, command: cmd.GangEnded) -> None:
        gang = self.gangs.pop(command.serial)
        record = self.passes[gang.pass_id]
        if command.aborted:
            if not gang.is_failed and not record.is_closed:
                record.waiting |= gang.calls
            return
        if not command.counts:
            return
        if gang.is_poisoned or any(lease.is_void for lease in gang.leases):
            raise Violation(f"POISON counts: gang {command.serial} has superseded results")
        self._must(gang.stashed == gang.calls, f"gang {command.serial} counts, but some results are missing")
        self._commit(record, gang.lo, gang.hi)

    # -- commands: results -----------------------------------------------------------------------------

    def _is_valid_report(self, lo: int, hi: int) -> bool:
        """Return whether the results of calls [lo, hi) were reported under a valid lease."""
        event = self._reporting
        if event is None or not event.lo <= lo < hi <= event.hi:
            raise Violation(f"results of calls [{lo}, {hi}) count, but were not reported")
        lease = self.leases[event.lease]
        return not lease.is_void and lease.incarnation == event.incarnation and lease.next >= hi

    def _on_accept(self, command: cmd.AcceptResults) -> None:
        lo, hi = command.lo, command.hi
        if not self._is_valid_report(lo, hi):
            raise Violation(f"POISON counts: calls [{lo}, {hi}) of a superseded lease")
        self._commit(self.passes[command.pass_id], lo, hi)

    def _on_stash(self, command: cmd.StashResults) -> None:
        gang = self.gangs[command.serial]
        if not self._is_valid_report(command.lo, command.hi):
            gang.is_poisoned = True
        gang.stashed |= set(range(command.lo, command.hi))

    def _commit(self, record: PassRecord, lo: int, hi: int) -> None:
        if 1 in record.committed[lo:hi]:
            raise Violation(f"calls [{lo}, {hi}) of pass {record.work.id} count twice")
        record.committed[lo:hi] = b"\1" * (hi - lo)

    def result_bytes(self, pass_id: int, first: int, last: int) -> int:
        """Return the bytes of the results of steps [first, last)."""
        record = self.passes[pass_id]
        replicas = record.work.settings.replicas
        return record.committed.count(1, first * replicas, last * replicas) * record.work.call_bytes

    # -- commands: quarantine ------------------------------------------------------------------------

    def _on_size_call(self, command: cmd.SizeCall) -> None:
        record = self.passes[command.pass_id]
        fails = record.work.poison(command.call) is not None
        # Which call ran is not always known, so that another one is charged with a death
        is_charged = record.deaths[command.call] >= self.limits.deaths_max
        is_new = command.call not in record.searched
        self._must((fails or is_charged) and is_new, f"call {command.call} is bisected")

    def _on_quarantined(self, command: cmd.CallsQuarantined) -> None:
        record = self.passes[command.pass_id]
        work, replicas = record.work, record.work.settings.replicas
        self._must(command.lo not in record.quarantined, f"call {command.lo} is quarantined twice")
        culprits: frozenset[int] = frozenset()
        if work.settings.gang:
            is_step = command.lo % replicas == 0 and command.hi - command.lo == replicas
            self._must(is_step, f"{command} is not the step of a gang")
            whole = any(work.quarantined(call)[1] for call in range(command.lo, command.hi))
        else:
            self._must(command.hi == command.lo + 1, f"{command} is not one call")
            culprits, whole = work.quarantined(command.lo)
        if command.whole is not None and "probes" in command.whole.text:  # too many probes
            self._must(self.limits.probes_max < 10, "the bisection ended too early")
            culprits, whole = frozenset(), True
        self._must((command.whole is not None) == whole, f"{command}: all elements: {whole}")
        found = frozenset(at for at, _ in command.culprits)
        self._must(found == culprits, f"{command}: the culprits are {culprits}")
        fate = work.fates.get(command.lo)
        elements = fate.poison.elements if fate is not None and fate.poison is not None else 0
        remains = not whole and len(culprits) < elements
        self._must(command.remains == remains, f"{command}: elements remain: {remains}")
        for call in range(command.lo, command.hi):
            record.quarantined[call] = command
        record.end_search(command.lo)

    def _on_culprits_found(self, record: PassRecord, call: int) -> None:
        """Record that the bisection of a call ended: it is executed again, without the culprits."""
        poison = record.work.poison(call)
        culprits = poison.culprits if poison is not None else ()
        spans: list[tuple[int, int]] = []
        for p in [p for p in range(poison.elements if poison and culprits else 0) if p not in culprits]:
            if spans and spans[-1][1] == p:
                spans[-1] = (spans[-1][0], p + 1)
            else:
                spans.append((p, p + 1))
        record.cleared[call] = tuple(spans)
        record.end_search(call)
        record.before[call] = record.attempts(call)
        record.raised[call].clear()
        record.deaths[call] = 0
        record.waiting.add(call)

    # -- commands: steps and passes --------------------------------------------------------------------

    def _on_request(self, command: cmd.RequestSteps) -> None:
        record = self.passes[command.pass_id]
        held_before = record.held_bytes
        record.requested += command.count
        in_flight = record.requested - record.consumed
        if in_flight <= 1:
            return  # one step always fits
        if in_flight > self.limits.steps_in_flight_max:
            raise Violation(f"{in_flight} steps in flight")
        maximum = self.limits.bytes_in_flight_max
        if held_before > maximum:
            raise Violation(f"steps are requested with {held_before} bytes in flight")
        held = (record.requested - record.visible) * record.work.step_bytes + record.result_bytes
        if held > maximum + record.work.steps:
            raise Violation(f"{held} bytes are requested or in flight")

    def _on_ready(self, command: cmd.StepsReady) -> None:
        for step in range(command.first, command.last):
            self._show(self.passes[command.pass_id], step, ())

    def _on_failed(self, command: cmd.StepFailed) -> None:
        record = self.passes[command.pass_id]
        self._show(record, command.step, command.failures)
        if record.work.settings.ordered:
            record.end = "failed"

    def _show(self, record: PassRecord, step: int, failures: tuple[cmd.Failure, ...]) -> None:
        work = record.work
        hopeless = work.hopeless_of(step)
        failed = [f.call for f in failures]
        if work.settings.gang and hopeless and work.fates[hopeless[0]].kills:
            # The member that died is reported, which may be another replica of the same worker.
            failed = hopeless[: len([c for c in failed if c // work.settings.replicas == step])]
        is_over = record.end in ("complete", "failed") or record.is_closed
        if is_over:
            raise Violation(f"step {step} is reported after the end of its pass")
        if step >= record.offered:
            raise Violation(f"step {step} is reported, but was not offered")
        if step in record.shown | record.failed:
            raise Violation(f"step {step} is reported twice")
        if failed != hopeless:
            raise Violation(f"{failures} of step {step} failed, expected {hopeless}")
        counting = set() if failures and work.settings.gang else set(work.calls(step)) - set(hopeless)
        if record.quarantined or work.settings.quarantine:
            counting = self._check_quarantined_step(record, counting, step)
        missing = {call for call in counting if not record.committed[call]}
        if missing:
            raise Violation(f"step {step} is visible, but results of {missing} are missing")
        if not failures:
            extra = {call for call in work.calls(step) if record.committed[call]} - counting
            if extra:
                raise Violation(f"results of the calls {extra} count, but must not")
        for failure in failures:
            self._check_failure(record, failure, hopeless)
        if work.settings.ordered:
            if step != record.visible:
                raise Violation(f"step {step} is reported before step {record.visible}")
            record.visible += 1
        (record.failed if failures else record.shown).add(step)

    def _check_quarantined_step(self, record: PassRecord, calls: set[int], step: int) -> set[int]:
        """Verify the quarantined calls of a step; return the calls whose results must count."""
        quarantined = {call for call in calls if call in record.quarantined}
        expected = {call for call in calls if any(record.work.quarantined(call))}
        if record.work.settings.gang and expected:
            expected = calls
        if quarantined != expected:
            raise Violation(f"step {step}: calls {quarantined} are quarantined, expected {expected}")
        return calls - {call for call in quarantined if not record.quarantined[call].remains}

    def _check_failure(self, record: PassRecord, failure: cmd.Failure, hopeless: list[int]) -> None:
        work = record.work
        attempts = record.attempts(failure.call)
        self._must(failure.attempts == attempts, f"{failure}: the call had {attempts} attempts")
        died = record.deaths[record.key(failure.call)] >= self.limits.deaths_max
        self._must((failure.cause is not None) == died, f"{failure}: wrong cause")
        if not died:
            fate = work.fates[hopeless[0] if work.settings.gang else failure.call]
            raised = max(record.raised[record.key(failure.call)].values(), default=0)
            enough = raised > fate.retries if work.settings.gang else raised == fate.retries + 1
            self._must(enough, f"{failure}: it raised {raised} times, with {fate.retries} retries")

    def _on_complete(self, command: cmd.PassComplete) -> None:
        record = self.passes[command.pass_id]
        is_complete = record.is_ended and record.reported == record.work.steps
        self._must(is_complete, f"pass {command.pass_id} is complete after {record.reported} steps")
        is_over = record.end in ("complete", "failed") or record.is_closed
        self._must(not is_over, f"pass {command.pass_id} is complete after its end ({record.end})")
        record.end = "complete"

    def _on_drained(self, command: cmd.PassDrained) -> None:
        record = self.passes[command.pass_id]
        self._must(record.is_draining, f"pass {command.pass_id} is drained, but is not draining")
        self._must(not record.is_drained, f"pass {command.pass_id} is drained twice")
        held = self._held_of(command.pass_id)
        self._must(not held, f"pass {command.pass_id} is drained, but its leases {held} run")
        record.is_drained = True
        record.end = record.end or "drained"

    def _held_of(self, pass_id: int) -> list[int]:
        return [x.id for worker in self.workers.values() for x in worker.leases if x.pass_id == pass_id]

    # -- after an event, and at the end --------------------------------------------------------------

    def observe(self, scheduler: Scheduler) -> None:
        """Record the calls whose culprits the scheduler has found, before its commands are checked."""
        for id_, pass_ in scheduler._passes.items():
            record = self.passes[id_]
            for call in pass_.searches.cleared:
                if call in record.searched:
                    poison = record.work.poison(call)
                    culprits = poison.culprits if poison is not None else frozenset()
                    found = pass_.searches.cleared[call].bisection
                    self._must(
                        found is not None and found.culprits.keys() == culprits,
                        f"call {call}: found {found and found.culprits}, the culprits are {culprits}",
                    )
                    self._on_culprits_found(record, call)

    def finish_event(self) -> None:
        """Verify what must hold after each event."""
        superseded, self._superseded = self._superseded, None
        if superseded is not None and not superseded.is_void:
            raise Violation(f"lease {superseded.id} is superseded, and continues")
        for lease in self._cancelled_probes:
            is_searched = lease.hi - 1 in self.passes[lease.pass_id].searched
            if is_searched:
                raise Violation(f"{lease} is cancelled without a reason")
        self._cancelled_probes.clear()
        for record in self.passes.values():
            if record.passed_over and not record.is_assignable:
                record.passed_over = 0
            if record.is_draining and not record.is_closed:
                held = self._held_of(record.work.id)
                if record.is_drained == bool(held):
                    raise Violation(f"pass {record.work.id}: drained, or runs {held}")

    def compare(self, scheduler: Scheduler) -> None:
        """Compare the whole state with the scheduler's: its deadline, leases, and gangs."""
        due = [
            w.heard_at + self.limits.heartbeat_timeout_s
            for w in self.workers.values()
            if w.supervised and w.ready
        ]
        for record in self.passes.values():
            if not record.is_closed and record.end != "failed":
                due += [*(at for at, _ in record.backing_off), *record.probes_backing_off.values()]
        expected, deadline = min(due, default=None), scheduler.deadline()
        if self._speculates:  # second attempts may be due before
            early = expected is None or (deadline is not None and deadline <= expected)
            if not early:
                raise Violation(f"the deadline is {deadline}, expected {expected} or less")
        else:
            if deadline != expected:
                raise Violation(f"the deadline is {deadline}, expected {expected}")
        held = {lease.id for worker in self.workers.values() for lease in worker.leases}
        leases = set(scheduler._members.leases)
        if leases != held:
            raise Violation(f"the scheduler has the leases {leases}, expected {held}")
        unreported: dict[int, set[int]] = {serial: set() for serial in self.gangs}
        for worker in self.workers.values():
            for lease in worker.leases:
                if lease.serial:
                    if lease.serial not in unreported:
                        raise Violation(f"{lease} is held, but its gang has ended")
                    unreported[lease.serial] |= set(range(lease.next, lease.hi))
        for serial, gang in self.gangs.items():
            if unreported[serial] != gang.calls - gang.reported:
                raise Violation(f"gang {serial} is not whole")
        for record in self.passes.values():
            pass_ = scheduler._passes.get(record.work.id)
            is_consumed = record.work.settings.ordered and record.consumed == record.work.steps
            if pass_ is not None and is_consumed and not record.is_draining:
                kept = (
                    pass_.input_bytes,
                    pass_.result_bytes,
                    pass_.todo.calls,
                    len(pass_.done),
                    len(pass_.histories),
                )
                if any(kept):
                    raise Violation(f"all steps are consumed, but {pass_} keeps {kept}")

    def check_end(self, scheduler: Scheduler) -> None:
        """Verify the outcome of each pass, after all of them were closed.

        Raises:
            Violation: it is not the expected one.
        """
        for record in self.passes.values():
            work = record.work
            if record.is_draining or record.end in ("closed", "drained"):
                continue
            if work.settings.ordered:
                expected = "failed" if work.settings.ordered and work.hopeless else "complete"
                self._must(
                    record.end == expected, f"pass {work.id}: {record.end or 'open'}, expected {expected}"
                )
            steps = record.shown | record.failed
            self._must(steps == set(range(work.needed)), f"pass {work.id} has reported {sorted(steps)}")
        leases, passes = scheduler._members.leases, scheduler._passes
        self._must(not passes and not leases, f"closed passes remain: {passes}, {leases}")


def _is_single(span: tuple[int, int]) -> bool:
    return span[1] - span[0] == 1


def _evict(name: str, incarnation: int) -> Command:
    return cmd.EvictWorker(name, incarnation, "")


def _comparable(commands: list[Command]) -> list[Command]:
    """Return predicted commands in a fixed order, without reasons."""
    kept = [c for c in commands if not (isinstance(c, cmd.GangEnded) and c.aborted)]  # checked one by one
    plain = [_evict(c.worker, c.incarnation) if isinstance(c, cmd.EvictWorker) else c for c in kept]
    return sorted(plain, key=repr) if len(plain) > 1 else plain


_PREDICTIONS: Mapping[type, Callable[[ReferenceModel, Any], list[Command]]] = {
    ev.WorkerExpected: ReferenceModel._on_worker_expected,
    ev.WorkerJoined: ReferenceModel._on_joined,
    ev.HeartbeatReceived: ReferenceModel._on_heartbeat,
    ev.WorkerLost: ReferenceModel._on_lost,
    ev.Tick: ReferenceModel._on_tick,
    ev.PassOpened: ReferenceModel._on_pass_opened,
    ev.StepsAvailable: ReferenceModel._on_steps_available,
    ev.StepsEnded: ReferenceModel._on_steps_ended,
    ev.StepsConsumed: ReferenceModel._on_steps_consumed,
    ev.PassDraining: ReferenceModel._on_draining,
    ev.PassClosed: ReferenceModel._on_closed,
    ev.CancelConfirmed: ReferenceModel._on_cancel_confirmed,
    ev.CallSized: ReferenceModel._on_call_sized,
    ev.CallsDone: ReferenceModel._on_report,
    ev.CallFailed: ReferenceModel._on_report,
    ev.GangStalled: ReferenceModel._on_gang_stalled,
}

_CHECKS: Mapping[type, Callable[[ReferenceModel, Any], None]] = {
    cmd.SendBind: ReferenceModel._on_bind,
    cmd.SendUnbind: ReferenceModel._on_unbind,
    cmd.SendAssign: ReferenceModel._on_assign,
    cmd.SendGang: ReferenceModel._on_gang,
    cmd.SendCancel: ReferenceModel._on_cancel,
    cmd.SendQuota: ReferenceModel._on_quota,
    cmd.AcceptResults: ReferenceModel._on_accept,
    cmd.StashResults: ReferenceModel._on_stash,
    cmd.GangEnded: ReferenceModel._on_gang_ended,
    cmd.SizeCall: ReferenceModel._on_size_call,
    cmd.CallsQuarantined: ReferenceModel._on_quarantined,
    cmd.StepsReady: ReferenceModel._on_ready,
    cmd.StepFailed: ReferenceModel._on_failed,
    cmd.RequestSteps: ReferenceModel._on_request,
    cmd.PassComplete: ReferenceModel._on_complete,
    cmd.PassDrained: ReferenceModel._on_drained,
}
