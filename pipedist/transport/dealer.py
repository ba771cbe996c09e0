"""A worker's socket: one DEALER, blocking, connected to the scheduler's Router.

A connection is one life: once it is lost, so may be messages in either direction, and the
Dealer says so instead of going on with another connection. Whoever wants to join again opens a
new Dealer, with a new identity.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import zmq

from pipedist.errors import PipedistError, RemoteProtocolError, UsageError
from pipedist.messages import Message
from pipedist.transport import envelope
from pipedist.transport.limits import KIB, LIMITS, Limits
from pipedist.transport.monitor import FAILURE_EVENTS, event_of
from pipedist.transport.rendezvous import parse_endpoint
from pipedist.transport.settings import SETTINGS, Settings
from pipedist.transport.shared_memory.joining import join
from pipedist.transport.shared_memory.link import Link
from pipedist.transport.shared_memory.references import Reference, weave
from pipedist.transport.shared_memory.settings import SHARED_BYTES_MIN
from pipedist.transport.wire import pack, unpack

if TYPE_CHECKING:
    from pipedist.transport.keys import ClientKeys

COPY_BYTES_MAX: Final = 64 * KIB
# Plain ints: the enumerations of pyzmq cost more than the calls that get them.
_POLLIN: Final = int(zmq.POLLIN)
_POLLOUT: Final = int(zmq.POLLOUT)
_SNDMORE: Final = int(zmq.SNDMORE)

_POLL_S_MAX: Final = 60.0
"""ZeroMQ counts milliseconds in an int; a longer wait is made of several."""

RECONNECT_MS: Final = 100
RECONNECT_MS_MAX: Final = 1000


class ConnectionLost(PipedistError):
    """The scheduler is gone, or does not read; a new connection is a new life."""


class Dealer:
    """Sends to and receives from one Router; for one thread.

    Args:
        endpoint: the Router's.
        identity: 1 to 255 bytes, not beginning with a zero byte; random, a new one for each life.
        keys: of a CURVE client; required for tcp.
        limits, settings: sizes and times.

    Raises:
        UsageError: the endpoint or the identity is not allowed.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        identity: bytes,
        keys: ClientKeys | None,
        limits: Limits = LIMITS,
        settings: Settings = SETTINGS,
    ) -> None:
        parsed = parse_endpoint(endpoint, bind=False, has_keys=keys is not None)
        if not 1 <= len(identity) <= 255 or identity[0] == 0:
            raise UsageError("an identity has 1 to 255 bytes and does not begin with a zero byte")
        self._endpoint = endpoint
        self._limits = limits
        self._settings = settings
        self._is_connected = False
        self._handshakes_failed = 0
        self._failure: PipedistError | None = None
        self._link: Link | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.ROUTING_ID, identity)
        # Not IMMEDIATE=1: when the connection is lost, that drops messages which have arrived, and
        # aborts the process (libzmq 4.3.5, fq.cpp: !_more) if it happens between two frames of one.
        socket.setsockopt(zmq.IMMEDIATE, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, max(limits.frame_bytes_max, envelope.bytes_max(limits)))
        socket.setsockopt(zmq.HANDSHAKE_IVL, round(settings.handshake_s * 1000))
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MS_MAX)
        socket.setsockopt(zmq.SNDHWM, settings.queue_messages_max)
        socket.setsockopt(zmq.RCVHWM, settings.queue_messages_max)
        if parsed.is_tcp:
            socket.setsockopt(zmq.HEARTBEAT_IVL, round(settings.heartbeat_s * 1000))
            socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, round(settings.heartbeat_timeout_s * 1000))
            socket.setsockopt(zmq.IPV6, int(parsed.is_ipv6))
        if keys is not None:
            socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server_public)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
        self._monitor = socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | FAILURE_EVENTS | zmq.EVENT_DISCONNECTED
        )
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close(0.0)
            raise UsageError(f"can't connect to {endpoint}: {error.strerror}") from None
        if not parsed.is_tcp:
            self._link = join(parsed.path, identity)
        self._link_fd = -1 if self._link is None else self._link.connection.fileno()
        self._watch()

    def __enter__(self) -> Dealer:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def send(
        self,
        message: Message,
        payload: Sequence[bytes | memoryview] = (),
        *,
        copy: bool = True,
        timeout_s: float = 60.0,
    ) -> None:
        """Queue a message for sending; waits while the queue is full.

        Args:
            payload: frames.
            copy: False: frames above 64 KiB are sent from their own memory, later, so it must
                not change any more. What a replica function returned may still change.
            timeout_s: how long to wait at most; may be infinite.

        Raises:
            ConnectionLost: the connection was lost, or there was no room in time.
            RemoteProtocolError: the scheduler refuses this worker.
            LocalProtocolError: the message is not allowed.
        """
        head = pack(message)
        if not self._wait(_POLLOUT, timeout_s):
            raise ConnectionLost(f"{self._endpoint} took no message for {timeout_s:g} s")
        references: Sequence[Reference] = ()
        if len(payload) > 1:
            link = self._link
            if link is not None and any(_size(frame) >= SHARED_BYTES_MIN for frame in payload[1:]):
                if not link.is_greeted:
                    link.read()  # a welcome, without which nothing is shared yet
                references, payload = link.lend(payload)
        header = payload[0] if payload else b""
        parts: list[bytes | memoryview] = [envelope.seal(head, header, references), *payload[1:]]
        last = len(parts) - 1
        for number, part in enumerate(parts):
            flags = _SNDMORE if number < last else 0
            self._socket.send(part, flags, copy=copy or _size(part) <= COPY_BYTES_MAX)

    def poll(self, timeout_s: float) -> bool:
        """Wait for a message.

        Args:
            timeout_s: how long at most; 0: only look.

        Returns:
            True where `recv` will return one at once.

        Raises:
            ConnectionLost: the connection was lost.
            RemoteProtocolError: the scheduler refuses this worker.
        """
        return self._wait(_POLLIN, timeout_s)

    def recv(self, timeout_s: float = 60.0) -> tuple[Message, list[memoryview]]:
        """Receive the next message.

        Returns:
            The message and its payload: read-only views of the received memory.

        Raises:
            ConnectionLost: the connection was lost, or nothing came in time.
            RemoteProtocolError: what came is malformed, or the scheduler refuses this worker.
        """
        if not self._wait(_POLLIN, timeout_s):
            raise ConnectionLost(f"{self._endpoint} sent no message for {timeout_s:g} s")
        limits = self._limits
        frames: list[memoryview] = []
        count, size_bytes, more = 0, 0, True
        while more:
            frame = self._socket.recv(copy=False)
            more = frame.more
            count += 1
            size_bytes += len(frame)
            if count <= limits.frames_max and size_bytes <= limits.message_bytes_max:
                frames.append(frame.buffer)
            else:
                frames = []
        if count > limits.frames_max or size_bytes > limits.message_bytes_max:
            raise RemoteProtocolError(
                f"{self._endpoint} sent a message of {count} frames and {size_bytes} bytes, the limit is "
                f"{limits.frames_max} frames and {limits.message_bytes_max} bytes"
            )
        head, header, references = envelope.unseal(frames[0], limits)
        message = unpack(head)
        if not header.nbytes:
            if count > 1 or references:
                raise RemoteProtocolError(f"{self._endpoint} sent frames without a header")
            return message, []
        frames[0] = header
        if references:
            if self._link is None:
                raise RemoteProtocolError(f"{self._endpoint} refers to memory that it does not share")
            weave(frames, references, self._link.frames(references), limits)
        return message, frames

    def close(self, linger_s: float | None = None) -> None:
        """Close; may be called twice.

        Args:
            linger_s: how long to wait for what is not sent yet; default: the settings'.
        """
        if self._context.closed:
            return
        if linger_s is None:
            # What a lost connection left behind must not reach the scheduler through another one.
            linger_s = self._settings.linger_s if self._failure is None else 0.0
        linger_ms = round(linger_s * 1000)
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=linger_ms)
        self._context.term()
        if self._link is not None:
            self._link.close()  # not before the last message that refers to it has left
            self._link = None

    def _wait(self, event: int, timeout_s: float) -> bool:
        """Wait until the socket has an event. What has arrived is read before a lost connection is told."""
        left_s, deadline = timeout_s, time.monotonic() + timeout_s
        while True:
            wait_ms = math.ceil(min(left_s, _POLL_S_MAX) * 1000) if left_s > 0 else 0
            is_ready = has_news = has_packets = False
            for who, _ in zmq.zmq_poll(self._watched[event], wait_ms):
                if who is self._socket:
                    is_ready = True
                elif who is self._monitor:
                    has_news = True
                else:
                    has_packets = True
            if is_ready and event == _POLLIN:
                return True
            if has_news or self._failure is not None:
                self._look_at_monitor()
            if is_ready:
                return True
            if has_packets and self._link is not None:
                self._read_link(self._link)
            if left_s <= 0:
                return False
            left_s = deadline - time.monotonic()

    def _watch(self) -> None:
        """Say what is waited for along with each event of the socket."""
        others: list[tuple[Any, int]] = [(self._monitor, _POLLIN)]
        if self._link_fd >= 0:
            others.append((self._link_fd, _POLLIN))
        self._watched = {event: [(self._socket, event), *others] for event in (_POLLIN, _POLLOUT)}

    def _read_link(self, link: Link) -> None:
        """Take what the link brought: memory that is not needed any more need not stay mapped."""
        link.read()
        if not link.is_open:
            self._link_fd = -1
            self._watch()

    def _look_at_monitor(self) -> None:
        while self._failure is None and self._monitor.poll(0):
            self._failure = self._judge(event_of(self._monitor.recv_multipart()[0]))
        if self._failure is not None:
            raise self._failure

    def _judge(self, event: int) -> PipedistError | None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._is_connected = True
        elif event == zmq.EVENT_DISCONNECTED:
            if self._is_connected:
                return ConnectionLost(f"the connection to {self._endpoint} was lost")
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return RemoteProtocolError(
                f"{self._endpoint} refused this worker's key; use the key file of that cluster"
            )
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            return RemoteProtocolError(
                f"{self._endpoint} does not speak this protocol, or without keys; is it the right port?"
            )
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self._handshakes_failed += 1
            if self._handshakes_failed >= self._settings.handshakes_failed_max:
                return RemoteProtocolError(
                    f"{self._endpoint} closed the connection in {self._handshakes_failed} handshakes: "
                    "its key is another one than the key file says, or it is no pipedist scheduler"
                )
        return None


def _size(part: bytes | memoryview) -> int:
    return part.nbytes if isinstance(part, memoryview) else len(part)
