"""References to frames in shared memory: a table in the first frame of a message.

The referenced frames are not sent; each is inserted again at its place among the payload's frames.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from pipedist.errors import RemoteProtocolError
from pipedist.protocol.limits import MessageLimits

ENTRY: Final = struct.Struct("<IIIIQ")


class Reference(NamedTuple):
    """A frame in a slot.

    Args:
        place: its number among the frames of the payload, of which 0 is the header.
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


def parse(table: memoryview) -> list[Reference]:
    """Return the references in a table, which is as long as its entries.

    Raises:
        RemoteProtocolError: they are not in order, or one stands in the header's place.
    """
    references = list(map(Reference._make, ENTRY.iter_unpack(table)))
    if references[0].place == 0 or any(a.place >= b.place for a, b in pairwise(references)):
        raise RemoteProtocolError("a table of references that is not in order")
    return references


def weave(
    frames: list[memoryview],
    references: Sequence[Reference],
    shared: Sequence[memoryview],
    limits: MessageLimits,
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
