"""State of one pass: which calls wait, are done or failed, and which steps are visible."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from msgspec import Struct, field

from pipedist.errors import LocalProtocolError
from pipedist.scheduler.bisection import CallHistory, CulpritSearches, Probe
from pipedist.scheduler.commands import Cause, Failure, SendGang
from pipedist.scheduler.gang_scheduling import GangGroups
from pipedist.scheduler.leases import GangAttempt
from pipedist.scheduler.queues import BackoffQueue, RangeSet, Todo, TodoQueue
from pipedist.scheduler.quotas import Quotas
from pipedist.scheduler.settings import PassSettings, SchedulerLimits
from pipedist.scheduler.transitions import PASS_TRANSITIONS, PassEvent, PassState, next_state


class Pass(Struct, eq=False):
    """The state of one pass.

    A call is in exactly one place: todo, backing_off, leased, searches, done, or not yet available.
    """

    id: int
    settings: PassSettings
    assigner: dict[int, Pass]  # of passes with waiting calls; this one registers itself
    backing_off_passes: dict[int, Pass]
    state: PassState = PassState.OPEN
    draining: bool = False
    drain_reported: bool = False
    # Steps before these numbers are available, requested (pulled passes only), visible (ordered ones), consumed.
    offered: int = 0
    requested: int = 0
    visible: int = 0
    consumed: int = 0
    todo: TodoQueue = field(default_factory=TodoQueue)
    backing_off: BackoffQueue = field(default_factory=BackoffQueue)
    searches: CulpritSearches = field(default_factory=CulpritSearches)
    done: RangeSet = field(default_factory=RangeSet)  # also failed ones, empty shards; not visible
    cached: dict[tuple[str, int], RangeSet] = field(default_factory=dict)
    """Results that a worker incarnation, which joins now or is READY, cached for the previous driver. Those of
    READY workers are recalled at once. Never for gangs."""
    leased: int = 0  # unreported calls
    quotas: Quotas | None = None  # None: no limit is divided among workers
    quotas_sent: int = 0
    gangs: dict[int, GangAttempt] = field(default_factory=dict)  # unfinished gangs, by serial
    groups: GangGroups = field(default_factory=GangGroups)
    histories: dict[int, CallHistory] = field(default_factory=dict)  # failed, not done; a gang: by first call
    failures: dict[int, Failure] = field(default_factory=dict)  # permanent ones, of steps not visible
    quarantined: int = 0  # elements quarantined, or found to fail alone
    is_full: bool = False  # more were than `quarantine_max`, which was reported
    quarantine_causes: list[tuple[int, Cause]] = field(default_factory=list)
    """Call and cause of the first failures that led to quarantine, at most CAUSES_MAX."""
    last_step: int | None = None  # FAILING: later steps are obsolete
    input_bytes: int = 0  # of available steps that are not visible
    step_bytes: float = 0.0  # inputs, from the latest StepsAvailable
    result_bytes: int = 0  # not consumed
    result_call_bytes: float = 0.0  # moving mean
    call_s: float | None = None  # moving mean of a call's, or gang's, duration; None before the first result
    bundle_max: int = 1  # maximum number of calls in the next lease; grows with completed leases

    def __post_init__(self) -> None:
        self.quarantined = self.settings.quarantined
        self.quotas = Quotas(self.settings.limits) if self.settings.limits else None
        self.offered = self.requested = self.visible = self.consumed = self.settings.first_step

    def become(self, what: PassEvent) -> None:
        self.state = next_state(f"pass {self.id}", PASS_TRANSITIONS, self.state, what)

    @property
    def awaits_step(self) -> bool:
        """Whether a gang pass has nothing to do before its next step, and has had no failure that is not over."""
        return (
            self.settings.gang
            and not self.settings.ordered
            and self.state is PassState.OPEN
            and not (self.draining or self.leased or self.todo.calls or self.gangs)
            and not (self.histories or self.failures or self.backing_off or self.searches.calls)
            and self.last_step is None
        )

    @property
    def has_assignable_calls(self) -> bool:
        return not self.draining and (self.todo.calls > 0 or bool(self.searches.waiting))

    def is_short(self, limits: SchedulerLimits) -> bool:
        return self.call_s is not None and self.call_s < limits.prefetch_below_s

    def offer(self, first: int, last: int, parts: int, size: int, holes: Sequence[int] = ()) -> None:
        """Add steps [first, last) of `parts` calls each, except those of the replicas in `holes`."""
        replicas = self.settings.replicas
        if self.state in (PassState.ENDED, PassState.COMPLETE):
            raise LocalProtocolError(f"pass {self.id}: steps arrived after its end")
        parts_min, least = (replicas, "") if self.settings.gang else (0, "at most ")
        if first != self.offered or last < first or not parts_min <= parts <= replicas:
            expected = f"them to begin at {self.offered} with {least}{replicas} calls"
            arrived = f"steps [{first}, {last}) of {parts} calls arrived"
            raise LocalProtocolError(f"pass {self.id}: {arrived}, expected {expected}")
        self.offered = last
        self.requested = max(self.requested, last)
        if last == first or not self.needs(first * replicas):
            return
        self.input_bytes += size
        self.step_bytes = size / (last - first)
        self.assigner[self.id] = self
        if parts == replicas and not holes:
            self.todo.put(first * replicas, last * replicas, 0)
            return
        for step in range(first, last):
            lo = step * replicas
            for hole, end in pairwise([-1, *holes, parts]):
                self.todo.put(lo + hole + 1, lo + end, 0)
            for hole in holes:
                self.done.add(lo + hole, lo + hole + 1)
            self.done.add(lo + parts, lo + replicas)

    def needs(self, call: int) -> bool:
        """Return whether a call is still needed: it is not beyond the step that fails the pass."""
        return self.last_step is None or call // self.settings.replicas <= self.last_step

    def wait(self, lo: int, hi: int, attempt: int) -> None:
        if self.last_step is not None:
            hi = min(hi, (self.last_step + 1) * self.settings.replicas)
        self.todo.put(lo, hi, attempt)
        self.assigner[self.id] = self

    def wait_probe(self, probe: Probe) -> None:
        if probe.call in self.searches.calls:
            self.searches.wait(probe)
            self.assigner[self.id] = self

    def rest(self, due: float, item: Todo | Probe) -> None:
        self.backing_off.put(due, item)
        self.backing_off_passes[self.id] = self

    def wake_due(self, now: float) -> None:
        for item in self.backing_off.take(now):
            if isinstance(item, Probe):
                self.wait_probe(item)
            else:
                self.wait(*item)
        if not self.backing_off:
            del self.backing_off_passes[self.id]

    def add_gang(self, gang: GangAttempt) -> None:
        self.gangs[gang.serial] = gang
        self.groups.begin(gang.group)
        self.leased += gang.hi - gang.lo

    def dismiss(self, gang: GangAttempt) -> None:
        del self.gangs[gang.serial]
        self.groups.end(gang.group)

    def executed(self, gang: SendGang, took_s: float, size: int) -> None:
        """Record that the next step was offered, and executed by a gang."""
        self.offered += 1
        self.requested = max(self.requested, self.offered)
        self.step_bytes = 0.0
        lo, hi = gang.parts[0].lo, gang.parts[-1].hi
        self._measure(lo, hi, took_s, size)

    def came_back(self, lo: int, hi: int, busy_s: float, size: int, limits: SchedulerLimits) -> None:
        self.leased -= hi - lo
        self.bundle_max = min(limits.bundle_calls_max, max(self.bundle_max, (hi - lo) * limits.bundle_growth))
        self._done(lo, hi, max(0.0, busy_s) / (hi - lo), size)

    def gang_came_back(self, gang: GangAttempt) -> None:
        self._done(gang.lo, gang.hi, gang.took_s, gang.bytes)

    def _done(self, lo: int, hi: int, took_s: float, size: int) -> None:
        self.done.add(lo, hi)
        if self.histories:
            for call in range(lo, hi) if hi - lo < len(self.histories) else list(self.histories):
                if lo <= call < hi:
                    self.histories.pop(call, None)
        self._measure(lo, hi, took_s, size)

    def _measure(self, lo: int, hi: int, took_s: float, size: int) -> None:
        self.result_bytes += size
        mean_bytes = size / (hi - lo)
        if self.call_s is None:
            self.call_s, self.result_call_bytes = took_s, mean_bytes
        else:
            self.call_s = 0.7 * self.call_s + 0.3 * took_s
            self.result_call_bytes = 0.7 * self.result_call_bytes + 0.3 * mean_bytes

    def fail(self, lo: int, hi: int, failures: Sequence[Failure]) -> None:
        """Record that calls [lo, hi) of one step are over, because some of them failed permanently."""
        self.failures.update((failure.call, failure) for failure in failures)
        self.histories.pop(lo, None)
        self.done.add(lo, hi)
        if not self.settings.ordered:
            return
        self.become("call failed")
        step = lo // self.settings.replicas
        self.last_step = step if self.last_step is None else min(step, self.last_step)
        end = (self.last_step + 1) * self.settings.replicas
        self.todo.drop_from(end)
        self.searches.forget_from(end)
        if self.backing_off:
            self.backing_off.drop_from(end)

    def _bundle_by_time(self, limits: SchedulerLimits) -> int:
        """Return the number of calls that take about `bundle_s`, at most `bundle_calls_max`."""
        if not self.call_s:
            return limits.bundle_calls_max
        return int(min(limits.bundle_calls_max, limits.bundle_s / self.call_s))

    def bundle_calls(self, limits: SchedulerLimits, workers: int) -> int:
        """Return the number of calls in the next lease: about `bundle_s` of work, at most a fair share."""
        if self.call_s is None or self.settings.concurrency or self.todo.first.attempt > 0:
            return 1  # retries are assigned one by one, so that the next death is charged to the right call
        fair = -(-self.todo.calls // (2 * workers))
        calls = min(self._bundle_by_time(limits), fair, self.bundle_max)
        if self.step_bytes > 0:
            calls = min(calls, int(limits.bundle_bytes_max * self.settings.replicas / self.step_bytes))
        return max(1, calls)

    def gangs_queued(self, limits: SchedulerLimits) -> int:
        """Return the maximum number of gangs of a group: those in advance take about `prefetch_below_s`."""
        if not self.is_short(limits):
            return 1
        if not self.call_s:
            return limits.gangs_queued_max
        return int(min(limits.gangs_queued_max, 1 + limits.prefetch_below_s / self.call_s))

    def _calls_ahead(self, limits: SchedulerLimits, workers: int) -> int:
        """Return the number of calls to have ready, so that no worker waits for the next step."""
        replicas = self.settings.replicas
        if self.settings.gang:
            return (workers // min(replicas, workers)) * (1 + self.gangs_queued(limits)) * replicas
        if self.settings.at_once:
            return 2 * (self.settings.concurrency or self.settings.at_once * workers)
        if self.call_s is None:
            return 4 * workers
        return 4 * workers * max(1, min(self._bundle_by_time(limits), self.bundle_max))

    def steps_wanted(self, limits: SchedulerLimits, workers: int) -> int:
        if not self.settings.pulled or self.state is not PassState.OPEN or self.draining:
            return 0
        in_flight = self.requested - self.consumed
        least = 1 if in_flight == 0 else 0  # one step always fits: otherwise the pass would stall
        if self.offered == self.settings.first_step:  # the size of a step is unknown before the first one
            return least
        replicas = self.settings.replicas
        calls = self._calls_ahead(limits, workers)
        promised = self.requested - self.offered
        to_come = self.todo.calls + self.leased + promised * replicas
        if self.settings.at_once:  # finished calls behind one that hangs do not count
            room = min(-(-(calls - to_come) // replicas), limits.steps_in_flight_max - in_flight)
        else:
            room = min(-(-calls // replicas) + 1, limits.steps_in_flight_max) - in_flight
        held = self.input_bytes + promised * self.step_bytes
        held += self.result_bytes + to_come * self.result_call_bytes
        spare = max(0.0, limits.bytes_in_flight_max - held)
        size = self.step_bytes + replicas * self.result_call_bytes
        if size > 0:
            room = int(min(room, spare // size))
        elif spare == 0:
            room = 0
        return max(least, room)

    def take_visible(self) -> int:
        """Advance over complete steps, and return the step before which all are visible."""
        replicas = self.settings.replicas
        end = min(self.done.end_from(self.visible * replicas) // replicas, self.offered)
        if self.last_step is not None:
            end = min(end, self.last_step + 1)
        if end > self.visible:
            share = (end - self.visible) / (self.offered - self.visible)
            self.input_bytes -= round(self.input_bytes * share)
            self.done.discard(self.visible * replicas, end * replicas)
        return end
