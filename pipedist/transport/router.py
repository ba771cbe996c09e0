"""The scheduler's socket: one ROUTER to which every worker's Dealer connects.

Rules
- A peer is an identity, chosen at random for each incarnation of a worker, and bound to the
  key with which it first spoke: under another key the identity is refused.
- A message that breaks a rule (malformed, too many frames, too large) costs its sender the
  connection and its identity, is counted by `on_reject`, and touches nobody else. Frames are
  looked at one by one as they are read, so a message of a million empty frames is never
  collected.
- Sending never blocks and loses nothing: what ZeroMQ's queue for a peer can't take waits here,
  in an outbox with limits; beyond them, the peer is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Final

import anyio
import anyio.to_thread
import zmq

from pipedist.errors import LocalProtocolError, RemoteProtocolError, UsageError
from pipedist.messages import Message, Refuse
from pipedist.transport import envelope
from pipedist.transport.connections import address_of, hang_up, user_of
from pipedist.transport.limits import KIB, LIMITS, Limits
from pipedist.transport.monitor import FAILURE_EVENTS, HANDSHAKE_FAILURES, event_of
from pipedist.transport.pump import Pump
from pipedist.transport.rendezvous import Endpoint, parse_endpoint
from pipedist.transport.settings import SETTINGS, Settings
from pipedist.transport.shared_memory.listener import Listener
from pipedist.transport.shared_memory.references import Reference, weave
from pipedist.transport.shared_memory.settings import SHARED_BYTES_MIN, SharedMemory
from pipedist.transport.wire import pack, unpack
from pipedist.transport.zap import ZAP_DOMAIN, ZapHandler

if TYPE_CHECKING:
    from pipedist.transport.keys import ServerKeys

COPY_BYTES_MAX: Final = 64 * KIB
"""Frames up to this size are copied into ZeroMQ's queue: cheaper than sharing them."""

# Plain ints: the enumerations of pyzmq cost more than the calls that get them.
_LAST: Final = int(zmq.DONTWAIT)
_MORE: Final = int(zmq.DONTWAIT | zmq.SNDMORE)


class _Peer:
    """What the Router knows about one identity."""

    __slots__ = ("is_dropped", "outbox", "outbox_bytes", "user")

    def __init__(self, user: str) -> None:
        self.user = user  # the key that the identity is bound to; "" without keys
        self.is_dropped = False
        self.outbox: deque[list[bytes | memoryview]] = deque()
        self.outbox_bytes = 0


