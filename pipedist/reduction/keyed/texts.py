"""Texts as two arrays, the ends of each and the UTF-8 bytes of all; no Python object for a text.

The order of texts is that of their bytes, which is the order of Python's `str`: by code point. It is found eight
bytes at a time: a big-endian word of eight bytes compares as they do. Only texts that are equal so far are compared
by their next word. A word is filled up with zeros, so texts that contain a zero byte are sorted by Python.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

_WORD = 8  # bytes


@dataclass(frozen=True, eq=False, slots=True)
class Texts:
    """n texts.

    Args:
        data: their UTF-8 bytes, one text after the other; uint8[bytes].
        ends: where each one ends in `data`; int64[n].
    """

    data: NDArray[np.uint8]
    ends: Ints

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.ends.nbytes

    @property
    def starts(self) -> Ints:
        starts = np.empty_like(self.ends)
        starts[:1] = 0
        starts[1:] = self.ends[:-1]
        return starts

    def take(self, rows: NDArray[Any]) -> Texts:
        """Return the texts at some rows."""
        starts = self.starts[rows]
        lengths = self.ends[rows] - starts
        ends = np.cumsum(lengths)
        places = np.repeat(starts - (ends - lengths), lengths)
        places += np.arange(len(places))
        return Texts(self.data[places], ends)

    def cut(self, lo: int, hi: int) -> Texts:
        """Return the texts of rows [lo, hi), which share memory with these if lo is 0."""
        first = int(self.ends[lo - 1]) if lo else 0
        last = int(self.ends[hi - 1]) if hi > lo else first
        ends = self.ends[lo:hi]
        return Texts(self.data[first:last], ends - first if first else ends)

    def strings(self, lo: int = 0, hi: int | None = None) -> list[str]:
        """Return the texts of rows [lo, hi) as Python's."""
        part = self.cut(lo, len(self) if hi is None else hi)
        data = part.data.tobytes()
        ends = part.ends.tolist()
        starts = [0, *ends[:-1]]
        if data.isascii():
            text = data.decode("ascii")
            return [text[a:b] for a, b in zip(starts, ends, strict=False)]
        return [data[a:b].decode("utf-8", "surrogatepass") for a, b in zip(starts, ends, strict=False)]

    def find(self, text: str) -> int:
        """Return the row of a text in sorted texts, or -1 - the row before which it would be inserted."""
        wanted = text.encode("utf-8", "surrogatepass")
        lo, hi = 0, len(self)
        while lo < hi:
            mid = (lo + hi) // 2
            start = self.ends[mid - 1] if mid else 0
            here = self.data[start : self.ends[mid]].tobytes()
            if here == wanted:
                return mid
            lo, hi = (mid + 1, hi) if here < wanted else (lo, mid)
        return -1 - lo


NONE = Texts(np.empty(0, np.uint8), np.empty(0, np.int64))


def of_strings(strings: Sequence[str]) -> Texts:
    """Return Python's texts as `Texts`."""
    joined = "".join(strings)
    if joined.isascii():
        lengths = np.fromiter(map(len, strings), np.int64, len(strings))
        return Texts(np.frombuffer(joined.encode("ascii"), np.uint8), np.cumsum(lengths))
    encoded = [text.encode("utf-8", "surrogatepass") for text in strings]
    lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
    return Texts(np.frombuffer(b"".join(encoded), np.uint8), np.cumsum(lengths))


def of_unicode(array: NDArray[Any]) -> Texts:
    """Return a `<U` array [n] as `Texts`."""
    width = array.dtype.itemsize // 4
    if not width or not len(array):
        return Texts(np.empty(0, np.uint8), np.zeros(len(array), np.int64))
    points = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="), copy=False)).view(np.uint32)
    points = points.reshape(len(array), width)
    if points.max() >= 128:
        return of_strings(array.tolist())
    used = points != 0
    lengths = np.where(used.any(axis=1), width - np.argmax(used[:, ::-1], axis=1), 0)
    return Texts(points.astype(np.uint8)[np.arange(width) < lengths[:, None]], np.cumsum(lengths))


Concatenate = Callable[[Iterable[NDArray[Any]]], NDArray[Any]]
"""Concatenates arrays of one dtype along their rows, in memory or in a file."""


def in_memory(arrays: Iterable[NDArray[Any]]) -> NDArray[Any]:
    return np.concatenate(list(arrays))


def concatenate(parts: Sequence[Texts], together: Concatenate = in_memory) -> Texts:
    if len(parts) == 1:
        return parts[0]
    sizes = [len(part.data) for part in parts]
    bases = np.cumsum([0, *sizes[:-1]]).tolist()
    ends = (part.ends + base for part, base in zip(parts, bases, strict=True))
    return Texts(together(part.data for part in parts), together(ends))


