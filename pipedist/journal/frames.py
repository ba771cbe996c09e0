"""The bytes of a journal: records that say their length, their checksum, and which record was before.

    magic "PJR1" | length of the payload, u32 | digest of the record before, 16 bytes | CRC32 of these, u32
    payload, msgpack                                                                  | CRC32 of it, u32

All numbers are little-endian. The digest of a record is the first 16 bytes of the SHA-256 of all of
its bytes; before the first record it is zero. So a bit that flips is found by a checksum, a record
that is taken out, put elsewhere or replaced by a good one is found by the chain.

A process that is killed in the middle of a write leaves a last record that is not whole: a TORN TAIL,
which was never acknowledged, and is dropped. Where anything good follows what is bad, it is no torn
tail but damage, and an error: what was acknowledged is gone, and that is never passed over.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final
from zlib import crc32

from msgspec import Struct

from pipedist.errors import JournalError

MAGIC: Final = b"PJR1"
DIGEST_BYTES: Final = 16
FIRST: Final = bytes(DIGEST_BYTES)
"""The digest before the first record."""

PAYLOAD_BYTES_MAX: Final = 2**30
"""The header names every file that the run reads, of which there may be millions."""

_HEAD: Final = struct.Struct(f"<4sI{DIGEST_BYTES}s")
_CRC: Final = struct.Struct("<I")
_BEFORE: Final = _HEAD.size + _CRC.size
OVERHEAD_BYTES: Final = _BEFORE + _CRC.size
"""Bytes of a record beside its payload."""


def pack_record(payload: bytes, before: bytes) -> bytes:
    """Return a record's bytes.

    Args:
        payload: what it says.
        before: digest of the record before.

    Raises:
        JournalError: the payload is too large.
    """
    if len(payload) > PAYLOAD_BYTES_MAX:
        raise JournalError(
            f"a record of the journal has at most {PAYLOAD_BYTES_MAX:,} bytes, and this one would have "
            f"{len(payload):,}: it names each file that the run reads; put these into fewer, larger ones"
        )
    head = _HEAD.pack(MAGIC, len(payload), before)
    return b"".join((head, _CRC.pack(crc32(head)), payload, _CRC.pack(crc32(payload))))


def digest_of(packed: bytes) -> bytes:
    """Return the digest of a record's bytes."""
    import hashlib  # not everybody who reads logs has a journal

    return hashlib.sha256(packed).digest()[:DIGEST_BYTES]


class Placed(Struct, frozen=True):
    """A record in a journal.

    Args:
        offset: where it begins, bytes.
        payload: what it says.
        digest: its own.
        end: where it ends.
    """

    offset: int
    payload: bytes
    digest: bytes
    end: int


def records(data: bytes | memoryview) -> Iterator[Placed]:
    """Yield the records of a journal's bytes, up to its end or its torn tail.

    Raises:
        JournalError: a record is damaged, missing, or in the wrong place; the text names the offset.
    """
    view = memoryview(data)
    at, before, number = 0, FIRST, 0
    while at < len(view):
        found = _record_at(view, at)
        if isinstance(found, str):
            good = _good_after(view, at + 1)
            if good is not None:
                raise JournalError(
                    f"record {number} at offset {at} is damaged: {found}, and a good record follows at "
                    f"offset {good}"
                )
            return
        chained = bytes(view[at + 8 : at + 8 + DIGEST_BYTES])
        if chained != before:
            raise JournalError(
                f"record {number} at offset {at} does not follow the one before it: its chain says "
                f"{chained.hex()}, expected {before.hex()}: a record was removed, added, replaced or moved"
            )
        yield found
        at, before, number = found.end, found.digest, number + 1


def _record_at(view: memoryview, at: int) -> Placed | str:
    """Return the record that begins at an offset, or what is wrong with it."""
    if len(view) - at < _BEFORE:
        return f"only {len(view) - at} bytes of its head are there"
    head = view[at : at + _HEAD.size]
    magic, length, _ = _HEAD.unpack(head)
    if magic != MAGIC or _CRC.unpack(view[at + _HEAD.size : at + _BEFORE])[0] != crc32(head):
        return "its head does not match its checksum"
    end = at + OVERHEAD_BYTES + length
    if length > PAYLOAD_BYTES_MAX:
        return f"its length is {length:,} bytes"
    if end > len(view):
        return f"only {len(view) - at:,} of {end - at:,} bytes are there"
    payload = view[at + _BEFORE : end - _CRC.size]
    if _CRC.unpack(view[end - _CRC.size : end])[0] != crc32(payload):
        return "its content does not match its checksum"
    return Placed(at, bytes(payload), digest_of(bytes(view[at:end])), end)


def _good_after(view: memoryview, at: int) -> int | None:
    """Return where the next good record begins, None if there is none."""
    data = bytes(view[at:])
    place = data.find(MAGIC)
    while place >= 0:
        if not isinstance(_record_at(view, at + place), str):
            return at + place
        place = data.find(MAGIC, place + 1)
    return None
