"""Files that grow by records of arrays: values that are durable as soon as the journal names their end.

    length of `meta`, u32 | number of frames, u32 | length of each frame, u64 | meta, msgpack | frames

A log has no checksums of its own: the journal knows how long it is, and the CRC32 of all of that. What
a killed process wrote behind it is cut off.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, BinaryIO, Final
from zlib import crc32

import msgpack
from msgspec import Struct

from pipedist.errors import JournalError, PipedistError
from pipedist.journal.disk import DISK, Buffer, Disk
from pipedist.program import Tree
from pipedist.transport.codec import decode, encode

_COUNTS: Final = struct.Struct("<II")
BUFFERED_BYTES_MAX: Final = 2**18
"""Small records are written together."""

CHECKED_BYTES: Final = 2**20
"""A file is checked in pieces of so many."""


class End(Struct, frozen=True):
    """How far a file is durable.

    Args:
        bytes: its length.
        crc: CRC32 of so many bytes.
    """

    bytes: int
    crc: int


class Entry(Struct, frozen=True):
    """A record of a log.

    Args:
        meta: what was said about it.
        at: where its frames begin, bytes.
        sizes: of each frame, bytes.
    """

    meta: Any
    at: int
    sizes: Sequence[int]


def packed(meta: Tree, frames: Sequence[Buffer]) -> list[Buffer]:
    """Return a record's bytes, as buffers; the frames are not copied."""
    said = msgpack.packb(meta)
    sizes = [memoryview(frame).nbytes for frame in frames]
    head = _COUNTS.pack(len(said), len(frames)) + struct.pack(f"<{len(sizes)}Q", *sizes)
    return [head + said, *frames]


def unpacked(data: Buffer) -> Tree:
    """Return the tree of a record, alone in its bytes.

    Raises:
        JournalError: these bytes are no such record.
    """
    view = memoryview(data)
    try:
        said, count = _COUNTS.unpack_from(view)
        sizes = struct.unpack_from(f"<{count}Q", view, _COUNTS.size)
        begin = _COUNTS.size + 8 * count + said
        starts = list(accumulate(sizes, initial=begin))
        return decode([view[a:b] for a, b in pairwise(starts)])
    except (struct.error, ValueError) as error:
        raise JournalError(f"a value can't be read: {error}") from error


EMPTY: Final = End(0, 0)


class Log:
    """A log that is being written.

    Args:
        fd: the file, open for reading and writing; it is the log's now.
        end: where the log ends now.
        fails: returns what to raise where the operating system fails.
        disk: system calls.
    """

    def __init__(
        self, fd: int, end: End, fails: Callable[[OSError], PipedistError], disk: Disk = DISK
    ) -> None:
        self.fd = fd
        self._fails = fails
        self._disk = disk
        self._crc = end.crc
        self._size = self._written = end.bytes
        self._waiting: list[Buffer] = []

    def append(self, tree: Tree, meta: Tree = None) -> Entry:
        """Add a record; small ones are written with the next ones, or by `end`.

        Args:
            tree: whatever the codec takes; its arrays must not change any more.
            meta: None, numbers, text, and lists of them.

        Raises:
            PipedistError: as `fails` says, if it can't be written.
        """
        return self.put(encode(tree), meta)

    def put(self, frames: Sequence[Buffer], meta: Tree = None) -> Entry:
        """Add a record of a tree that is encoded already; as `append`.

        Raises:
            PipedistError: as `fails` says, if it can't be written.
        """
        made = packed(meta, frames)
        sizes = [memoryview(frame).nbytes for frame in frames]
        entry = Entry(meta, self._size + memoryview(made[0]).nbytes, sizes)
        for buffer in made:
            self._crc = crc32(buffer, self._crc)
            self._size += memoryview(buffer).nbytes
        self._waiting += made
        if self._size - self._written >= BUFFERED_BYTES_MAX:
            self.flush()
        return entry

    def flush(self) -> None:
        """Give everything to the operating system.

        Raises:
            PipedistError: as `fails` says, if it can't be written.
        """
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            try:
                self._written += self._disk.write(self.fd, waiting, self._written)
            except OSError as error:
                raise self._fails(error) from error

    def end(self) -> End:
        """Return where the log ends; everything before it is written, and not yet durable.

        Raises:
            PipedistError: as `fails` says, if it can't be written.
        """
        self.flush()
        return End(self._size, self._crc)

    def close(self) -> None:
        """Close the file; harmless twice."""
        self._waiting = []
        if self.fd >= 0:
            self._disk.close(self.fd)
            self.fd = -1


def read_log(path: Path, end: End) -> Iterator[tuple[Entry, list[bytes]]]:
    """Yield the records of a log and their frames; not before all of it is known to be what was written.

    Raises:
        JournalError: it is shorter than the journal says, its bytes are others, or it can't be read.
    """
    try:
        with path.open("rb") as file:
            _check(file, path, end)
            file.seek(0)
            while (begin := file.tell()) < end.bytes:
                said, count = _COUNTS.unpack(file.read(_COUNTS.size))
                sizes = struct.unpack(f"<{count}Q", file.read(8 * count))
                meta = msgpack.unpackb(file.read(said))
                at = begin + _COUNTS.size + 8 * count + said
                yield Entry(meta, at, sizes), [file.read(size) for size in sizes]
    except FileNotFoundError:
        raise JournalError(
            f"{path} is missing, and the journal says that it has {end.bytes:,} bytes"
        ) from None
    except OSError as error:
        raise JournalError(f"{path} can't be read: {error.strerror or error}") from error


def _check(file: BinaryIO, path: Path, end: End) -> None:
    """Raise if a file does not begin with the bytes that its end was noted with."""
    crc = at = 0
    while at < end.bytes:
        data = file.read(min(CHECKED_BYTES, end.bytes - at))
        if not data:
            raise JournalError(f"{path} is damaged: it has {at:,} bytes, and the journal says {end.bytes:,}")
        crc = crc32(data, crc)
        at += len(data)
    if crc != end.crc:
        raise JournalError(
            f"{path} is damaged: the CRC32 of its first {end.bytes:,} bytes is {crc:08x}, "
            f"and the journal says {end.crc:08x}"
        )
