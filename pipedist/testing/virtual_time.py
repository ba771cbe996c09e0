"""Time that jumps to whatever happens next."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any, Protocol


class Time(Protocol):
    """What the simulated network and processes need of a clock."""

    @property
    def now(self) -> float:
        """Seconds since the beginning."""

    def at(self, when: float, action: Callable[..., object], *args: object) -> None:
        """Let something happen at a time, after everything that was to happen then before."""


class VirtualTime:
    """A clock, and what happens when; it stands still while something happens."""

    __slots__ = ("_heap", "_order", "now")

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds since the beginning."""
        self._heap: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._order = 0

    def at(self, when: float, action: Callable[..., object], *args: object) -> None:
        """Let something happen at a time, after everything that was to happen then before."""
        self._order += 1
        heappush(self._heap, (when, self._order, action, args))

    def clear(self) -> None:
        """Forget what is still to happen."""
        self._heap.clear()

    def run(self, goes_on: Callable[[], bool], until: float) -> None:
        """Jump from one thing that happens to the next, as long as there is one.

        Args:
            goes_on: asked before each whether that one is to happen.
            until: nothing that is to happen later does.
        """
        heap = self._heap
        while heap and heap[0][0] <= until and goes_on():
            self.now, _, action, args = heappop(heap)
            action(*args)
