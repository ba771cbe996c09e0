"""Sets and queues of calls, kept as ranges [lo, hi), so that a million calls cost what one does."""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

from pipedist.scheduler.bisection import Probe
from pipedist.scheduler.settings import SchedulerLimits


class RangeSet:
    """A set of ints as sorted, disjoint, non-adjacent ranges."""

    __slots__ = ("_his", "_los")

    def __init__(self) -> None:
        self._los: list[int] = []
        self._his: list[int] = []

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(zip(self._los, self._his, strict=True))

    def __len__(self) -> int:
        """Return the number of ranges (not of ints)."""
        return len(self._los)

    def add(self, lo: int, hi: int) -> None:
        """Add [lo, hi), parts of which may be contained."""
        if lo >= hi:
            return
        if self._his and self._his[-1] == lo:  # the common case: work comes back in order
            self._his[-1] = hi
            return
        i = bisect_left(self._his, lo)
        j = bisect_right(self._los, hi)
        if i < j:
            lo = min(lo, self._los[i])
            hi = max(hi, self._his[j - 1])
        self._los[i:j] = [lo]
        self._his[i:j] = [hi]

    def discard(self, lo: int, hi: int) -> None:
        if lo >= hi:
            return
        i = bisect_right(self._his, lo)
        j = bisect_left(self._los, hi)
        if i >= j:
            return
        if j - i == 1 and self._los[i] == lo and self._his[i] == hi:  # the common case
            del self._los[i], self._his[i]
            return
        kept = [(a, b) for a, b in ((self._los[i], lo), (hi, self._his[j - 1])) if a < b]
        self._los[i:j] = [a for a, _ in kept]
        self._his[i:j] = [b for _, b in kept]

    def end_from(self, x: int) -> int:
        """Return the end of the range that holds `x`, or `x` itself if none does."""
        i = bisect_right(self._los, x) - 1
        return self._his[i] if i >= 0 and self._his[i] > x else x

    def covers(self, lo: int, hi: int) -> bool:
        return lo >= hi or self.end_from(lo) >= hi


class Todo(NamedTuple):
    """Calls [lo, hi), all of one attempt."""

    lo: int
    hi: int
    attempt: int


class TodoQueue:
    """Calls that wait for a worker, lowest first, so that earlier steps finish first."""

    __slots__ = ("_items", "calls")

    def __init__(self) -> None:
        self._items: list[Todo] = []
        self.calls = 0  # waiting

    def __iter__(self) -> Iterator[Todo]:
        return iter(self._items)

    @property
    def first(self) -> Todo:
        return self._items[0]

    def put(self, lo: int, hi: int, attempt: int) -> None:
        """Add calls [lo, hi), which must not be waiting already."""
        if lo >= hi:
            return
        self.calls += hi - lo
        if self._items and self._items[-1].hi == lo and self._items[-1].attempt == attempt:
            self._items[-1] = Todo(self._items[-1].lo, hi, attempt)
        elif not self._items or self._items[-1].hi <= lo:
            self._items.append(Todo(lo, hi, attempt))
        else:
            insort(self._items, Todo(lo, hi, attempt))

    def take(self, calls_max: int) -> Todo:
        first = self._items[0]
        if first.hi - first.lo <= calls_max:
            del self._items[0]
            self.calls -= first.hi - first.lo
            return first
        cut = first.lo + calls_max
        self._items[0] = Todo(cut, first.hi, first.attempt)
        self.calls -= calls_max
        return Todo(first.lo, cut, first.attempt)

    def take_untried(self, lo: int, hi: int) -> list[Todo]:
        """Remove and return those of calls [lo, hi) that wait for their first attempt."""
        found, left = [], []
        for item in self._items:
            a, b = max(item.lo, lo), min(item.hi, hi)
            if item.attempt or a >= b:
                left.append(item)
                continue
            found.append(Todo(a, b, 0))
            left += [Todo(x, y, 0) for x, y in ((item.lo, a), (b, item.hi)) if x < y]
        if found:
            self._items = left
            self.calls -= sum(t.hi - t.lo for t in found)
        return found

    def drop_from(self, call: int) -> None:
        self._items = [Todo(t.lo, min(t.hi, call), t.attempt) for t in self._items if t.lo < call]
        self.calls = sum(t.hi - t.lo for t in self._items)


def backoff_after_s(raised: int, limits: SchedulerLimits) -> float:
    """Return the backoff after a number of exceptions, in seconds: 0 after the first, then doubling."""
    if raised <= 1:
        return 0.0
    return min(limits.backoff_s_max, limits.backoff_s * 2.0 ** min(raised - 2, 60))


class BackoffQueue:
    __slots__ = ("_heap", "_order")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Todo | Probe]] = []
        self._order = count()

    def __iter__(self) -> Iterator[Todo | Probe]:
        return (item for _, _, item in self._heap)

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def schedule(self) -> Iterator[tuple[float, Todo | Probe]]:
        """All items with the times at which they are due, in no order."""
        return ((due, item) for due, _, item in self._heap)

    @property
    def due(self) -> float | None:
        return self._heap[0][0] if self._heap else None

    def put(self, due: float, item: Todo | Probe) -> None:
        heapq.heappush(self._heap, (due, next(self._order), item))

    def take(self, now: float) -> Iterator[Todo | Probe]:
        while self._heap and self._heap[0][0] <= now:
            yield heapq.heappop(self._heap)[2]

    def drop_from(self, call: int) -> None:
        self._heap = [x for x in self._heap if (x[2].call if isinstance(x[2], Probe) else x[2].lo) < call]
        heapq.heapify(self._heap)

    def drop_probes(self, call: int) -> None:
        self._heap = [x for x in self._heap if not (isinstance(x[2], Probe) and x[2].call == call)]
        heapq.heapify(self._heap)
