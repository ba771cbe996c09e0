"""The scheduler's state machine.

Rules
-----
* No I/O, no clock, no randomness: `handle(event, now)` returns commands. The same machine
  runs in production, in playbook tests and in simulations.
* The unit is a range of calls. A single call has state only if it failed (`Trouble`), failed for
  good (`Failure`), or is searched for guilty elements (`Suspect`).
* A result counts only while its lease is held by the incarnation that sent it. A lease ends
  when its last call came back, when its worker is lost, or when its pass is closed or fails;
  what comes later is dropped (`DropResults`), so no call is committed twice.
* Steps of an ordered pass become visible in step order. So the first failure that is told is
  that of the lowest step, whatever the order of arrival.
* A call that a worker has finished for a scheduler that is gone is recalled: the worker gets a lease of it
  like any other, but executes nothing. So it counts by the same rules, in the same place. One that was
  tried here meanwhile is executed.
* The calls of a gang are issued at once or not at all, over as many workers as there are (at most
  R). They count at once or not at all: a gang that loses a member, or whose calls are to be tried
  again, starts again as a whole, under a new serial. What a call of a gang raised is told when all
  its calls have reported, and is that of the lowest replica that was not just aborted.
* One valve per pass: steps are requested only while `steps_in_flight_max` and
  `bytes_in_flight_max` leave room, but one step always fits.

Theory of operation
-------------------
This module takes in what happens; `dealing` decides whose calls go where, `outcomes` what becomes
of them. A pass offers steps; their calls wait in its `todo`. Ranges of them are dealt to workers
that have room: one lease runs, and where leases are short a second one waits at the
worker, so that it never idles between them. The size of a lease follows the measured time of
the calls. A worker executes a lease in order and reports ranges, so what has not come back is
known to be [lease.next, lease.hi). When a worker is lost, the call that it was running is
charged with the death; the others just wait again. A call that raised may rest before it is tried
again: `deadline` says until when. Of a call that failed for good, `separation` may have subsets of
its elements tried, so that only the guilty ones are lost. Calls that take far longer than others are
executed a second time by workers that have nothing else to do: see `speculation`. Since reports come
in order, one that leaves a gap means that another was lost: the worker is expelled, or the gap would
wait for ever.

A gang needs several idle workers. While a gang pass has its turn and too few are idle, nothing
else is dealt; so they become idle, and nobody starves. Short gangs are queued in advance at the
workers of an earlier one, which hold the pass's state and share memory. All members get the lease
of a gang before that of a later one, so gangs wait in one and the same order everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from pipedist.errors import LocalProtocolError
from pipedist.scheduler import commands as cmd
from pipedist.scheduler import events as ev
from pipedist.scheduler.dealing import Dealing
from pipedist.scheduler.deaths import Death
from pipedist.scheduler.membership import Lease, Membership, Worker
from pipedist.scheduler.outcomes import Outcomes
from pipedist.scheduler.passes import Pass
from pipedist.scheduler.ranges import RangeSet
from pipedist.scheduler.settings import Limits
from pipedist.scheduler.states import WorkerState
from pipedist.scheduler.stragglers import Stragglers

if TYPE_CHECKING:
    from pipedist.scheduler.why import Explanation

_MOVES = frozenset(
    {
        ev.WorkerJoined,
        ev.PassOpened,
        ev.PassClosed,
        ev.StepsAvailable,
        ev.StepsEnded,
        ev.StepsConsumed,
        ev.CallsDone,
        ev.CallFailed,
        ev.CallSized,
    }
)
"""Events with which a run goes on."""


class Scheduler:
    """Deals the calls of passes to workers; see the module's text.

    Args:
        limits: the bounds of everything that it keeps.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._members = Membership(self._limits.prefetch_below_s)
        self._passes: dict[int, Pass] = {}
        self._pulled: dict[int, Pass] = {}
        """Those whose steps are asked for."""
        self._waiting: dict[int, Pass] = {}
        """Those that have calls waiting; others may be among them."""
        self._rousing: dict[int, Pass] = {}
        """Those that have calls resting; others may be among them."""
        self._fruitless = 0
        """Workers that died in a row without joining."""
        self._out: list[cmd.Command] = []
        """Commands of the event that is being handled."""
        self._dealing = Dealing(self._limits, self._members, self._waiting, self._out)
        self._outcomes = Outcomes(self._limits, self._members, self._passes, self._dealing, self._out)
        self._now = 0.0
        self._moved_at: float | None = None
        """When something came back, was offered or was taken last; None: nothing has been to do yet."""

    def handle(self, event: ev.Event, now: float) -> list[cmd.Command]:
        """Take in one event and return what must be done, in order.

        Args:
            event: what happened.
            now: seconds on a clock that never goes back.

        Raises:
            LocalProtocolError: if the event can't happen in this state: a defect of the driver.
        """
        self._now = now
        handler = _HANDLERS.get(type(event))
        if handler is None:
            raise LocalProtocolError(f"the scheduler knows no event {event!r}")
        self._outcomes.now = self._members.now = now
        if type(event) in _MOVES:
            self._moved_at = now
        handler(self, event)
        if self._rousing:
            for pass_ in list(self._rousing.values()):
                pass_.rouse(now)
        if self._waiting:
            self._dealing.deal()
        if self._members.watched and self._members.idle:
            self._outcomes.speculation.begin(now)
        if self._pulled:
            self._pull()
        out = self._out[:]
        self._out.clear()
        return out

    def deadline(self) -> float | None:
        """Return when to send a Tick if nothing else happens, or None."""
        first = next(iter(self._members.supervised.values()), None)
        unheard_at = None if first is None else self._unheard_at(first)
        if not self._rousing and not self._members.watched:
            return unheard_at
        due = [pass_.resting.due for pass_ in self._rousing.values()]
        slow_at = self._outcomes.speculation.due
        return min((at for at in (unheard_at, slow_at, *due) if at is not None), default=None)

    def why(self, now: float) -> Explanation:
        """Say what everything waits for."""
        from pipedist.scheduler.why import explain  # seldom asked for

        return explain(self._passes, self._members, self._limits, now - self.silent_s(now), now)

    def silent_s(self, now: float) -> float:
        """Return for how long nothing has come back, been offered or been taken, seconds."""
        return 0.0 if self._moved_at is None else now - self._moved_at

    def pass_of(self, worker: str, lease: int) -> int | None:
        """Return the pass of a lease that a worker holds, None if it holds no such lease."""
        held = self._members.leases.get(lease)
        return held.pass_id if held is not None and held.worker == worker else None

    def _unheard_at(self, worker: Worker) -> float:
        return worker.heard_at + self._limits.heard_within_s

    # -- workers ---------------------------------------------------------------------

    def _on_worker_expected(self, event: ev.WorkerExpected) -> None:
        if event.worker in self._members.workers:
            raise LocalProtocolError(
                f"worker {event.worker} is expected, but there is one of that name already"
            )
        worker = Worker(event.worker, managed=True)
        self._members.workers[event.worker] = worker
        self._out.append(cmd.StartWorker(worker.name, worker.incarnation))

    def _on_worker_joined(self, event: ev.WorkerJoined) -> None:
        worker = self._members.workers.get(event.worker)
        if worker is None:
            worker = Worker(event.worker, managed=False, incarnation=event.incarnation)
            worker.state = WorkerState.GONE
            self._members.workers[event.worker] = worker
        if event.incarnation < worker.incarnation:
            self._out.append(
                cmd.EvictWorker(event.worker, event.incarnation, "a later incarnation has joined")
            )
            return
        if worker.state is WorkerState.READY:
            if event.incarnation == worker.incarnation:
                self._out.append(
                    cmd.EvictWorker(event.worker, event.incarnation, "this incarnation has joined already")
                )
                return
            cause = "a later incarnation has joined"
            self._out.append(cmd.EvictWorker(worker.name, worker.incarnation, cause))
            self._lose(worker, cause, graceful=False, replace=False)
        self._members.admit(
            worker, event.incarnation, supervised=event.supervised, now=self._now, gpus=event.gpus
        )
        self._fruitless = 0

    def _on_worker_heard(self, event: ev.HeartbeatReceived) -> None:
        worker = self._members.current(event.worker, event.incarnation)
        if worker is not None:
            self._members.hear(worker, self._now)

    def _on_worker_lost(self, event: ev.WorkerLost) -> None:
        worker = self._members.workers.get(event.worker)
        if worker is None or worker.incarnation != event.incarnation or worker.state is WorkerState.GONE:
            return
        if worker.state is WorkerState.STARTING:
            self._fruitless += 1
            if self._fruitless >= self._limits.starts_fruitless_max:
                self._out.append(
                    cmd.ClusterFailed(
                        f"{self._fruitless} workers in a row died before they joined, "
                        f"the last one with {event.cause}"
                    )
                )
                return
        death = Death(event.cause, event.stage, event.timed_out, event.retries, event.quarantine)
        self._lose(
            worker, event.cause, graceful=event.graceful, replace=True, running=event.running, death=death
        )

    def _on_tick(self, _event: ev.Tick) -> None:
        unheard = takewhile(lambda w: self._unheard_at(w) <= self._now, self._members.supervised.values())
        for worker in list(unheard):
            cause = f"not heard for {self._limits.heard_within_s:g} s"
            self._out.append(cmd.EvictWorker(worker.name, worker.incarnation, cause))
            self._lose(worker, cause, graceful=False, replace=True)

    def _lose(
        self,
        worker: Worker,
        cause: str,
        *,
        graceful: bool,
        replace: bool,
        running: tuple[int, int] | None = None,
        death: Death | None = None,
    ) -> None:
        death = death or Death(cause)
        known = not graceful and not worker.unsure
        for place, lease in enumerate(self._members.dismiss(worker)):
            blamed = lease.next if known and place == 0 else None
            if running is not None and not graceful:  # finished calls before it may not have been reported
                blamed = running[1] if running[0] == lease.id else None
            self._outcomes.lost(lease, death, blamed)
        if worker.managed and replace:
            worker.incarnation += 1
            self._out.append(cmd.StartWorker(worker.name, worker.incarnation))

    # -- passes ----------------------------------------------------------------------

    def _on_pass_opened(self, event: ev.PassOpened) -> None:
        if event.pass_id in self._passes:
            raise LocalProtocolError(f"pass {event.pass_id} was opened twice")
        pass_ = self._passes[event.pass_id] = Pass(
            event.pass_id, event.settings, self._waiting, self._rousing
        )
        if event.settings.pulled:
            self._pulled[pass_.id] = pass_
        if event.settings.speculation:
            self._members.watched[pass_.id] = Stragglers(event.settings.speculation)

    def _on_steps_offered(self, event: ev.StepsAvailable) -> None:
        pass_ = self._passes.get(event.pass_id)
        if pass_ is None:
            return
        pass_.offer(event.first, event.last, event.parts, event.bytes, event.skipped_replicas)
        if event.parts == len(event.skipped_replicas):
            replicas = pass_.settings.replicas
            self._outcomes.show(pass_, event.first * replicas, event.last * replicas)

    def _on_steps_ended(self, event: ev.StepsEnded) -> None:
        pass_ = self._passes.get(event.pass_id)
        if pass_ is None:
            return
        pass_.become("ended")
        if pass_.settings.ordered:
            self._outcomes.show_in_order(pass_)

    def _on_steps_consumed(self, event: ev.StepsConsumed) -> None:
        pass_ = self._passes.get(event.pass_id)
        if pass_ is None:
            return
        pass_.consumed = max(pass_.consumed, event.before)
        pass_.result_bytes -= event.bytes

    def _on_calls_kept(self, event: ev.CallsCached) -> None:
        pass_ = self._passes.get(event.pass_id)
        if pass_ is None or pass_.settings.gang:  # a gang counts at once or not at all
            return
        kept = pass_.kept.setdefault((event.worker, event.incarnation), RangeSet())
        for lo, hi in event.calls:
            kept.add(lo, hi)

    def _on_steps_settled(self, event: ev.StepsCommitted) -> None:
        if event.pass_id not in self._passes:
            return
        before = event.before * self._passes[event.pass_id].settings.replicas
        for worker in self._members.workers.values():
            if event.pass_id in worker.bound:
                self._out.append(cmd.SendCommitted(worker.name, event.pass_id, before))

    def _on_pass_held(self, event: ev.PassDraining) -> None:
        pass_ = self._passes.get(event.pass_id)
        if pass_ is None:
            return
        pass_.held = True
        self._outcomes.quiet(pass_)

    def _on_pass_closed(self, event: ev.PassClosed) -> None:
        pass_ = self._passes.pop(event.pass_id, None)
        if pass_ is None:
            return
        self._pulled.pop(pass_.id, None)
        self._waiting.pop(pass_.id, None)
        self._rousing.pop(pass_.id, None)
        self._outcomes.cancel(pass_, from_call=0)
        self._members.watched.pop(pass_.id, None)
        for worker in self._members.workers.values():
            if event.pass_id in worker.bound:
                worker.bound.discard(event.pass_id)
                self._out.append(cmd.SendUnbind(worker.name, event.pass_id))

    # -- calls -----------------------------------------------------------------------

    def _held_lease(self, name: str, incarnation: int, lease_id: int, lo: int, hi: int) -> Lease | None:
        """Return the lease under which a report counts, or None: then the report is dropped."""
        lease = self._members.leases.get(lease_id)
        worker = self._members.current(name, incarnation)
        if lease is None or worker is None or lease.worker != name:
            self._out.append(cmd.DropResults(name, lease_id))
            return None
        # A report that is missing never comes: without this its calls would be leased for ever.
        if lease_id == worker.leases[0] and lease.next == lo < hi <= lease.hi:
            worker.unsure = False
            return lease
        due = self._members.leases[worker.leases[0]]
        cause = (
            f"it reported calls [{lo}, {hi}) of lease {lease_id} "
            f"where [{due.next}, {due.hi}) of lease {due.id} were to come"
        )
        self._out.append(cmd.DropResults(name, lease_id))
        self._out.append(cmd.EvictWorker(name, incarnation, cause))
        self._lose(worker, f"it broke the protocol: {cause}", graceful=False, replace=True)
        return None

    def _on_calls_done(self, event: ev.CallsDone) -> None:
        lease = self._held_lease(event.worker, event.incarnation, event.lease, event.lo, event.hi)
        if lease is not None:
            self._outcomes.done(lease, event)

    def _on_call_failed(self, event: ev.CallFailed) -> None:
        lease = self._held_lease(event.worker, event.incarnation, event.lease, event.call, event.call + 1)
        if lease is not None:
            self._outcomes.raised(lease, event)

    def _on_call_sized(self, event: ev.CallSized) -> None:
        pass_ = self._passes.get(event.pass_id)
        if pass_ is not None:
            self._outcomes.separation.sized(pass_, event.call, event.elements)

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
        missing = [leases[m] for m in event.members if 0 <= m < len(leases)]  # the reporter's own, perhaps
        hung = [self._members.workers[x.worker] for x in missing if x.id in self._members.leases]
        for worker in hung:
            cause = f"it did not come to a collective of its gang: {event.text}"
            self._out.append(cmd.EvictWorker(worker.name, worker.incarnation, cause))
            self._lose(worker, cause, graceful=False, replace=True)

    def _on_cancel_heard(self, event: ev.CancelConfirmed) -> None:
        worker = self._members.current(event.worker, event.incarnation)
        if worker is not None and worker.laid_off == event.lease:
            self._members.take_on(worker)

    # -- the valve ---------------------------------------------------------------------

    def _pull(self) -> None:
        for pass_ in self._pulled.values():
            workers = max(1, self._members.ready_for(pass_.settings.gpus))
            wanted = pass_.steps_wanted(self._limits, workers)
            if wanted > 0:
                pass_.requested += wanted
                self._out.append(cmd.RequestSteps(pass_.id, wanted))

    # -- checks ------------------------------------------------------------------------

    def validate(self) -> None:
        """Check every invariant of the whole state; used after each event in tests.

        Raises:
            LocalProtocolError: naming the invariant that does not hold.
        """
        from pipedist.scheduler.invariants import check  # in tests alone

        check(self._passes, self._members, self._waiting)


