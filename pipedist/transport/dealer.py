"""A worker's end: one connection to the scheduler's Router, blocking.

A Dealer never reconnects: once its connection is lost, messages may be lost in either direction, so it
raises ConnectionLost. To join again, open a new Dealer with a new identity.
"""

from __future__ import annotations

import math
import select
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import zmq

from pipedist.errors import PipedistError, RemoteProtocolError, UsageError
from pipedist.protocol.limits import LIMITS, MessageLimits
from pipedist.protocol.messages import Message
from pipedist.protocol.wire import Reference, pack, seal, unpack, unseal, weave
from pipedist.transport.config import SETTINGS, SocketSettings
from pipedist.transport.endpoints import parse_endpoint
from pipedist.transport.shared_memory.link import Link, join
from pipedist.transport.zeromq.connections import (
    COPY_BYTES_MAX,
    FAILURE_EVENTS,
    configure,
    event_of,
    plain_send,
    size_of,
)

if TYPE_CHECKING:
    from pipedist.transport.keys import ClientKeys

# Plain ints: the enumerations of pyzmq cost more than the calls that get them.
_POLLIN: Final = int(zmq.POLLIN)
_POLLOUT: Final = int(zmq.POLLOUT)
_SNDMORE: Final = int(zmq.SNDMORE)
_DONTWAIT: Final = int(zmq.DONTWAIT)

_POLL_S_MAX: Final = 60.0  # ZeroMQ counts milliseconds in an int; a longer wait is made of several
RECONNECT_MS: Final = 100
RECONNECT_MS_MAX: Final = 1000


class ConnectionLost(PipedistError):
    """The scheduler is gone, or does not read; a new Dealer may connect again."""


