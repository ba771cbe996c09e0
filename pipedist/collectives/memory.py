"""Memory for large results that is used again once nobody has a view of it.

A fresh array of 64 MiB costs more than folding it does: the system has to find and clear its pages. A
training step throws away the result of the last one when it gets the next, so that a few arrays go
round. An array counts as free when this module holds the only reference to it: views of it, however
they were made, keep it as their base.
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from math import prod
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

RECYCLED_BYTES_MIN: Final = 1 << 20
"""Smaller arrays come from memory that the allocator keeps anyway."""
_KEPT_BYTES_MAX: Final = 256 << 20
_KEPT_MAX: Final = 16


class _Kept:
    """The arrays that were handed out, the latest last."""

    def __init__(self) -> None:
        self._arrays: OrderedDict[int, NDArray[np.uint8]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, size_bytes: int) -> NDArray[np.uint8]:
        with self._lock:
            for key in self._arrays:
                if self._arrays[key].size == size_bytes and self._references(key) <= _ALONE:
                    self._arrays.move_to_end(key)
                    return self._arrays[key]
            array = np.empty(size_bytes, np.uint8)
            if size_bytes <= _KEPT_BYTES_MAX:
                self._arrays[id(array)] = array
                while len(self._arrays) > _KEPT_MAX or self._kept_bytes() > _KEPT_BYTES_MAX:
                    self._arrays.popitem(last=False)
            return array

    def _kept_bytes(self) -> int:
        return sum(array.size for array in self._arrays.values())

    def _references(self, key: int) -> int:
        return sys.getrefcount(self._arrays[key])

    def measure(self) -> int:
        """Return what `_references` says of an array that nobody has: it depends on the interpreter."""
        self._arrays[0] = np.empty(1, np.uint8)
        count = self._references(0)
        self._arrays.clear()
        return count


_ALONE: Final = _Kept().measure()
_kept: Final = _Kept()


def empty(shape: int | tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return an uninitialised array, as `numpy.empty` does; a large one may have been used before."""
    size_bytes = (shape if isinstance(shape, int) else prod(shape)) * dtype.itemsize
    if size_bytes < RECYCLED_BYTES_MIN:
        return np.empty(shape, dtype)
    return _kept.get(size_bytes).view(dtype).reshape(shape)
