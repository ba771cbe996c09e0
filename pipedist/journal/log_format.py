"""The files of a journal: their bytes, and the system calls that make them durable.

The journal is a file of records (`pipedist.core.record_format`) of two frames:

    digest of the record before, 16 bytes | payload, msgpack

The digest of a record is the first 16 bytes of the SHA-256 of all of its bytes; before the first
record it is zero. So a bit that flips is found by a checksum, a record that is removed, moved or
replaced by a good one is found by the chain. A torn tail was never acknowledged, and is dropped.
Where a good record follows a bad one, acknowledged data is lost: that is damage, and an error.

A log is a file of records whose first frame is msgpack and whose others are of the codec. The
journal knows how long each log is, and the CRC32 of the heads of its records, which have the CRC32
of the frames. Bytes that a killed process wrote behind that are cut off.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final
from zlib import crc32

import msgpack
from msgspec import Struct

from pipedist.core import files, record_format
from pipedist.core.record_format import Buffer
from pipedist.core.types import Tree
from pipedist.errors import JournalError, PipedistError
from pipedist.protocol.codec import decode, encode

DIGEST_BYTES: Final = 16
FIRST: Final = bytes(DIGEST_BYTES)  # the digest before the first record

PAYLOAD_BYTES_MAX: Final = 2**30
"""The header names every file that the run reads, of which there may be millions."""

OVERHEAD_BYTES: Final = record_format.head_bytes(2) + DIGEST_BYTES
"""Bytes of a record of the journal beside its payload."""

BUFFERED_BYTES_MAX: Final = 2**18  # small records of a log are written together

BUFFERS_MAX: Final = 512  # buffers of one `writev`; the kernel takes 1,024


class Disk:
    """The system calls of a journal, which tests replace; all raise OSError."""

    def open(self, path: Path) -> int:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)

    def write(self, fd: int, buffers: Sequence[Buffer], at: int) -> int:
        """Write all of `buffers` from offset `at` on, and return the bytes."""
        begin = at
        waiting = [view.cast("B") for b in buffers if (view := memoryview(b)).nbytes]
        while waiting:
            done = os.pwritev(fd, waiting[:BUFFERS_MAX], at)  # it may write less
            at += done
            taken = 0
            while taken < len(waiting) and done >= waiting[taken].nbytes:
                done -= waiting[taken].nbytes
                taken += 1
            del waiting[:taken]
            if done:
                waiting[0] = waiting[0][done:]
        return at - begin

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def sync(self, fd: int) -> None:
        os.fdatasync(fd)

    def sync_folder(self, path: Path) -> None:
        files.sync_folder(path)

    def rename(self, source: Path, target: Path) -> None:
        os.replace(source, target)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def close(self, fd: int) -> None:
        os.close(fd)


DISK: Final = Disk()


def pack_record(payload: bytes, before: bytes) -> bytes:
    """Return a record of the journal, chained to the digest `before`."""
    if len(payload) > PAYLOAD_BYTES_MAX:
        raise JournalError(
            f"a record of the journal has {len(payload):,} bytes, at most {PAYLOAD_BYTES_MAX:,} are allowed. "
            "It names each file that the run reads. Put the data into fewer, larger files."
        )
    return b"".join(record_format.pack([before, payload]))


def digest_of(packed: bytes | memoryview) -> bytes:
    import hashlib  # loads OpenSSL, and logs need no digest

    return hashlib.sha256(packed).digest()[:DIGEST_BYTES]


class JournalRecord(Struct, frozen=True):
    """A record in a journal.

    Args:
        offset, end: where it begins and ends, bytes.
        digest: of all of its bytes.
        before: the digest of the record before, as this one has it.
    """

    offset: int
    payload: bytes
    digest: bytes
    before: bytes
    end: int


def read_records(data: bytes | memoryview) -> Iterator[JournalRecord]:
    """Yield the records of a journal's bytes, up to the end or a torn tail.

    If one is damaged, missing, or in the wrong place, raise JournalError with its offset.
    """
    view = memoryview(data)
    at, before, number = 0, FIRST, 0
    while at < len(view):
        found = _journal_record_at(view, at)
        if isinstance(found, str):
            good = _next_good(view, at + 1)
            if good is not None:
                raise JournalError(
                    f"record {number} at offset {at} is damaged: {found}, and a good record follows at "
                    f"offset {good}"
                )
            return
        if found.before != before:
            raise JournalError(
                f"record {number} at offset {at} does not follow the one before it: its chain has "
                f"{found.before.hex()}, expected {before.hex()}: a record was removed, added, replaced or "
                "moved"
            )
        yield found
        at, before, number = found.end, found.digest, number + 1


def _journal_record_at(view: memoryview, at: int) -> JournalRecord | str:
    """Return the record that begins at an offset, or the reason why there is none."""
    head = record_format.record_at(view, at)
    if isinstance(head, str):
        return head
    if len(head.sizes) != 2 or head.sizes[0] != DIGEST_BYTES or head.sizes[1] > PAYLOAD_BYTES_MAX:
        return f"its frames have {', '.join(map(str, head.sizes[:9]))} bytes"
    before, payload = record_format.frames_of(view, head)
    return JournalRecord(at, bytes(payload), digest_of(view[at : head.end]), bytes(before), head.end)


def _next_good(view: memoryview, at: int) -> int | None:
    """Return the offset of the next good record."""
    for magic in re.finditer(re.escape(record_format.MAGIC), view[at:]):
        place = at + magic.start()
        if not isinstance(_journal_record_at(view, place), str):
            return place
    return None


class LogEnd(Struct, frozen=True, array_like=True):
    """How far a log is durable: its length, and the CRC32 of its heads."""

    bytes: int
    crc: int


EMPTY: Final = LogEnd(0, 0)


class LogEntry(Struct, frozen=True):
    """A record of a log.

    Args:
        meta: its first frame, unpacked.
        at: offset of its second frame, bytes.
        sizes: bytes of each frame from the second on.
    """

    meta: Any
    at: int
    sizes: Sequence[int]


def packed(meta: Tree, frames: Sequence[Buffer]) -> list[Buffer]:
    """Return a record of a log as its head and its frames, which are not copied."""
    return record_format.pack([msgpack.packb(meta), *frames])


def unpacked(data: Buffer) -> Tree:
    """Return the tree of a record that is alone in its bytes."""
    view = memoryview(data)
    head = record_format.record_at(view, 0)
    try:
        if isinstance(head, str):
            raise ValueError(head)
        return decode(record_format.frames_of(view, head)[1:])
    except ValueError as error:
        raise JournalError(f"a value can't be read: {error}") from error


def end_of(buffers: Sequence[Buffer]) -> LogEnd:
    """Return the end of a file that holds one record, from the record's head and frames."""
    return LogEnd(record_format.frame_bytes(buffers), crc32(buffers[0]))


