"""How a message names frames that travel in shared memory: a table before its head.

    [0xC1] [number of references: u32] [references] [head]

No head begins with 0xC1: msgpack never uses it. The frames that are named are left out of the
message; each is put back at its place among the payload's frames.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from pipedist.errors import RemoteProtocolError
from pipedist.transport.limits import Limits

MARK: Final = 0xC1
_START: Final = struct.Struct("<BI")
_ENTRY: Final = struct.Struct("<IIIIQ")


class Reference(NamedTuple):
    """A frame in a slot.

    Args:
        place: its number among the frames of the payload.
        segment: the segment's serial.
        slot: number in the segment.
        loan: number of the loan.
        size_bytes: of the frame.
    """

    place: int
    segment: int
    slot: int
    loan: int
    size_bytes: int


def prepend(references: Sequence[Reference], head: bytes) -> bytes:
    """Return a message's first frame."""
    entries = [_ENTRY.pack(*reference) for reference in references]
    return b"".join([_START.pack(MARK, len(entries)), *entries, head])


def split(first: memoryview, limits: Limits) -> tuple[list[Reference], memoryview]:
    """Return the references in a message's first frame, and its head.

    Raises:
        RemoteProtocolError: a table that is cut off, too long, or not in order.
    """
    if not first.nbytes or first[0] != MARK:
        return [], first
    if first.nbytes < _START.size:
        raise RemoteProtocolError("a table of references that is cut off")
    _, count = _START.unpack_from(first)
    end = _START.size + count * _ENTRY.size
    if not 1 <= count <= limits.frames_max or end > first.nbytes:
        raise RemoteProtocolError(f"a table of {count} references in {first.nbytes} bytes")
    references = [Reference(*entry) for entry in _ENTRY.iter_unpack(first[_START.size : end])]
    places = [reference.place for reference in references]
    if any(a >= b for a, b in pairwise(places)):
        raise RemoteProtocolError("a table of references that is not in order")
    return references, first[end:]


def weave(
    frames: list[memoryview], references: Sequence[Reference], shared: Sequence[memoryview], limits: Limits
) -> None:
    """Put shared frames at their places among the others.

    Raises:
        RemoteProtocolError: a place beyond the end of the payload, or too much in all.
    """
    for reference, frame in zip(references, shared, strict=True):
        if reference.place > len(frames):
            raise RemoteProtocolError(f"a shared frame {reference.place} in a payload of {len(frames)}")
        frames.insert(reference.place, frame)
    size_bytes = sum(frame.nbytes for frame in frames)
    if len(frames) > limits.frames_max or size_bytes > limits.message_bytes_max:
        raise RemoteProtocolError(
            f"a message of {len(frames)} frames and {size_bytes} bytes, with shared ones"
        )
