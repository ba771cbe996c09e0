"""Making, sealing and mapping memory that two processes share; it has no name, so none is left behind."""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import Final

from pipedist.errors import RemoteProtocolError

# <linux/fcntl.h>. The module `fcntl` lacks one of them, and elsewhere all: there this is only imported.
_F_ADD_SEALS: Final = 1033
_F_GET_SEALS: Final = 1034
_SEALS: Final = 0x1 | 0x2 | 0x4 | 0x10  # F_SEAL_SEAL, SHRINK, GROW, FUTURE_WRITE


def create(name: str, size_bytes: int) -> tuple[mmap.mmap, int]:
    """Make memory that only this process can write to.

    Args:
        name: for people who read /proc.

    Returns:
        The writable mapping, and the descriptor to hand over.

    Raises:
        OSError: no memory, no descriptor, or a kernel without these seals.
    """
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        # Without the pages at hand, a machine out of memory would kill us at the first write.
        os.posix_fallocate(descriptor, 0, size_bytes)
        memory = mmap.mmap(descriptor, size_bytes)
        fcntl.fcntl(descriptor, _F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return memory, descriptor


def open_received(descriptor: int, size_bytes: int) -> mmap.mmap:
    """Map a peer's memory, read-only, after checking that it can't shrink any more.

    Args:
        descriptor: as received; stays open.

    Raises:
        RemoteProtocolError: it is not what `create` makes.
        OSError: it can't be mapped.
    """
    try:
        seals = fcntl.fcntl(descriptor, _F_GET_SEALS)
    except OSError:
        raise RemoteProtocolError("a descriptor that is no memory which can be sealed") from None
    if seals & _SEALS != _SEALS:
        raise RemoteProtocolError(f"shared memory with the seals {seals:#x}, expected {_SEALS:#x}")
    found_bytes = os.fstat(descriptor).st_size
    if found_bytes != size_bytes:
        raise RemoteProtocolError(f"shared memory of {found_bytes} bytes, {size_bytes} were announced")
    return mmap.mmap(descriptor, size_bytes, prot=mmap.PROT_READ)
