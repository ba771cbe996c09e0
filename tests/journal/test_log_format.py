"""The bytes of a journal: any damage gives the exact prefix or a named error."""

from __future__ import annotations

import random

import pytest

from pipedist.core.record_format import MAGIC
from pipedist.errors import JournalError
from pipedist.journal.log_format import FIRST, OVERHEAD_BYTES, digest_of, pack_record, read_records


def journal(count: int, seed: int = 1) -> tuple[list[bytes], list[bytes]]:
    """Return payloads and packed records; some payloads look like records themselves."""
    rng = random.Random(seed)
    payloads, packed, before = [], [], FIRST
    for number in range(count):
        payload = rng.randbytes(rng.randrange(40)) + (MAGIC if number % 7 == 0 else b"")
        made = pack_record(payload, before)
        payloads.append(payload)
        packed.append(made)
        before = digest_of(made)
    return payloads, packed


def read(data: bytes) -> list[bytes]:
    return [placed.payload for placed in read_records(data)]


def test_records_are_read_as_written() -> None:
    payloads, packed = journal(100)
    assert read(b"".join(packed)) == payloads
    assert read(b"") == []
    assert len(pack_record(b"", FIRST)) == OVERHEAD_BYTES


def test_a_record_may_name_a_million_files_and_no_more_than_can_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    payload = bytes(100 * 2**20)
    assert read(pack_record(payload, FIRST)) == [payload]
    monkeypatch.setattr("pipedist.journal.log_format.PAYLOAD_BYTES_MAX", 99)
    with pytest.raises(JournalError, match=r"has 100 bytes, at most 99 .* fewer, larger"):
        pack_record(bytes(100), FIRST)


def test_every_truncation_point_gives_the_exact_prefix() -> None:
    payloads, packed = journal(100)
    data = b"".join(packed)
    whole, end = 0, len(packed[0])
    for cut in range(len(data) + 1):
        while whole < len(packed) and cut >= end:
            whole += 1
            end += len(packed[whole]) if whole < len(packed) else 0
        assert read(data[:cut]) == payloads[:whole], cut


def check_flips(bits: range) -> None:
    """Flip bits of a journal of 100 records, one at a time, by their numbers in it."""
    payloads, packed = journal(100)
    data = b"".join(packed)
    last = len(data) - len(packed[-1])
    starts = [sum(map(len, packed[:n])) for n in range(len(packed))]
    for number in range(bits.start, 8 * len(data), bits.step):
        at, bit = divmod(number, 8)
        flipped = bytearray(data)
        flipped[at] ^= 1 << bit
        if at >= last:  # as a tail that was torn
            assert read(bytes(flipped)) == payloads[:-1], (at, bit)
            continue
        start = max(s for s in starts if s <= at)
        with pytest.raises(JournalError, match=rf"at offset {start} "):
            read(bytes(flipped))


def test_every_bit_flip_gives_the_exact_prefix_or_a_named_error() -> None:
    check_flips(range(3, 4, 19))  # every 19th bit, of all places in a byte; the others: make chaos-driver


@pytest.mark.parametrize("where", [0, 1, 50, 98])
def test_a_record_that_is_removed_moved_or_replaced_is_found(where: int) -> None:
    _, packed = journal(100)
    offset = sum(map(len, packed[:where]))
    follows = rf"at offset {offset} does not follow"
    with pytest.raises(JournalError, match=follows):
        read(b"".join(packed[:where] + packed[where + 1 :]))
    swapped = [*packed[:where], packed[where + 1], packed[where], *packed[where + 2 :]]
    with pytest.raises(JournalError, match=follows):
        read(b"".join(swapped))
    before = FIRST if where == 0 else digest_of(packed[where - 1])
    replaced = [*packed[:where], pack_record(b"forged", before), *packed[where + 1 :]]
    with pytest.raises(JournalError, match=rf"at offset {offset + OVERHEAD_BYTES + 6} does not follow"):
        read(b"".join(replaced))
    with pytest.raises(JournalError, match="does not follow"):
        read(b"".join([*packed[:where], packed[where], *packed[where:]]))


def test_zeros_or_noise_behind_the_last_record_are_a_torn_tail() -> None:
    payloads, packed = journal(5)
    data = b"".join(packed)
    for tail in (bytes(1), bytes(4096), MAGIC, MAGIC * 30, random.Random(2).randbytes(500)):
        assert read(data + tail) == payloads
