"""The shared memory of gang members on one host, and how members find it.

The driver creates one segment per GROUP (these worker processes, with their incarnations, in this
order, and R), and keeps it for all gangs of that group, one after the other. The segment is a memfd: it
has no name, so nothing remains if a process is killed. Members open it as /proc/PID/fd/FD, which the
kernel permits to processes of the same user; a random token in the header protects against a reused
descriptor number. It is sealed against resizing, so that no access raises SIGBUS.

    header      page 0: magic, version, token, size, R, bytes of a pack; the ABORT word
    blocks      512 bytes for each member (at most R of them): `pipedist.collectives.shared`
    inputs      for each parity 0, 1, for each replica: a pack
    results     for each parity 0, 1: a pack

The ABORT word holds the highest serial of the aborted attempts: serials increase, so an attempt is over
if its serial is not above it. Only the driver writes it.
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
from pipedist.core.memory_order import fence
from pipedist.errors import PipedistError
from pipedist.transport.shared_memory.pool import F_GET_SEALS, SIZE_SEALS, create_memory

_MAGIC: Final = b"pdgang\0\1"
_HEADER: Final = struct.Struct("<8s16sQQQ")
_HEADER_BYTES: Final = 4096
ABORT_AT: Final = _HEADER_BYTES // 2  # offset of the abort word, alone in its cache line
BLOCK_BYTES: Final = 512
PACK_BYTES: Final = 1 << 20  # size of a pack in a segment for few replicas
_PACK_BYTES_MIN: Final = 64 << 10
_SEGMENT_BYTES: Final = 16 << 20  # maximum size of a segment, unless packs are at their minimum
_REPLICAS_MAX: Final = 1024
_SEGMENTS_MAX: Final = 4


class SegmentUnavailable(PipedistError):
    """The shared memory of a gang cannot be created, or not be opened in this process."""


def pack_bytes_for(replicas: int) -> int:
    share = _SEGMENT_BYTES // (2 * (replicas + 1))
    return max(_PACK_BYTES_MIN, min(PACK_BYTES, 1 << share.bit_length() - 1))


def _inputs_at(replicas: int) -> int:
    return -(-(_HEADER_BYTES + replicas * BLOCK_BYTES) // _HEADER_BYTES) * _HEADER_BYTES


class SegmentOwner:
    """A segment in the process that created it (the driver), or SegmentUnavailable.

    `pack_bytes` is a multiple of 4096; 0: chosen for the number of replicas.
    """

    def __init__(self, replicas: int, *, pack_bytes: int = 0) -> None:
        if not 1 <= replicas <= _REPLICAS_MAX:
            raise SegmentUnavailable(f"{replicas} replicas share no memory, at most {_REPLICAS_MAX} can")
        pack_bytes = pack_bytes or pack_bytes_for(replicas)
        self._replicas = replicas
        self.size_bytes = _inputs_at(replicas) + 2 * (replicas + 1) * pack_bytes
        self._token = secrets.token_bytes(16)
        try:
            self._memory, self._descriptor = create_memory("pipedist-gang", self.size_bytes, SIZE_SEALS)
        except (AttributeError, OSError) as error:
            raise SegmentUnavailable(f"no {self.size_bytes} bytes of shared memory: {error}") from None
        _HEADER.pack_into(self._memory, 0, _MAGIC, self._token, self.size_bytes, replicas, pack_bytes)
        self.where = f"{os.getpid()}:{self._descriptor}:{self.size_bytes}:{self._token.hex()}"
        """Address of the segment for `attach`, sent as `AssignGang.segment`."""
        self._abort_word = memoryview(self._memory)[ABORT_AT : ABORT_AT + 8].cast("Q")

    def abort(self, serial: int) -> None:
        """Abort all attempts up to this serial: wake waiting members; others notice soon."""
        self._abort_word[0] = max(serial, self._abort_word[0])
        fence()
        start = _address(self._memory)
        for member in range(self._replicas):
            futex.wake(start + _HEADER_BYTES + member * BLOCK_BYTES)

    def close(self) -> None:
        """Release the segment; members that have mapped it keep their memory. Idempotent."""
        if self._descriptor >= 0:
            self._abort_word.release()
            self._memory.close()
            os.close(self._descriptor)
            self._descriptor = -1


class GangSegment:
    def __init__(self, memory: mmap.mmap, token: bytes, replicas: int, pack_bytes: int) -> None:
        self._memory: mmap.mmap | None = memory
        self.group = token.hex()  # equal in all members
        self.replicas = replicas
        self.pack_bytes = pack_bytes
        inputs_at = _inputs_at(replicas)
        self.words = memoryview(memory)[:inputs_at].cast("Q")  # header and blocks
        self.address = _address(memory)
        self._packs: NDArray[np.uint8] = np.frombuffer(memory, np.uint8, offset=inputs_at)
        self.views: tuple[dict[Any, Any], dict[Any, Any]] = ({}, {})  # of members, by parity and layout

    def input(self, parity: int, replica: int) -> NDArray[np.uint8]:
        """Return a replica's pack, followed by those of the next replicas."""
        return self._packs[(parity * self.replicas + replica) * self.pack_bytes :]

    def result(self, parity: int) -> NDArray[np.uint8]:
        """Return the pack through which members exchange folded slices."""
        start = (2 * self.replicas + parity) * self.pack_bytes
        return self._packs[start : start + self.pack_bytes]

    def close(self) -> None:
        """Unmap the segment as soon as the last view of it is released. Idempotent."""
        memory, self._memory = self._memory, None
        if memory is None:
            return
        self.views = ({}, {})
        self.words.release()
        self._packs = np.empty(0, np.uint8)
        with contextlib.suppress(BufferError):  # unmapped with the last view
            memory.close()


