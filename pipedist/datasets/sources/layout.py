"""Several pieces, one dataset: rows numbered through files, or through row groups of files."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class Layout:
    """Finds rows that are numbered through consecutive pieces.

    Args:
        lengths: rows of each piece, in order; 0 is allowed.
    """

    __slots__ = ("_ends", "total")

    def __init__(self, lengths: Sequence[int]) -> None:
        self._ends = np.cumsum(np.asarray(lengths, dtype=np.int64), dtype=np.int64)
        self.total = int(self._ends[-1]) if len(lengths) else 0

    def segments(self, rows: range) -> list[tuple[int, int, int]]:
        """Return the (piece, lo, hi) that make up contiguous `rows`, hi exclusive."""
        found = []
        row = rows.start
        while row < rows.stop:
            # "right": a piece without rows ends where its predecessor does, and is passed over.
            piece = int(np.searchsorted(self._ends, row, side="right"))
            begin = int(self._ends[piece - 1]) if piece else 0
            stop = min(rows.stop, int(self._ends[piece]))
            found.append((piece, row - begin, stop - begin))
            row = stop
        return found

    def places(self, rows: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return, for each of `rows`, its piece and its row within it: int64[n] each."""
        pieces = np.searchsorted(self._ends, rows, side="right").astype(np.int64, copy=False)
        begins = np.concatenate([np.zeros(1, np.int64), self._ends])
        return pieces, rows - begins[pieces]
