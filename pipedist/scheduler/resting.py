"""Calls that rest before they are tried again."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import count

from pipedist.scheduler.ranges import Todo
from pipedist.scheduler.settings import Limits
from pipedist.scheduler.suspects import Probe


def rest_s(raised: int, limits: Limits) -> float:
    """Return how long a call rests that has raised so often: not at all the first time, then ever longer."""
    if raised <= 1:
        return 0.0
    return min(limits.backoff_s_max, limits.backoff_s * 2.0 ** min(raised - 2, 60))


class RestingCalls:
    """Calls of one pass, each with the time at which it has rested."""

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
        """What rests, each with the time at which it has rested; in no order."""
        return ((due, item) for due, _, item in self._heap)

    @property
    def due(self) -> float | None:
        """When the first of them has rested; None if there are none."""
        return self._heap[0][0] if self._heap else None

    def put(self, due: float, item: Todo | Probe) -> None:
        """Let calls rest until `due`."""
        heapq.heappush(self._heap, (due, next(self._order), item))

    def take(self, now: float) -> Iterator[Todo | Probe]:
        """Remove and yield those that have rested."""
        while self._heap and self._heap[0][0] <= now:
            yield heapq.heappop(self._heap)[2]

    def drop_from(self, call: int) -> None:
        """Forget all calls >= `call`."""
        self._heap = [x for x in self._heap if _first(x[2]) < call]
        heapq.heapify(self._heap)

    def drop_probes(self, call: int) -> None:
        """Forget the probes of a call."""
        self._heap = [x for x in self._heap if not (isinstance(x[2], Probe) and x[2].call == call)]
        heapq.heapify(self._heap)


def _first(item: Todo | Probe) -> int:
    return item.call if isinstance(item, Probe) else item.lo