def attach(where: str) -> GangSegment:
    """Map the segment at `SegmentOwner.where`, or raise SegmentUnavailable if it is another one or gone."""
    try:
        pid, descriptor, size, token = where.split(":")
        path = f"/proc/{int(pid)}/fd/{int(descriptor)}"
        size_bytes, expected = int(size), bytes.fromhex(token)
    except ValueError:
        raise SegmentUnavailable(f"{where!r} is not the address of a segment") from None
    try:
        opened = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise SegmentUnavailable(
            f"shared memory of this gang cannot be opened at {path}: {error.strerror}. Run workers and "
            "driver in one container as one user, or set PIPEDIST_SHARED_MEMORY=0"
        ) from None
    try:
        memory = _map(opened, path, size_bytes, expected)
    finally:
        os.close(opened)
    _, _, _, replicas, pack_bytes = _HEADER.unpack_from(memory)
    return GangSegment(memory, expected, replicas, pack_bytes)


def _map(descriptor: int, path: str, size_bytes: int, token: bytes) -> mmap.mmap:
    try:
        seals = fcntl.fcntl(descriptor, F_GET_SEALS)
        found_bytes = os.fstat(descriptor).st_size
        if seals & SIZE_SEALS != SIZE_SEALS or found_bytes != size_bytes or size_bytes < 2 * _HEADER_BYTES:
            raise SegmentUnavailable(f"{path} is not the memory of this gang: the group has ended")
        memory = mmap.mmap(descriptor, size_bytes)
    except OSError as error:
        raise SegmentUnavailable(f"{path} is not the memory of this gang: {error.strerror}") from None
    magic, found, size, replicas, pack_bytes = _HEADER.unpack_from(memory)
    fits = 1 <= replicas <= _REPLICAS_MAX and (
        _inputs_at(replicas) + 2 * (replicas + 1) * pack_bytes == size == size_bytes
    )
    if magic != _MAGIC or found != token or not fits:
        memory.close()
        raise SegmentUnavailable(f"{path} is not the memory of this gang: the group has ended")
    return memory


class GangSegments:
    """The segments mapped by a worker process: those of the latest groups, at most 4."""

    def __init__(self) -> None:
        self._segments: OrderedDict[str, GangSegment] = OrderedDict()

    def get(self, where: str) -> GangSegment:
        segment = self._segments.get(where)
        if segment is None:
            segment = self._segments[where] = attach(where)
            while len(self._segments) > _SEGMENTS_MAX:
                self._segments.popitem(last=False)[1].close()
        self._segments.move_to_end(where)
        return segment

    def close(self) -> None:
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()


def _address(memory: mmap.mmap) -> int:
    """Return the address of a mapping, without a lasting reference to it."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
