"""Lines about workers and retries as they happen.

Warnings, such as a death, are logged at a limited rate; a sink gets every line.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from pipedist.core.names import printable
from pipedist.core.token_bucket import TokenBucket

LOGGER = "pipedist.cluster"  # of these lines and of rejections; without a handler its lines go to stderr

LINES_MAX = 20  # lines at once; after these, one line every LINE_S seconds, which counts those between
LINE_S = 5.0

_CHARACTERS_MAX = 500


def as_line(text: str) -> str:
    """Return text of a peer or a user function as one bounded line that a terminal can show."""
    return printable(" ".join(text[:_CHARACTERS_MAX].splitlines()))


NoticeSink = Callable[[int, str], None]  # gets the level (of `logging`) and text of each line


class Notices:
    """Logs lines."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._limit = TokenBucket(LINES_MAX, 1 / LINE_S, clock_s)
        self.sinks: list[NoticeSink] = []  # get every line

    def add(self, text: str, level: int = logging.WARNING) -> None:
        for sink in self.sinks:
            sink(level, text)
        if level >= logging.WARNING and not self._limit.allows():
            return
        skipped = self._limit.take_denied() if level >= logging.WARNING else 0
        more = f" ({skipped:,} such lines before it were skipped)" if skipped else ""
        logging.getLogger(LOGGER).log(level, "pipedist: %s%s", as_line(text), more)
