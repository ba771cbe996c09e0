"""Finished calls that a worker keeps until they are durable, also beyond its own end.

A result that was sent may be lost: its scheduler can be killed before the journal has it. So results of
a pass that can be resumed stay here until the scheduler says `Settled`. When the connection is lost, or
the process is put out, they are written into memory that its supervisor holds (`save`); the next
incarnation, a new process with the code as it is then, takes them over (`load`) and offers them in its
Hello. Which of them are as good as new is the scheduler's decision, by their key; what it wants it
recalls, call by call or many at a time.

What is full keeps nothing more: the oldest results are those that are waited for, in step order.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence

import msgpack
from msgspec import Struct

from pipedist.core.record_format import frames_of, pack, whole_records
from pipedist.errors import RemoteProtocolError
from pipedist.protocol.codec import Frame, decode, encode
from pipedist.protocol.messages import CACHED_RANGES_MAX

KEPT_BYTES_MAX = 256 * 2**20
"""Results that a worker keeps."""


class KeptCalls(Struct, frozen=True):
    """The results of calls [lo, hi), as they were sent.

    Args:
        busy_ns: the time that executing them took, nanoseconds.
        frames: the payload of their Results message.
    """

    lo: int
    hi: int
    busy_ns: int
    frames: Sequence[Frame]

    @property
    def size_bytes(self) -> int:
        """What it takes to keep them."""
        return sum(memoryview(frame).nbytes for frame in self.frames)

    def part(self, lo: int, hi: int) -> KeptCalls:
        """Return calls [lo, hi) of them."""
        if (lo, hi) == (self.lo, self.hi):
            return self
        # Ours, and never a peer's: importing what defines a dataclass in them is no risk.
        calls = decode(self.frames, may_import=True)
        share = self.busy_ns * (hi - lo) // (self.hi - self.lo)
        return KeptCalls(lo, hi, share, encode(calls[lo - self.lo : hi - self.lo]))


class KeptResults:
    """The results that one worker keeps.

    Args:
        bytes_max: of all of them.
    """

    def __init__(self, bytes_max: int = KEPT_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._size_bytes = 0
        self._passes: dict[str, list[KeptCalls]] = {}
        """By key, in the order in which they were finished."""

    def __len__(self) -> int:
        """Return how many calls are kept."""
        return sum(each.hi - each.lo for kept in self._passes.values() for each in kept)

    def add(self, key: str, calls: KeptCalls) -> None:
        """Keep the results of some calls, if there is room."""
        size = calls.size_bytes
        if self._size_bytes + size > self._bytes_max:
            return
        self._size_bytes += size
        self._passes.setdefault(key, []).append(calls)

    def settle(self, key: str, before: int) -> None:
        """Let go of calls below `before`; they are durable."""
        kept = self._passes.get(key, [])
        left = [each for each in kept if each.hi > before]
        if len(left) < len(kept):
            self._size_bytes -= sum(each.size_bytes for each in kept if each.hi <= before)
            self._passes[key] = left

    def drop(self, key: str) -> None:
        """Let go of everything under a key."""
        self._size_bytes -= sum(each.size_bytes for each in self._passes.pop(key, ()))

    def offers(self) -> tuple[str, ...]:
        """Return what there is, for Hello; not more ranges than it may have, the largest ones."""
        found = []
        for key, kept in self._passes.items():
            for lo, hi in _merged((each.lo, each.hi) for each in kept):
                found.append((lo - hi, key, lo, hi))
        return tuple(f"{key}:{lo}-{hi}" for _, key, lo, hi in sorted(found)[:CACHED_RANGES_MAX])

    def recalled(self, key: str, lo: int, hi: int) -> Iterator[KeptCalls]:
        """Yield the results of calls [lo, hi), in order.

        Raises:
            RemoteProtocolError: they were not all offered.
        """
        kept = sorted(self._passes.get(key, []), key=lambda each: each.lo)
        for each in kept:
            if lo < hi and each.lo <= lo < each.hi:
                until = min(hi, each.hi)
                yield each.part(lo, until)
                lo = until
        if lo < hi:
            raise RemoteProtocolError(f"calls [{lo}, {hi}) were recalled, but are not kept")

    # -- from one incarnation to the next --------------------------------------------------------

    def save(self, file: int) -> None:
        """Write everything to a file, as records: key, calls and time, then the frames.

        Args:
            file: its descriptor.

        Raises:
            OSError: there is no room.
        """
        os.ftruncate(file, 0)
        at = 0
        for key, kept in self._passes.items():
            for each in kept:
                about = msgpack.packb([key, each.lo, each.hi, each.busy_ns])
                for buffer in pack([about, *each.frames]):
                    at = _write(file, memoryview(buffer).cast("B"), at)

    def load(self, file: int) -> None:
        """Add the whole records that an earlier incarnation wrote, and empty the file."""
        if size := os.fstat(file).st_size:
            with mmap.mmap(file, size, access=mmap.ACCESS_READ) as data, memoryview(data) as view:
                for head in whole_records(view):
                    about, *frames = map(bytes, frames_of(view, head))
                    key, lo, hi, busy_ns = msgpack.unpackb(about)
                    self.add(key, KeptCalls(lo, hi, busy_ns, frames))
        os.ftruncate(file, 0)


def _merged(ranges: Iterator[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for lo, hi in sorted(ranges):
        if merged and lo <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], hi))
        else:
            merged.append((lo, hi))
    return merged


def _write(file: int, data: bytes | memoryview, at: int) -> int:
    """Write all of it; return where it ends."""
    left = memoryview(data)
    while left:
        count = os.pwrite(file, left, at)
        at += count
        left = left[count:]
    return at
