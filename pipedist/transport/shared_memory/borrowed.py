"""A borrower's side: the peer's segments, the frames in them, and when each is given back.

A loan is over when the last view of its frame is gone, in whatever thread that happens. The
borrower then writes the loan's number into its ledger: one store, without a system call, so that
slots come back also from a process that is busy for minutes.

Order. The lender's stores into a slot come before the message with the reference, which both processes pass through
the kernel. The borrower's loads of the frame must come before its store into the ledger, or the lender could fill
the slot while a late load still reads it: on x86-64 they do, elsewhere a fence separates them. The lender loads the
ledger before it fills the slot: it stores only if the load shows that the loan is over, and no processor makes a
store visible before the branch that it depends on is decided.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable
from typing import Final

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from pipedist.core.memory_order import fence_unless_tso
from pipedist.errors import RemoteProtocolError
from pipedist.protocol.wire import Reference
from pipedist.transport.config import SEGMENTS_MAX, SHARED_BYTES_MIN, SLOTS_MAX
from pipedist.transport.shared_memory.pool import create_memory, map_received

LEDGER_BYTES: Final = SEGMENTS_MAX * SLOTS_MAX * 4  # a u32 for every slot that a lender may have


class _Mapped(Struct, frozen=True):
    memory: mmap.mmap
    number: int
    slot_bytes: int
    slots: int


class _Watch(weakref.ref[NDArray[np.uint8]]):
    """Notices when the array is gone that all views of a borrowed frame are based on."""

    __slots__ = ("entry", "loan")

    entry: int
    loan: int


class Borrowed:
    """What one peer lends us; OSError: no memory for the ledger."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._process = os.getpid()
        self._mapped: dict[int, _Mapped] = {}
        self._out: dict[int, _Watch] = {}  # by entry of the ledger: frames of which there are views
        self._memory, self._descriptor = create_memory("pipedist-ledger", LEDGER_BYTES)
        self._ledger = memoryview(self._memory).cast("I")

    def hand_over(self) -> int:
        """Return the ledger's descriptor, for the peer; the caller closes it."""
        descriptor, self._descriptor = self._descriptor, -1
        return descriptor

    def close(self) -> None:
        """Close what was not handed over; segments and frames are freed with their last view."""
        if self._descriptor >= 0:
            os.close(self.hand_over())

    def add(self, serial: int, number: int, slots: int, slot_bytes: int, descriptor: int) -> None:
        """Map a segment; raise RemoteProtocolError if it is not what a lender makes, or too much."""
        size_bytes = slots * slot_bytes
        if serial in self._mapped or any(number == mapped.number for mapped in self._mapped.values()):
            raise RemoteProtocolError(f"the segment {serial} a second time")
        if not (number < SEGMENTS_MAX and 1 <= slots <= SLOTS_MAX and slot_bytes >= SHARED_BYTES_MIN):
            raise RemoteProtocolError(f"a segment {number} of {slots} slots of {slot_bytes} bytes")
        if self._bytes + size_bytes > self._bytes_max:
            raise RemoteProtocolError(
                f"segments of {self._bytes + size_bytes} bytes, the limit is {self._bytes_max}"
            )
        try:
            memory = map_received(descriptor, size_bytes)
        except OSError as error:
            raise RemoteProtocolError(f"a segment that can't be mapped: {error}") from None
        self._mapped[serial] = _Mapped(memory, number, slot_bytes, slots)
        self._bytes += size_bytes

    def has(self, serial: int) -> bool:
        return serial in self._mapped

    def retire(self, serial: int) -> None:
        """Forget a segment; its memory stays as long as there is a view of it."""
        mapped = self._mapped.pop(serial, None)
        if mapped is None:
            raise RemoteProtocolError(f"the end of a segment {serial} that it did not lend")
        self._bytes -= mapped.slots * mapped.slot_bytes

    def frame(self, reference: Reference) -> memoryview:
        """Return a borrowed frame: a read-only view of the peer's memory."""
        mapped = self._mapped.get(reference.segment)
        if mapped is None:
            raise RemoteProtocolError(f"a frame in a segment {reference.segment} that it did not lend")
        if reference.slot >= mapped.slots or not 1 <= reference.size_bytes <= mapped.slot_bytes:
            raise RemoteProtocolError(
                f"a frame of {reference.size_bytes} bytes in slot {reference.slot}, "
                f"of {mapped.slots} slots of {mapped.slot_bytes} bytes"
            )
        entry = mapped.number * SLOTS_MAX + reference.slot
        if entry in self._out:
            raise RemoteProtocolError("a frame in a slot whose last frame is still in use")
        array = np.frombuffer(
            mapped.memory, np.uint8, reference.size_bytes, reference.slot * mapped.slot_bytes
        )
        watch = self._out[entry] = _Watch(array, self._return)
        watch.entry, watch.loan = entry, reference.loan
        return array.data

    def _return(self, watch: _Watch, getpid: Callable[[], int] = os.getpid) -> None:
        # In a process that user code has forked, views end that still live here.
        if getpid() == self._process:
            del self._out[watch.entry]
            fence_unless_tso()
            self._ledger[watch.entry] = watch.loan
