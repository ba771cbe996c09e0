"""Maximum sizes of messages, the same on both ends of a connection."""

from __future__ import annotations

from msgspec import Struct

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

DEPTH_MAX = 128  # levels of nesting in a tree; deeper ones would overflow the stack of code that walks it
ELEMENTS_MAX = 1 << 25  # elements of a tree, counting those of its lists but not those of its arrays

RESULT_OBJECTS_MAX = 1_000_000
"""Numbers, strings and containers in one call's value, if the driver processes them one by one: to gather, reduce
or stream them takes about a microsecond each. Values that it only passes to a `combine` or `update` function are
limited by ELEMENTS_MAX alone: a dict by key may have millions of keys."""

INT_BYTES_MAX = 4096  # bytes of one Python int: longer ones take quadratic time to print


class MessageLimits(Struct, frozen=True):
    """Maximum sizes of one multi-frame message."""

    head_bytes_max: int = 4 * MIB  # bytes of the packed message in the first frame
    # Bytes of the payload's header in the first frame, which holds everything except large arrays. Decoding it
    # takes at most about 200 times its size in memory
    header_bytes_max: int = 256 * MIB
    frame_bytes_max: int = 4 * GIB  # bytes of any other frame, and so of one array
    frames_max: int = 16384  # number of frames
    message_bytes_max: int = 8 * GIB  # bytes of all frames together


LIMITS = MessageLimits()  # the limits of the protocol; tests use smaller ones
