"""Sizes, times and queue lengths of the transport, and how much memory is shared.

Both ends of a connection use the same values; tests use smaller ones.
"""

from __future__ import annotations

import os
import sys
from typing import Final

from msgspec import Struct

from pipedist.errors import UsageError
from pipedist.protocol.limits import GIB, KIB, MIB


class SocketSettings(Struct, frozen=True):
    """The times and queue lengths of a socket.

    Args:
        queue_messages_max: messages that ZeroMQ queues per peer and direction. More than the credit that the
            scheduler gives a worker, so that it does not limit workers.
        outbox_messages_max, outbox_bytes_max: messages and bytes that a Router keeps for one peer beyond that,
            before it drops the peer.
        linger_s: how long closing waits for unsent messages.
        heartbeat_s, heartbeat_timeout_s: ZeroMQ's own heartbeat on TCP, which detects a host that vanished. The
            scheduler detects hung workers.
        handshakes_failed_max: failed handshakes without a reason, after which a Dealer raises an error.
        flush_retry_s: longest time between two attempts to send to a full queue.
        frames_per_wake_up: frames that a Router handles before other tasks have their turn.
        peers_max: identities that a Router keeps.
        other_peers_max: identities that it remembers beside those; the oldest is forgotten first.
    """

    queue_messages_max: int = 256
    outbox_messages_max: int = 64 * KIB
    outbox_bytes_max: int = 4 * GIB
    linger_s: float = 1.0
    handshake_s: float = 5.0
    heartbeat_s: float = 5.0
    heartbeat_timeout_s: float = 30.0
    handshakes_failed_max: int = 3
    flush_retry_s: float = 0.005
    frames_per_wake_up: int = 256
    peers_max: int = 64 * KIB
    other_peers_max: int = KIB


SETTINGS = SocketSettings()

VARIABLE: Final = "PIPEDIST_SHARED_MEMORY"
"""Environment variable: 0 sends everything as frames."""

SHARED_BYTES_MIN: Final = 64 * KIB
"""Smaller frames are cheaper to send than to share."""

SLOT_BYTES_MAX: Final = 64 * MIB
"""Larger frames are not shared: a fresh slot takes longer to fill than a frame takes to send."""

SEGMENT_BYTES_MAX: Final = 16 * MIB
"""Bytes of a segment that has more than one slot; making it takes about a millisecond a MiB."""

SEGMENTS_MAX: Final = 128
"""Segments of one lender, so that descriptors are bounded."""

SLOTS_MAX: Final = 256
"""Slots of one segment."""


class SharedMemory(Struct, frozen=True):
    """How much memory a Router shares with its peers.

    Args:
        lent_bytes_max: bytes of the pool that frames to all the peers are written into.
        borrowed_bytes_max: bytes of the pool of each peer.
    """

    lent_bytes_max: int = 512 * MIB
    borrowed_bytes_max: int = 256 * MIB

    @classmethod
    def of_cluster(cls, workers: int) -> SharedMemory | None:
        """Return the share for a cluster on this host; None if memory is not shared.

        1 GiB in all, or an eighth of the machine's memory; half of it for what goes out.
        """
        text = os.environ.get(VARIABLE, "")
        if text not in ("", "0", "1"):
            raise UsageError(f"{VARIABLE}={text!r}: expected 1, or 0 to send all data as frames")
        if text == "0" or not is_supported():
            return None
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        half_bytes = min(GIB, memory_bytes // 8) // 2
        return cls(half_bytes, half_bytes // workers)


def is_supported() -> bool:
    """Whether this system has memfd, seals and unix sockets that keep messages apart."""
    return sys.platform == "linux" and hasattr(os, "memfd_create")