class RecordLog:
    """A log that is being written.

    Args:
        fd: the file, open for reading and writing; the log closes it.
        end: where the log ends now.
        fails: returns the error to raise when a system call fails.
    """

    def __init__(
        self, fd: int, end: LogEnd, fails: Callable[[OSError], PipedistError], disk: Disk = DISK
    ) -> None:
        self.fd = fd
        self._fails = fails
        self._disk = disk
        self._crc = end.crc
        self._size = self._written = end.bytes
        self._waiting: list[Buffer] = []

    def append(self, tree: Tree, meta: Tree = None) -> LogEntry:
        """Add a record; small ones are written with the next ones, or by `end`.

        Args:
            tree: whatever the codec takes; its arrays must not change any more.
            meta: None, numbers, text, and lists and maps of them.
        """
        return self.put(encode(tree), meta)

    def put(self, frames: Sequence[Buffer], meta: Tree = None) -> LogEntry:
        """Add a record of a tree that is encoded already; as `append`."""
        head, first, *rest = packed(meta, frames)
        sizes = [memoryview(frame).nbytes for frame in rest]
        entry = LogEntry(meta, self._size + len(head) + len(first), sizes)
        self._crc = crc32(head, self._crc)
        self._size = entry.at + sum(sizes)
        self._waiting += [head, first, *rest]
        if self._size - self._written >= BUFFERED_BYTES_MAX:
            self.flush()
        return entry

    def flush(self) -> None:
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            try:
                self._written += self._disk.write(self.fd, waiting, self._written)
            except OSError as error:
                raise self._fails(error) from error

    def end(self) -> LogEnd:
        """Return where the log ends; everything before it is written, and not yet durable."""
        self.flush()
        return LogEnd(self._size, self._crc)

    def close(self) -> None:
        """Close the file; harmless twice."""
        self._waiting = []
        if self.fd >= 0:
            self._disk.close(self.fd)
            self.fd = -1


def read_log(path: Path, end: LogEnd) -> Iterator[tuple[LogEntry, list[bytes]]]:
    """Yield the records of a log and their frames, after all of it was checked."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < end.bytes:
                raise JournalError(
                    f"{path} is damaged: it has {size:,} bytes, and the journal records {end.bytes:,}"
                )
            if not end.bytes:
                return
            # not closed here: the traceback of an error may hold views of it
            view = memoryview(mmap.mmap(file.fileno(), end.bytes, access=mmap.ACCESS_READ))
    except FileNotFoundError:
        raise JournalError(
            f"{path} is missing, and the journal records that it has {end.bytes:,} bytes"
        ) from None
    except OSError as error:
        raise JournalError(f"{path} can't be read: {error.strerror or error}") from error
    _check(view, path, end)
    at = 0
    while at < end.bytes:
        head = record_format.head_at(view, at)
        assert not isinstance(head, str)  # it was checked
        meta, *frames = map(bytes, record_format.frames_of(view, head))
        yield LogEntry(msgpack.unpackb(meta), head.body + len(meta), head.sizes[1:]), frames
        at = head.end


def _check(view: memoryview, path: Path, end: LogEnd) -> None:
    crc = at = 0
    while at < end.bytes:
        head = record_format.record_at(view, at)
        if isinstance(head, str):
            raise JournalError(f"{path} is damaged: the record at offset {at:,}: {head}")
        crc = crc32(view[at : head.body], crc)
        at = head.end
    if crc != end.crc:
        raise JournalError(
            f"{path} is damaged: the CRC32 of its first {end.bytes:,} bytes is {crc:08x}, "
            f"and the journal records {end.crc:08x}"
        )
