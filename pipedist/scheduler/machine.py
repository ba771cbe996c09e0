"""The scheduler's state machine.

Rules
-----
* No I/O, no clock, no randomness: `handle(event, now)` returns commands. The same machine runs in
  production, in scenario tests and in simulations.
* The unit is a range of calls. A single call has state only if it failed (`CallHistory`), failed
  permanently (`Failure`), or is searched for culprits (`CulpritSearch`).
* A result counts only while its lease is held by the incarnation that sent it. A lease ends
  when its last call is reported, when its worker is lost, or when its pass is closed or fails;
  later results are dropped (`DropResults`), so no call is committed twice.
* Steps of an ordered pass become visible in step order. So the first reported failure is that of the
  lowest step, in any order of arrival.
* A result that a worker cached for the previous driver is recalled: the worker gets a lease for it like any
  other, but executes nothing. So it counts by the same rules. A call that was retried meanwhile is executed.
* The calls of a gang are assigned together or not at all, over as many workers as there are (at most R).
  They count together or not at all: a gang that loses a member, or whose calls are retried, starts again as
  a whole, under a new serial. The error of a gang is reported when all its calls have reported, and is that of
  the lowest replica that was not merely aborted.
* Calls of a pass with `at_once` only wait. A worker executes several leases of them at the same time, and reports
  each lease by itself: the order holds within a lease. Their number is limited per worker and over all workers.
* One valve per pass: steps are requested only while `steps_in_flight_max` and
  `bytes_in_flight_max` leave room, but one step always fits.

Theory of operation
-------------------
This module handles events; `assignment` decides which calls go where, `outcomes` how they end. A pass
offers steps; their calls wait in its `todo`. Ranges of them are assigned to workers that have capacity:
one lease runs, and if leases are short a second one waits at the worker, so that it never idles between
them. The size of a lease follows the measured time of the calls. A worker executes a lease in order and
reports ranges, so its unreported calls are [lease.next, lease.hi). When a worker is lost, the call that it
was running is charged with the death; the others wait again. A call that raised may back off before its
retry, until `deadline`. If a call failed permanently, `quarantine` may have subsets of its elements
executed, so that only the culprits are lost. Calls that take far longer than others are executed a second
time by idle workers: see `speculation`. Since reports arrive in order, a gap means that a report was lost:
the worker is evicted, otherwise the gap would never be filled.

A gang needs several idle workers. While a gang pass has its turn and too few workers are idle, no other
calls are assigned, so that workers become idle and no pass starves. Short gangs are queued in advance at
the workers of an earlier one, which hold the pass's state and share memory. All members get the lease of a
gang before that of a later one, so gangs wait in the same order everywhere.

If the workers of a gang pass's latest gang are idle, and no other call waits, the next step will be assigned to
them: `foresee` returns that command before the step is offered. So the driver can execute a step of a training
loop at once, and report it with one event (`StepExecuted`) when it is over. The state is then the same as after
the events that it stands for.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from pipedist.errors import LocalProtocolError
from pipedist.scheduler import commands as cmd
from pipedist.scheduler import events as ev
from pipedist.scheduler.assignment import Assigner
from pipedist.scheduler.bisection import Death
from pipedist.scheduler.leases import GangGroup, Lease, Worker
from pipedist.scheduler.membership import Membership
from pipedist.scheduler.outcomes import Outcomes
from pipedist.scheduler.passes import Pass
from pipedist.scheduler.queues import RangeSet
from pipedist.scheduler.settings import SchedulerLimits
from pipedist.scheduler.stragglers import Stragglers
from pipedist.scheduler.transitions import WorkerState

if TYPE_CHECKING:
    from pipedist.scheduler.diagnostics import Explanation

_MOVES = frozenset(  # events that count as progress
    {
        ev.WorkerJoined,
        ev.PassOpened,
        ev.PassClosed,
        ev.StepsAvailable,
        ev.StepExecuted,
        ev.StepsEnded,
        ev.StepsConsumed,
        ev.CallsDone,
        ev.CallFailed,
        ev.CallSized,
        ev.ElementsQuarantined,
    }
)


class Scheduler:
    """Assigns the calls of passes to workers; see the module docstring."""

    def __init__(self, limits: SchedulerLimits | None = None) -> None:
        self._limits = limits or SchedulerLimits()
        self._members = Membership(self._limits.prefetch_below_s, self._limits.start_s)
        self._passes: dict[int, Pass] = {}
        self._pulled: dict[int, Pass] = {}
        self._waiting: dict[int, Pass] = {}  # with waiting calls; may contain others
        self._backing_off: dict[int, Pass] = {}  # may contain others
        self._failed_starts = 0  # workers in a row that died before they joined
        self._out: list[cmd.Command] = []  # of the event that is being handled
        self._assigner = Assigner(self._limits, self._members, self._waiting, self._out)
        self._outcomes = Outcomes(self._limits, self._members, self._passes, self._assigner, self._out)
        self._now = 0.0
        self._moved_at: float | None = None  # the last progress; None before the first pass
        self._groups: dict[int, GangGroup] = {}  # get the next step of a pass; until another event comes
        self._foreseen: cmd.SendGang | None = None  # the latest one; until an event comes

    def handle(self, event: ev.Event, now: float) -> list[cmd.Command]:
        """Handle one event at a monotonic time in seconds; return the commands to execute, in order.

        Raise LocalProtocolError if the event is not possible in this state: a defect of the driver.
        """
        self._now = now
        handler = _HANDLERS.get(type(event))
        if handler is None:
            raise LocalProtocolError(f"unknown event {event!r}")
        self._outcomes.now = self._members.now = now
        if type(event) in _MOVES:
            self._moved_at = now
        if type(event) is not ev.StepExecuted:
            self._groups.clear()
        handler(self, event)
        self._foreseen = None
        if self._backing_off:
            for pass_ in list(self._backing_off.values()):
                pass_.wake_due(now)
        if self._waiting:
            self._assigner.assign()
        if self._members.watched and self._members.idle:
            self._outcomes.speculation.begin(now)
        if self._pulled:
            self._pull()
        if self._members.moved:
            self._divide()
        out = self._out[:]
        self._out.clear()
        return out

    def foresee(self, pass_id: int) -> cmd.SendGang | None:
        """Return the only command that `StepsAvailable` of the next step of a pass will cause.

        The step must have a call for each replica, and no bytes. None: it is not known. It holds until the next event,
        so the driver may execute it at once, and then report `StepExecuted`; before any other event it reports the
        `StepsAvailable`, and the `CallsDone` that have arrived.
        """
        pass_ = self._passes.get(pass_id)
        if pass_ is None:
            return None
        group = self._groups.get(pass_id)
        if group is None:
            if self._backing_off or self._members.watched:
                return None
            group = self._assigner.foreseeable_group(pass_)
            if group is None:
                return None
            self._groups[pass_id] = group
        self._foreseen = gang = self._assigner.foresee(pass_, group)
        return gang

    def deadline(self) -> float | None:
        """Return the time at which to send a Tick if no other event occurs, or None."""
        due: list[float | None] = []
        if self._backing_off:
            due += [pass_.backing_off.due for pass_ in self._backing_off.values()]
        if self._members.watched and self._members.idle:
            due.append(self._outcomes.speculation.due)
        if self._members.supervised:
            due.append(self._silent_at(next(iter(self._members.supervised.values()))))
        return min([at for at in due if at is not None], default=None) if due else None

    def why(self, now: float) -> Explanation:
        from pipedist.scheduler.diagnostics import explain  # rarely needed

        return explain(self._passes, self._members, self._limits, now - self.silent_s(now), now)

    def silent_s(self, now: float) -> float:
        return 0.0 if self._moved_at is None else now - self._moved_at

    def pass_of(self, worker: str, lease: int) -> int | None:
        held = self._members.leases.get(lease)
        return held.pass_id if held is not None and held.worker == worker else None

    def cancelled_pass_of(self, worker: str, lease: int) -> int | None:
        """Return the pass of a cancelled lease of which a worker may still report results."""
        held = self._members.cancelled.get(lease)
        return held.pass_id if held is not None and held.worker == worker else None

    def may_report(self, pass_id: int) -> bool:
        """Return whether workers may still report results of cancelled leases of a pass."""
        return any(lease.pass_id == pass_id for lease in self._members.cancelled.values())

    def _silent_at(self, worker: Worker) -> float:
        return worker.heard_at + self._limits.heartbeat_timeout_s

    # -- workers ---------------------------------------------------------------------

    def _on_worker_expected(self, event: ev.WorkerExpected) -> None:
        if event.worker in self._members.workers:
            raise LocalProtocolError(
                f"worker {event.worker} is expected, but there is a worker of that name already"
            )
        worker = self._members.workers[event.worker] = Worker(event.worker, managed=True)
        self._members.starts(worker)
        self._out.append(cmd.StartWorker(worker.name, worker.incarnation))

    def _on_worker_joined(self, event: ev.WorkerJoined) -> None:
        worker = self._members.workers.get(event.worker)
        if worker is None:
            worker = self._members.workers[event.worker] = Worker(
                event.worker, managed=False, incarnation=event.incarnation, state=WorkerState.GONE
            )
        later = "a later incarnation has joined"
        if event.incarnation < worker.incarnation:
            self._forget_cached(event.worker, event.incarnation)
            self._out.append(cmd.EvictWorker(event.worker, event.incarnation, later))
            return
        if worker.state is WorkerState.READY:
            if event.incarnation == worker.incarnation:
                cause = "this incarnation has joined already"
                self._out.append(cmd.EvictWorker(event.worker, event.incarnation, cause))
                return
            self._evict(worker, later, replace=False)
        self._members.admit(worker, event.incarnation, supervised=event.supervised, gpus=event.gpus)
        self._failed_starts = 0

    def _on_heartbeat(self, event: ev.HeartbeatReceived) -> None:
        worker = self._members.current(event.worker, event.incarnation)
        if worker is not None:
            self._members.record_heartbeat(worker)

    def _on_worker_lost(self, event: ev.WorkerLost) -> None:
        worker = self._members.workers.get(event.worker)
        if worker is None or worker.incarnation != event.incarnation or worker.state is WorkerState.GONE:
            return
        if worker.state is WorkerState.STARTING:
            self._failed_starts += 1
            if self._failed_starts >= self._limits.failed_starts_max:
                dead = f"{self._failed_starts} workers in a row died before they joined"
                self._out.append(cmd.ClusterFailed(f"{dead}, the last one with {event.cause}"))
                return
        death = Death(event.cause, event.stage, event.timed_out, event.retries, event.quarantine)
        self._lose(worker, death, graceful=event.graceful, running=event.running)

    def _on_tick(self, _event: ev.Tick) -> None:
        silent = takewhile(lambda w: self._silent_at(w) <= self._now, self._members.supervised.values())
        for worker in list(silent):
            self._evict(worker, f"no heartbeat for {self._limits.heartbeat_timeout_s:g} s")

    def _evict(self, worker: Worker, cause: str, *, replace: bool = True) -> None:
        self._out.append(cmd.EvictWorker(worker.name, worker.incarnation, cause))
        self._lose(worker, Death(cause), replace=replace)

    def _lose(
        self,
        worker: Worker,
        death: Death,
        *,
        graceful: bool = False,
        replace: bool = True,
        running: tuple[int, int] | None = None,
    ) -> None:
        self._forget_cached(worker.name, worker.incarnation)
        known = not graceful and not worker.unsure
        for place, lease in enumerate(self._members.dismiss(worker)):
            blamed = lease.next if known and place == 0 else None
            if running is not None and not graceful:  # finished calls before it may be unreported
                blamed = running[1] if running[0] == lease.id else None
            self._outcomes.lost(lease, death, blamed)
        if worker.managed and replace:
            worker.incarnation += 1
            self._members.starts(worker)
            self._out.append(cmd.StartWorker(worker.name, worker.incarnation))

    def _forget_cached(self, worker: str, incarnation: int) -> None:
        for pass_ in self._passes.values():
            pass_.cached.pop((worker, incarnation), None)

    # -- passes ----------------------------------------------------------------------

    def _on_pass_opened(self, event: ev.PassOpened) -> None:
        if event.pass_id in self._passes:
            raise LocalProtocolError(f"pass {event.pass_id} was opened twice")
        pass_ = self._passes[event.pass_id] = Pass(
            event.pass_id, event.settings, self._waiting, self._backing_off
        )
        if event.settings.pulled:
            self._pulled[pass_.id] = pass_
        if event.settings.speculation:
            self._members.watched[pass_.id] = Stragglers(event.settings.speculation)

    def _on_steps_available(self, event: ev.StepsAvailable) -> None:
        pass_ = self._passes.get(event.pass_id)
        if pass_ is None:
            return
        pass_.offer(event.first, event.last, event.parts, event.bytes, event.skipped_replicas)
        if event.parts == len(event.skipped_replicas):
            replicas = pass_.settings.replicas
            self._outcomes.publish(pass_, event.first * replicas, event.last * replicas)

    def _on_step_executed(self, event: ev.StepExecuted) -> None:
        gang = self._foreseen
        if gang is None or gang.pass_id != event.pass_id:
            gang = self.foresee(event.pass_id)
        if gang is None or gang.serial != event.serial or len(event.reports) != len(gang.parts):
            raise LocalProtocolError(f"{event!r}, but foreseen was {gang!r}")
        pass_, took_ns, size = self._passes[event.pass_id], 0, 0
        for _, busy_ns, bytes_ in event.reports:
            took_ns = max(took_ns, busy_ns)
            size += bytes_
        self._assigner.executed(pass_, gang)
        self._members.used(event.reports)
        pass_.executed(gang, took_ns / 1e9, size)

    def _on_steps_ended(self, event: ev.StepsEnded) -> None:
        pass_ = self._passes.get(event.pass_id)
        if pass_ is None:
            return
        pass_.become("ended")
        if pass_.settings.ordered:
            self._outcomes.publish_in_order(pass_)

    def _on_steps_consumed(self, event: ev.StepsConsumed) -> None:
        pass_ = self._passes.get(event.pass_id)
        if pass_ is None:
            return
        pass_.consumed = max(pass_.consumed, event.before)
        pass_.result_bytes -= event.bytes

    def _on_calls_cached(self, event: ev.CallsCached) -> None:
        pass_ = self._passes.get(event.pass_id)
        if pass_ is None or pass_.settings.gang:  # the calls of a gang count together or not at all
            return
        kept = pass_.cached.setdefault((event.worker, event.incarnation), RangeSet())
        for lo, hi in event.calls:
            kept.add(lo, hi)

    def _on_steps_committed(self, event: ev.StepsCommitted) -> None:
        if event.pass_id not in self._passes:
            return
        before = event.before * self._passes[event.pass_id].settings.replicas
        for worker in self._members.workers.values():
            if event.pass_id in worker.bound:
                self._out.append(cmd.SendCommitted(worker.name, event.pass_id, before))

    def _on_pass_draining(self, event: ev.PassDraining) -> None:
        pass_ = self._passes.get(event.pass_id)
        if pass_ is None:
            return
        pass_.draining = True
        for name in self._members.slots.get(pass_.id, ()):  # calls that only wait are given back
            self._send_quota(name, pass_, (), 0)
        self._outcomes.report_drained(pass_)

    def _on_pass_closed(self, event: ev.PassClosed) -> None:
        pass_ = self._passes.pop(event.pass_id, None)
        if pass_ is None:
            return
        self._pulled.pop(pass_.id, None)
        self._waiting.pop(pass_.id, None)
        self._backing_off.pop(pass_.id, None)
        self._outcomes.cancel(pass_, from_call=0)
        self._members.watched.pop(pass_.id, None)
        self._members.slots.pop(pass_.id, None)
        self._members.slots_used.pop(pass_.id, None)
        for worker in self._members.workers.values():
            if event.pass_id in worker.bound:
                worker.bound.discard(event.pass_id)
                self._out.append(cmd.SendUnbind(worker.name, event.pass_id))

    # -- calls -----------------------------------------------------------------------

    def _valid_lease(self, name: str, incarnation: int, lease_id: int, lo: int, hi: int) -> Lease | None:
        """Return the lease to which a report belongs, or None: then the report is dropped."""
        lease = self._members.leases.get(lease_id)
        worker = self._members.current(name, incarnation)
        if lease is None or worker is None or lease.worker != name:
            self._out.append(cmd.DropResults(name, lease_id))
            return None
        # A missing report never arrives: without this check its calls would stay leased.
        if lease.next == lo < hi <= lease.hi and (lease.overlaps or lease_id == worker.leases[0]):
            worker.unsure = worker.unsure and lease.overlaps
            return lease
        due = self._members.leases[worker.leases[0]]
        expected = f"[{due.next}, {due.hi}) of lease {due.id}"
        cause = f"it reported calls [{lo}, {hi}) of lease {lease_id}, expected {expected}"
        self._out.append(cmd.DropResults(name, lease_id))
        self._out.append(cmd.EvictWorker(name, incarnation, cause))
        self._lose(worker, Death(f"it broke the protocol: {cause}"))
        return None

    def _on_calls_done(self, event: ev.CallsDone) -> None:
        lease = self._valid_lease(event.worker, event.incarnation, event.lease, event.lo, event.hi)
        if lease is not None:
            self._outcomes.done(lease, event)

    def _on_call_failed(self, event: ev.CallFailed) -> None:
        lease = self._valid_lease(event.worker, event.incarnation, event.lease, event.call, event.call + 1)
        if lease is not None:
            self._outcomes.raised(lease, event)

    def _on_call_sized(self, event: ev.CallSized) -> None:
        pass_ = self._passes.get(event.pass_id)
        if pass_ is not None:
            self._outcomes.quarantine.sized(pass_, event.call, event.elements)

    def _on_elements_quarantined(self, event: ev.ElementsQuarantined) -> None:
        pass_ = self._passes.get(event.pass_id)
        if pass_ is not None:
            self._outcomes.quarantine.count(pass_, event.elements)

    def _on_lease_not_sent(self, event: ev.LeaseNotSent) -> None:
        lease = self._members.leases.get(event.lease)
        if lease is not None:
            self._outcomes.not_sent(lease)

    def _on_gang_stalled(self, event: ev.GangStalled) -> None:
        lease = self._members.leases.get(event.lease)
        waits = self._members.current(event.worker, event.incarnation)
        if lease is None or lease.gang is None or waits is None or lease.worker != event.worker:
            return
        leases = lease.gang.leases
        missing = [leases[m] for m in event.members if 0 <= m < len(leases)]  # may include the reporter's own
        hung = [self._members.workers[x.worker] for x in missing if x.id in self._members.leases]
        for worker in hung:
            self._evict(worker, f"it did not join a collective of its gang: {event.text}")

    def _on_cancel_confirmed(self, event: ev.CancelConfirmed) -> None:
        worker = self._members.current(event.worker, event.incarnation)
        if worker is not None:
            self._members.confirm(worker, event.lease)

    def _on_quota_met(self, event: ev.QuotaConfirmed) -> None:
        pass_ = self._passes.get(event.pass_id)
        worker = self._members.current(event.worker, event.incarnation)
        if pass_ is not None and pass_.quotas is not None and worker is not None:
            pass_.quotas.met((event.worker, event.incarnation), event.calls)
            self._members.moved.add(pass_.id)

    def _divide(self) -> None:
        """Divide the limits of passes among the workers that have their calls now."""
        moved, workers = [self._passes.get(id_) for id_ in self._members.moved], self._members.workers
        self._members.moved.clear()
        for pass_ in moved:
            if pass_ is None or pass_.quotas is None or pass_.draining:
                continue
            slots = self._members.slots.get(pass_.id) or ()
            holders = {(name, workers[name].incarnation): None for name in slots}
            if not holders:
                continue  # their quotas stay until another worker has calls
            alive = {(name, each.incarnation) for name, each in workers.items() if pass_.id in each.bound}
            for name, quota in pass_.quotas.divide(holders, alive):
                self._send_quota(name, pass_, quota, len(holders))

    def _send_quota(self, worker: str, pass_: Pass, calls: tuple[int, ...], sharing: int) -> None:
        pass_.quotas_sent += 1
        self._out.append(cmd.SendQuota(worker, pass_.id, pass_.quotas_sent, calls, sharing))

    def _pull(self) -> None:
        for pass_ in self._pulled.values():
            workers = max(1, self._members.ready_for(pass_.settings.gpus))
            wanted = pass_.steps_wanted(self._limits, workers)
            if wanted > 0:
                pass_.requested += wanted
                self._out.append(cmd.RequestSteps(pass_.id, wanted))

    def validate(self) -> None:
        """Check every invariant of the whole state, or raise LocalProtocolError; used in tests."""
        from pipedist.scheduler.invariants import check  # used in tests only

        check(self._passes, self._members, self._waiting)


_HANDLERS: dict[type, Callable[[Scheduler, Any], None]] = {
    ev.WorkerExpected: Scheduler._on_worker_expected,
    ev.WorkerJoined: Scheduler._on_worker_joined,
    ev.HeartbeatReceived: Scheduler._on_heartbeat,
    ev.WorkerLost: Scheduler._on_worker_lost,
    ev.PassOpened: Scheduler._on_pass_opened,
    ev.StepsAvailable: Scheduler._on_steps_available,
    ev.StepExecuted: Scheduler._on_step_executed,
    ev.StepsEnded: Scheduler._on_steps_ended,
    ev.StepsConsumed: Scheduler._on_steps_consumed,
    ev.CallsCached: Scheduler._on_calls_cached,
    ev.StepsCommitted: Scheduler._on_steps_committed,
    ev.PassDraining: Scheduler._on_pass_draining,
    ev.PassClosed: Scheduler._on_pass_closed,
    ev.CallsDone: Scheduler._on_calls_done,
    ev.CallFailed: Scheduler._on_call_failed,
    ev.CallSized: Scheduler._on_call_sized,
    ev.ElementsQuarantined: Scheduler._on_elements_quarantined,
    ev.QuotaConfirmed: Scheduler._on_quota_met,
    ev.LeaseNotSent: Scheduler._on_lease_not_sent,
    ev.GangStalled: Scheduler._on_gang_stalled,
    ev.CancelConfirmed: Scheduler._on_cancel_confirmed,
    ev.Tick: Scheduler._on_tick,
}
