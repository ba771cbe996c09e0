"""The scheduler's state machine.

Rules
-----
* No I/O, no clock, no randomness: `handle(event, now)` returns commands. The same machine
  runs in production, in playbook tests and in simulations.
* The unit is a range of calls. A single call has state only if it failed (`Trouble`) or
  failed for good (`Failure`).
* A result counts only while its lease is held by the incarnation that sent it. A lease ends
  when its last call came back, when its worker is lost, or when its pass is closed or fails;
  what comes later is dropped (`DropResults`), so no call is committed twice.
* Steps of an ordered pass become visible in step order. So the first failure that is told is
  that of the lowest step, whatever the order of arrival.
* One valve per pass: steps are requested only while `steps_in_flight_max` and
  `bytes_in_flight_max` leave room, but one step always fits.

Theory of operation
-------------------
A pass offers steps; their calls wait in its `todo`. `_deal` gives ranges of waiting calls to
workers that have room: one lease runs, and where leases are short a second one waits at the
worker, so that it never idles between them. The size of a lease follows the measured time of
the calls. A worker executes a lease in order and reports ranges, so what has not come back is
known to be [lease.next, lease.hi). When a worker is lost, the call that it was running is
charged with the death; the others just wait again. Since reports come in order, one that
leaves a gap means that another was lost: the worker is expelled, or the gap would wait for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile
from typing import Any

from pipedist.errors import LocalProtocolError
from pipedist.scheduler import commands as cmd
from pipedist.scheduler import events as ev
from pipedist.scheduler.invariants import check
from pipedist.scheduler.membership import Lease, Membership, Worker
from pipedist.scheduler.passes import Pass, Trouble
from pipedist.scheduler.settings import Limits
from pipedist.scheduler.states import PassState, WorkerState


class Scheduler:
    """Deals the calls of passes to workers; see the module's text.

    Args:
        limits: the bounds of everything that it keeps.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._members = Membership(self._limits.prefetch_below_s)
        self._passes: dict[int, Pass] = {}
        self._fruitless = 0
        """Workers that died in a row without joining."""
        self._turn = 0
        """The pass that was dealt last, so that passes of one priority take turns."""
        self._out: list[cmd.Command] = []
        """Commands of the event that is being handled."""
        self._now = 0.0

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
        handler(self, event)
        self._deal()
        self._pull()
        out, self._out = self._out, []
        return out

    def deadline(self) -> float | None:
        """Return when to send a Tick if nothing else happens, or None."""
        for worker in self._members.supervised.values():
            return self._unheard_at(worker)
        return None

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
                cmd.ExpelWorker(event.worker, event.incarnation, "a later incarnation has joined")
            )
            return
        if worker.state is WorkerState.READY:
            if event.incarnation == worker.incarnation:
                self._out.append(
                    cmd.ExpelWorker(event.worker, event.incarnation, "this incarnation has joined already")
                )
                return
            cause = "a later incarnation has joined"
            self._out.append(cmd.ExpelWorker(worker.name, worker.incarnation, cause))
            self._lose(worker, cause, graceful=False, replace=False)
        self._members.admit(worker, event.incarnation, supervised=event.supervised, now=self._now)
        self._fruitless = 0

    def _on_worker_heard(self, event: ev.WorkerHeard) -> None:
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
        self._lose(worker, event.cause, graceful=event.graceful, replace=True, running=event.running)

    def _on_tick(self, _event: ev.Tick) -> None:
        unheard = takewhile(lambda w: self._unheard_at(w) <= self._now, self._members.supervised.values())
        for worker in list(unheard):
            cause = f"not heard for {self._limits.heard_within_s:g} s"
            self._out.append(cmd.ExpelWorker(worker.name, worker.incarnation, cause))
            self._lose(worker, cause, graceful=False, replace=True)

    def _lose(
        self,
        worker: Worker,
        cause: str,
        *,
        graceful: bool,
        replace: bool,
        running: tuple[int, int] | None = None,
    ) -> None:
        known = not graceful and not worker.unsure
        for place, lease in enumerate(self._members.dismiss(worker)):
            blamed = lease.next if known and place == 0 else None
            if running is not None and not graceful:  # finished calls before it may not have been reported
                blamed = running[1] if running[0] == lease.id else None
            self._give_back(lease, cause, blamed)
        if worker.managed and replace:
            worker.incarnation += 1
            self._out.append(cmd.StartWorker(worker.name, worker.incarnation))

    def _give_back(self, lease: Lease, cause: str, blamed: int | None) -> None:
        """Let a lost lease's calls wait again; the one that was running is charged with the death."""
        pass_ = self._passes[lease.pass_id]
        lo = lease.next
        pass_.leased -= lease.hi - lo
        if blamed is not None and lo <= blamed < lease.hi and pass_.needs(blamed):
            pass_.wait(lo, blamed, lease.attempt)
            trouble = pass_.trouble.setdefault(blamed, Trouble())
            trouble.deaths += 1
            tried = trouble.raised + trouble.deaths
            if trouble.deaths >= self._limits.deaths_max:
                self._fail(pass_, cmd.Failure(blamed, tried, lease.worker, cause=cause))
            else:
                pass_.wait(blamed, blamed + 1, tried)
            lo = blamed + 1
        pass_.wait(lo, lease.hi, lease.attempt)
        self._quiet(pass_)

    # -- passes ----------------------------------------------------------------------

    def _on_pass_opened(self, event: ev.PassOpened) -> None:
        if event.pass_id in self._passes:
            raise LocalProtocolError(f"pass {event.pass_id} was opened twice")
        self._passes[event.pass_id] = Pass(event.pass_id, event.settings)

    def _on_steps_offered(self, event: ev.StepsOffered) -> None:
        pass_ = self._passes.get(event.pass_id)
        if pass_ is None:
            return
        pass_.offer(event.first, event.last, event.parts, event.bytes)
        if event.parts == 0:
            replicas = pass_.settings.replicas
            self._show_from(pass_, event.first * replicas, event.last * replicas)

    def _on_steps_ended(self, event: ev.StepsEnded) -> None:
        pass_ = self._passes.get(event.pass_id)
        if pass_ is None:
            return
        pass_.become("ended")
        self._show(pass_)

    def _on_steps_consumed(self, event: ev.StepsConsumed) -> None:
        pass_ = self._passes.get(event.pass_id)
        if pass_ is None:
            return
        pass_.consumed = max(pass_.consumed, event.before)
        pass_.result_bytes -= event.bytes

    def _on_pass_held(self, event: ev.PassHeld) -> None:
        pass_ = self._passes.get(event.pass_id)
        if pass_ is None:
            return
        pass_.held = True
        self._quiet(pass_)

    def _on_pass_closed(self, event: ev.PassClosed) -> None:
        pass_ = self._passes.pop(event.pass_id, None)
        if pass_ is None:
            return
        self._cancel_leases(pass_, from_call=0)
        for worker in self._members.workers.values():
            if event.pass_id in worker.bound:
                worker.bound.discard(event.pass_id)
                self._out.append(cmd.SendUnbind(worker.name, event.pass_id))

    def _cancel_leases(self, pass_: Pass, *, from_call: int) -> None:
        for lease in [x for x in self._members.leases.values() if x.pass_id == pass_.id]:
            if lease.lo >= from_call:
                self._members.cancel(lease)
                pass_.leased -= lease.hi - lease.next
                self._out.append(cmd.SendCancel(lease.worker, lease.id))

    def _quiet(self, pass_: Pass) -> None:
        if pass_.held and not pass_.told_quiet and pass_.leased == 0:
            pass_.told_quiet = True
            self._out.append(cmd.PassQuiet(pass_.id))

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
        self._out.append(cmd.ExpelWorker(name, incarnation, cause))
        self._lose(worker, f"it broke the protocol: {cause}", graceful=False, replace=True)
        return None

    def _advance(self, lease: Lease, to: int) -> None:
        lease.next = to
        if to >= lease.hi:
            self._members.revoke(lease)

    def _on_calls_done(self, event: ev.CallsDone) -> None:
        lease = self._held_lease(event.worker, event.incarnation, event.lease, event.lo, event.hi)
        if lease is None:
            return
        pass_ = self._passes[lease.pass_id]
        self._out.append(cmd.AcceptResults(pass_.id, event.lo, event.hi, event.worker))
        pass_.came_back(event.lo, event.hi, event.busy_ns / 1e9, event.bytes, self._limits)
        self._advance(lease, event.hi)
        self._show_from(pass_, event.lo, event.hi)
        self._quiet(pass_)

    def _on_call_failed(self, event: ev.CallFailed) -> None:
        lease = self._held_lease(event.worker, event.incarnation, event.lease, event.call, event.call + 1)
        if lease is None:
            return
        pass_ = self._passes[lease.pass_id]
        pass_.leased -= 1
        self._advance(lease, event.call + 1)
        if pass_.needs(event.call):
            self._raised(pass_, event)
        self._quiet(pass_)

    def _raised(self, pass_: Pass, event: ev.CallFailed) -> None:
        trouble = pass_.trouble.setdefault(event.call, Trouble())
        trouble.raised += 1
        tried = trouble.raised + trouble.deaths
        if trouble.raised <= event.retries:
            pass_.wait(event.call, event.call + 1, tried)
        else:
            self._fail(pass_, cmd.Failure(event.call, tried, event.worker, token=event.token))

    def _fail(self, pass_: Pass, failure: cmd.Failure) -> None:
        pass_.fail(failure)
        if pass_.last_step is not None:
            self._cancel_leases(pass_, from_call=(pass_.last_step + 1) * pass_.settings.replicas)
        self._show_from(pass_, failure.call, failure.call + 1)

    # -- what is visible ---------------------------------------------------------------

    def _show_from(self, pass_: Pass, lo: int, hi: int) -> None:
        if pass_.settings.ordered:
            self._show(pass_)
            return
        replicas = pass_.settings.replicas
        for step in range(lo // replicas, (hi - 1) // replicas + 1):
            first = step * replicas
            if pass_.done.covers(first, first + replicas):
                pass_.done.discard(first, first + replicas)
                self._tell(pass_, step, step + 1)

    def _show(self, pass_: Pass) -> None:
        """Tell of every step that has become visible, in order; then of the pass's end."""
        if not pass_.settings.ordered:
            return
        first, end = pass_.visible, pass_.take_visible()
        pass_.visible = end
        self._tell(pass_, first, end)
        if pass_.state is PassState.ENDED and pass_.visible == pass_.offered:
            pass_.become("all visible")
            self._out.append(cmd.PassComplete(pass_.id))

    def _tell(self, pass_: Pass, first: int, end: int) -> None:
        if first == end:
            return
        replicas = pass_.settings.replicas
        for step in sorted({c // replicas for c in pass_.failures if first <= c // replicas < end}):
            if step > first:
                self._out.append(cmd.StepsReady(pass_.id, first, step))
            calls = range(step * replicas, (step + 1) * replicas)
            causes = tuple(pass_.failures.pop(c) for c in calls if c in pass_.failures)
            self._out.append(cmd.StepFailed(pass_.id, step, causes))
            if pass_.settings.fail_fast:
                pass_.become("failure told")
                self._cancel_leases(pass_, from_call=0)
                return
            first = step + 1
        if first < end:
            self._out.append(cmd.StepsReady(pass_.id, first, end))

    # -- dealing -----------------------------------------------------------------------

    def _deal(self) -> None:
        """Give waiting calls to workers that have room: first to the idle, then in advance."""
        while self._members.idle and (pass_ := self._next_pass(in_advance=False)) is not None:
            self._assign(next(iter(self._members.idle.values())), pass_)
        while self._members.thirsty and (pass_ := self._next_pass(in_advance=True)) is not None:
            self._assign(next(iter(self._members.thirsty.values())), pass_)

    def _next_pass(self, *, in_advance: bool) -> Pass | None:
        """Return the pass whose turn it is, of those of the best priority; None: nothing is dealt now.

        Only short calls are sent in advance. If others have their turn, nothing is, so that workers
        become idle for them; and looking is no turn, or another pass would have it every time.
        """
        dealing = [p for p in self._passes.values() if p.deals]
        if not dealing:
            return None
        best = min(p.settings.priority for p in dealing)
        ids = [p.id for p in dealing if p.settings.priority == best]
        pass_ = self._passes[next((i for i in ids if i > self._turn), ids[0])]
        if in_advance and not pass_.is_short(self._limits):
            return None
        self._turn = pass_.id
        return pass_

    def _assign(self, worker: Worker, pass_: Pass) -> None:
        todo = pass_.todo.take(pass_.bundle_calls(self._limits, self._members.ready))
        if pass_.id not in worker.bound:
            worker.bound.add(pass_.id)
            self._out.append(cmd.SendBind(worker.name, pass_.id))
        expected_s = (pass_.call_s or 0.0) * (todo.hi - todo.lo)
        lease = self._members.grant(worker, pass_.id, todo.lo, todo.hi, todo.attempt, expected_s)
        pass_.leased += todo.hi - todo.lo
        self._out.append(cmd.SendAssign(worker.name, lease.id, pass_.id, todo.lo, todo.hi, todo.attempt))

    def _pull(self) -> None:
        workers = max(1, self._members.ready)
        for pass_ in self._passes.values():
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
        check(self._passes, self._members)


_HANDLERS: dict[type, Callable[[Scheduler, Any], None]] = {
    ev.WorkerExpected: Scheduler._on_worker_expected,
    ev.WorkerJoined: Scheduler._on_worker_joined,
    ev.WorkerHeard: Scheduler._on_worker_heard,
    ev.WorkerLost: Scheduler._on_worker_lost,
    ev.PassOpened: Scheduler._on_pass_opened,
    ev.StepsOffered: Scheduler._on_steps_offered,
    ev.StepsEnded: Scheduler._on_steps_ended,
    ev.StepsConsumed: Scheduler._on_steps_consumed,
    ev.PassHeld: Scheduler._on_pass_held,
    ev.PassClosed: Scheduler._on_pass_closed,
    ev.CallsDone: Scheduler._on_calls_done,
    ev.CallFailed: Scheduler._on_call_failed,
    ev.Tick: Scheduler._on_tick,
}
