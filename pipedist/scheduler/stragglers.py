"""Find the leases of a pass that have been silent for longest, and the usual duration.

Measured and compared is the time from the start of a lease, or its last report, to its next report. So the
reason for a long call does not matter (the function, its import, the network), nor do overlapping calls.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable

from pipedist.scheduler.leases import Lease

_SHARE = 0.95  # percentile of the durations with which a call is compared

_PARTS = 8  # buckets per doubling of a duration

_TIME_MIN_S = 1e-9
_LOOK_AGAIN = 1.1  # the percentile is recomputed when the number of durations has grown by this factor


class Durations:
    __slots__ = ("_counts", "_look_at", "_upper_s", "count")

    def __init__(self) -> None:
        self.count = 0
        self._counts: dict[int, int] = {}
        self._upper_s = 0.0
        self._look_at = 0.0

    def add(self, took_s: float) -> None:
        mantissa, exponent = math.frexp(max(took_s, _TIME_MIN_S))
        place = exponent * _PARTS + int((mantissa - 0.5) * 2 * _PARTS)
        self._counts[place] = self._counts.get(place, 0) + 1
        self.count += 1

    @property
    def upper_s(self) -> float:
        """The 95th percentile, rounded up by an eighth at most."""
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
    """The running leases of one pass that may get a second attempt: at `times` the usual duration."""

    __slots__ = ("_running", "_times", "durations")

    def __init__(self, times: float) -> None:
        self.durations = Durations()
        self._times = times
        # A lease moves to the end when it starts or reports: the longest silent one is always first.
        self._running: OrderedDict[int, Lease] = OrderedDict()

    @property
    def first(self) -> Lease | None:
        return next(iter(self._running.values()), None)

    @property
    def leases(self) -> Iterable[Lease]:
        return self._running.values()

    def begun(self, lease: Lease) -> None:
        self._running[lease.id] = lease
        self._running.move_to_end(lease.id)

    def again(self, lease: Lease) -> None:
        """Re-register a lease after its twin was dropped; keep its original start time."""
        later = [other.id for other in self._running.values() if other.since > lease.since]
        self._running[lease.id] = lease
        for id_ in later:  # rare: few calls are slow
            self._running.move_to_end(id_)

    def over(self, lease: Lease) -> None:
        """Remove a lease that ended or may not get a second attempt; unknown leases are ignored."""
        self._running.pop(lease.id, None)

    def limit_s(self, reports_min: int, least_s: float) -> float | None:
        """Return how long a lease may be silent, at least `least_s`; None before `reports_min` durations."""
        if self.durations.count < reports_min:
            return None
        return max(least_s, self._times * self.durations.upper_s)
