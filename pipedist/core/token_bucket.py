"""A limit on the rate of lines."""

from __future__ import annotations

import time
from collections.abc import Callable


class TokenBucket:
    """Allows `burst` lines at once and `per_s` a second after them, and counts the others."""

    def __init__(self, burst: float, per_s: float, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._burst = self._tokens = float(burst)
        self._per_s = per_s
        self._clock_s = clock_s
        self._filled_s = clock_s()
        self.denied = 0  # lines that were not allowed since `take_denied`

    def allows(self) -> bool:
        now_s = self._clock_s()
        self._tokens = min(self._burst, self._tokens + (now_s - self._filled_s) * self._per_s)
        self._filled_s = now_s
        if self._tokens < 1:
            self.denied += 1
            return False
        self._tokens -= 1
        return True

    def take_denied(self) -> int:
        denied, self.denied = self.denied, 0
        return denied
