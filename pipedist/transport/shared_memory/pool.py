"""A lender's slots: which sizes there are, which are free, and when one comes back.

Slots of one size form a SHELF. A shelf grows by segments, each as large as all before it, so that
little data takes little memory. Slots are reused, the last one given back first: its pages are there
and warm, while fresh ones fill at a tenth of the speed. When the pool is full, segments of other sizes
that lie idle are retired.
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Final

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from pipedist.errors import RemoteProtocolError
from pipedist.protocol.limits import MIB
from pipedist.transport.config import SEGMENT_BYTES_MAX, SEGMENTS_MAX, SLOT_BYTES_MAX, SLOTS_MAX

# <linux/fcntl.h>. The module `fcntl` lacks one of them, and elsewhere all: there this is only imported.
_F_ADD_SEALS: Final = 1033
F_GET_SEALS: Final = 1034
SIZE_SEALS: Final = 0x1 | 0x2 | 0x4  # F_SEAL_SEAL, SHRINK, GROW
_SEALS: Final = SIZE_SEALS | 0x10  # F_SEAL_FUTURE_WRITE


def create_memory(name: str, size_bytes: int, seals: int = _SEALS) -> tuple[mmap.mmap, int]:
    """Make memory of a fixed size; return the writable mapping, and the descriptor to hand over, or OSError.

    By default, only this process can write to it. The name is for people who read /proc.
    """
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        # Without the pages at hand, a machine out of memory would kill us at the first write.
        os.posix_fallocate(descriptor, 0, size_bytes)
        memory = mmap.mmap(descriptor, size_bytes)
        fcntl.fcntl(descriptor, _F_ADD_SEALS, seals)
    except BaseException:
        os.close(descriptor)
        raise
    return memory, descriptor


def map_received(descriptor: int, size_bytes: int) -> mmap.mmap:
    """Map a peer's memory, read-only, after checking that it can't shrink any more, or raise OSError.

    The descriptor stays open. Raise RemoteProtocolError if it is not what `create_memory` makes.
    """
    try:
        seals = fcntl.fcntl(descriptor, F_GET_SEALS)
    except OSError:
        raise RemoteProtocolError("a descriptor that is no memory which can be sealed") from None
    if seals & _SEALS != _SEALS:
        raise RemoteProtocolError(f"shared memory with the seals {seals:#x}, expected {_SEALS:#x}")
    found_bytes = os.fstat(descriptor).st_size
    if found_bytes != size_bytes:
        raise RemoteProtocolError(f"shared memory of {found_bytes} bytes, {size_bytes} were announced")
    return mmap.mmap(descriptor, size_bytes, prot=mmap.PROT_READ)


_FIRST_SEGMENT_BYTES: Final = 1 * MIB
_LOOKS_MAX: Final = 64  # loans that are looked at, at most, to find one that has ended
_MISSES_MAX: Final = 64  # requests that go away empty-handed before a full pool is searched again
_LOANS: Final = 1 << 32


def slot_bytes_for(size_bytes: int) -> int:
    """Return the size of the slot for a frame: the next of eight sizes per power of two."""
    octave = 1 << ((size_bytes - 1).bit_length() - 1)
    return -(-size_bytes // (octave >> 3)) * (octave >> 3)


class LentSegment:
    """Shared memory of a lender: its slots are in ledgers from `number * SLOTS_MAX` on."""

    def __init__(self, serial: int, number: int, slot_bytes: int, slots: int) -> None:
        self.serial = serial
        self.number = number
        self.slot_bytes = slot_bytes
        self.slots = slots
        self.memory, self.descriptor = create_memory("pipedist-data", slot_bytes * slots)
        weakref.finalize(self, os.close, self.descriptor).atexit = False

    @property
    def size_bytes(self) -> int:
        return self.slot_bytes * self.slots


class _Slot(Struct, eq=False):
    """A place for one frame."""

    segment: LentSegment
    index: int  # its number in its segment
    entry: int  # its number in a borrower's ledger
    memory: NDArray[np.uint8]  # uint8[slot_bytes], writable


class Loan(Struct, eq=False):
    """A slot that a borrower reads."""

    slot: _Slot
    number: int  # unique in the pool; the borrower writes it into its ledger when it is done
    ledger: memoryview  # the borrower's, as we see it

    @property
    def is_over(self) -> bool:
        return self.ledger[self.slot.entry] == self.number


class _Shelf:
    def __init__(self) -> None:
        self.slots = 0
        self.free: list[_Slot] = []
        self.lent: deque[Loan] = deque()

    def find(self) -> _Slot | None:
        """Return a slot that is not lent, after a look at a bounded number of loans.

        It is the one that was lent last: its data is still in the caches.
        """
        while self.lent and self.lent[0].is_over:
            self.free.append(self.lent.popleft().slot)
        if self.free:
            return self.free.pop()
        for _ in range(min(_LOOKS_MAX, len(self.lent))):
            loan = self.lent.popleft()
            if loan.is_over:
                return loan.slot
            self.lent.append(loan)
        return None

    def settle(self, forgiven: memoryview | None = None) -> None:
        """Take back every slot whose loan is over, and those lent to the owner of a ledger."""
        lent = self.lent
        self.lent = deque(loan for loan in lent if loan.ledger is not forgiven and not loan.is_over)
        if len(self.lent) < len(lent):
            still = set(map(id, self.lent))
            self.free += [loan.slot for loan in lent if id(loan) not in still]


class Pool:
    """Memory that a process lends to others; `on_retire` gets the serial of a segment not used any more."""

    def __init__(self, bytes_max: int, on_retire: Callable[[int], None]) -> None:
        self._bytes_max = bytes_max
        self._on_retire = on_retire
        self._shelves: defaultdict[int, _Shelf] = defaultdict(_Shelf)
        self._segments: dict[int, LentSegment] = {}  # by number
        self.size_bytes = 0  # bytes of all segments, lent or not
        self._serials = itertools.count()
        self._loans = itertools.chain.from_iterable(itertools.repeat(range(1, _LOANS)))  # their numbers
        self._misses_left = 0

    def lend(self, frame: bytes | memoryview, ledger: memoryview) -> Loan | None:
        """Copy a frame into a slot, and lend it to the owner of a ledger.

        The frame is contiguous, and has at least SHARED_BYTES_MIN bytes. None where no slot is to be had now, or the
        frame is too large.
        """
        source = np.frombuffer(frame, np.uint8)
        if source.size > SLOT_BYTES_MAX:
            return None
        slot_bytes = slot_bytes_for(source.size)
        shelf = self._shelves[slot_bytes]
        slot = shelf.find() or self._grow(shelf, slot_bytes)
        if slot is None:
            return None
        loan = Loan(slot, next(self._loans), ledger)
        shelf.lent.append(loan)
        _fill(slot.memory[: source.size], source)
        return loan

    def withdraw(self, loan: Loan) -> None:
        """Take back a loan whose reference was not sent."""
        shelf = self._shelves[loan.slot.segment.slot_bytes]
        shelf.lent.remove(loan)
        shelf.free.append(loan.slot)

    def forgive(self, ledger: memoryview) -> None:
        """Take back what was lent to the owner of a ledger: it reads no more."""
        for shelf in self._shelves.values():
            shelf.settle(ledger)

    def close(self) -> None:
        """Free all memory; lent slots stay readable."""
        self._shelves.clear()
        self._segments.clear()
        self.size_bytes = self._bytes_max = 0

    def _grow(self, shelf: _Shelf, slot_bytes: int) -> _Slot | None:
        if self._misses_left:
            self._misses_left -= 1
            return None
        slots = max(shelf.slots, _FIRST_SEGMENT_BYTES // slot_bytes)
        slots = max(1, min(slots, SEGMENT_BYTES_MAX // slot_bytes))
        if self.size_bytes + slots * slot_bytes > self._bytes_max or len(self._segments) >= SEGMENTS_MAX:
            self._retire_idle(slot_bytes, slots)
            if shelf.free:
                return shelf.free.pop()
        slots = min(slots, (self._bytes_max - self.size_bytes) // slot_bytes)
        if slots < 1 or len(self._segments) >= SEGMENTS_MAX:
            self._misses_left = _MISSES_MAX
            return None
        number = next(n for n in range(SEGMENTS_MAX) if n not in self._segments)
        try:
            segment = LentSegment(next(self._serials), number, slot_bytes, slots)
        except (OSError, MemoryError):  # the system has none left: frames will do
            self._misses_left = _MISSES_MAX
            return None
        self._segments[number] = segment
        self.size_bytes += segment.size_bytes
        shelf.slots += slots
        memory = np.frombuffer(segment.memory, np.uint8)
        for index in range(slots):
            part = memory[index * slot_bytes : (index + 1) * slot_bytes]
            shelf.free.append(_Slot(segment, index, number * SLOTS_MAX + index, part))
        return shelf.free.pop()

    def _retire_idle(self, slot_bytes: int, slots: int) -> None:
        """Retire segments of other sizes of which no slot is lent, until there is room."""
        for shelf in self._shelves.values():
            shelf.settle()
        lent = {loan.slot.segment.serial for shelf in self._shelves.values() for loan in shelf.lent}
        for segment in list(self._segments.values()):
            has_room = self.size_bytes + slots * slot_bytes <= self._bytes_max
            if has_room and len(self._segments) < SEGMENTS_MAX:
                return
            if segment.serial not in lent and segment.slot_bytes != slot_bytes:
                self._retire(segment)

    def _retire(self, segment: LentSegment) -> None:
        shelf = self._shelves[segment.slot_bytes]
        shelf.free = [slot for slot in shelf.free if slot.segment is not segment]
        shelf.slots -= segment.slots
        del self._segments[segment.number]
        self.size_bytes -= segment.size_bytes
        self._on_retire(segment.serial)


def _fill(slot: NDArray[np.uint8], frame: NDArray[np.uint8]) -> None:
    slot[:] = frame
