"""The Router's ZeroMQ socket: bound, with a bounded queue for each peer."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import anyio
import anyio.to_thread
import zmq
from zmq.utils import z85

from pipedist.errors import UsageError
from pipedist.protocol.limits import MessageLimits
from pipedist.protocol.wire import first_frame_bytes_max
from pipedist.transport.config import SocketSettings
from pipedist.transport.endpoints import Endpoint
from pipedist.transport.zeromq.connections import (
    COPY_BYTES_MAX,
    FAILURE_EVENTS,
    HANDSHAKE_FAILURES,
    Outbox,
    address_of,
    configure,
    event_of,
    hang_up,
    plain_address,
    plain_send,
)
from pipedist.transport.zeromq.pump import Pump

if TYPE_CHECKING:
    from pipedist.transport.keys import ServerKeys

# Plain ints: the enumerations of pyzmq cost more than the calls that get them.
_LAST: Final = int(zmq.DONTWAIT)
_MORE: Final = int(zmq.DONTWAIT | zmq.SNDMORE)


_ZAP_ENDPOINT: Final = "inproc://zeromq.zap.01"
_ZAP_DOMAIN: Final = b"pipedist"
_ZAP_FRAMES_MAX: Final = 16

LOOK_UP_S: Final = 10.0  # how long the look-up of a name may take


class Unwelcome(Exception):
    """A message's sender is rejected: its connection is closed; the text, if any, is logged."""


class Address(NamedTuple):
    text: str
    is_ipv6: bool


async def looked_up(endpoint: Endpoint) -> Address:
    """Return the address of an endpoint, whose host may be a name: its first IPv4 address, or its first one.

    ZeroMQ would look it up in the event loop. Raise UsageError if it has none, or takes longer than LOOK_UP_S.
    """
    host = endpoint.host
    if not endpoint.is_name:
        return Address(endpoint.text, endpoint.is_ipv6)
    if any(name == host for _, name in socket.if_nameindex()):
        return Address(endpoint.text, is_ipv6=False)
    look_up = partial(socket.getaddrinfo, host, None, type=socket.SOCK_STREAM)
    try:
        with anyio.fail_after(LOOK_UP_S):
            found = await anyio.to_thread.run_sync(look_up, abandon_on_cancel=True)
    except TimeoutError:
        raise UsageError(
            f"can't bind {endpoint.text}: looking up {host!r} takes longer than {LOOK_UP_S:g} s; use an address of "
            "this host, or * for all of them"
        ) from None
    except (OSError, UnicodeError):
        raise UsageError(f"can't bind {endpoint.text}: {_why_not(endpoint, errno.ENODEV)}") from None
    family, *_, (address, *_) = min(found, key=lambda each: each[0] != socket.AF_INET)
    port = endpoint.text.rpartition(":")[2]
    if family == socket.AF_INET:
        return Address(f"tcp://{address}:{port}", is_ipv6=False)
    return Address(f"tcp://[{address}]:{port}", is_ipv6=True)