class Dealer:
    """Sends to and receives from one Router; for one thread.

    All methods raise ConnectionLost once the connection is lost, and RemoteProtocolError if the scheduler refuses this
    worker; the constructor raises UsageError.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        identity: bytes,  # 1 to 255 bytes, not beginning with a zero byte; random, new for each Dealer
        keys: ClientKeys | None,  # of a CURVE client; required for tcp
        limits: MessageLimits = LIMITS,
        settings: SocketSettings = SETTINGS,
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
        self._is_readable = False  # a message was found, and not received yet
        # The link comes first: the Router then knows of it before the first message.
        self._link = None if parsed.is_tcp or keys is not None else join(parsed.path, identity)
        self._watched_link: Link | None = self._link  # the open link: it is read while waiting
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = socket = self._context.socket(zmq.DEALER)
        self._send_part, self._receive_part = plain_send(socket), socket.recv
        self._looks = {event: [(socket, event)] for event in (_POLLIN, _POLLOUT)}
        socket.setsockopt(zmq.ROUTING_ID, identity)
        # Not IMMEDIATE=1: when the connection is lost, that drops messages that have arrived, and
        # aborts the process (libzmq 4.3.5, fq.cpp: !_more) if it happens between two frames of one.
        socket.setsockopt(zmq.IMMEDIATE, 0)
        configure(socket, limits, settings, is_tcp=parsed.is_tcp, is_ipv6=parsed.is_ipv6)
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MS_MAX)
        if keys is not None:
            socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server_public)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
        # Not EVENT_DISCONNECTED: it comes before the last messages of the connection, the retry after them.
        self._monitor = socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | FAILURE_EVENTS | zmq.EVENT_CONNECT_RETRIED
        )
        self._monitor.poll(0)  # its file announces what comes after it was found empty
        self._fd, self._monitor_fd = (int(each.getsockopt(zmq.FD)) for each in (socket, self._monitor))
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close(0.0)
            raise UsageError(f"can't connect to {endpoint}: {error.strerror}") from None
        self._watch()

    def __enter__(self) -> Dealer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(
        self,
        message: Message,
        payload: Sequence[bytes | memoryview] = (),  # frames
        *,
        copy: bool = True,
        timeout_s: float = 60.0,  # how long to wait for room at most, before ConnectionLost; may be infinite
    ) -> None:
        """Queue a message for sending; waits while the queue is full.

        Without `copy`, frames above 64 KiB are sent from their own memory, later, so it must not change any more; the
        result of a replica function may still change.
        """
        head = pack(message)
        references: Sequence[Reference] = ()
        if len(payload) > 1 and self._link is not None:
            references, payload = self._link.lend(payload)
        header = payload[0] if payload else b""
        parts = [seal(head, header, references), *payload[1:]]
        self._send_parts(parts, copy=copy, timeout_s=timeout_s)

    def _send_parts(self, parts: list[bytes | memoryview], *, copy: bool, timeout_s: float) -> None:
        if self._failure is not None or self._others.poll(0):
            self._await_room(timeout_s)
        last = len(parts) - 1
        for number, part in enumerate(parts):
            flags = _SNDMORE if number < last else 0
            copies = copy or size_of(part) <= COPY_BYTES_MAX
            if number:  # ZeroMQ takes all frames of a message, or none
                self._send_part(part, flags, copies)
                continue
            try:
                self._send_part(part, flags | _DONTWAIT, copies)
            except zmq.Again:
                self._await_room(timeout_s)
                self._send_part(part, flags, copies)

    def _await_room(self, timeout_s: float) -> None:
        if not self._wait(_POLLOUT, timeout_s):
            raise ConnectionLost(f"{self._endpoint} took no message for {timeout_s:g} s")

    def fileno(self) -> int:
        """Return a file that becomes readable when a message arrives after `poll` has found none."""
        return self._fd

    def poll(self, timeout_s: float) -> bool:
        """Wait for a message (0 s: only look); return whether there is one."""
        if not self._is_readable:
            if not timeout_s and self._failure is None:  # the next wait, or `send`, notices a loss
                self._is_readable = bool(zmq.zmq_poll(self._looks[_POLLIN], 0))
            else:
                self._is_readable = self._wait(_POLLIN, timeout_s)
        return self._is_readable

    def recv(self, timeout_s: float = 60.0) -> tuple[Message, list[memoryview]]:
        """Receive the next message and its payload: read-only views of the received memory.

        Raise ConnectionLost also if nothing comes in time, RemoteProtocolError if it is malformed or refuses this
        worker.
        """
        if not (self._is_readable or self.poll(timeout_s)):
            raise ConnectionLost(f"{self._endpoint} sent no message for {timeout_s:g} s")
        frames = self._receive()
        head, header, references = unseal(frames[0], self._limits)
        message = unpack(head)
        if not header.nbytes:
            if len(frames) > 1 or references:
                raise RemoteProtocolError(f"{self._endpoint} sent frames without a header")
            return message, []
        frames[0] = header
        if references:
            if self._link is None:
                raise RemoteProtocolError(f"{self._endpoint} refers to memory that it does not share")
            weave(frames, references, self._link.frames(references), self._limits)
        return message, frames

    def _receive(self) -> list[memoryview]:
        limits, receive = self._limits, self._receive_part
        self._is_readable = False
        frames: list[memoryview] = []
        count, size_bytes, more = 0, 0, True
        while more:
            frame = receive(0, copy=False)
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
        return frames

    def close(self, linger_s: float | None = None) -> None:
        """Close, after `linger_s` for unsent messages; may be called twice."""
        if self._context.closed:
            return
        if linger_s is None:
            # Messages left by a lost connection must not reach the scheduler over another one.
            linger_s = self._settings.linger_s if self._failure is None else 0.0
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=round(linger_s * 1000))
        self._context.term()
        if self._link is not None:
            self._link.close()  # after the last message that refers to its memory
            self._link = self._watched_link = None

    def _wait(self, event: int, timeout_s: float) -> bool:
        """Wait until the socket has an event; messages that arrived come before ConnectionLost.

        The files of ZeroMQ's sockets are readable while these have something to process, which looking at their events
        does. To have ZeroMQ wait for them would take twice as many system calls.
        """
        left_s, deadline = timeout_s if self._failure is None else 0.0, time.monotonic() + timeout_s
        look = self._looks[event]
        while True:
            is_ready = bool(zmq.zmq_poll(look, 0))
            if is_ready and event == _POLLIN:
                return True
            wait_ms = math.ceil(min(left_s, _POLL_S_MAX) * 1000) if left_s > 0 and not is_ready else 0
            has_news = False
            for file, _ in self._files.poll(wait_ms):
                if file == self._monitor_fd:
                    has_news = True
                elif file != self._fd:
                    self._read_link()
            if has_news and not is_ready:  # its messages came first, maybe after the look at them
                is_ready = bool(zmq.zmq_poll(look, 0))
            if is_ready and event == _POLLIN:
                return True
            if has_news or self._failure is not None:
                self._look_at_monitor()
            if is_ready:
                return True
            if left_s <= 0:
                return False
            left_s = deadline - time.monotonic()

    def _watch(self) -> None:
        self._others, self._files = select.poll(), select.poll()
        others = [self._monitor_fd]
        if self._watched_link is not None:
            others.append(self._watched_link.connection.fileno())
        for file in others:
            self._others.register(file, select.POLLIN)
        for file in (self._fd, *others):
            self._files.register(file, select.POLLIN)

    def _read_link(self) -> None:
        """Take the link's packets, so that retired memory does not stay mapped."""
        if self._watched_link is not None:
            self._watched_link.read()
            if not self._watched_link.is_open:
                self._watched_link = None
                self._watch()

    def _look_at_monitor(self) -> None:
        while self._failure is None and self._monitor.poll(0):
            self._failure = self._judge(event_of(self._monitor.recv_multipart()[0]))
        if self._failure is not None:
            raise self._failure

    def _judge(self, event: int) -> PipedistError | None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._is_connected = True
        elif event == zmq.EVENT_CONNECT_RETRIED:
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
                    "the key file is that of another cluster, or the run's keys were made again, or another "
                    "program listens there. Copy the workers' key file from the host of the run."
                )
        return None
