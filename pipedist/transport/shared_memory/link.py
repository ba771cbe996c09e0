"""A link: what this process lends to one peer, and what it borrows from it."""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from pipedist.errors import RemoteProtocolError
from pipedist.transport.shared_memory import notices, segments
from pipedist.transport.shared_memory.borrowed import LEDGER_BYTES, Borrowed
from pipedist.transport.shared_memory.pool import Pool, Segment
from pipedist.transport.shared_memory.references import Reference
from pipedist.transport.shared_memory.settings import SHARED_BYTES_MIN

_PACKETS_AT_ONCE_MAX: Final = 1024
_DESCRIPTORS: Final = {notices.HELLO: 1, notices.WELCOME: 1, notices.SEGMENT: 1}
"""How many each kind of packet brings; others none."""


class Link:
    """One end of a link; nothing here waits.

    Args:
        connection: a unix SOCK_SEQPACKET socket, not blocking; `close` closes it.
        borrowed_bytes_max: bytes that the peer may lend us.
        greeting: the kind of the packet with which the peer begins.
        on_greeting: called with its body; returns the pool from which the peer borrows. It raises
            RemoteProtocolError for a greeting that is wrong.

    Raises:
        OSError: no memory or no descriptors for a ledger.
    """

    def __init__(
        self,
        connection: socket.socket,
        *,
        borrowed_bytes_max: int,
        greeting: bytes,
        on_greeting: Callable[[bytes], Pool],
    ) -> None:
        self.connection = connection
        self.is_open = True
        self._greeting = greeting
        self._on_greeting = on_greeting
        self._borrowed = Borrowed(borrowed_bytes_max)
        self._pool: Pool | None = None
        """What we lend from; None before the greeting."""
        self._ledger = memoryview(b"")
        """The peer's."""
        self._told: set[int] = set()
        """Serials of the segments that the peer knows."""
        self._unsent: deque[int] = deque()
        """Retired segments of which the peer could not be told yet."""

    @property
    def is_greeted(self) -> bool:
        """Whether the peer has said who it is; before that, nothing can be lent to it."""
        return self._pool is not None

    def greet(self, kind: bytes, body: bytes) -> None:
        """Send our greeting.

        Raises:
            OSError: the peer is gone.
        """
        ledger = self._borrowed.hand_over()
        try:
            notices.send(self.connection, kind, body, (ledger,))
        finally:
            os.close(ledger)

    def lend(self, payload: Sequence[bytes | memoryview]) -> tuple[list[Reference], list[bytes | memoryview]]:
        """Put a payload's large frames into slots, as far as there are any.

        Args:
            payload: frames; the first one, the header, is never shared.

        Returns:
            References to the frames in slots, and the frames that are to be sent.
        """
        references: list[Reference] = []
        frames = list(payload[:1])
        for place in range(1, len(payload)):
            frame = payload[place]
            size_bytes = frame.nbytes if isinstance(frame, memoryview) else len(frame)
            reference = None
            if size_bytes >= SHARED_BYTES_MIN:
                reference = self._lend(place, frame, size_bytes)
            if reference is None:
                frames.append(frame)
            else:
                references.append(reference)
        return references, frames

    def frames(self, references: Sequence[Reference]) -> list[memoryview]:
        """Return the frames that a message refers to.

        Raises:
            RemoteProtocolError: one of them is not there.
        """
        if not all(self._borrowed.has(reference.segment) for reference in references):
            self.read()  # what the peer said of a segment is here before the message that uses it
        return [self._borrowed.frame(reference) for reference in references]

    def read(self) -> None:
        """Take the packets that have come; `is_open` is False after the last one.

        Raises:
            RemoteProtocolError: a packet that is not allowed.
        """
        for _ in range(_PACKETS_AT_ONCE_MAX):
            if not self.is_open:
                return
            notice = notices.receive(self.connection)
            if notice is None:
                return
            try:
                self._take(notice)
            finally:
                notice.close()

    def retire(self, serial: int) -> None:
        """Tell the peer, if it knows a segment, that it is over."""
        if serial in self._told:
            self._told.discard(serial)
            self._unsent.append(serial)
            self._flush()

    def close(self) -> None:
        """Close; frames that are in use here stay. May be called twice."""
        self._end()
        self.connection.close()
        self._borrowed.close()
        # Without these cycles, memory and descriptors are let go now, and not by the collector.
        self._on_greeting = _refuse
        self._pool = None
        self._ledger = memoryview(b"")

    def _end(self) -> None:
        """The peer is gone, or is to be: what it borrowed is ours again."""
        self.is_open = False
        if self._pool is not None:
            self._pool.forgive(self._ledger)

    def _lend(self, place: int, frame: bytes | memoryview, size_bytes: int) -> Reference | None:
        if not self.is_open or self._pool is None or not self._flush():
            return None
        loan = self._pool.lend(frame, self._ledger)
        if loan is None:
            return None
        slot = loan.slot
        if slot.segment.serial not in self._told and not self._tell(slot.segment):
            self._pool.withdraw(loan)
            return None
        return Reference(place, slot.segment.serial, slot.index, loan.number, size_bytes)

    def _tell(self, segment: Segment) -> bool:
        body = notices.SEGMENT_FORM.pack(segment.serial, segment.number, segment.slots, segment.slot_bytes)
        try:
            sent = notices.send(self.connection, notices.SEGMENT, body, (segment.descriptor,))
        except OSError:
            return False  # it is gone: reading says so too
        if sent:
            self._told.add(segment.serial)
        return sent

    def _flush(self) -> bool:
        """Send what could not be sent before; return whether nothing is left."""
        while self._unsent:
            try:
                if not notices.send(self.connection, notices.RETIRED, notices.SERIAL.pack(self._unsent[0])):
                    return False
            except OSError:
                return False  # it is gone: reading says so too
            self._unsent.popleft()
        return True

    def _take(self, notice: notices.Notice) -> None:
        kind, body, descriptors = notice
        if kind == b"":
            self._end()
        elif len(descriptors) != _DESCRIPTORS.get(kind, 0):
            raise RemoteProtocolError(f"a packet {kind!r} with {len(descriptors)} descriptors")
        elif kind == self._greeting and self._pool is None:
            try:
                self._ledger = memoryview(segments.open_received(descriptors[0], LEDGER_BYTES)).cast("I")
            except OSError as error:
                raise RemoteProtocolError(f"a ledger that can't be mapped: {error}") from None
            self._pool = self._on_greeting(body)
        elif kind == notices.SEGMENT and len(body) == notices.SEGMENT_FORM.size:
            serial, number, slots, slot_bytes = notices.SEGMENT_FORM.unpack(body)
            self._borrowed.add(serial, number, slots, slot_bytes, descriptors[0])
        elif kind == notices.RETIRED and len(body) == notices.SERIAL.size:
            self._borrowed.retire(*notices.SERIAL.unpack(body))
        else:
            raise RemoteProtocolError(f"a packet {kind!r} of {len(body)} bytes that does not belong here")


def _refuse(_body: bytes) -> Pool:
    raise RemoteProtocolError("a greeting on a link that is closed")
