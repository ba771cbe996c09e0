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
    """The times and queue lengths of a socket."""

    queue_messages_max: int = 256  # in ZeroMQ, per peer and direction: more than a worker's credit
    outbox_messages_max: int = 64 * KIB  # beyond those, for one peer, before a Router drops it
    outbox_bytes_max: int = 4 * GIB
    linger_s: float = 1.0  # how long closing waits for unsent messages
    handshake_s: float = 5.0
    heartbeat_s: float = 5.0  # ZeroMQ's own on TCP: for hosts that vanish; the scheduler detects hung workers
    heartbeat_timeout_s: float = 30.0
    handshakes_failed_max: int = 3  # failed handshakes without a reason, after which a Dealer raises an error
    flush_retry_s: float = 0.005  # longest time between two attempts to send to a full queue
    frames_per_wake_up: int = 256  # frames that a Router handles before other tasks have their turn
    peers_max: int = 64 * KIB  # identities that a Router keeps
    other_peers_max: int = KIB  # identities that it remembers beside those; the oldest is forgotten first


SETTINGS = SocketSettings()

VARIABLE: Final = "PIPEDIST_SHARED_MEMORY"  # environment variable: 0 sends everything as frames
SHARED_BYTES_MIN: Final = 64 * KIB  # smaller frames are cheaper to send than to share
SLOT_BYTES_MAX: Final = 64 * MIB  # filling a fresh slot takes longer than sending a larger frame
SEGMENT_BYTES_MAX: Final = 16 * MIB  # of a segment with several slots; a MiB takes about a millisecond
SEGMENTS_MAX: Final = 128  # segments of one lender, so that descriptors are bounded
SLOTS_MAX: Final = 256  # slots of one segment


class SharedMemory(Struct, frozen=True):
    """How much memory a Router shares with its peers."""

    lent_bytes_max: int = 512 * MIB  # bytes of the pool that frames to all the peers are written into
    borrowed_bytes_max: int = 256 * MIB  # bytes of the pool of each peer

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