_HANDLERS: dict[type, Callable[[Scheduler, Any], None]] = {
    ev.WorkerExpected: Scheduler._on_worker_expected,
    ev.WorkerJoined: Scheduler._on_worker_joined,
    ev.HeartbeatReceived: Scheduler._on_worker_heard,
    ev.WorkerLost: Scheduler._on_worker_lost,
    ev.PassOpened: Scheduler._on_pass_opened,
    ev.StepsAvailable: Scheduler._on_steps_offered,
    ev.StepsEnded: Scheduler._on_steps_ended,
    ev.StepsConsumed: Scheduler._on_steps_consumed,
    ev.CallsCached: Scheduler._on_calls_kept,
    ev.StepsCommitted: Scheduler._on_steps_settled,
    ev.PassDraining: Scheduler._on_pass_held,
    ev.PassClosed: Scheduler._on_pass_closed,
    ev.CallsDone: Scheduler._on_calls_done,
    ev.CallFailed: Scheduler._on_call_failed,
    ev.CallSized: Scheduler._on_call_sized,
    ev.LeaseNotSent: Scheduler._on_lease_not_sent,
    ev.GangStalled: Scheduler._on_gang_stalled,
    ev.CancelConfirmed: Scheduler._on_cancel_heard,
    ev.Tick: Scheduler._on_tick,
}