class Router:
    """Receives from and sends to any number of Dealers; `async with` binds and closes it.

    Args:
        endpoint: `tcp://host:port` (port 0: any free one) or `ipc://` in a private directory.
        keys: of a CURVE server; required for tcp.
        on_message: called in the loop with (identity, message, payload frames), in the order of
            arrival; frames are read-only views of the received memory. It must not block.
        on_reject: called with a reason, each time a peer is refused or dropped for what it did.
        on_lost: called with (identity, reason) when the Router itself gives up a peer that had
            delivered messages: it broke the protocol, or its outbox is full.
        limits, settings: sizes and times.
        shared_memory: how much memory is shared with Dealers on this host, over an ipc endpoint;
            None: everything travels as frames.

    Raises:
        UsageError: on construction: the endpoint is not allowed; on entering: it can't be bound.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        keys: ServerKeys | None,
        on_message: Callable[[bytes, Message, list[memoryview]], None],
        on_reject: Callable[[str], None],
        on_lost: Callable[[bytes, str], None] | None = None,
        limits: Limits = LIMITS,
        settings: Settings = SETTINGS,
        shared_memory: SharedMemory | None = None,
    ) -> None:
        self._endpoint: Endpoint = parse_endpoint(endpoint, bind=True, has_keys=keys is not None)
        self._keys = keys
        self._on_message = on_message
        self._on_reject = on_reject
        self._on_lost = on_lost
        self._limits = limits
        self._first_bytes_max = envelope.bytes_max(limits)
        self._settings = settings
        self._shared_memory = shared_memory
        self._listener: Listener | None = None
        self._peers: dict[bytes, _Peer] = {}
        self._waiting: set[bytes] = set()  # identities whose outbox is not empty
        self._retry: asyncio.TimerHandle | None = None
        self._is_open = False
        self._begin_message()

    @property
    def endpoint(self) -> str:
        """Where workers connect to, with the real port; known after entering."""
        return self._endpoint.text

    async def __aenter__(self) -> Router:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._open()
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._is_open = True
        if self._zap is not None:
            self._zap.start()
        self._pump.start()
        self._monitor_pump.start()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._close()

    def send(self, identity: bytes, message: Message, payload: Sequence[bytes | memoryview] = ()) -> bool:
        """Send a message to a peer, now or as soon as its queue has room; never blocks.

        Args:
            identity: as `on_message` gave it.
            payload: frames; those above 64 KiB may be sent from their own memory, which must not
                change any more.

        Returns:
            False where the peer is gone, unknown or dropped.

        Raises:
            LocalProtocolError: the message itself is not allowed, or the Router is not open.
        """
        if not self._is_open:
            raise LocalProtocolError("a Router sends only between entering and leaving `async with`")
        peer = self._peers.get(identity)
        if peer is None or peer.is_dropped:
            return False
        references: Sequence[Reference] = ()
        if len(payload) > 1:
            listener = self._listener
            if listener is not None and any(_size(frame) >= SHARED_BYTES_MIN for frame in payload[1:]):
                references, payload = listener.lend(identity, payload)
        header = payload[0] if payload else b""
        parts: list[bytes | memoryview] = [identity, envelope.seal(pack(message), header, references)]
        parts += payload[1:]
        if not peer.outbox:
            sent = self._try_send(parts)
            if sent is not None:
                return sent
        return self._keep(identity, peer, parts)

    def drop(self, identity: bytes, reason: str = "") -> None:
        """Never again hear or speak to a peer; its connection is cut when it next speaks.

        Args:
            reason: what it did, for `on_reject` and for the peer; "": nothing, it is just over.
        """
        peer = self._peers.get(identity)
        if peer is None or peer.is_dropped:
            return
        if reason:
            if self._is_open:
                self._try_send([identity, envelope.seal(pack(Refuse(reason[:1000])))])
            self._on_reject(reason)
        peer.is_dropped = True
        if self._listener is not None:
            self._listener.forget(identity)
        peer.outbox.clear()
        peer.outbox_bytes = 0
        self._waiting.discard(identity)

    # --- opening and closing --------------------------------------------------------------

    def _open(self) -> None:
        self._socket = self._context.socket(zmq.ROUTER)
        self._zap = (
            None if self._keys is None else ZapHandler(self._context, self._keys.clients, self._on_reject)
        )
        self._configure()
        self._monitor = self._socket.get_monitor_socket(FAILURE_EVENTS)
        pace = self._settings.frames_per_wake_up
        self._pump = Pump(self._socket, self._take, wake=self._flush, frames_per_wake_up=pace)
        self._monitor_pump = Pump(self._monitor, self._take_event, frames_per_wake_up=pace)
        self._bind()
        if self._shared_memory is not None and not self._endpoint.is_tcp:
            # Without a socket, a kernel or the memory for it, frames will do.
            with contextlib.suppress(OSError):
                self._listener = Listener(
                    self._endpoint.path,
                    self._shared_memory,
                    grace_s=self._settings.linger_s,
                    on_fault=self._on_link_fault,
                )

    def _configure(self) -> None:
        settings, socket = self._settings, self._socket
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, max(self._limits.frame_bytes_max, self._first_bytes_max))
        socket.setsockopt(zmq.HANDSHAKE_IVL, round(settings.handshake_s * 1000))
        socket.setsockopt(zmq.LINGER, round(settings.linger_s * 1000))
        socket.setsockopt(zmq.SNDHWM, settings.queue_messages_max)
        socket.setsockopt(zmq.RCVHWM, settings.queue_messages_max)
        if self._endpoint.is_tcp:
            socket.setsockopt(zmq.HEARTBEAT_IVL, round(settings.heartbeat_s * 1000))
            socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, round(settings.heartbeat_timeout_s * 1000))
            socket.setsockopt(zmq.IPV6, int(self._endpoint.is_ipv6))
        if self._keys is not None:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, self._keys.public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._keys.secret)
            socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
            socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def _bind(self) -> None:
        text = self._endpoint.text
        try:
            self._socket.bind(text)
        except zmq.ZMQError as error:
            if error.errno == errno.EADDRINUSE and self._endpoint.is_tcp:
                port, host = self._endpoint.port, self._endpoint.host
                raise UsageError(
                    f"port {port} on {host} is taken; choose another one, or 0 for any free one"
                ) from None
            raise UsageError(f"can't bind {text}: {os.strerror(error.errno or 0)}") from None
        if self._endpoint.is_tcp:
            real = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
            self._endpoint = Endpoint(real, self._endpoint.host, int(real.rpartition(":")[2]))

    async def _close(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        if self._listener is not None:
            self._listener.close()
        if self._retry is not None:
            self._retry.cancel()
        self._pump.stop()
        self._monitor_pump.stop()
        if self._zap is not None:
            self._zap.close()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()
        with anyio.CancelScope(shield=True):
            # Takes as long as the linger time at most.
            await anyio.to_thread.run_sync(self._context.term)

    # --- receiving ------------------------------------------------------------------------

    def _begin_message(self) -> None:
        self._identity: bytes | None = None
        self._parts: list[zmq.Frame] = []
        self._parts_bytes = 0
        self._fault = ""  # why the rest of the message is thrown away, unread

    def _take(self, frame: zmq.Frame, more: bool) -> None:
        if self._identity is None:
            self._identity = frame.bytes
            if more:
                return
            self._fault = "a message without frames"
        elif not self._fault:
            self._fault = self._examine(frame)
            if self._fault:
                self._parts = []
            else:
                self._parts.append(frame)
        if not more:
            identity, parts, fault = self._identity, self._parts, self._fault
            self._begin_message()
            self._deliver(identity, parts, fault, frame)

    def _examine(self, frame: zmq.Frame) -> str:
        limits, number, size_bytes = self._limits, len(self._parts), len(frame)
        self._parts_bytes += size_bytes
        if number >= limits.frames_max:
            return f"a message of more than {limits.frames_max} frames"
        if number == 0 and size_bytes > self._first_bytes_max:
            return f"a first frame of {size_bytes} bytes, the limit is {self._first_bytes_max}"
        if self._parts_bytes > limits.message_bytes_max:
            return f"a message of more than {limits.message_bytes_max} bytes"
        return ""

    def _deliver(self, identity: bytes, parts: list[zmq.Frame], fault: str, last: zmq.Frame) -> None:
        user = user_of(last) if self._keys is not None else ""
        peer = self._peers.get(identity)
        if peer is None:
            peer = self._admit(identity, user)
        if peer is None:
            self._on_reject(f"more than {self._settings.peers_max} peers; {_shown(identity)} is refused")
        elif peer.user != user:
            self._on_reject(f"the identity {_shown(identity)} of another key's peer, from {address_of(last)}")
        elif peer.is_dropped:
            pass
        else:
            if not fault:
                try:
                    message, frames = self._open_message(identity, parts)
                except RemoteProtocolError as error:
                    fault = str(error)
            if fault:
                # It keeps its connection until it speaks again, so that it can read why.
                self._lose(identity, f"peer {_shown(identity)} sent {fault}")
            else:
                self._on_message(identity, message, frames)
            return
        hang_up(last, self._endpoint)

    def _open_message(self, identity: bytes, parts: list[zmq.Frame]) -> tuple[Message, list[memoryview]]:
        head, header, references = envelope.unseal(parts[0].buffer, self._limits)
        message = unpack(head)
        if not header.nbytes:
            if len(parts) > 1 or references:
                raise RemoteProtocolError("frames without a header")
            return message, []
        frames = [header]
        if len(parts) > 1:
            frames += [part.buffer for part in parts[1:]]
        if references:
            if self._listener is None:
                raise RemoteProtocolError("references to shared memory, which is off")
            weave(frames, references, self._listener.frames(identity, references), self._limits)
        return message, frames

    def _admit(self, identity: bytes, user: str) -> _Peer | None:
        if len(self._peers) >= self._settings.peers_max:
            # A dropped peer may be forgotten: its incarnation is refused further up as well.
            oldest = next((name for name, peer in self._peers.items() if peer.is_dropped), None)
            if oldest is None:
                return None
            del self._peers[oldest]
        peer = self._peers[identity] = _Peer(user)
        return peer

    def _take_event(self, frame: zmq.Frame, more: bool) -> None:
        if more:  # the second and last frame is our own endpoint
            self._on_reject(f"a peer failed to join: {HANDSHAKE_FAILURES[event_of(frame.bytes)]}")

    def _on_link_fault(self, identity: bytes, reason: str) -> None:
        peer = self._peers.get(identity)
        if peer is None:
            self._on_reject(reason)
        elif not peer.is_dropped:
            self._lose(identity, f"peer {_shown(identity)}: {reason}")

    # --- sending --------------------------------------------------------------------------

    def _try_send(self, parts: list[bytes | memoryview]) -> bool | None:
        """Return True: sent; False: the peer is gone; None: its queue is full."""
        last = len(parts) - 1
        try:
            for number, part in enumerate(parts):
                flags = _MORE if number < last else _LAST
                self._socket.send(part, flags, copy=_size(part) <= COPY_BYTES_MAX)
        except zmq.Again:
            return None
        except zmq.ZMQError as error:
            if error.errno == errno.EHOSTUNREACH:
                return False
            raise
        finally:
            self._pump.look_again()
        return True

    def _keep(self, identity: bytes, peer: _Peer, parts: list[bytes | memoryview]) -> bool:
        size_bytes = sum(map(_size, parts))
        settings = self._settings
        if (
            len(peer.outbox) >= settings.outbox_messages_max
            or peer.outbox_bytes + size_bytes > settings.outbox_bytes_max
        ):
            self._lose(
                identity,
                f"peer {_shown(identity)} is overrun: it does not read, and "
                f"{len(peer.outbox)} messages of {peer.outbox_bytes} bytes wait for it",
            )
            return False
        peer.outbox.append(parts)
        peer.outbox_bytes += size_bytes
        self._waiting.add(identity)
        self._retry_soon()
        return True

    def _flush(self) -> None:
        """Send what waits, as far as there is room.

        Looking for messages may use up the edge that says that there is room again: so while something
        waits, it is tried again also without a wake-up.
        """
        if not self._waiting:
            return
        for identity in list(self._waiting):
            peer = self._peers[identity]
            while peer.outbox:
                sent = self._try_send(peer.outbox[0])
                if sent is None:
                    break
                if sent:
                    peer.outbox_bytes -= sum(map(_size, peer.outbox.popleft()))
                else:
                    peer.outbox.clear()
                    peer.outbox_bytes = 0
            if not peer.outbox:
                self._waiting.discard(identity)
        self._retry_soon()

    def _retry_soon(self) -> None:
        if self._waiting and self._retry is None:
            loop = asyncio.get_running_loop()
            self._retry = loop.call_later(self._settings.flush_retry_s, self._retry_now)

    def _retry_now(self) -> None:
        self._retry = None
        if self._is_open:
            self._flush()
            self._pump.look_again()

    def _lose(self, identity: bytes, reason: str) -> None:
        self.drop(identity, reason)
        if self._on_lost is not None:
            self._on_lost(identity, reason)


def _size(part: bytes | memoryview) -> int:
    return part.nbytes if isinstance(part, memoryview) else len(part)


def _shown(identity: bytes) -> str:
    return identity.decode("ascii") if identity.isascii() and identity.isalnum() else identity.hex()
