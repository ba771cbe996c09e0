"""An asyncio event loop whose clock jumps to its next timer when there is nothing else to do.

While `virtual_clock` lasts, it is the clock of the simulation's threads, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import selectors
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class NothingHappens(RuntimeError):
    """Everybody waits, and nothing is to happen any more: without virtual time, for ever."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop with a clock of its own, which begins at 0."""

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds since the beginning."""
        self.errors: list[BaseException] = []
        """What was raised where nobody could catch it: in callbacks, and in tasks that nobody awaits."""
        self.is_interrupted = False
        """The simulation is to end soon."""
        self.on_interrupt: Callable[[], object] = lambda: None
        """Called in the loop then."""
        self._due: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._order = 0
        super().__init__(_Jumping(self))
        self.set_debug(False)  # it takes threads that have their turn for ones that may disturb it
        self.set_exception_handler(self._keep_error)

    def time(self) -> float:
        """Return the seconds since the beginning."""
        return self.now

    def at(self, when: float, action: Callable[..., object], *args: object) -> None:
        """Let something happen at a time, after everything that was to happen then before."""
        self._order += 1  # asyncio itself leaves open which of two timers of the same time comes first
        heappush(self._due, (when, self._order, action, args))
        self.call_at(when, self._next)

    def interrupt(self) -> None:
        """Let the simulation end soon; for any thread."""
        self.is_interrupted = True
        with contextlib.suppress(RuntimeError):  # it is over
            self.call_soon_threadsafe(self.on_interrupt)

    def _next(self) -> None:
        when, _, action, args = heappop(self._due)
        self.now = max(self.now, when)
        action(*args)

    def _keep_error(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.errors.append(context.get("exception") or RuntimeError(context["message"]))


class _Jumping(selectors.DefaultSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._virtual_loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            raise NothingHappens("everybody waits, and nothing is to happen any more")
        self._virtual_loop.now += max(timeout, 0.0)
        return []
