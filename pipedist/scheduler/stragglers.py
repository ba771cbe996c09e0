"""Which leases of a pass have been silent for longest, and how long is usual.

What is measured is what is compared: the time from when a lease begins, or was heard of last, to its next
report. So it does not matter what makes a call long (the function, its import, the way back), nor whether
calls of a lease overlap.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipedist.scheduler.membership import Lease

_SHARE = 0.95
"""Of the times; a call is compared with what this share of them does not exceed."""

_PARTS = 8
"""Of each doubling of time: a time is known to an eighth."""

_TIME_MIN_S = 1e-9
_LOOK_AGAIN = 1.1
"""What is usual is found anew when there are so many times as many times as before."""


class Durations:
    """How long something takes, as counts of times that are alike: it does not grow with their number."""

    __slots__ = ("_counts", "_look_at", "_upper_s", "count")

    def __init__(self) -> None:
        self.count = 0
        """How many times there are."""
        self._counts: dict[int, int] = {}
        self._upper_s = 0.0
        self._look_at = 0.0

    def add(self, took_s: float) -> None:
        """Enter a time."""
        mantissa, exponent = math.frexp(max(took_s, _TIME_MIN_S))
        place = exponent * _PARTS + int((mantissa - 0.5) * 2 * _PARTS)
        self._counts[place] = self._counts.get(place, 0) + 1
        self.count += 1

    @property
    def upper_s(self) -> float:
        """The time that 19 of 20 do not exceed, rounded up by an eighth at most."""
        if self.count >= self._look_at:
            self._look_at = self.count * _LOOK_AGAIN + 1e-9
            below, wanted = 0, _SHARE * self.count
            for place in sorted(self._counts):
                below += self._counts[place]
                if below >= wanted:
                    exponent, part = divmod(place, _PARTS)
                    self._upper_s = math.ldexp(0.5 + (part + 1) / (2 * _PARTS), exponent)
                    break
        return self._upper_s


class Stragglers:
    """The leases of one pass that run, and may get a second attempt.

    Args:
        times: how many times as long as usual makes a straggler.
    """

    __slots__ = ("_running", "_times", "durations")

    def __init__(self, times: float) -> None:
        self.durations = Durations()
        self._times = times
        # What begins, or is heard of, goes to the end: the one silent for longest is always the first.
        self._running: OrderedDict[int, Lease] = OrderedDict()

    @property
    def first(self) -> Lease | None:
        """The one that has been silent for longest."""
        return next(iter(self._running.values()), None)

    @property
    def leases(self) -> Iterable[Lease]:
        """All of them, the one that has been silent for longest first."""
        return self._running.values()

    def begun(self, lease: Lease) -> None:
        """A lease runs, or was heard of."""
        self._running[lease.id] = lease
        self._running.move_to_end(lease.id)

    def again(self, lease: Lease) -> None:
        """A lease goes on alone, and may get a second attempt once more: its silence is not over."""
        later = [other.id for other in self._running.values() if other.since > lease.since]
        self._running[lease.id] = lease
        for id_ in later:  # few calls are slow: this is seldom
            self._running.move_to_end(id_)

    def over(self, lease: Lease) -> None:
        """A lease does not run any more, or may not get a second attempt; it may be another's."""
        self._running.pop(lease.id, None)

    def limit_s(self, reports_min: int, least_s: float) -> float | None:
        """Return how long a lease may be silent; None where too little is known.

        Args:
            reports_min: how many times must be known.
            least_s: it is never less.
        """
        if self.durations.count < reports_min:
            return None
        return max(least_s, self._times * self.durations.upper_s)
