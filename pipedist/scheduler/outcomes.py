"""Decide how calls end: which results count, which calls are retried or fail, which steps are visible."""

from __future__ import annotations

from collections.abc import Sequence

from pipedist.scheduler import commands as cmd
from pipedist.scheduler import events as ev
from pipedist.scheduler.assignment import Assigner
from pipedist.scheduler.bisection import CallHistory, Death, Probe
from pipedist.scheduler.leases import GangAttempt, Lease, RaisedCall
from pipedist.scheduler.membership import Membership
from pipedist.scheduler.passes import Pass
from pipedist.scheduler.quarantine import Quarantine
from pipedist.scheduler.queues import Todo, backoff_after_s
from pipedist.scheduler.settings import SchedulerLimits
from pipedist.scheduler.speculation import Speculation
from pipedist.scheduler.transitions import GangState, PassState

_ABORTED_WITHOUT_CAUSE = "its gang was aborted, but none of its calls raised"


class Outcomes:
    """Applies the reports and losses of leases to their passes."""

    def __init__(
        self,
        limits: SchedulerLimits,
        members: Membership,
        passes: dict[int, Pass],
        assigner: Assigner,
        out: list[cmd.Command],
    ) -> None:
        self._limits = limits
        self._members = members
        self._passes = passes
        self._out = out
        self.now = 0.0  # of the event that is being handled
        self.quarantine = Quarantine(limits, members, out, self._cancel, self._finish)
        self.speculation = Speculation(limits, members, passes, assigner, self._cancel, self._take_back)

    # -- reports under a lease that is held ------------------------------------------

    def done(self, lease: Lease, event: ev.CallsDone) -> None:
        pass_, gang, lo, hi = self._passes[lease.pass_id], lease.gang, event.lo, event.hi
        if gang is not None:
            self._out.append(cmd.StashResults(gang.serial, lo, hi, event.worker))
            gang.came_back(lease.id, event.busy_ns, event.bytes)
            self._reported(pass_, gang, lease, hi)
            return
        if lease.probe is not None:
            self._members.advance(lease, hi)
            pass_.leased -= 1
            self.quarantine.passed(pass_, lease.probe)
            self.report_drained(pass_)
            return
        self.speculation.reported(pass_, lease, self.now)
        if pass_.searches.cleared:
            self.quarantine.returned(pass_, lo, hi)
        self._out.append(cmd.AcceptResults(pass_.id, lo, hi, event.worker))
        pass_.came_back(lo, hi, event.busy_ns / 1e9, event.bytes, self._limits)
        self._members.advance(lease, hi)
        self.publish(pass_, lo, hi)
        self.report_drained(pass_)

    def raised(self, lease: Lease, event: ev.CallFailed) -> None:
        pass_, gang, call = self._passes[lease.pass_id], lease.gang, event.call
        cause = cmd.Cause(event.stage, event.text)
        raised = RaisedCall(
            call, event.worker, event.retries, event.aborted, event.quarantine, cause, event.culprits
        )
        if gang is not None:
            gang.become("call raised")
            gang.raised.append(raised)
            self._reported(pass_, gang, lease, call + 1)
            return
        if lease.twin is not None:  # the other attempt decides
            self.speculation.failed(pass_, lease)
            return
        pass_.leased -= 1
        self._members.advance(lease, call + 1)
        if pass_.draining and event.aborted:  # the attempt has not begun
            if lease.probe is not None:
                pass_.wait_probe(lease.probe)
            else:
                pass_.wait(call, call + 1, lease.attempt)
        elif lease.probe is not None:
            self._retry_or_fail_probe(pass_, lease.probe, raised)
        elif pass_.needs(call):
            self._retry_or_fail(pass_, call, call + 1, (raised,))
        self.report_drained(pass_)

    def _reported(self, pass_: Pass, gang: GangAttempt, lease: Lease, to: int) -> None:
        """Record that a gang member reported its calls up to `to`; with the last one, the gang ends."""
        pass_.leased -= to - lease.next
        gang.due -= to - lease.next
        self._members.advance(lease, to)
        if gang.due == 0:
            gang.become("all reported")
            pass_.dismiss(gang)
            counts = gang.state is GangState.COMPLETE
            self._out.append(cmd.GangEnded(gang.serial, counts, aborted=False))
            if counts:
                pass_.gang_came_back(gang)
                self.publish(pass_, gang.lo, gang.hi)
            elif at_fault := gang.at_fault:
                self._retry_or_fail(pass_, gang.lo, gang.hi, at_fault)
            else:
                first = gang.raised[0]
                self._charge(pass_, gang.lo, gang.hi, first.call, first.worker, Death(_ABORTED_WITHOUT_CAUSE))
            gang.leases.clear()  # they refer to it: a step must leave nothing to the garbage collector
        self.report_drained(pass_)

    def not_sent(self, lease: Lease) -> None:
        pass_, gang = self._passes[lease.pass_id], lease.gang
        calls = [RaisedCall(call, lease.worker) for call in range(lease.lo, lease.hi)]
        if gang is not None:
            self.break_up(pass_, gang)
            self._retry_or_fail(pass_, gang.lo, gang.hi, calls)
        elif lease.twin is not None:
            self.speculation.failed(pass_, lease)
        else:
            self._members.revoke(lease)
            pass_.leased -= lease.hi - lease.lo
            for raised in calls:
                if pass_.needs(raised.call):
                    self._retry_or_fail(pass_, raised.call, raised.call + 1, (raised,))
        self.report_drained(pass_)

    # -- leases that end early -------------------------------------------------------

    def lost(self, lease: Lease, death: Death, blamed: int | None) -> None:
        """Requeue the calls of a lost lease; the running one is charged with the death."""
        pass_, gang, lo = self._passes[lease.pass_id], lease.gang, lease.next
        pass_.leased -= lease.hi - lo
        if blamed is not None and not (lo <= blamed < lease.hi and pass_.needs(blamed)):
            blamed = None
        if lease.twin is not None:  # the other attempt continues
            self.speculation.goes_on(lease.twin)
            self.report_drained(pass_)
            return
        if lease.probe is not None:
            if blamed is not None:
                self._charge_probe(pass_, lease.probe, lease.worker, death)
            else:
                pass_.wait_probe(lease.probe)
        elif gang is not None:
            if gang.state is not GangState.BROKEN:  # it starts again as a whole
                self.break_up(pass_, gang)
                if blamed is not None:
                    self._charge(pass_, gang.lo, gang.hi, blamed, lease.worker, death)
                else:
                    pass_.wait(gang.lo, gang.hi, gang.attempt)
        else:
            if blamed is not None:
                pass_.wait(lo, blamed, lease.attempt)
                self._charge(pass_, blamed, blamed + 1, blamed, lease.worker, death)
                lo = blamed + 1
            pass_.wait(lo, lease.hi, lease.attempt)
        self.report_drained(pass_)

    def cancel(self, pass_: Pass, *, from_call: int) -> None:
        """Cancel the leases of all calls >= `from_call`, which are obsolete."""
        if pass_.leased == 0:
            return
        workers, leases = self._members.workers, self._members.leases.values()
        obsolete = [x for x in leases if x.pass_id == pass_.id and x.lo >= from_call]
        running = [x for x in obsolete if workers[x.worker].leases[0] == x.id]
        for gang in [x for x in pass_.gangs.values() if x.lo >= from_call]:
            self.break_up(pass_, gang)
        if not pass_.settings.gang:
            for lease in obsolete:
                self._cancel(pass_, lease)
        for lease in running:  # it may hang: no other call waits behind it
            if not workers[lease.worker].leases:
                self._members.suspend(workers[lease.worker], lease.id)

    def break_up(self, pass_: Pass, gang: GangAttempt) -> None:
        gang.become("broken up")
        pass_.dismiss(gang)
        for lease in gang.leases:
            if lease.id in self._members.leases:
                self._cancel(pass_, lease)
        self._out.append(cmd.GangEnded(gang.serial, counts=False, aborted=True))

    def _cancel(self, pass_: Pass, lease: Lease) -> None:
        self._members.cancel(lease)
        pass_.leased -= lease.hi - lease.next
        self._out.append(cmd.SendCancel(lease.worker, lease.id))

    def _take_back(self, pass_: Pass, lease: Lease) -> None:
        self._cancel(pass_, lease)
        pass_.wait(lease.next, lease.hi, lease.attempt)
        self.report_drained(pass_)

    # -- another attempt, or failure ---------------------------------------------------

    def _retry_or_fail(self, pass_: Pass, lo: int, hi: int, raised: Sequence[RaisedCall]) -> None:
        """Retry calls [lo, hi), one call or a gang, that raised, or fail them permanently.

        The stage of the lowest call that raised decides; each stage counts its own retries.
        """
        history, stage = pass_.histories.setdefault(lo, CallHistory()), raised[0].cause.stage
        history.raised[stage] += 1
        if history.raised[stage] <= raised[0].retries:
            self._back_off(pass_, history.raised[stage], Todo(lo, hi, history.tried))
        else:
            failures = [cmd.Failure(x.call, history.tried, x.worker) for x in raised]
            first = raised[0]
            self._give_up(pass_, lo, hi, failures, first.cause, first.quarantine, culprits=first.culprits)

    def _charge(self, pass_: Pass, lo: int, hi: int, call: int, worker: str, death: Death) -> None:
        """Charge calls [lo, hi), one call or a gang, with a death: retry them or fail them."""
        if death.timed_out:
            self._retry_or_fail(pass_, lo, hi, (_timed_out(call, worker, death),))
            return
        history = pass_.histories.setdefault(lo, CallHistory())
        death = history.charge(death)
        if history.deaths < self._limits.deaths_max:
            pass_.wait(lo, hi, history.tried)
        else:
            failures = [cmd.Failure(call, history.tried, worker, death.cause)]
            cause = cmd.Cause(death.stage, death.cause)
            self._give_up(pass_, lo, hi, failures, cause, _quarantines(pass_, death))

    def _retry_or_fail_probe(self, pass_: Pass, probe: Probe, raised: RaisedCall) -> None:
        stage = raised.cause.stage
        probe.raised[stage] += 1
        if probe.is_single and probe.raised[stage] <= raised.retries:
            self._back_off(pass_, probe.raised[stage], probe)
            return
        cause = raised.cause
        if probe.is_single and raised.culprits:  # as it is named in a call of several elements
            cause = cmd.Cause(stage, raised.culprits[0][1])
        self.quarantine.failed(pass_, probe, cause if raised.quarantine else None)

    def _charge_probe(self, pass_: Pass, probe: Probe, worker: str, death: Death) -> None:
        if death.timed_out:
            self._retry_or_fail_probe(pass_, probe, _timed_out(probe.call, worker, death))
            return
        death = probe.charge(death)
        if probe.is_single and probe.deaths < self._limits.deaths_max:
            pass_.wait_probe(probe)
        else:
            cause = cmd.Cause(death.stage, death.cause)
            self.quarantine.failed(pass_, probe, cause if _quarantines(pass_, death) else None)

    def _back_off(self, pass_: Pass, raised: int, item: Todo | Probe) -> None:
        """Requeue an item that raised for the `raised`-th time, at once or after its backoff."""
        rest = backoff_after_s(raised, self._limits)
        if rest > 0.0:
            pass_.rest(self.now + rest, item)
        elif isinstance(item, Probe):
            pass_.wait_probe(item)
        else:
            pass_.wait(*item)

    def _give_up(
        self,
        pass_: Pass,
        lo: int,
        hi: int,
        failures: list[cmd.Failure],
        cause: cmd.Cause,
        quarantine: bool,
        culprits: tuple[tuple[int, str], ...] = (),
    ) -> None:
        """Fail calls [lo, hi) permanently, one call or a gang, or quarantine elements."""
        cleared = pass_.searches.cleared.get(lo)
        if not quarantine:
            pass_.searches.forget(lo)
            self._fail(pass_, lo, hi, failures)
        elif cleared is not None:
            self.quarantine.search_rest(pass_, lo, cleared, cause, culprits)
        elif pass_.settings.gang:
            self.quarantine.quarantine_all(pass_, lo, hi, cause, "a gang's step is all or nothing")
        else:
            self.quarantine.begin(pass_, lo, cause, culprits)

    def _finish(self, pass_: Pass, lo: int, hi: int) -> None:
        pass_.histories.pop(lo, None)
        pass_.done.add(lo, hi)
        self.publish(pass_, lo, hi)

    def _fail(self, pass_: Pass, lo: int, hi: int, failures: list[cmd.Failure]) -> None:
        pass_.fail(lo, hi, failures)
        if pass_.last_step is not None:
            self.cancel(pass_, from_call=(pass_.last_step + 1) * pass_.settings.replicas)
        self.publish(pass_, lo, hi)

    # -- what is visible ---------------------------------------------------------------

    def publish(self, pass_: Pass, lo: int, hi: int) -> None:
        """Report the steps that became visible when calls [lo, hi) ended."""
        if pass_.settings.ordered:
            self.publish_in_order(pass_)
            return
        replicas = pass_.settings.replicas
        for step in range(lo // replicas, (hi - 1) // replicas + 1):
            first = step * replicas
            if pass_.done.covers(first, first + replicas):
                pass_.done.discard(first, first + replicas)
                self._report(pass_, step, step + 1)

    def publish_in_order(self, pass_: Pass) -> None:
        first, end = pass_.visible, pass_.take_visible()
        pass_.visible = end
        self._report(pass_, first, end)
        if pass_.state is PassState.ENDED and pass_.visible == pass_.offered:
            pass_.become("all visible")
            self._out.append(cmd.PassComplete(pass_.id))

    def _report(self, pass_: Pass, first: int, end: int) -> None:
        if pass_.failures:
            first = self._report_failures(pass_, first, end)
        if first < end:
            self._out.append(cmd.StepsReady(pass_.id, first, end))

    def _report_failures(self, pass_: Pass, first: int, end: int) -> int:
        """Report the steps up to the last failed one before `end`, and return the step after it."""
        replicas = pass_.settings.replicas
        for step in sorted({c // replicas for c in pass_.failures if first <= c // replicas < end}):
            if step > first:
                self._out.append(cmd.StepsReady(pass_.id, first, step))
            calls = range(step * replicas, (step + 1) * replicas)
            causes = tuple(pass_.failures.pop(c) for c in calls if c in pass_.failures)
            self._out.append(cmd.StepFailed(pass_.id, step, causes))
            if pass_.settings.ordered:
                pass_.become("failure reported")
                self.cancel(pass_, from_call=0)
                return end
            first = step + 1
        return first

    def report_drained(self, pass_: Pass) -> None:
        if pass_.draining and not pass_.drain_reported and pass_.leased == 0:
            pass_.drain_reported = True
            self._out.append(cmd.PassDrained(pass_.id))


def _timed_out(call: int, worker: str, death: Death) -> RaisedCall:
    cause = cmd.Cause(death.stage, death.cause)
    return RaisedCall(call, worker, death.retries, quarantine=death.quarantine, cause=cause)


def _quarantines(pass_: Pass, death: Death) -> bool:
    return death.quarantine if death.stage else pass_.settings.quarantine
