"""Lines about deaths of workers and repeated calls as they happen, at a limited rate."""

from __future__ import annotations

import time
from collections.abc import Callable

LOGGER = "pipedist.cluster"  # of these lines and of rejections; without a handler its lines go to stderr

LINES_MAX = 20  # lines at once; after these, one line every LINE_S seconds, which counts those between
LINE_S = 5.0

_CHARACTERS_MAX = 500


def printable(text: str) -> str:
    """Return text of a peer or a user function as one bounded line that a terminal can show."""
    cut = " ".join(text[:_CHARACTERS_MAX].splitlines())
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in cut)


class Notices:
    """Logs lines as warnings."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._lines = float(LINES_MAX)
        self._counted_s = clock_s()
        self._skipped = 0
        self.sinks: list[Callable[[str], None]] = []  # get every line

    def add(self, text: str) -> None:
        for sink in self.sinks:
            sink(text)
        now_s = self._clock_s()
        self._lines = min(LINES_MAX, self._lines + (now_s - self._counted_s) / LINE_S)
        self._counted_s = now_s
        if self._lines < 1:
            self._skipped += 1
            return
        import logging  # few runs need it

        self._lines -= 1
        more = f" ({self._skipped:,} such lines before it were skipped)" if self._skipped else ""
        self._skipped = 0
        logging.getLogger(LOGGER).warning("pipedist: %s%s", printable(text), more)
