"""One re-armable timer."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable


class Timer:
    """One re-armable timer on the running loop.

    It is moved with every event, and rings seldom: so it is armed anew only to ring earlier. What is to
    be later is looked at when it rings.
    """

    def __init__(self, fire: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._fire = fire
        self._handle: asyncio.TimerHandle | None = None
        self._rings_at = math.inf
        self._at = math.inf

    def set(self, at: float | None) -> None:
        """Fire at a time of `time.monotonic`, or never."""
        self._at = math.inf if at is None else at
        if self._at < self._rings_at:
            self._arm()

    def _arm(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._rings_at = self._at
        self._handle = self._loop.call_later(max(0.0, self._at - time.monotonic()), self._ring)

    def _ring(self) -> None:
        rung, self._rings_at = self._rings_at, math.inf
        self._handle = None
        if self._at <= rung:
            self._at = math.inf
            self._fire()
        elif self._at < math.inf:
            self._arm()

    def cancel(self) -> None:
        """Do not fire."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        self._rings_at = self._at = math.inf
