"""A link: the unix socket over which two processes share memory, and what each lends the other.

| packet | content | descriptors |
|---|---|---|
| Hello | the worker's identity | the worker's ledger |
| Welcome | bytes that may be lent | the Router's ledger |
| Segment | serial, number, slots, bytes of a slot | its memory |
| Retired | serial of a segment that is not used any more | |
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from pipedist.errors import RemoteProtocolError
from pipedist.protocol.limits import GIB
from pipedist.protocol.wire import Reference
from pipedist.transport.config import SHARED_BYTES_MIN, is_supported
from pipedist.transport.endpoints import SHARED_MEMORY_SUFFIX
from pipedist.transport.shared_memory.borrowed import LEDGER_BYTES, Borrowed
from pipedist.transport.shared_memory.pool import LentSegment, Pool, map_received

HELLO, WELCOME, SEGMENT, RETIRED = b"H", b"W", b"S", b"R"
BYTES: Final = struct.Struct("<Q")
SEGMENT_FORM: Final = struct.Struct("<IIIQ")
SERIAL: Final = struct.Struct("<I")

_PACKET_BYTES_MAX: Final = 512
_DESCRIPTORS_MAX: Final = 16
_INT_BYTES: Final = array.array("i").itemsize


class _Packet(NamedTuple):
    kind: bytes  # its first byte; "" when the peer has closed the link
    body: bytes
    descriptors: Sequence[int] = ()  # the caller closes them


def _send(connection: socket.socket, kind: bytes, body: bytes, descriptors: Sequence[int] = ()) -> bool:
    """Send a packet, if there is room; return whether there was, or raise OSError if the peer is gone."""
    try:
        socket.send_fds(connection, [kind + body], descriptors)
    except BlockingIOError:
        return False
    return True


def _receive(connection: socket.socket) -> _Packet | None:
    """Receive a packet, or None; RemoteProtocolError: it is too long, or has more descriptors than any."""
    try:
        data, control, flags, _ = connection.recvmsg(
            _PACKET_BYTES_MAX,
            socket.CMSG_SPACE(_DESCRIPTORS_MAX * _INT_BYTES),
            socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC,
        )
    except BlockingIOError:
        return None
    except ConnectionError:
        return _Packet(b"", b"")
    descriptors = array.array("i")
    for level, kind, bytes_ in control:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(bytes_[: len(bytes_) // _INT_BYTES * _INT_BYTES])
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        for descriptor in descriptors:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        raise RemoteProtocolError("a packet that is too long, or descriptors that could not be received")
    return _Packet(data[:1], data[1:], descriptors)


_PACKETS_AT_ONCE_MAX: Final = 1024
_DESCRIPTORS: Final = {HELLO: 1, WELCOME: 1, SEGMENT: 1}  # how many each kind of packet brings; others none


class Link:
    """One end of a link; nothing here waits. OSError: no memory or no descriptors for a ledger.

    `on_greeting` gets the body of the peer's greeting, and returns the pool from which the peer borrows, or raises
    RemoteProtocolError.
    """

    def __init__(
        self,
        connection: socket.socket,  # a unix SOCK_SEQPACKET socket, not blocking; `close` closes it
        *,
        borrowed_bytes_max: int,  # bytes that the peer may lend us
        greeting: bytes,  # the kind of the packet with which the peer begins
        on_greeting: Callable[[bytes], Pool],
    ) -> None:
        self.connection = connection
        self.is_open = True
        self._greeting = greeting
        self._on_greeting = on_greeting
        self._borrowed = Borrowed(borrowed_bytes_max)
        self._pool: Pool | None = None  # what we lend from; None before the greeting
        self._ledger = memoryview(b"")  # the peer's
        self._announced: set[int] = set()  # serials of the segments that the peer knows
        self._unsent: deque[int] = deque()  # retired segments that the peer does not know of yet

    def greet(self, kind: bytes, body: bytes) -> None:
        """Send our greeting, or raise OSError if the peer is gone."""
        ledger = self._borrowed.hand_over()
        try:
            _send(self.connection, kind, body, (ledger,))
        finally:
            os.close(ledger)

    def lend(self, payload: Sequence[bytes | memoryview]) -> tuple[list[Reference], list[bytes | memoryview]]:
        """Put a payload's large frames into slots, as far as there are any.

        The first frame, the header, is never shared. Returns references to the frames in slots, and the frames that are
        to be sent.
        """
        references: list[Reference] = []
        frames = list(payload[:1])
        for place, frame in enumerate(payload[1:], 1):
            size_bytes = frame.nbytes if isinstance(frame, memoryview) else len(frame)
            reference = self._lend(place, frame, size_bytes) if size_bytes >= SHARED_BYTES_MIN else None
            if reference is None:
                frames.append(frame)
            else:
                references.append(reference)
        return references, frames

    def frames(self, references: Sequence[Reference]) -> list[memoryview]:
        frames: list[memoryview] = []
        for reference in references:
            if not self._borrowed.has(reference.segment):
                self.read()  # a segment's packet is here before the message that refers to it
            frames.append(self._borrowed.frame(reference))
        return frames

    def read(self) -> None:
        """Take the packets that have come, or raise RemoteProtocolError; `is_open` is False after the last one."""
        for _ in range(_PACKETS_AT_ONCE_MAX):
            if not self.is_open:
                return
            packet = _receive(self.connection)
            if packet is None:
                return
            try:
                self._take(packet)
            finally:
                for descriptor in packet.descriptors:
                    os.close(descriptor)

    def retire(self, serial: int) -> None:
        """Tell the peer, if it knows a segment, that it is over."""
        if serial in self._announced:
            self._announced.discard(serial)
            self._unsent.append(serial)
            self._flush()

    def close(self) -> None:
        """Close; frames that are in use here stay. May be called twice."""
        self._end()
        self.connection.close()
        self._borrowed.close()
        # Break cycles so that memory and descriptors are freed immediately.
        self._on_greeting = _refuse
        self._pool = None
        self._ledger = memoryview(b"")

    def _end(self) -> None:
        """End the link, and take back the slots that the peer borrowed."""
        self.is_open = False
        if self._pool is not None:
            self._pool.forgive(self._ledger)

    def _lend(self, place: int, frame: bytes | memoryview, size_bytes: int) -> Reference | None:
        if self._pool is None:
            self.read()  # the greeting, without which nothing is shared yet
        if not self.is_open or self._pool is None or (self._unsent and not self._flush()):
            return None
        loan = self._pool.lend(frame, self._ledger)
        if loan is None:
            return None
        slot = loan.slot
        if slot.segment.serial not in self._announced and not self._announce(slot.segment):
            self._pool.withdraw(loan)
            return None
        return Reference(place, slot.segment.serial, slot.index, loan.number, size_bytes)

    def _announce(self, segment: LentSegment) -> bool:
        body = SEGMENT_FORM.pack(segment.serial, segment.number, segment.slots, segment.slot_bytes)
        try:
            sent = _send(self.connection, SEGMENT, body, (segment.descriptor,))
        except OSError:
            return False  # it is gone: `read` finds out too
        if sent:
            self._announced.add(segment.serial)
        return sent

    def _flush(self) -> bool:
        """Send what could not be sent before; return whether nothing is left."""
        while self._unsent:
            try:
                if not _send(self.connection, RETIRED, SERIAL.pack(self._unsent[0])):
                    return False
            except OSError:
                return False  # it is gone: `read` finds out too
            self._unsent.popleft()
        return True

    def _take(self, packet: _Packet) -> None:
        kind, body, descriptors = packet
        if kind == b"":
            self._end()
        elif len(descriptors) != _DESCRIPTORS.get(kind, 0):
            raise RemoteProtocolError(f"a packet {kind!r} with {len(descriptors)} descriptors")
        elif kind == self._greeting and self._pool is None:
            try:
                self._ledger = memoryview(map_received(descriptors[0], LEDGER_BYTES)).cast("I")
            except OSError as error:
                raise RemoteProtocolError(f"a ledger that can't be mapped: {error}") from None
            self._pool = self._on_greeting(body)
        elif kind == SEGMENT and len(body) == SEGMENT_FORM.size:
            serial, number, slots, slot_bytes = SEGMENT_FORM.unpack(body)
            self._borrowed.add(serial, number, slots, slot_bytes, descriptors[0])
        elif kind == RETIRED and len(body) == SERIAL.size:
            self._borrowed.retire(*SERIAL.unpack(body))
        else:
            raise RemoteProtocolError(f"a packet {kind!r} of {len(body)} bytes that does not belong here")


def _refuse(_body: bytes) -> Pool:
    raise RemoteProtocolError("a greeting on a link that is closed")


_BORROWED_BYTES_MAX: Final = 64 * GIB  # the Router decides, and is trusted


def join(ipc_path: str, identity: bytes) -> Link | None:
    """Open a link to the Router of an ipc endpoint; None where it shares no memory."""
    if not is_supported():
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link: Link | None = None

    def greeted(body: bytes) -> Pool:
        if len(body) != BYTES.size or link is None:
            raise RemoteProtocolError("a malformed greeting on the link")
        return Pool(BYTES.unpack(body)[0], link.retire)

    try:
        connection.setblocking(False)
        connection.connect(ipc_path + SHARED_MEMORY_SUFFIX)
        link = Link(connection, borrowed_bytes_max=_BORROWED_BYTES_MAX, greeting=WELCOME, on_greeting=greeted)
        link.greet(HELLO, identity)
    except OSError:  # no such socket, or no memory: frames will do
        connection.close()
        if link is not None:
            link.close()
        return None
    return link