def union(parts: Sequence[Texts]) -> tuple[Texts, list[Ints]]:
    """Return the distinct texts of sorted parts, sorted, and for each part the places of its texts among them."""
    if len(parts) == 1:
        return parts[0], [np.arange(len(parts[0]))]
    together = concatenate(parts)
    codes, first = ranks(together)
    bounds = np.cumsum([len(part) for part in parts])[:-1]
    return together.take(first), np.split(codes, bounds)


def union_in_turn(parts: Sequence[Texts]) -> tuple[Texts, list[Ints]]:
    """Return what `union` does, in the memory for two parts, which suits parts that have most texts in common."""
    whole, found = parts[0], [np.arange(len(parts[0]))]
    for part in parts[1:]:
        whole, (left, right) = union([whole, part])
        found = [*(left[places] for places in found), right]
    return whole, found


def ranks(texts: Texts) -> tuple[Ints, Ints]:
    """Return the rank of each text among the distinct ones, and the first row of each of these, sorted.

    Returns:
        The ranks int64[n], and rows int64[distinct].
    """
    order, fresh = _sorted(texts)
    codes = np.empty(len(texts), np.int64)
    codes[order] = np.cumsum(fresh) - 1
    return codes, order[fresh]


def _sorted(texts: Texts) -> tuple[Ints, NDArray[np.bool_]]:
    """Return the rows in the order of their texts, stable, and for each place whether its text is a new one."""
    n = len(texts)
    fresh = np.ones(n, bool)
    if n < 2:
        return np.arange(n), fresh
    if (texts.data == 0).any():
        return _sorted_by_python(texts)
    starts = texts.starts
    lengths = texts.ends - starts
    data = np.concatenate([texts.data, np.zeros(_WORD, np.uint8)])
    # A word at every byte: overlapping, and not aligned.
    words = np.ndarray((len(data) - _WORD + 1,), ">u8", data.data, strides=(1,))
    word = _words(words, starts, lengths, 0)
    order = np.argsort(word, kind="stable")
    word = word[order]
    fresh[1:] = word[1:] != word[:-1]
    places = np.arange(n)
    for at in range(_WORD, int(lengths.max()) + _WORD, _WORD):
        # Texts that are equal so far, and may go on.
        same = ~fresh[places]
        same[:-1] |= same[1:] & (places[1:] == places[:-1] + 1)
        places = places[same]
        places = places[lengths[order[places]] >= at]
        if not len(places):
            break
        rows = order[places]
        word = _words(words, starts[rows], lengths[rows], at)
        run = np.cumsum(fresh[places])
        inner = np.lexsort((word, run)) if run[-1] > 1 else np.argsort(word, kind="stable")
        order[places] = rows[inner]
        word = word[inner]
        fresh[places[1:]] |= word[1:] != word[:-1]
    return order, fresh


def _words(words: NDArray[Any], starts: Ints, lengths: Ints, at: int) -> NDArray[np.uint64]:
    """Return the bytes [at, at + 8) of texts as numbers that compare as they do."""
    left = lengths - at
    found = words[np.where(left > 0, starts + at, 0)].astype(np.uint64)
    unused = (8 * np.clip(_WORD - left, 0, _WORD - 1)).astype(np.uint64)
    return np.where(left > 0, found >> unused << unused, np.uint64(0))


def _sorted_by_python(texts: Texts) -> tuple[Ints, NDArray[np.bool_]]:
    data = texts.data.tobytes()
    cells = [data[a:b] for a, b in zip(texts.starts.tolist(), texts.ends.tolist(), strict=True)]
    rows = sorted(range(len(cells)), key=cells.__getitem__)
    fresh = [True, *(cells[a] != cells[b] for a, b in pairwise(rows))]
    return np.array(rows, np.int64), np.array(fresh)


def encode(strings: Iterable[str]) -> tuple[Texts, Ints]:
    """Return the sorted distinct ones of Python's texts, and the place of each text among them.

    Raises:
        TypeError: one of them is no text.
    """
    places: defaultdict[str, int] = defaultdict(count().__next__)  # numbers texts as they come
    rows = np.fromiter(map(places.__getitem__, strings), np.int64)
    if not {str}.issuperset(map(type, places)):
        other = next((text for text in places if not isinstance(text, str)), None)
        if other is not None:
            raise TypeError(f"expected text, got {other!r}")
    found = of_strings(list(places))
    codes, first = ranks(found)
    return found.take(first), codes[rows]
