"""One re-armable timer."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable


class Timer:
    """One re-armable timer on the running loop."""

    def __init__(self, fire: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._fire = fire
        self._handle: asyncio.TimerHandle | None = None
        self._at = math.inf

    def set(self, at: float | None) -> None:
        """Fire at a time of `time.monotonic`, or never."""
        when = math.inf if at is None else at
        if when == self._at:
            return
        self.cancel()
        self._at = when
        if when < math.inf:
            delay = max(0.0, when - time.monotonic())
            self._handle = self._loop.call_later(delay, self._ring)

    def _ring(self) -> None:
        self._at = math.inf
        self._fire()

    def cancel(self) -> None:
        """Do not fire."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        self._at = math.inf
