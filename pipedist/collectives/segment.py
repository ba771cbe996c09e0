"""The memory that the members of a gang on one host share, and how they find it.

The scheduler's process makes one segment for a GROUP (these worker processes, with their incarnations,
in this order, and R), and keeps it for all gangs on that group, one after the other. It is a memfd: it
has no name, so nothing is left behind whoever is killed. Members find it as /proc/PID/fd/FD, which the
kernel grants to processes of the same user; a random token in its header tells it from whatever else
may have that number by then. It can't shrink or grow, so that nobody is killed by SIGBUS.

    header      page 0: magic, version, token, size, R, bytes of a pack; the ABORT word
    blocks      512 bytes for each member (there may be R of them): `pipedist.collectives.shared`
    inputs      for each parity 0, 1, for each replica: a pack
    results     for each parity 0, 1: a pack

The ABORT word holds the highest serial of the attempts that are not to go on: serials grow, so that an
attempt is over if its own is not above it. Only the scheduler's process writes it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import secrets
import struct
from collections import OrderedDict
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pipedist.collectives import futex
from pipedist.errors import PipedistError

_MAGIC: Final = b"pdgang\0\1"
_HEADER: Final = struct.Struct("<8s16sQQQ")
_HEADER_BYTES: Final = 4096
ABORT_AT: Final = _HEADER_BYTES // 2
"""Offset of the abort word; it is read by all, so that it shares its cache line with nothing."""

BLOCK_BYTES: Final = 512
PACK_BYTES: Final = 1 << 20
"""Of a segment for few replicas."""
_PACK_BYTES_MIN: Final = 64 << 10
_SEGMENT_BYTES: Final = 16 << 20
"""What a segment takes at most, as long as packs are above their minimum."""
_REPLICAS_MAX: Final = 1024
_SEGMENTS_MAX: Final = 4

# <linux/fcntl.h>: the module `fcntl` lacks these.
_F_ADD_SEALS: Final = 1033
_F_GET_SEALS: Final = 1034
_SEALS: Final = 0x1 | 0x2 | 0x4  # F_SEAL_SEAL, SHRINK, GROW


class SegmentUnavailable(PipedistError):
    """The memory of a gang can't be made, or not be found from here."""


def pack_bytes_for(replicas: int) -> int:
    """Return the size of a pack in a segment of so many replicas."""
    share = _SEGMENT_BYTES // (2 * (replicas + 1))
    return max(_PACK_BYTES_MIN, min(PACK_BYTES, 1 << share.bit_length() - 1))


