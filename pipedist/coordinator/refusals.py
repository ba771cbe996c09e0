"""Who was kept out of a cluster, or put out for what it sent: counted, and told where others may come."""

from __future__ import annotations

LOGGER = "pipedist.cluster"
"""The logger that is told; without a handler its lines go to stderr."""

_EACH_UP_TO = 8
"""So many are told one by one, then every time that their number has doubled: nobody can fill a log."""

_REASON_CHARACTERS_MAX = 500


class Refusals:
    """Counts refusals.

    Args:
        tells: whether the logger is told; otherwise they are only counted.
    """

    def __init__(self, *, tells: bool) -> None:
        self.count = 0
        self._tells = tells

    def note(self, reason: str) -> None:
        """Count one.

        Args:
            reason: who, and why; what a stranger wrote may stand in it.
        """
        self.count += 1
        if self._tells and (self.count <= _EACH_UP_TO or self.count.bit_count() == 1):
            import logging  # hardly any run needs it

            text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in reason)
            text = text[:_REASON_CHARACTERS_MAX]
            logging.getLogger(LOGGER).warning("pipedist: refused (%d so far): %s", self.count, text)
