"""How a worker comes in: what people are told meanwhile, and what it takes over from its scheduler."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

from pipedist.protocol.messages import Welcome

SILENT_S = 2.0
"""How long a scheduler may take to answer before that is told."""


class Joining:
    """From Hello to Welcome.

    Args:
        tell: told, for people, that the worker has joined, or waits for a scheduler.
        threads: BLAS and OpenMP threads of this process.
        join_s: how long the connection may take, seconds.
        doubt: returns what is wrong with the endpoint, after "; "; "" if it may still be right.
    """

    def __init__(
        self, tell: Callable[[str], None], *, threads: int, join_s: float, doubt: Callable[[], str]
    ) -> None:
        self._tell = tell
        self._doubt = doubt
        self._threads = threads
        self._join_s = join_s
        self._waits_from: float | None = None
        """Since when nobody has answered; None where that has been told, or does not matter any more."""

    def begin(self) -> None:
        """Hello is being said."""
        self._waits_from = time.monotonic()

    def look(self) -> None:
        """Tell once that nobody answers, if it has taken that long, and is waited for still."""
        if self._waits_from is None:
            return
        if SILENT_S <= time.monotonic() - self._waits_from < self._join_s:
            self._waits_from = None
            self._tell(f"waiting for a scheduler, for at most {self._join_s:.3g} s{self._doubt()}")

    def joined(self, welcome: Welcome) -> None:
        """Tell that the worker is in, and resolve modules as the scheduler's process on this host does."""
        self._waits_from = None
        threads = "1 thread" if self._threads == 1 else f"{self._threads} threads"
        self._tell(f"joined cluster {welcome.cluster}, {threads}")
        if welcome.notice:
            self._tell(welcome.notice)
        theirs = [entry for entry in map(os.fsdecode, welcome.sys_path) if os.path.isabs(entry)]
        if theirs:
            sys.path[:] = theirs + [entry for entry in sys.path if entry not in theirs]
