"""How messages follow each other in a stream of bytes: a head with the sizes of the frames, then these.

    [number of frames: u32] [0: u32] [bytes of a frame: u64] ... [frame] [frame] ...

All little-endian. Head and frames are filled up with zeros to multiples of 16 bytes, so that arrays
are aligned where they were received, and need no copy.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

import numpy as np

from pipedist.errors import RemoteProtocolError
from pipedist.transport.limits import Limits
from pipedist.transport.outbox import size_of
from pipedist.transport.wire import first_frame_bytes_max

ALIGNMENT_BYTES: Final = 16
HEAD: Final = struct.Struct("<IIQ")
"""The whole head of a message of one frame, and the beginning of any other."""

_TABLE_OFFSET: Final = 8
_ZEROS: Final = tuple(bytes(count) for count in range(ALIGNMENT_BYTES))


def frame_up(parts: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
    """Return what is written for a message: buffers, to be sent one after the other.

    Args:
        parts: its frames; they are not copied.
    """
    if len(parts) == 1:
        (part,) = parts
        size_bytes = size_of(part)
        return [HEAD.pack(1, 0, size_bytes), part, _ZEROS[-size_bytes % ALIGNMENT_BYTES]]
    sizes = [size_of(part) for part in parts]
    head = HEAD.pack(len(sizes), 0, sizes[0]) + struct.pack(f"<{len(sizes) - 1}Q", *sizes[1:])
    buffers: list[bytes | memoryview] = [head + _ZEROS[-len(head) % ALIGNMENT_BYTES]]
    for part, size_bytes in zip(parts, sizes, strict=True):
        if size_bytes:
            buffers.append(part)
            if rest := size_bytes % ALIGNMENT_BYTES:
                buffers.append(_ZEROS[ALIGNMENT_BYTES - rest])
    return buffers


class Assembler:
    """Makes messages of what was read; does no I/O.

    A message that has come in one piece is handed out as views of that piece. For any other, memory
    is made as soon as its head is there, and `unfilled` is where the rest of it is to be read into.

    Args:
        limits: how large a message may be.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._first_bytes_max = first_frame_bytes_max(limits)
        self._chunk = memoryview(b"")
        self._at = 0
        """Where in the chunk the next message begins."""
        self._frames: list[memoryview] | None = None
        """Of the message that is being filled."""
        self.unfilled: list[memoryview] = []
        """Writable memory for the next bytes, in order; none: they are to be fed."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left of what was read."""
        return self._at >= len(self._chunk) and self._frames is None

    def feed(self, data: bytes) -> None:
        """Take the next bytes; only while nothing is unfilled, and `take` has returned None."""
        if self._at < len(self._chunk):  # the beginning of a head
            data = bytes(self._chunk[self._at :]) + data
        self._chunk, self._at = memoryview(data), 0

    def filled(self, size_bytes: int) -> None:
        """Take note that so many bytes were read into what was unfilled."""
        left_bytes = size_bytes
        for place, memory in enumerate(self.unfilled):
            if memory.nbytes > left_bytes:
                self.unfilled[: place + 1] = [memory[left_bytes:]]
                return
            left_bytes -= memory.nbytes
        self.unfilled.clear()

    def take(self) -> list[memoryview] | None:
        """Return the frames of the next message, read-only; None where it has not come as a whole.

        Raises:
            RemoteProtocolError: it is malformed, or breaks a limit; nothing after it can be read.
        """
        if self._frames is not None:
            if self.unfilled:
                return None
            frames, self._frames = self._frames, None
            return frames
        chunk, at = self._chunk, self._at
        left_bytes = len(chunk) - at
        if left_bytes < HEAD.size:
            return None
        count, zero, size_bytes = HEAD.unpack_from(chunk, at)
        if zero or not count:
            raise RemoteProtocolError("malformed message: a head that is none")
        if count == 1:
            sizes: tuple[int, ...] = (size_bytes,)
            begin = at + HEAD.size
        else:
            if count > self._limits.frames_max:
                raise RemoteProtocolError(f"a message of more than {self._limits.frames_max} frames")
            table_bytes = _padded(_TABLE_OFFSET + 8 * count)
            if left_bytes < table_bytes:
                return None
            sizes = struct.unpack_from(f"<{count}Q", chunk, at + _TABLE_OFFSET)
            begin = at + table_bytes
        self._check(sizes)
        end = begin + sum(map(_padded, sizes))
        if end > len(chunk):
            self._begin_filling(sizes, begin)
            return None
        self._at = end
        if (end - begin) * 2 < len(chunk):
            # Whoever keeps a view of it does not keep what came along with it.
            return _cut(memoryview(bytes(chunk[begin:end])), 0, sizes)
        return _cut(chunk, begin, sizes)

    def release(self) -> None:
        """Let go of all memory; nothing comes any more."""
        self._chunk, self._at = memoryview(b""), 0
        self._frames = None
        self.unfilled.clear()

    def _check(self, sizes: tuple[int, ...]) -> None:
        limits = self._limits
        if sizes[0] > self._first_bytes_max:
            raise RemoteProtocolError(
                f"a first frame of {sizes[0]} bytes, the limit is {self._first_bytes_max}"
            )
        if len(sizes) > 1 and max(sizes[1:]) > limits.frame_bytes_max:
            raise RemoteProtocolError(
                f"a frame of {max(sizes[1:])} bytes, the limit is {limits.frame_bytes_max}"
            )
        if sum(sizes) > limits.message_bytes_max:
            raise RemoteProtocolError(f"a message of more than {limits.message_bytes_max} bytes")

    def _begin_filling(self, sizes: tuple[int, ...], begin: int) -> None:
        """Make memory for a message of which the rest is still to come."""
        chunk, at = self._chunk, begin
        frames = []
        for size_bytes in sizes:
            padded_bytes = _padded(size_bytes)
            try:
                memory = np.empty(padded_bytes, np.uint8).data
            except MemoryError:
                raise RemoteProtocolError(
                    f"a frame of {size_bytes} bytes, for which there is no memory"
                ) from None
            here = chunk[at : at + padded_bytes]
            memory[: here.nbytes] = here
            if here.nbytes < padded_bytes:
                self.unfilled.append(memory[here.nbytes :])
            frames.append(memory[:size_bytes].toreadonly())
            at += padded_bytes
        self._frames = frames
        self._chunk, self._at = memoryview(b""), 0


def _padded(size_bytes: int) -> int:
    return size_bytes + -size_bytes % ALIGNMENT_BYTES


def _cut(memory: memoryview, at: int, sizes: tuple[int, ...]) -> list[memoryview]:
    frames = []
    for size_bytes in sizes:
        frames.append(memory[at : at + size_bytes])
        at += _padded(size_bytes)
    return frames