class ServerSocket:
    """A bound ROUTER; sending never blocks and loses nothing. Raises UsageError if it can't be bound.

    `on_message` gets (identity, key, frames, fault): the key under which it came, "" without keys; frames are
    read-only; a fault names the broken rule, "" for none. It raises Unwelcome.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        address: Address,  # from `looked_up`
        *,
        keys: ServerKeys | None,
        on_message: Callable[[bytes, str, list[memoryview], str], None],
        on_reject: Callable[[str], None],  # called with a reason, each time a peer is refused
        limits: MessageLimits,
        settings: SocketSettings,
    ) -> None:
        self.endpoint = endpoint
        self._address = address
        self._keys = keys
        self._on_message = on_message
        self._on_reject = on_reject
        self._limits = limits
        self._first_bytes_max = min(first_frame_bytes_max(limits), limits.message_bytes_max)
        self._settings = settings
        self._waiting: dict[bytes, Outbox] = {}  # what ZeroMQ's queue can't take, by identity; not empty
        self._retry: asyncio.TimerHandle | None = None
        self._drained = anyio.Event()  # set while closing, when nothing waits any more
        self._is_open = True
        self._begin_message()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._open()
        except BaseException:
            self._context.destroy(linger=0)
            raise
        # A context that is collected before its sockets would wait for them for ever.
        sockets = [self._socket, self._monitor, *([] if self._zap is None else [self._zap.socket])]
        self._abandoned = weakref.finalize(self, _abandon, self._context, sockets)
        self._abandoned.atexit = False

    def start(self) -> None:
        if self._zap is not None:
            self._zap.start()
        self._pump.start()
        self._monitor_pump.start()

    def send(self, identity: bytes, parts: list[bytes | memoryview]) -> bool:
        """Send a message as soon as there is room; return False if the peer is gone.

        Raise RemoteProtocolError if too much waits for it already. Call `look_again` after one or several messages.
        """
        message = [identity, *parts]
        outbox = self._waiting.get(identity)
        if outbox is None:
            sent = self._try_send(message)
            if sent is not None:
                return sent
            outbox = Outbox(self._settings)
        outbox.add(message)
        self._waiting[identity] = outbox
        self._retry_soon()
        return True

    def look_again(self) -> None:
        """Look for messages that have come: sending may have used up the edge that announces them."""
        self._pump.look_again()

    def silence(self, identity: bytes, last_words: bytes = b"") -> None:
        """Send nothing more to a peer, but for a last frame if there is room."""
        if last_words:
            self._try_send([identity, last_words])
            self._pump.look_again()
        self._waiting.pop(identity, None)

    async def close(self) -> None:
        """Send what waits, for about the linger time, and close; incoming messages are ignored."""
        self._is_open = False
        self._abandoned.detach()
        try:
            with anyio.move_on_after(self._settings.linger_s, shield=True):
                if self._waiting:
                    await self._drained.wait()
        finally:
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
                await anyio.to_thread.run_sync(self._context.term)

    # --- opening --------------------------------------------------------------------------

    def _open(self) -> None:
        self._socket = self._context.socket(zmq.ROUTER)
        self._send = plain_send(self._socket)
        self._zap = (
            None if self._keys is None else ZapHandler(self._context, self._keys.clients, self._on_reject)
        )
        opened = self._socket
        configure(
            opened, self._limits, self._settings, is_tcp=self.endpoint.is_tcp, is_ipv6=self._address.is_ipv6
        )
        opened.setsockopt(zmq.ROUTER_MANDATORY, 1)
        opened.setsockopt(zmq.ROUTER_HANDOVER, 0)
        opened.setsockopt(zmq.LINGER, round(self._settings.linger_s * 1000))
        if self._keys is not None:
            opened.setsockopt(zmq.CURVE_SERVER, 1)
            opened.setsockopt(zmq.CURVE_PUBLICKEY, self._keys.public)
            opened.setsockopt(zmq.CURVE_SECRETKEY, self._keys.secret)
            opened.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
            opened.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        self._monitor = self._socket.get_monitor_socket(FAILURE_EVENTS)
        pace = self._settings.frames_per_wake_up
        self._pump = Pump(self._socket, self._take, wake=self._flush, frames_per_wake_up=pace)
        self._monitor_pump = Pump(self._monitor, self._take_event, frames_per_wake_up=pace)
        self._bind()

    def _bind(self) -> None:
        text = self.endpoint.text
        try:
            self._socket.bind(self._address.text)
        except zmq.ZMQError as error:
            if error.errno == errno.EADDRINUSE and self.endpoint.is_tcp:
                port, host = self.endpoint.port, self.endpoint.host
                raise UsageError(
                    f"port {port} on {host} is taken; choose another one, or 0 for any free one"
                ) from None
            raise UsageError(f"can't bind {text}: {_why_not(self.endpoint, error.errno or 0)}") from None
        if self.endpoint.is_tcp:
            real = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
            self.endpoint = Endpoint(real, self.endpoint.host, int(real.rpartition(":")[2]))

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
        elif not (more or self._parts or self._fault) and len(frame) <= self._first_bytes_max:
            identity, self._identity = (
                self._identity,
                None,
            )  # a message of one frame: the common case, cheaper
            if self._is_open:
                self._deliver(identity, [frame], "", frame)
            return
        elif not self._fault:
            self._fault = self._examine(frame)
            if self._fault:
                self._parts = []
            else:
                self._parts.append(frame)
        if not more:
            identity, parts, fault = self._identity, self._parts, self._fault
            self._begin_message()
            if self._is_open:
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
        user = str(last.get("User-Id")) if self._keys is not None else ""
        try:
            frames = [last.buffer] if len(parts) == 1 else [part.buffer for part in parts]
            self._on_message(identity, user, frames, fault)
        except Unwelcome as error:
            if str(error):
                self._on_reject(f"{error}, from {address_of(last)}")
            hang_up(last, self.endpoint)

    def _take_event(self, frame: zmq.Frame, more: bool) -> None:
        if more and self._is_open:  # the second and last frame is our own endpoint
            self._on_reject(f"a peer failed to join: {HANDSHAKE_FAILURES[event_of(frame.bytes)]}")

    # --- sending --------------------------------------------------------------------------

    def _try_send(self, parts: list[bytes | memoryview]) -> bool | None:
        """Return True: sent; False: the peer is gone; None: its queue is full."""
        last = len(parts) - 1
        try:
            for number, part in enumerate(parts):
                flags = _MORE if number < last else _LAST
                size_bytes = part.nbytes if type(part) is memoryview else len(part)
                self._send(part, flags, size_bytes <= COPY_BYTES_MAX)
        except zmq.Again:
            return None
        except zmq.ZMQError as error:
            if error.errno == errno.EHOSTUNREACH:
                return False
            raise
        return True

    def _flush(self) -> None:
        """Send what waits, as far as there is room.

        Looking for messages may use up the edge that says that there is room again: so while something
        waits, it is tried again also without a wake-up.
        """
        if self._is_open and not self._waiting:  # at most wake-ups
            return
        for identity, outbox in list(self._waiting.items()):
            while outbox.messages:
                sent = self._try_send(outbox.messages[0])
                if sent is None:
                    break
                if sent:
                    outbox.pop()
                else:
                    outbox.clear()
            if not outbox.messages:
                self._waiting.pop(identity, None)
        self._retry_soon()

    def _retry_soon(self) -> None:
        if not self._waiting:
            if not self._is_open:
                self._drained.set()
        elif self._retry is None:
            loop = asyncio.get_running_loop()
            self._retry = loop.call_later(self._settings.flush_retry_s, self._retry_now)

    def _retry_now(self) -> None:
        self._retry = None
        self._flush()
        self._pump.look_again()


def _abandon(context: zmq.Context[zmq.Socket[bytes]], sockets: Sequence[zmq.Socket[bytes]]) -> None:
    """Close the sockets of a server that was never closed, and is garbage."""
    for each in sockets:
        each.close(linger=0)
    context.term()


class ZapHandler:
    """Lets in the keys (Z85) of a fixed set, each under its own name (`User-Id`: the key); see RFC 27, ZAP.

    A server with ZAP_ENFORCE_DOMAIN and a domain rejects every client if the handler does not reply, or is
    gone: it fails closed.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        allowed: frozenset[bytes],
        on_refuse: Callable[[str], None],
    ) -> None:
        self._allowed = allowed
        self._on_refuse = on_refuse
        self._request: list[bytes] = []
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(_ZAP_ENDPOINT)
        self._pump = Pump(self.socket, self._take, frames_per_wake_up=256)

    def start(self) -> None:
        self._pump.start()

    def close(self) -> None:
        """Stop; from now on every client is rejected."""
        self._pump.stop()
        self.socket.close()

    def _take(self, frame: zmq.Frame, more: bool) -> None:
        if len(self._request) < _ZAP_FRAMES_MAX:
            self._request.append(frame.bytes)
        if not more:
            request, self._request = self._request, []
            user, reason = self._decide(request)
            if reason:
                self._on_refuse(reason)
            reply = (b"400", b"refused", b"", b"") if reason else (b"200", b"OK", user, b"")
            request_id = request[1] if len(request) > 1 else b""
            self.socket.send_multipart([b"1.0", request_id, *reply], zmq.DONTWAIT)
            self._pump.look_again()

    def _decide(self, request: list[bytes]) -> tuple[bytes, str]:
        if len(request) != 7 or request[0] != b"1.0":
            return b"", "a malformed request for authentication"
        _, _, domain, address, _, mechanism, credential = request
        where = plain_address(address.decode("ascii", "replace"))
        if domain != _ZAP_DOMAIN or mechanism != b"CURVE" or len(credential) != 32:
            return b"", f"a peer at {where} without a CURVE key"
        key = z85.encode(credential)
        if key not in self._allowed:
            return b"", f"a peer at {where} with the unknown key {key.decode('ascii')}"
        return key, ""


def _why_not(endpoint: Endpoint, number: int) -> str:
    """Return what an error number of `bind` says, and what to do, for people."""
    if number == errno.EADDRNOTAVAIL:
        return f"{endpoint.host} is no address of this host; say one of its own, or * for all of them"
    if number == errno.ENODEV:
        return f"there is no host, and no network device of this one, with the name {endpoint.host!r}"
    if number == errno.EACCES and endpoint.is_tcp:
        return f"this user may not listen at port {endpoint.port}; choose one from 1024 on"
    return os.strerror(number)
