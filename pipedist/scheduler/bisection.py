"""Finds the elements of a failed call that fail alone, by trying subsets of them.

Rules
-----
* What is tried are aligned halves of what failed: first both halves of the whole call, then both
  halves of each subset that failed, down to single elements. Nothing is inferred: that one half passed
  does not prove the other one guilty, because elements may also fail only together.
* An element is guilty if it fails alone. A larger subset that fails is only split, so one attempt is
  enough for it; how many attempts an element has before it is guilty is `Outcomes`' matter.
* So what is found depends on which subsets fail, not on the order in which that is known.
* With k guilty elements of n that are about 2 k log2(n / k) + 2 k probes, never more than 2 n. Beyond
  `probes_max` the search is given up.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from pipedist.errors import LocalProtocolError
from pipedist.scheduler.commands import Cause

Span = tuple[int, int]
"""Positions [lo, hi) of elements in a call's shard."""


class Bisection:
    """The search in one call, which failed as a whole.

    Args:
        elements: how many can be told apart; 0: none.
        probes_max: subsets that may be tried.
        cause: why the whole call failed, for good.
    """

    __slots__ = ("_budget", "elements", "guilty", "trying")

    def __init__(self, elements: int, probes_max: int, cause: Cause) -> None:
        self.elements = elements
        self.trying: set[Span] = set()
        """Subsets that are being tried."""
        self.guilty: dict[int, Cause] = {}
        """By position, the elements that fail alone."""
        self._budget = probes_max
        if elements == 1:  # it has failed alone
            self.guilty[0] = cause

    def begin(self) -> Sequence[Span]:
        """Return the first subsets to try; none where there is nothing to find."""
        return self._halves((0, self.elements)) if self.elements > 1 else ()

    def passed(self, span: Span) -> None:
        """Take note that a subset did not fail."""
        self._over(span)

    def failed(self, span: Span, cause: Cause | None) -> Sequence[Span]:
        """Take note that a subset failed, and return which ones are to be tried next.

        Args:
            cause: why, of a single element; None: in a way that does not make it guilty.
        """
        self._over(span)
        lo, hi = span
        if hi - lo > 1:
            return self._halves(span)
        if cause is not None:
            self.guilty[lo] = cause
        return ()

    @property
    def is_given_up(self) -> bool:
        """Whether it would take more than `probes_max`."""
        return self._budget < 0

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to try."""
        return self.is_given_up or not self.trying

    @property
    def innocent(self) -> tuple[Span, ...]:
        """The elements that are not guilty, as ranges of positions."""
        ends = [-1, *sorted(self.guilty), self.elements]
        return tuple((a + 1, b) for a, b in pairwise(ends) if a + 1 < b)

    def _halves(self, span: Span) -> Sequence[Span]:
        lo, hi = span
        self._budget -= 2
        if self._budget < 0:
            return ()
        mid = (lo + hi) // 2
        halves = ((lo, mid), (mid, hi))
        self.trying.update(halves)
        return halves

    def _over(self, span: Span) -> None:
        if span not in self.trying:
            raise LocalProtocolError(f"elements {span} were tried, but were not to be")
        self.trying.remove(span)
