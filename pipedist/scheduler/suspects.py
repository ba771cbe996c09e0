"""Calls whose guilty elements are looked for: what is tried, and what is left out."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from pipedist.scheduler.bisection import Bisection, Span
from pipedist.scheduler.commands import Cause
from pipedist.scheduler.deaths import Death


@dataclass(slots=True, eq=False)
class Probe:
    """A subset of a call's elements which is tried by itself; what comes of it does not count."""

    call: int
    span: Span
    raised: Counter[str] = field(default_factory=Counter)
    """How many attempts raised, by the stage that did."""
    deaths: int = 0
    """How many workers died while trying it."""
    named: list[Death] = field(default_factory=list)
    """These deaths, as far as it is known in which stage they were."""

    @property
    def tried(self) -> int:
        """How many attempts are over."""
        return self.raised.total() + self.deaths

    @property
    def is_single(self) -> bool:
        """Whether it is one element."""
        return self.span[1] - self.span[0] == 1


@dataclass(slots=True, eq=False)
class Suspect:
    """A call that failed for good, and whose guilty elements are looked for."""

    cause: Cause
    """Why the whole call failed."""
    bisection: Bisection | None = None
    """None until it is known how many elements there are."""


@dataclass(slots=True, eq=False)
class Suspects:
    """Those of one pass."""

    calls: dict[int, Suspect] = field(default_factory=dict)
    """By call."""
    waiting: list[Probe] = field(default_factory=list)
    """What waits for a worker, of the lowest call first."""
    cleared: dict[int, Suspect] = field(default_factory=dict)
    """By call, those whose guilty elements are known: it is executed once more, without them."""

    def wait(self, probe: Probe) -> None:
        """Let a probe wait for a worker."""
        at = len(self.waiting)
        while at and (probe.call, probe.span) < (self.waiting[at - 1].call, self.waiting[at - 1].span):
            at -= 1
        self.waiting.insert(at, probe)

    def elements_of(self, call: int) -> tuple[Span, ...]:
        """Return which elements of a call are sent; empty: all of them."""
        cleared = self.cleared.get(call)
        return cleared.bisection.innocent if cleared is not None and cleared.bisection is not None else ()

    def forget(self, call: int) -> None:
        """Let go of a call that is over, or of no use any more."""
        self.cleared.pop(call, None)
        if self.calls.pop(call, None) is not None:
            self.waiting = [probe for probe in self.waiting if probe.call != call]

    def forget_from(self, call: int) -> None:
        """Let go of all calls >= `call`."""
        for each in [c for c in (*self.calls, *self.cleared) if c >= call]:
            self.forget(each)
