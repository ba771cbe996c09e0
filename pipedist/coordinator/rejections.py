"""Who was kept out, and why: counted, and logged as warnings of the logger `pipedist.coordinator`."""

from __future__ import annotations

import logging

_LOG = logging.getLogger("pipedist.coordinator")

TOLD_MAX = 20
"""So many are logged one by one; after them, one whenever their number has doubled: a flood fills no disk."""

_REASON_CHARACTERS_MAX = 500


class Rejections:
    """Counts what was refused, and says so.

    Attributes:
        count: until now.
    """

    def __init__(self) -> None:
        self.count = 0
        self._next = 1

    def note(self, reason: str) -> None:
        """Count and log one.

        Args:
            reason: who, and why; what a stranger wrote may stand in it.
        """
        self.count += 1
        if self.count < self._next:
            return
        self._next = self.count + 1 if self.count < TOLD_MAX else 2 * self.count
        text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in reason)
        _LOG.warning("refused (%d until now): %s", self.count, text[:_REASON_CHARACTERS_MAX])