def _inputs_at(replicas: int) -> int:
    return -(-(_HEADER_BYTES + replicas * BLOCK_BYTES) // _HEADER_BYTES) * _HEADER_BYTES


class SegmentOwner:
    """A segment as its maker sees it: in the scheduler's process.

    Args:
        replicas: R.
        pack_bytes: bytes of a pack, a multiple of 4096; 0: chosen for R.

    Raises:
        SegmentUnavailable: there are too many replicas for one, no memory, or no memfd here.
    """

    def __init__(self, replicas: int, *, pack_bytes: int = 0) -> None:
        if not 1 <= replicas <= _REPLICAS_MAX:
            raise SegmentUnavailable(f"{replicas} replicas share no memory: at most {_REPLICAS_MAX} do")
        pack_bytes = pack_bytes or pack_bytes_for(replicas)
        self._replicas = replicas
        self._size = _inputs_at(replicas) + 2 * (replicas + 1) * pack_bytes
        self._token = secrets.token_bytes(16)
        try:
            self._descriptor = os.memfd_create("pipedist-gang", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except (AttributeError, OSError) as error:
            raise SegmentUnavailable(f"no shared memory for a gang: {error}") from None
        try:
            # Without the pages at hand, a machine out of memory would kill a member at its first write.
            os.posix_fallocate(self._descriptor, 0, self._size)
            self._memory = mmap.mmap(self._descriptor, self._size)
            fcntl.fcntl(self._descriptor, _F_ADD_SEALS, _SEALS)
        except OSError as error:
            os.close(self._descriptor)
            raise SegmentUnavailable(f"no {self._size} bytes of shared memory: {error}") from None
        _HEADER.pack_into(self._memory, 0, _MAGIC, self._token, self._size, replicas, pack_bytes)
        self._abort_word = memoryview(self._memory)[ABORT_AT : ABORT_AT + 8].cast("Q")

    @property
    def size_bytes(self) -> int:
        """What it takes."""
        return self._size

    @property
    def where(self) -> str:
        """How members find it: `AssignGang.segment`."""
        return f"{os.getpid()}:{self._descriptor}:{self._size}:{self._token.hex()}"

    def abort(self, serial: int) -> None:
        """End all attempts up to this serial: members that wait notice it at once, others soon."""
        self._abort_word[0] = max(serial, self._abort_word[0])
        futex.fence()
        start = _address(self._memory)
        for member in range(self._replicas):
            futex.wake(start + _HEADER_BYTES + member * BLOCK_BYTES)

    def close(self) -> None:
        """Let it go; members that have it mapped keep their memory. May be called twice."""
        if self._descriptor >= 0:
            self._abort_word.release()
            self._memory.close()
            os.close(self._descriptor)
            self._descriptor = -1


class GangSegment:
    """A segment as a member sees it. Make it with `attach`.

    Attributes:
        group: its name, the same in all members.
        replicas: R.
        pack_bytes: bytes of a pack.
        words: all of header and blocks, as 64-bit words.
        address: where it begins in this process.
    """

    def __init__(self, memory: mmap.mmap, token: bytes, replicas: int, pack_bytes: int) -> None:
        self._memory: mmap.mmap | None = memory
        self.group = token.hex()
        self.replicas = replicas
        self.pack_bytes = pack_bytes
        inputs_at = _inputs_at(replicas)
        self.words = memoryview(memory)[:inputs_at].cast("Q")
        self.address = _address(memory)
        self._packs: NDArray[np.uint8] = np.frombuffer(memory, np.uint8, offset=inputs_at)
        self.views: tuple[dict[Any, Any], dict[Any, Any]] = ({}, {})
        """What members keep about layouts, by parity; it ends with the segment."""

    def input(self, parity: int, replica: int) -> NDArray[np.uint8]:
        """Return a replica's pack; behind it lie those of the replicas that follow."""
        return self._packs[(parity * self.replicas + replica) * self.pack_bytes :]

    def result(self, parity: int) -> NDArray[np.uint8]:
        """Return the pack in which members give each other what they have folded."""
        start = (2 * self.replicas + parity) * self.pack_bytes
        return self._packs[start : start + self.pack_bytes]

    def close(self) -> None:
        """Unmap it, as soon as nobody has a view of it. May be called twice."""
        memory, self._memory = self._memory, None
        if memory is None:
            return
        self.views = ({}, {})
        self.words.release()
        self._packs = np.empty(0, np.uint8)
        with contextlib.suppress(BufferError):  # the last view's end unmaps it
            memory.close()


def attach(where: str) -> GangSegment:
    """Map a segment.

    Args:
        where: `SegmentOwner.where`.

    Raises:
        SegmentUnavailable: it is not there (any more), or is something else.
    """
    try:
        pid, descriptor, size, token = where.split(":")
        path = f"/proc/{int(pid)}/fd/{int(descriptor)}"
        size_bytes, expected = int(size), bytes.fromhex(token)
    except ValueError:
        raise SegmentUnavailable(f"{where!r} is no place of a segment") from None
    try:
        opened = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise SegmentUnavailable(
            f"the memory of this gang can't be opened as {path}: {error.strerror}. Are the workers and the "
            "scheduler in one container, and of one user? PIPEDIST_SHARED_MEMORY=0 does without it"
        ) from None
    try:
        memory = _map(opened, path, size_bytes, expected)
    finally:
        os.close(opened)
    _, _, _, replicas, pack_bytes = _HEADER.unpack_from(memory)
    return GangSegment(memory, expected, replicas, pack_bytes)


def _map(descriptor: int, path: str, size_bytes: int, token: bytes) -> mmap.mmap:
    try:
        seals = fcntl.fcntl(descriptor, _F_GET_SEALS)
        found_bytes = os.fstat(descriptor).st_size
        if seals & _SEALS != _SEALS or found_bytes != size_bytes or size_bytes < 2 * _HEADER_BYTES:
            raise SegmentUnavailable(f"{path} is not the memory of this gang: the group is over")
        memory = mmap.mmap(descriptor, size_bytes)
    except OSError as error:
        raise SegmentUnavailable(f"{path} is not the memory of this gang: {error.strerror}") from None
    magic, found, size, replicas, pack_bytes = _HEADER.unpack_from(memory)
    fits = 1 <= replicas <= _REPLICAS_MAX and (
        _inputs_at(replicas) + 2 * (replicas + 1) * pack_bytes == size == size_bytes
    )
    if magic != _MAGIC or found != token or not fits:
        memory.close()
        raise SegmentUnavailable(f"{path} is not the memory of this gang: the group is over")
    return memory


class GangSegments:
    """The segments that a worker process has mapped: those of the last few groups."""

    def __init__(self) -> None:
        self._segments: OrderedDict[str, GangSegment] = OrderedDict()

    def get(self, where: str) -> GangSegment:
        """Return a segment, mapped now or before.

        Raises:
            SegmentUnavailable: see `attach`.
        """
        segment = self._segments.get(where)
        if segment is None:
            segment = self._segments[where] = attach(where)
            while len(self._segments) > _SEGMENTS_MAX:
                self._segments.popitem(last=False)[1].close()
        self._segments.move_to_end(where)
        return segment

    def close(self) -> None:
        """Unmap all."""
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()


def _address(memory: mmap.mmap) -> int:
    """Return where memory begins in this process; keeps nothing of it."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
