"""Lines about deaths of workers and repeated calls as they happen, at a limited rate."""

from __future__ import annotations

import time
from collections.abc import Callable

from pipedist.core.token_bucket import TokenBucket

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
        self._limit = TokenBucket(LINES_MAX, 1 / LINE_S, clock_s)

    def add(self, text: str) -> None:
        if not self._limit.allows():
            return
        import logging  # few runs need it

        skipped = self._limit.take_denied()
        more = f" ({skipped:,} such lines before it were skipped)" if skipped else ""
        logging.getLogger(LOGGER).warning("pipedist: %s%s", printable(text), more)
