"""What goes over a link: a few small packets, some with descriptors.

| packet | says | descriptors |
|---|---|---|
| Hello | who it is | the worker's ledger |
| Welcome | how much may be lent | the Router's ledger |
| Segment | a new segment: serial, number, slots, bytes of a slot | its memory |
| Retired | a segment that is over | |
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

from pipedist.errors import RemoteProtocolError

HELLO, WELCOME, SEGMENT, RETIRED = b"H", b"W", b"S", b"R"
BYTES: Final = struct.Struct("<Q")
SEGMENT_FORM: Final = struct.Struct("<IIIQ")
SERIAL: Final = struct.Struct("<I")

_PACKET_BYTES_MAX: Final = 512
_DESCRIPTORS_MAX: Final = 16
_INT_BYTES: Final = array.array("i").itemsize


class Notice(NamedTuple):
    """A packet.

    Args:
        kind: its first byte; "" when the peer has closed the link.
        body: the rest.
        descriptors: the caller closes them.
    """

    kind: bytes
    body: bytes
    descriptors: Sequence[int] = ()

    def close(self) -> None:
        """Close the descriptors."""
        for descriptor in self.descriptors:
            os.close(descriptor)


def send(connection: socket.socket, kind: bytes, body: bytes, descriptors: Sequence[int] = ()) -> bool:
    """Send a packet, if there is room; return whether there was.

    Raises:
        OSError: the peer is gone.
    """
    try:
        if descriptors:
            socket.send_fds(connection, [kind + body], descriptors)
        else:
            connection.send(kind + body)
    except BlockingIOError:
        return False
    return True


def receive(connection: socket.socket) -> Notice | None:
    """Receive a packet; None where there is none.

    Raises:
        RemoteProtocolError: it is too long, or has more descriptors than any.
    """
    try:
        data, control, flags, _ = connection.recvmsg(
            _PACKET_BYTES_MAX,
            socket.CMSG_SPACE(_DESCRIPTORS_MAX * _INT_BYTES),
            socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC,
        )
    except BlockingIOError:
        return None
    except ConnectionError:
        return Notice(b"", b"")
    descriptors = array.array("i")
    for level, kind, bytes_ in control:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(bytes_[: len(bytes_) // _INT_BYTES * _INT_BYTES])
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        for descriptor in descriptors:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        raise RemoteProtocolError("a packet that is too long, or descriptors that could not be received")
    return Notice(data[:1], data[1:], descriptors)
