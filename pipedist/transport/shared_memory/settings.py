"""Whether memory is shared, and how much."""

from __future__ import annotations

import os
import sys
from typing import Final

from msgspec import Struct

from pipedist.errors import UsageError
from pipedist.transport.limits import GIB, KIB, MIB

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

_CLUSTER_BYTES_MAX: Final = 1 * GIB
_MEMORY_SHARE: Final = 8  # at most one eighth of the machine's memory


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
        """Return what a cluster of so many workers on this host shares; None: only frames.

        1 GiB in all, or an eighth of the machine's memory; half of it for what goes out.

        Raises:
            UsageError: the environment variable PIPEDIST_SHARED_MEMORY is neither 0 nor 1.
        """
        if not is_wanted() or not is_supported():
            return None
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        half_bytes = min(_CLUSTER_BYTES_MAX, memory_bytes // _MEMORY_SHARE) // 2
        return cls(half_bytes, half_bytes // workers)


def is_wanted() -> bool:
    """Whether the environment allows shared memory.

    Raises:
        UsageError: the variable has another value than 0, 1 or none.
    """
    text = os.environ.get(VARIABLE, "")
    if text not in ("", "0", "1"):
        raise UsageError(f"{VARIABLE}={text!r}: expected 1, or 0 to send all data as frames")
    return text != "0"


def is_supported() -> bool:
    """Whether this system has memfd, seals and unix sockets that keep messages apart."""
    return sys.platform == "linux" and hasattr(os, "memfd_create")
