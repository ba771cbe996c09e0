"""Drives the search for the guilty elements of calls that failed for good, and says what came of it.

    call fails --SizeCall/CallSized--> probes <--> bisection --> guilty known --> once more, without them
                                                     |                                  |        |
                                        none, or too many probes                     returns   fails
                                                     '--> all of it is set aside <----- | --------'
                                                                                 the guilty are set aside

A suspect call is in no other place meanwhile: it does not wait, is under no lease, and is not done.
Its probes are leased one by one, to idle workers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pipedist.scheduler import commands as cmd
from pipedist.scheduler.bisection import Bisection, Span
from pipedist.scheduler.membership import Lease, Membership
from pipedist.scheduler.passes import Pass, Trouble
from pipedist.scheduler.settings import Limits
from pipedist.scheduler.suspects import Probe, Suspect


class Separation:
    """Finds guilty elements.

    Args:
        limits, members: the scheduler's.
        out: where commands are added.
        cancel: takes a lease away.
        finish: enters calls [lo, hi) as over, without a result.
    """

    def __init__(
        self,
        limits: Limits,
        members: Membership,
        out: list[cmd.Command],
        cancel: Callable[[Pass, Lease], None],
        finish: Callable[[Pass, int, int], None],
    ) -> None:
        self._limits = limits
        self._members = members
        self._out = out
        self._cancel = cancel
        self._finish = finish

    def begin(self, pass_: Pass, call: int, cause: cmd.Cause) -> None:
        """Suspect a call, which has failed for good."""
        pass_.suspects.calls[call] = Suspect(cause)
        self._out.append(cmd.SizeCall(pass_.id, call))

    def sized(self, pass_: Pass, call: int, elements: int) -> None:
        """Begin the search in a call of so many elements."""
        suspect = pass_.suspects.calls.get(call)
        if suspect is None or suspect.bisection is not None:
            return  # its pass fails at an earlier step
        suspect.bisection = Bisection(elements, self._limits.probes_max, suspect.cause)
        self._try(pass_, call, suspect.bisection.begin())
        self._conclude(pass_, call, suspect, suspect.bisection)

    def passed(self, pass_: Pass, probe: Probe) -> None:
        """Take note that a probe returned."""
        suspect = pass_.suspects.calls.get(probe.call)
        if suspect is not None and suspect.bisection is not None:
            suspect.bisection.passed(probe.span)
            self._conclude(pass_, probe.call, suspect, suspect.bisection)

    def failed(self, pass_: Pass, probe: Probe, cause: cmd.Cause | None) -> None:
        """Take note that a probe failed for good.

        Args:
            cause: why; None where its stage says that such calls fail the run, so that it proves nothing.
        """
        suspect = pass_.suspects.calls.get(probe.call)
        if suspect is not None and suspect.bisection is not None:
            self._try(pass_, probe.call, suspect.bisection.failed(probe.span, cause))
            self._conclude(pass_, probe.call, suspect, suspect.bisection)

    def returned(self, pass_: Pass, lo: int, hi: int) -> None:
        """Tell which elements were left out of calls [lo, hi), whose results count now."""
        suspects = pass_.suspects
        for call in [c for c in suspects.cleared if lo <= c < hi]:
            bisection = suspects.cleared[call].bisection
            assert bisection is not None  # it was cleared by one
            guilty = _guilty(bisection)
            self._out.append(cmd.CallsQuarantined(pass_.id, call, call + 1, guilty, remains=True))
            suspects.forget(call)

    def set_aside(self, pass_: Pass, lo: int, hi: int, cause: cmd.Cause, why: str) -> None:
        """Set all elements of calls [lo, hi) aside, one or a gang's.

        Args:
            why: they can't be told apart, or have not been.
        """
        pass_.suspects.forget(lo)
        whole = cmd.Cause(cause.stage, f"{cause.text} ({why})")
        self._out.append(cmd.CallsQuarantined(pass_.id, lo, hi, (), whole))
        self._finish(pass_, lo, hi)

    def _try(self, pass_: Pass, call: int, spans: Sequence[Span]) -> None:
        for span in spans:
            pass_.wait_probe(Probe(call, span))

    def _conclude(self, pass_: Pass, call: int, suspect: Suspect, bisection: Bisection) -> None:
        """Go on with a call whose guilty elements are known, or can't be."""
        if not bisection.is_over:
            return
        if bisection.is_given_up:
            self._stop_trying(pass_, call)
            why = (
                f"not separable: to find the guilty elements takes more than {self._limits.probes_max} probes"
            )
            self.set_aside(pass_, call, call + 1, suspect.cause, why)
        elif not bisection.guilty:
            why = "no element fails alone" if bisection.elements else "its elements can't be tried apart"
            self.set_aside(pass_, call, call + 1, suspect.cause, f"not separable: {why}")
        elif not bisection.innocent:
            pass_.suspects.forget(call)
            self._out.append(cmd.CallsQuarantined(pass_.id, call, call + 1, _guilty(bisection)))
            self._finish(pass_, call, call + 1)
        else:
            trouble = pass_.trouble.setdefault(call, Trouble())
            trouble.before, trouble.deaths = trouble.tried, 0
            trouble.raised.clear()
            trouble.named.clear()
            pass_.suspects.forget(call)
            pass_.suspects.cleared[call] = suspect
            pass_.wait(call, call + 1, trouble.tried)

    def _stop_trying(self, pass_: Pass, call: int) -> None:
        pass_.resting.drop_probes(call)
        for lease in [x for x in self._members.leases.values() if x.pass_id == pass_.id]:
            if lease.probe is not None and lease.probe.call == call:
                self._cancel(pass_, lease)


def _guilty(bisection: Bisection) -> tuple[tuple[int, cmd.Cause], ...]:
    return tuple(sorted(bisection.guilty.items()))
