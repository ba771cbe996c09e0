"""Search for the culprits of calls that failed permanently, and quarantine them.

    call fails --SizeCall/CallSized--> probes <--> bisection --> no more probes --> once more, without culprits
                                           |                                            |        |
                              inseparable, or too many probes                        returns   fails
                                           '--> all quarantined <---------------------- | --------'
                                                                              the culprits are quarantined

If no element fails alone, all are executed once more: what failed may have been the worker.

A stage that is called with single elements names its culprits, and the call is executed without them before any
probe. If then another stage fails, the search goes on (`search_rest`).

During the search the call itself does not wait, is not leased, and is not done. Its probes are leased one
by one, to idle workers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipedist.scheduler import commands as cmd
from pipedist.scheduler.bisection import Bisection, CallHistory, CulpritSearch, Probe, Span
from pipedist.scheduler.leases import Lease
from pipedist.scheduler.membership import Membership
from pipedist.scheduler.passes import Pass
from pipedist.scheduler.settings import SchedulerLimits

CAUSES_MAX = 3  # failures that are listed in the error of a pass with too many


@dataclass(eq=False)
class Quarantine:
    _limits: SchedulerLimits
    _members: Membership
    _out: list[cmd.Command]
    _cancel: Callable[[Pass, Lease], None]
    _finish: Callable[[Pass, int, int], None]  # marks calls [lo, hi) as over, without a result

    def begin(
        self, pass_: Pass, call: int, cause: cmd.Cause, culprits: tuple[tuple[int, str], ...] = ()
    ) -> None:
        pass_.searches.calls[call] = CulpritSearch(cause, culprits)
        self._out.append(cmd.SizeCall(pass_.id, call))

    def search_rest(
        self,
        pass_: Pass,
        call: int,
        search: CulpritSearch,
        cause: cmd.Cause,
        culprits: tuple[tuple[int, str], ...],
    ) -> None:
        """Go on with a call that failed again, after culprits were named or a bisection has ended.

        `culprits` are positions in the rest. If the failure names none of them, the call is bisected; if it was
        bisected before, all its elements are quarantined.
        """
        bisection = search.bisection
        assert bisection is not None  # set when it was cleared
        rest = [at for lo, hi in bisection.healthy for at in range(lo, hi)]
        found = {rest[at]: cmd.Cause(cause.stage, text) for at, text in culprits if at < len(rest)}
        if not found and not search.culprits:
            why = "the rest still fails" if bisection.culprits or culprits else "no element fails alone"
            self.quarantine_all(pass_, call, call + 1, cause, f"not separable: {why}")
            return
        if not found:
            pass_.quarantined -= len(bisection.culprits)  # they are found again
            pass_.searches.forget(call)
            self.begin(pass_, call, cause)
            return
        bisection.culprits.update(found)
        for each in found.values():
            self._found(pass_, call, each)
        self._conclude(pass_, call, search, bisection)

    def sized(self, pass_: Pass, call: int, elements: int) -> None:
        search = pass_.searches.calls.get(call)
        if search is None or search.bisection is not None:
            return  # the pass fails at an earlier step
        search.bisection = Bisection(elements, self._limits.probes_max, search.cause)
        known = {at: cmd.Cause(search.cause.stage, text) for at, text in search.culprits if at < elements}
        if known:
            search.bisection.culprits.update(known)
        else:
            self._try(pass_, call, search.bisection.begin())
        for cause in search.bisection.culprits.values():
            self._found(pass_, call, cause)
        self._conclude(pass_, call, search, search.bisection)

    def passed(self, pass_: Pass, probe: Probe) -> None:
        search = pass_.searches.calls.get(probe.call)
        if search is not None and search.bisection is not None:
            search.bisection.passed(probe.span)
            self._conclude(pass_, probe.call, search, search.bisection)

    def failed(self, pass_: Pass, probe: Probe, cause: cmd.Cause | None) -> None:
        """Record that a probe failed for good; without `cause` its stage does not quarantine: it proves nothing."""
        search = pass_.searches.calls.get(probe.call)
        if search is not None and search.bisection is not None:
            self._try(pass_, probe.call, search.bisection.failed(probe.span, cause))
            if probe.is_single and cause is not None:
                self._found(pass_, probe.call, cause)
            self._conclude(pass_, probe.call, search, search.bisection)

    def returned(self, pass_: Pass, lo: int, hi: int) -> None:
        """Report the elements that were skipped in calls [lo, hi), whose results count now."""
        searches = pass_.searches
        for call in [c for c in searches.cleared if lo <= c < hi]:
            bisection = searches.cleared[call].bisection
            assert bisection is not None  # set when it was cleared
            if culprits := _culprits(bisection):
                self._out.append(cmd.CallsQuarantined(pass_.id, call, call + 1, culprits, remains=True))
            searches.forget(call)

    def quarantine_all(self, pass_: Pass, lo: int, hi: int, cause: cmd.Cause, why: str) -> None:
        """Quarantine all elements of one call or a gang; `why` its culprits are not known."""
        search = pass_.searches.calls.get(lo) or pass_.searches.cleared.get(lo)
        if search is not None and search.bisection is not None:
            pass_.quarantined -= len(search.bisection.culprits)  # `count` counts all elements
        self._note(pass_, lo, cause)
        pass_.searches.forget(lo)
        whole = cmd.Cause(cause.stage, f"{cause.text} ({why})")
        self._out.append(cmd.CallsQuarantined(pass_.id, lo, hi, (), whole))
        self._finish(pass_, lo, hi)

    def count(self, pass_: Pass, elements: int) -> None:
        """Count failed elements, and report once that a pass has more than it may have."""
        limit = pass_.settings.quarantine_max
        pass_.quarantined += elements
        if limit is not None and pass_.quarantined > limit and not pass_.is_full:
            pass_.is_full = True
            self._out.append(cmd.QuarantineFull(pass_.id, pass_.quarantined, tuple(pass_.quarantine_causes)))

    def _found(self, pass_: Pass, call: int, cause: cmd.Cause) -> None:
        self._note(pass_, call, cause)
        self.count(pass_, 1)

    def _note(self, pass_: Pass, call: int, cause: cmd.Cause) -> None:
        if len(pass_.quarantine_causes) < CAUSES_MAX:
            pass_.quarantine_causes.append((call, cause))

    def _try(self, pass_: Pass, call: int, spans: Sequence[Span]) -> None:
        for span in spans:
            pass_.wait_probe(Probe(call, span))

    def _conclude(self, pass_: Pass, call: int, search: CulpritSearch, bisection: Bisection) -> None:
        if not bisection.is_over:
            return
        if bisection.is_given_up:
            self._stop_trying(pass_, call)
            why = f"not separable: the search needs more than {self._limits.probes_max} probes"
            self.quarantine_all(pass_, call, call + 1, search.cause, why)
        elif not bisection.elements:
            why = "not separable: its elements can't be executed separately"
            self.quarantine_all(pass_, call, call + 1, search.cause, why)
        elif not bisection.healthy:
            pass_.searches.forget(call)
            self._out.append(cmd.CallsQuarantined(pass_.id, call, call + 1, _culprits(bisection)))
            self._finish(pass_, call, call + 1)
        else:
            history = pass_.histories.setdefault(call, CallHistory())
            history.begin_again()
            pass_.searches.forget(call)
            pass_.searches.cleared[call] = search
            pass_.wait(call, call + 1, history.tried)

    def _stop_trying(self, pass_: Pass, call: int) -> None:
        pass_.backing_off.drop_probes(call)
        for lease in [x for x in self._members.leases.values() if x.pass_id == pass_.id]:
            if lease.probe is not None and lease.probe.call == call:
                self._cancel(pass_, lease)


def _culprits(bisection: Bisection) -> tuple[tuple[int, cmd.Cause], ...]:
    return tuple(sorted(bisection.culprits.items()))
