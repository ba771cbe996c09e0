"""What to return in place of a value that can be neither sent nor reduced: advice for errors."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import AsyncIterator, Iterator, KeysView, Set, ValuesView


def is_masked(value: object) -> bool:
    """Return whether a value is a masked array: made a plain one, it shows what its mask hides."""
    masked = sys.modules.get("numpy.ma")
    return masked is not None and isinstance(value, masked.MaskedArray)


def stand_in(value: object) -> str:
    """Return what a function could return in place of a value, "" where nothing is known."""
    if is_masked(value):
        return "x.filled(...) has its values with something in place of the masked ones"
    if hasattr(value, "__array__"):
        return "np.asarray(...) makes a plain array of it"
    if isinstance(value, dict):
        return "dict(...) makes a plain one of it"
    if isinstance(value, Set | KeysView):
        return "sorted(...) makes a list of it"
    if isinstance(value, AsyncIterator):
        return "[x async for x in ...] makes a list of it"
    if isinstance(value, Iterator | ValuesView | deque | range):
        return "np.array(list(...)) makes an array of it"
    return ""
