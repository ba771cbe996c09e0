"""Find the elements of a failed call that fail alone, by executing subsets of them.

Rules
-----
* Aligned halves are executed: first both halves of the whole call, then both halves of each subset that
  failed, down to single elements. Nothing is inferred: one half that passed does not prove that the other
  contains a culprit, because elements may also fail only together.
* A culprit is an element that fails alone. A larger subset that fails is only split, so one attempt is
  enough for it; `Outcomes` decides how many attempts a single element has.
* So the outcome depends on which subsets fail, not on the order of the reports.
* k culprits among n elements need about 2 k log2(n / k) + 2 k probes, at most 2 n. Beyond `probes_max`
  the search is abandoned.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from msgspec import Struct, field

from pipedist.errors import LocalProtocolError
from pipedist.scheduler.commands import Cause

Span = tuple[int, int]  # positions [lo, hi) of elements in a call's shard


class Bisection:
    """The search in one call of separable elements, which failed as a whole for `cause`."""

    __slots__ = ("_budget", "culprits", "elements", "trying")

    def __init__(self, elements: int, probes_max: int, cause: Cause) -> None:
        self.elements = elements
        self.trying: set[Span] = set()  # pending
        self.culprits: dict[int, Cause] = {}  # elements that fail alone, by position
        self._budget = probes_max
        if elements == 1:  # it failed alone
            self.culprits[0] = cause

    def begin(self) -> Sequence[Span]:
        """Return the first subsets to execute; none if there are fewer than two elements."""
        return self._halves((0, self.elements)) if self.elements > 1 else ()

    def passed(self, span: Span) -> None:
        self._over(span)

    def failed(self, span: Span, cause: Cause | None) -> Sequence[Span]:
        """Record that a subset failed, and return the next; with `cause`, a single element is a culprit."""
        self._over(span)
        lo, hi = span
        if hi - lo > 1:
            return self._halves(span)
        if cause is not None:
            self.culprits[lo] = cause
        return ()

    @property
    def is_given_up(self) -> bool:
        return self._budget < 0

    @property
    def is_over(self) -> bool:
        return self.is_given_up or not self.trying

    @property
    def healthy(self) -> tuple[Span, ...]:
        ends = [-1, *sorted(self.culprits), self.elements]
        return tuple((a + 1, b) for a, b in pairwise(ends) if a + 1 < b)

    def _halves(self, span: Span) -> Sequence[Span]:
        lo, hi = span
        self._budget -= 2
        if self._budget < 0:
            return ()
        mid = (lo + hi) // 2
        halves = ((lo, mid), (mid, hi))
        self.trying.update(halves)
        return halves

    def _over(self, span: Span) -> None:
        if span not in self.trying:
            raise LocalProtocolError(f"elements {span} were executed, but not requested")
        self.trying.remove(span)


class Death(Struct, frozen=True):
    """The loss of a worker, and its meaning for the call that was running; see `events.WorkerLost`."""

    cause: str
    stage: str = ""
    timed_out: bool = False
    retries: int = 0
    quarantine: bool = False


class CallHistory(Struct, eq=False, kw_only=True):
    """The failed attempts of a call, or of some of its elements; other calls have none."""

    raised: Counter[str] = field(default_factory=Counter)  # attempts, by stage
    deaths: int = 0  # of workers that executed it
    before: int = 0  # number of attempts before its culprits were skipped
    _named: list[Death] = field(default_factory=list)  # deaths with a known stage

    @property
    def tried(self) -> int:
        return self.before + self.raised.total() + self.deaths

    def charge(self, death: Death) -> Death:
        """Add a death, and return the most frequent one with a known stage, else this one.

        A worker may also be killed from outside while it runs a call that kills; if it died with its fork
        server, the stage is unknown. The outcome must not depend on the order of deaths.
        """
        self.deaths += 1
        if death.stage:
            self._named.append(death)
        return max(self._named, key=self._named.count, default=death)

    def begin_again(self) -> None:
        """Forget the failures, but not their number: the call is executed without its culprits."""
        self.before, self.deaths = self.tried, 0
        self.raised.clear()
        self._named.clear()


class Probe(CallHistory, eq=False):
    """A subset of a call's elements that is executed by itself; its result does not count."""

    call: int
    span: Span

    @property
    def is_single(self) -> bool:
        return self.span[1] - self.span[0] == 1


class CulpritSearch(Struct, eq=False):
    cause: Cause
    # Those that the stage named; others are searched if the rest fails. Without any, the call is bisected, once
    culprits: tuple[tuple[int, str], ...] = ()
    bisection: Bisection | None = None  # None until the number of elements is known


class CulpritSearches(Struct, eq=False):
    calls: dict[int, CulpritSearch] = field(default_factory=dict)
    waiting: list[Probe] = field(default_factory=list)  # for a worker, the lowest call first
    cleared: dict[int, CulpritSearch] = field(default_factory=dict)  # finished, by call

    def wait(self, probe: Probe) -> None:
        insort(self.waiting, probe, key=lambda x: (x.call, x.span))

    def elements_of(self, call: int) -> tuple[Span, ...]:
        """Return the elements of a call to execute; empty: all of them."""
        cleared = self.cleared.get(call)
        bisection = cleared.bisection if cleared is not None else None
        return bisection.healthy if bisection is not None and bisection.culprits else ()

    def forget(self, call: int) -> None:
        """Drop the search of a call that is over or obsolete."""
        self.cleared.pop(call, None)
        if self.calls.pop(call, None) is not None:
            self.waiting = [probe for probe in self.waiting if probe.call != call]

    def forget_from(self, call: int) -> None:
        for each in [c for c in (*self.calls, *self.cleared) if c >= call]:
            self.forget(each)
