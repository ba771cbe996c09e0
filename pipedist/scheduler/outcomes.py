"""What becomes of calls: what counts, what is tried again, what fails, and what is visible."""

from __future__ import annotations

from collections.abc import Sequence

from pipedist.scheduler import commands as cmd
from pipedist.scheduler import events as ev
from pipedist.scheduler.dealing import Dealing
from pipedist.scheduler.deaths import Death, likeliest
from pipedist.scheduler.gangs import Gang, Raised
from pipedist.scheduler.membership import Lease, Membership
from pipedist.scheduler.passes import Pass, Trouble
from pipedist.scheduler.ranges import Todo
from pipedist.scheduler.resting import rest_s
from pipedist.scheduler.separation import Separation
from pipedist.scheduler.settings import Limits
from pipedist.scheduler.speculation import Speculation
from pipedist.scheduler.states import GangState, PassState
from pipedist.scheduler.suspects import Probe

_ABORTED_BY_NOBODY = "its gang was aborted, but none of its calls raised"


class Outcomes:
    """Enters what came of leases into their passes.

    Args:
        limits, members, passes, dealing: the scheduler's.
        out: where commands are added.
    """

    def __init__(
        self,
        limits: Limits,
        members: Membership,
        passes: dict[int, Pass],
        dealing: Dealing,
        out: list[cmd.Command],
    ) -> None:
        self._limits = limits
        self._members = members
        self._passes = passes
        self._out = out
        self.now = 0.0
        """The time of the event that is being handled."""
        self.separation = Separation(limits, members, out, self._cancel, self._finish)
        self.speculation = Speculation(limits, members, passes, dealing, out, self._cancel, self._take_back)

    # -- reports under a lease that is held ------------------------------------------

    def done(self, lease: Lease, event: ev.CallsDone) -> None:
        """Calls of a lease came back."""
        pass_, gang, lo, hi = self._passes[lease.pass_id], lease.gang, event.lo, event.hi
        if gang is not None:
            self._out.append(cmd.StashResults(gang.serial, lo, hi, event.worker))
            gang.came_back(lease.id, event.busy_ns, event.bytes)
            self._reported(pass_, gang, lease, hi)
            return
        if lease.probe is not None:
            self._members.advance(lease, hi)
            pass_.leased -= 1
            self.separation.passed(pass_, lease.probe)
            self.quiet(pass_)
            return
        self.speculation.reported(pass_, lease, self.now)
        if pass_.suspects.cleared:
            self.separation.returned(pass_, lo, hi)
        self._out.append(cmd.AcceptResults(pass_.id, lo, hi, event.worker))
        pass_.came_back(lo, hi, event.busy_ns / 1e9, event.bytes, self._limits)
        self._members.advance(lease, hi)
        self.show(pass_, lo, hi)
        self.quiet(pass_)

    def raised(self, lease: Lease, event: ev.CallFailed) -> None:
        """A call of a lease raised."""
        pass_, gang, call = self._passes[lease.pass_id], lease.gang, event.call
        cause = cmd.Cause(event.stage, event.text)
        raised = Raised(call, event.worker, event.retries, event.aborted, event.quarantine, cause)
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
        if lease.probe is not None:
            self._blame_probe(pass_, lease.probe, raised)
        elif pass_.needs(call):
            self._blame(pass_, call, call + 1, (raised,))
        self.quiet(pass_)

    def _reported(self, pass_: Pass, gang: Gang, lease: Lease, to: int) -> None:
        """A member of a gang has reported its calls up to `to`; with the last one, the gang is over."""
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
                self.show(pass_, gang.lo, gang.hi)
            elif at_fault := gang.at_fault:
                self._blame(pass_, gang.lo, gang.hi, at_fault)
            else:
                first = gang.raised[0]
                self._charge(pass_, gang.lo, gang.hi, first.call, first.worker, Death(_ABORTED_BY_NOBODY))
        self.quiet(pass_)

    def not_sent(self, lease: Lease) -> None:
        """A lease could not be sent: its calls failed for good."""
        pass_, gang = self._passes[lease.pass_id], lease.gang
        calls = [Raised(call, lease.worker) for call in range(lease.lo, lease.hi)]
        if gang is not None:
            self.break_up(pass_, gang)
            self._blame(pass_, gang.lo, gang.hi, calls)
        elif lease.twin is not None:
            self.speculation.failed(pass_, lease)
        else:
            self._members.revoke(lease)
            pass_.leased -= lease.hi - lease.lo
            for raised in calls:
                if pass_.needs(raised.call):
                    self._blame(pass_, raised.call, raised.call + 1, (raised,))
        self.quiet(pass_)

    # -- leases that end early -------------------------------------------------------

    def lost(self, lease: Lease, death: Death, blamed: int | None) -> None:
        """Let a lost lease's calls wait again; the one that was running is charged with the death."""
        pass_, gang, lo = self._passes[lease.pass_id], lease.gang, lease.next
        pass_.leased -= lease.hi - lo
        guilty = blamed is not None and lo <= blamed < lease.hi and pass_.needs(blamed)
        if lease.twin is not None:  # the other attempt goes on
            self.speculation.goes_on(lease.twin)
            self.quiet(pass_)
            return
        if lease.probe is not None:
            if guilty:
                self._charge_probe(pass_, lease.probe, lease.worker, death)
            else:
                pass_.wait_probe(lease.probe)
        elif gang is not None:
            if gang.state is not GangState.BROKEN:  # it starts again, whole
                self.break_up(pass_, gang)
                if blamed is not None and guilty:
                    self._charge(pass_, gang.lo, gang.hi, blamed, lease.worker, death)
                else:
                    pass_.wait(gang.lo, gang.hi, gang.attempt)
        else:
            if blamed is not None and guilty:
                pass_.wait(lo, blamed, lease.attempt)
                self._charge(pass_, blamed, blamed + 1, blamed, lease.worker, death)
                lo = blamed + 1
            pass_.wait(lo, lease.hi, lease.attempt)
        self.quiet(pass_)

    def cancel(self, pass_: Pass, *, from_call: int) -> None:
        """Take the leases of all calls from this one on away: they are of no use any more."""
        if pass_.leased == 0:
            return
        workers, leases = self._members.workers, self._members.leases.values()
        useless = [x for x in leases if x.pass_id == pass_.id and x.lo >= from_call]
        running = [x for x in useless if workers[x.worker].leases[0] == x.id]
        for gang in [x for x in pass_.gangs.values() if x.lo >= from_call]:
            self.break_up(pass_, gang)
        if not pass_.settings.gang:
            for lease in useless:
                self._cancel(pass_, lease)
        for lease in running:  # it may hang: others do not wait behind it
            if not workers[lease.worker].leases:
                self._members.lay_off(workers[lease.worker], lease.id)

    def break_up(self, pass_: Pass, gang: Gang) -> None:
        """End a gang before its calls were reported."""
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
        self.quiet(pass_)

    # -- another attempt, or failure ---------------------------------------------------

    def _blame(self, pass_: Pass, lo: int, hi: int, raised: Sequence[Raised]) -> None:
        """Calls [lo, hi), one or a gang's, were tried and raised: try them again, or fail them for good.

        The stage of the lowest that raised decides: each stage has its own retries, and counts its own.
        """
        trouble, stage = pass_.trouble.setdefault(lo, Trouble()), raised[0].cause.stage
        trouble.raised[stage] += 1
        if trouble.raised[stage] <= raised[0].retries:
            self._rest(pass_, trouble.raised[stage], Todo(lo, hi, trouble.tried))
        else:
            failures = [cmd.Failure(x.call, trouble.tried, x.worker) for x in raised]
            self._give_up(pass_, lo, hi, failures, raised[0].cause, quarantine=raised[0].quarantine)

    def _charge(self, pass_: Pass, lo: int, hi: int, call: int, worker: str, death: Death) -> None:
        """Calls [lo, hi), one or a gang's, are charged with a death: try them again, or fail them."""
        if death.timed_out:
            self._blame(pass_, lo, hi, (_timed_out(call, worker, death),))
            return
        trouble = pass_.trouble.setdefault(lo, Trouble())
        trouble.deaths += 1
        death = likeliest(trouble.named, death)
        if trouble.deaths < self._limits.deaths_max:
            pass_.wait(lo, hi, trouble.tried)
        else:
            failures = [cmd.Failure(call, trouble.tried, worker, death.cause)]
            cause = cmd.Cause(death.stage, death.cause)
            self._give_up(pass_, lo, hi, failures, cause, quarantine=_quarantines(pass_, death))

    def _blame_probe(self, pass_: Pass, probe: Probe, raised: Raised) -> None:
        """A probe raised: try it again, or enter it as failed."""
        stage = raised.cause.stage
        probe.raised[stage] += 1
        if probe.is_single and probe.raised[stage] <= raised.retries:
            self._rest(pass_, probe.raised[stage], probe)
        else:
            self.separation.failed(pass_, probe, raised.cause if raised.quarantine else None)

    def _charge_probe(self, pass_: Pass, probe: Probe, worker: str, death: Death) -> None:
        """A probe is charged with a death: try it again, or enter it as failed."""
        if death.timed_out:
            self._blame_probe(pass_, probe, _timed_out(probe.call, worker, death))
            return
        probe.deaths += 1
        death = likeliest(probe.named, death)
        if probe.is_single and probe.deaths < self._limits.deaths_max:
            pass_.wait_probe(probe)
        else:
            cause = cmd.Cause(death.stage, death.cause)
            self.separation.failed(pass_, probe, cause if _quarantines(pass_, death) else None)

    def _rest(self, pass_: Pass, raised: int, item: Todo | Probe) -> None:
        """Let what raised for the `raised`-th time wait once more, at once or after a rest."""
        rest = rest_s(raised, self._limits)
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
        *,
        quarantine: bool,
    ) -> None:
        """Calls [lo, hi), one or a gang's, were tried often enough: fail them, or set elements aside."""
        if lo in pass_.suspects.cleared:
            self.separation.set_aside(pass_, lo, hi, cause, "not separable: the rest still fails")
        elif not quarantine:
            self._fail(pass_, lo, hi, failures)
        elif pass_.settings.gang:
            self.separation.set_aside(pass_, lo, hi, cause, "a gang's step is all or nothing")
        else:
            self.separation.begin(pass_, lo, cause)

    def _finish(self, pass_: Pass, lo: int, hi: int) -> None:
        """Enter calls [lo, hi) as over, without a result."""
        pass_.trouble.pop(lo, None)
        pass_.done.add(lo, hi)
        self.show(pass_, lo, hi)

    def _fail(self, pass_: Pass, lo: int, hi: int, failures: list[cmd.Failure]) -> None:
        pass_.fail(lo, hi, failures)
        if pass_.last_step is not None:
            self.cancel(pass_, from_call=(pass_.last_step + 1) * pass_.settings.replicas)
        self.show(pass_, lo, hi)

    # -- what is visible ---------------------------------------------------------------

    def show(self, pass_: Pass, lo: int, hi: int) -> None:
        """Tell of what has become visible, now that calls [lo, hi) are over."""
        if pass_.settings.ordered:
            self.show_in_order(pass_)
            return
        replicas = pass_.settings.replicas
        for step in range(lo // replicas, (hi - 1) // replicas + 1):
            first = step * replicas
            if pass_.done.covers(first, first + replicas):
                pass_.done.discard(first, first + replicas)
                self._tell(pass_, step, step + 1)

    def show_in_order(self, pass_: Pass) -> None:
        """Tell of every step of an ordered pass that has become visible; then of the pass's end."""
        first, end = pass_.visible, pass_.take_visible()
        pass_.visible = end
        self._tell(pass_, first, end)
        if pass_.state is PassState.ENDED and pass_.visible == pass_.offered:
            pass_.become("all visible")
            self._out.append(cmd.PassComplete(pass_.id))

    def _tell(self, pass_: Pass, first: int, end: int) -> None:
        if first == end:
            return
        if pass_.failures:
            first = self._tell_failures(pass_, first, end)
        if first < end:
            self._out.append(cmd.StepsReady(pass_.id, first, end))

    def _tell_failures(self, pass_: Pass, first: int, end: int) -> int:
        """Tell of steps up to the last failed one before `end`, and return the step after it."""
        replicas = pass_.settings.replicas
        for step in sorted({c // replicas for c in pass_.failures if first <= c // replicas < end}):
            if step > first:
                self._out.append(cmd.StepsReady(pass_.id, first, step))
            calls = range(step * replicas, (step + 1) * replicas)
            causes = tuple(pass_.failures.pop(c) for c in calls if c in pass_.failures)
            self._out.append(cmd.StepFailed(pass_.id, step, causes))
            if pass_.settings.fail_fast:
                pass_.become("failure told")
                self.cancel(pass_, from_call=0)
                return end
            first = step + 1
        return first

    def quiet(self, pass_: Pass) -> None:
        """Say once that nothing of a held pass is running."""
        if pass_.held and not pass_.told_quiet and pass_.leased == 0:
            pass_.told_quiet = True
            self._out.append(cmd.PassDrained(pass_.id))


def _timed_out(call: int, worker: str, death: Death) -> Raised:
    cause = cmd.Cause(death.stage, death.cause)
    return Raised(call, worker, death.retries, quarantine=death.quarantine, cause=cause)


def _quarantines(pass_: Pass, death: Death) -> bool:
    """Whether elements are set aside of a call under which workers died."""
    return death.quarantine if death.stage else pass_.settings.quarantine
