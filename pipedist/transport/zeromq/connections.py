"""Connections of a socket: queued messages, senders, closing, and monitor events.

`zmq.utils.monitor` parses events too, but importing it costs a worker 50 ms for asyncio.
"""

from __future__ import annotations

import os
import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import zmq

from pipedist.errors import RemoteProtocolError
from pipedist.protocol.limits import KIB, MessageLimits
from pipedist.protocol.wire import first_frame_bytes_max
from pipedist.transport.config import SocketSettings
from pipedist.transport.endpoints import Endpoint

COPY_BYTES_MAX: Final = 64 * KIB  # up to this size, copying into ZeroMQ's queue is cheaper than sharing


class Outbox:
    """Messages for one peer, in order, as many as the settings allow."""

    def __init__(self, settings: SocketSettings) -> None:
        self._settings = settings
        self.messages: deque[list[bytes | memoryview]] = deque()
        self.size_bytes = 0

    def add(self, parts: list[bytes | memoryview]) -> None:
        """Keep a message, or raise RemoteProtocolError: the queue is full; the text continues the peer's name."""
        size_bytes = sum(map(size_of, parts))
        count, settings = len(self.messages), self._settings
        if count >= settings.outbox_messages_max or self.size_bytes + size_bytes > settings.outbox_bytes_max:
            raise RemoteProtocolError(
                f"does not read: its send queue is full, {count} messages ({self.size_bytes} bytes) wait"
            )
        self.messages.append(parts)
        self.size_bytes += size_bytes

    def pop(self) -> None:
        self.size_bytes -= sum(map(size_of, self.messages.popleft()))

    def clear(self) -> None:
        self.messages.clear()
        self.size_bytes = 0


def size_of(part: bytes | memoryview) -> int:
    return part.nbytes if isinstance(part, memoryview) else len(part)


def plain_send(socket: zmq.Socket[bytes]) -> Callable[[bytes | memoryview, int, bool], object]:
    """Return the `send` of a socket, of (part, flags, whether to copy), without pyzmq's options for other sockets."""
    send: Any = super(zmq.Socket, socket).send
    plain: Callable[[bytes | memoryview, int, bool], object] = send
    return plain


def address_of(frame: zmq.Frame) -> str:
    try:
        return plain_address(str(frame.get("Peer-Address")))
    except zmq.ZMQError:
        return "an unknown address"


def plain_address(text: str) -> str:
    """Return an address as people know it: an IPv4 one that came over an IPv6 socket, as IPv4."""
    return text.removeprefix("::ffff:") if "." in text else text


def configure(
    socket: zmq.Socket[bytes], limits: MessageLimits, settings: SocketSettings, *, is_tcp: bool, is_ipv6: bool
) -> None:
    """Set the options that both ends of a connection have."""
    socket.setsockopt(zmq.MAXMSGSIZE, max(limits.frame_bytes_max, first_frame_bytes_max(limits)))
    socket.setsockopt(zmq.HANDSHAKE_IVL, round(settings.handshake_s * 1000))
    socket.setsockopt(zmq.SNDHWM, settings.queue_messages_max)
    socket.setsockopt(zmq.RCVHWM, settings.queue_messages_max)
    if is_tcp:
        socket.setsockopt(zmq.HEARTBEAT_IVL, round(settings.heartbeat_s * 1000))
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, round(settings.heartbeat_timeout_s * 1000))
        socket.setsockopt(zmq.IPV6, int(is_ipv6))


def hang_up(frame: zmq.Frame, endpoint: Endpoint) -> None:
    """Cut the connection on which a frame came; ZeroMQ has no call for it.

    A descriptor may have been closed, and reused, since the frame arrived. So it is duplicated first, and shut down
    only if it is a connection to our own endpoint; the worst case is that another peer from the same address has to
    connect anew.
    """
    try:
        descriptor = os.dup(int(frame.get(zmq.SRCFD)))
    except (OSError, zmq.ZMQError, ValueError):
        return  # it is gone already
    try:
        connection = socket.socket(fileno=descriptor)
    except OSError:
        os.close(descriptor)
        return
    with connection:
        try:
            ours = connection.getsockname()
            if ours == endpoint.path or (endpoint.is_tcp and ours[1] == endpoint.port):
                connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it is gone already


HANDSHAKE_FAILURES: Final[dict[int, str]] = {  # why a handshake failed, as seen by the server
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "its key was refused",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "it does not speak the protocol, or has not this cluster's key",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "it went away",
}

FAILURE_EVENTS: Final = sum(HANDSHAKE_FAILURES)  # one bit each


def event_of(frame: bytes) -> int:
    return int(struct.unpack("=hi", frame)[0])  # event, value
