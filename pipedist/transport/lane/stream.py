"""Reading from and writing to a lane's socket: never waits, and no frame is copied on the way."""

from __future__ import annotations

import socket
from typing import Final

from pipedist.transport.lane.framing import Assembler
from pipedist.transport.limits import KIB, MIB
from pipedist.transport.outbox import size_of

SEND_BUFFER_BYTES: Final = 1 * MIB
"""What the kernel is asked to queue; it gives what the machine's limit allows."""

CHUNK_BYTES: Final = 96 * KIB
"""Bytes that are read at once where it is not known what comes: more than most messages have."""

_BUFFERS_MAX: Final = 256
"""Buffers of one system call; Linux takes 1024."""

# User code may have given SIGPIPE another meaning. Systems without this flag have no lanes either.
_SEND_FLAGS: Final = socket.MSG_DONTWAIT | getattr(socket, "MSG_NOSIGNAL", 0)


def read(connection: socket.socket, assembler: Assembler) -> int:
    """Read once; return how many bytes there were, 0 at the end of the stream.

    Raises:
        BlockingIOError: there is nothing to be read.
        OSError: the peer is gone.
    """
    if assembler.unfilled:
        size_bytes = connection.recvmsg_into(assembler.unfilled[:_BUFFERS_MAX], 0, socket.MSG_DONTWAIT)[0]
        assembler.filled(size_bytes)
        return size_bytes
    data = connection.recv(CHUNK_BYTES, socket.MSG_DONTWAIT)
    if data:
        assembler.feed(data)
    return len(data)


def write(connection: socket.socket, buffers: list[bytes | memoryview]) -> list[bytes | memoryview]:
    """Write as much as there is room for; return what is left.

    Raises:
        OSError: the peer is gone.
    """
    while buffers:
        try:
            sent = connection.sendmsg(buffers[:_BUFFERS_MAX], (), _SEND_FLAGS)
        except BlockingIOError:
            return buffers
        buffers = _rest(buffers, sent)
    return buffers


def _rest(buffers: list[bytes | memoryview], sent_bytes: int) -> list[bytes | memoryview]:
    for place, buffer in enumerate(buffers):
        size_bytes = size_of(buffer)
        if size_bytes > sent_bytes:
            return [memoryview(buffer).cast("B")[sent_bytes:], *buffers[place + 1 :]]
        sent_bytes -= size_bytes
    return []
