"""Who was kept out of a cluster, or put out for what it sent: counted, and told where others may come."""

from __future__ import annotations

LOGGER = "pipedist.cluster"
"""The logger that is told; without a handler its lines go to stderr."""

_REASONS_MAX = 8
"""So many different reasons are told as they come; then how many there are, each time that it has doubled."""

_REASON_CHARACTERS_MAX = 500


class Refusals:
    """Counts refusals, and tells of them so that nobody can fill a log.

    Args:
        tells: whether the logger is told; otherwise they are only counted.
    """

    def __init__(self, *, tells: bool) -> None:
        self.count = 0
        self.stale = 0
        """Messages for leases that nobody holds any more: nobody's fault, so nobody is told."""
        self._tells = tells
        self._told: set[str] = set()

    def note(self, reason: str, again: str = "") -> None:
        """Count one.

        Args:
            reason: who, and why; what a stranger wrote may stand in it.
            again: what of it is the same when it happens again, as to a worker that is started again and
                again, each time with another name; "": all.
        """
        again = again or reason
        self.count += 1
        is_new = again not in self._told and len(self._told) < _REASONS_MAX
        has_doubled = self.count > _REASONS_MAX and self.count.bit_count() == 1
        if self._tells and (is_new or has_doubled):
            import logging  # hardly any run needs it

            if is_new:
                self._told.add(again)
            text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in reason)
            text = text[:_REASON_CHARACTERS_MAX]
            logging.getLogger(LOGGER).warning("pipedist: refused (%d so far): %s", self.count, text)
