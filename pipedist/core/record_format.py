"""The form of records on disk: frames behind their lengths and checksums.

    magic "PDR1" | number of frames, u32 | bytes of each frame, u64 | CRC32 of the frames | CRC32 of the head
    the frames, one after the other

Numbers and CRC32 (u32) are little-endian; the head's CRC32 is of all bytes before it. A process that
is killed in the middle of a write leaves a last record whose checksums do not match: a torn tail,
which readers drop. The journal, its logs and values, and the results that a worker keeps are such records.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Final
from zlib import crc32

from msgspec import Struct

Buffer = bytes | memoryview

MAGIC: Final = b"PDR1"
_COUNT: Final = struct.Struct("<4sI")
_CRC: Final = struct.Struct("<I")


class Head(Struct, frozen=True):
    """Where a record and its frames are: offsets, bytes."""

    begin: int
    body: int  # offset of the first frame
    end: int  # offset behind the last frame
    sizes: tuple[int, ...]  # size of each frame
    crc: int  # CRC32 of the frames


def frame_bytes(frames: Sequence[Buffer]) -> int:
    """Return the size of frames together."""
    size = 0
    for frame in frames:
        size += len(frame) if type(frame) is bytes else memoryview(frame).nbytes
    return size


def head_bytes(frames: int) -> int:
    """Return the size of the head of a record, which depends on the number of its frames alone."""
    return _COUNT.size + 8 * frames + 2 * _CRC.size


def pack(frames: Sequence[Buffer]) -> list[Buffer]:
    """Return a record as its head and its frames, which are not copied."""
    crc = 0
    for frame in frames:
        crc = crc32(frame, crc)
    sizes = [memoryview(frame).nbytes for frame in frames]
    head = _COUNT.pack(MAGIC, len(sizes)) + struct.pack(f"<{len(sizes)}Q", *sizes) + _CRC.pack(crc)
    return [head + _CRC.pack(crc32(head)), *frames]


def head_at(data: memoryview, at: int) -> Head | str:
    """Return the head of the record that begins at an offset, or the reason why there is none."""
    left = len(data) - at
    if left < _COUNT.size:
        return f"only {left} bytes of its head are there"
    magic, count = _COUNT.unpack_from(data, at)
    if magic != MAGIC:
        return "its head does not match its checksum"
    body = at + head_bytes(count)
    if body > len(data):
        return f"only {left:,} of {body - at:,} bytes of its head are there"
    crc, crc_of_head = struct.unpack_from("<II", data, body - 2 * _CRC.size)
    if crc_of_head != crc32(data[at : body - _CRC.size]):
        return "its head does not match its checksum"
    sizes = struct.unpack_from(f"<{count}Q", data, at + _COUNT.size)
    end = body + sum(sizes)
    if end > len(data):
        return f"only {left:,} of {end - at:,} bytes are there"
    return Head(at, body, end, sizes, crc)


def record_at(data: memoryview, at: int) -> Head | str:
    """Return the head of the whole record at an offset, or the reason why there is none."""
    head = head_at(data, at)
    if not isinstance(head, str) and crc32(data[head.body : head.end]) != head.crc:
        return "its content does not match its checksum"
    return head


def frames_of(data: memoryview, head: Head) -> list[memoryview]:
    """Return the frames of a record, as parts of `data`."""
    starts = accumulate(head.sizes, initial=head.body)
    return [data[begin:end] for begin, end in pairwise(starts)]


def whole_records(data: memoryview) -> Iterator[Head]:
    """Yield the heads of all records, up to the end of the data or a torn tail."""
    at = 0
    while at < len(data) and not isinstance(head := record_at(data, at), str):
        yield head
        at = head.end
