"""A message's first frame: what is said, and the payload's header, in one piece.

    [bytes of the head: u32] [number of references: u32] [references] [head] [header]

All little-endian. The head is the message (`pipedist.transport.wire`), the header is the first frame
of the payload (`pipedist.transport.codec`) and empty where there is none. References name frames that
travel in shared memory (`pipedist.transport.shared_memory.borrowed`). The other frames of a message
are the payload's arrays. One frame instead of three: on a socket, a frame costs more than a copy.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

from pipedist.errors import RemoteProtocolError
from pipedist.transport.config import MessageLimits
from pipedist.transport.shared_memory.borrowed import ENTRY, Reference, parse

START: Final = struct.Struct("<II")


def seal(head: bytes, header: bytes | memoryview = b"", references: Sequence[Reference] = ()) -> bytes:
    """Return a message's first frame.

    Args:
        head: the packed message.
        header: of the payload; empty where there is none.
        references: to the frames in shared memory, in order of their places.
    """
    start = START.pack(len(head), len(references))
    if references:
        return b"".join([start, *[ENTRY.pack(*reference) for reference in references], head, header])
    return b"".join((start, head, header))


def unseal(first: memoryview, limits: MessageLimits) -> tuple[memoryview, memoryview, list[Reference]]:
    """Return the head in a message's first frame, the payload's header, and references.

    Raises:
        RemoteProtocolError: it is cut off, a part is too long, or the references are not in order.
    """
    size_bytes = first.nbytes
    if size_bytes < START.size:
        raise RemoteProtocolError(f"malformed message: a first frame of {size_bytes} bytes")
    head_bytes, count = START.unpack_from(first)
    begin = START.size + count * ENTRY.size if count else START.size
    end = begin + head_bytes
    if count > limits.frames_max or end > size_bytes:
        raise RemoteProtocolError(
            f"malformed message: a head of {head_bytes} bytes and {count} references "
            f"in a first frame of {size_bytes} bytes"
        )
    if head_bytes > limits.head_bytes_max:
        raise RemoteProtocolError(f"a head of {head_bytes} bytes, the limit is {limits.head_bytes_max}")
    if size_bytes - end > limits.header_bytes_max:
        raise RemoteProtocolError(
            f"a header of {size_bytes - end} bytes, the limit is {limits.header_bytes_max}"
        )
    return first[begin:end], first[end:], parse(first[START.size : begin]) if count else []


def bytes_max(limits: MessageLimits) -> int:
    """Return how large a first frame may be."""
    return START.size + limits.frames_max * ENTRY.size + limits.head_bytes_max + limits.header_bytes_max
