"""A lender's pool, by itself."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipedist.protocol.limits import KIB, MIB
from pipedist.protocol.wire import Reference
from pipedist.transport.config import SEGMENTS_MAX, SHARED_BYTES_MIN, SLOT_BYTES_MAX, SLOTS_MAX
from pipedist.transport.shared_memory import borrowed as borrowed_module
from pipedist.transport.shared_memory.borrowed import LEDGER_BYTES, Borrowed
from pipedist.transport.shared_memory.pool import Loan, Pool, map_received, slot_bytes_for

from .memory import lent_bytes


def ledger() -> memoryview:
    return memoryview(bytearray(LEDGER_BYTES)).cast("I")


def give_back(loan: Loan) -> None:
    loan.ledger[loan.slot.entry] = loan.number


@given(st.integers(SHARED_BYTES_MIN, SLOT_BYTES_MAX))
def test_slots_are_at_most_an_eighth_too_large_and_begin_at_pages(size_bytes: int) -> None:
    slot_bytes = slot_bytes_for(size_bytes)
    assert size_bytes <= slot_bytes <= size_bytes * 9 / 8
    assert slot_bytes % (4 * KIB) == 0
    assert slot_bytes_for(slot_bytes) == slot_bytes


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32))
def test_no_slot_is_lent_twice_and_bytes_are_bounded(seed: int) -> None:
    random_ = random.Random(seed)
    retired: list[int] = []
    pool = Pool(4 * MIB, retired.append)
    ledgers = [ledger() for _ in range(3)]
    out: list[tuple[Loan, int]] = []
    for number in range(300):
        if out and random_.random() < 0.5:
            loan, _ = out.pop(random_.randrange(len(out)))
            give_back(loan)
        if random_.random() < 0.02:
            gone = random_.choice(ledgers)
            pool.forgive(gone)
            out = [entry for entry in out if entry[0].ledger is not gone]
        size_bytes = random_.choice([64, 100, 128, 512, 1024, 3000]) * KIB
        loan_ = pool.lend(bytes([number % 256]) * size_bytes, random_.choice(ledgers))
        if loan_ is not None:
            assert loan_.slot.segment.serial not in retired
            out.append((loan_, number % 256))
        assert pool.size_bytes <= 4 * MIB
        assert all(loan.slot.memory[0] == byte and loan.slot.memory[-1] in (byte, 0) for loan, byte in out)
        places = [(loan.slot.segment.serial, loan.slot.index) for loan, _ in out]
        assert len(set(places)) == len(places)
        assert len({loan.slot.entry for loan, _ in out}) == len(out)
        assert max((loan.slot.entry for loan, _ in out), default=0) < SEGMENTS_MAX * SLOTS_MAX
    assert lent_bytes(pool) == sum(loan.slot.segment.slot_bytes for loan, _ in out)


def test_a_slot_is_used_again_at_once() -> None:
    pool, book = Pool(64 * MIB, lambda _: None), ledger()
    for _ in range(100):
        loan = pool.lend(bytes(4 * MIB), book)
        assert loan is not None
        give_back(loan)
    assert pool.size_bytes == 4 * MIB


def test_the_loads_of_a_frame_come_before_its_return(monkeypatch: pytest.MonkeyPatch) -> None:
    lender, borrowed = Pool(64 * MIB, lambda _: None), Borrowed(64 * MIB)
    book = memoryview(map_received(borrowed._descriptor, LEDGER_BYTES)).cast("I")
    loan = lender.lend(bytes(4 * MIB), book)
    assert loan is not None
    segment = loan.slot.segment
    borrowed.add(segment.serial, segment.number, segment.slots, segment.slot_bytes, segment.descriptor)
    frame = borrowed.frame(Reference(1, segment.serial, loan.slot.index, loan.number, 4 * MIB))
    over: list[bool] = []
    monkeypatch.setattr(borrowed_module, "fence_unless_tso", lambda: over.append(loan.is_over))
    assert bytes(frame[:1]) == b"\0"
    del frame
    assert over == [False], "there is a fence, before the store"
    assert loan.is_over
    borrowed.close()


def test_a_withdrawn_loan_is_free() -> None:
    pool, book = Pool(1 * MIB, lambda _: None), ledger()
    for _ in range(100):
        loan = pool.lend(bytes(1 * MIB), book)
        assert loan is not None
        pool.withdraw(loan)
    assert lent_bytes(pool) == 0


def test_frames_that_are_too_large_and_pools_that_are_too_small() -> None:
    book = ledger()
    assert (
        Pool(1 << 30, lambda _: None).lend(memoryview(np.empty(SLOT_BYTES_MAX + 1, np.uint8)), book) is None
    )
    assert Pool(SHARED_BYTES_MIN - 1, lambda _: None).lend(bytes(SHARED_BYTES_MIN), book) is None


def test_the_number_of_segments_is_bounded() -> None:
    pool, book = Pool(1 << 40, lambda _: None), ledger()
    sizes = [SHARED_BYTES_MIN * (8 + k) // 8 for k in range(8)]
    for number in range(20 * SEGMENTS_MAX):
        pool.lend(bytes(sizes[number % 8] << (number // 8 % 2)), book)
    assert len(pool._segments) <= SEGMENTS_MAX


def test_without_memory_there_is_no_loan_and_later_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, book = Pool(64 * MIB, lambda _: None), ledger()

    def fails(*_args: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.posix_fallocate", fails)
        assert pool.lend(bytes(MIB), book) is None
    found = [pool.lend(bytes(MIB), book) for _ in range(100)]
    assert found[0] is None  # a system without memory is not asked each time
    assert found[-1] is not None
