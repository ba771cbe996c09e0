"""The scheduler's end: one ZeroMQ socket for all Dealers, and the memory shared with them.

Rules
- A peer is an identity, chosen at random for each incarnation of a worker. It is bound to
  the key with which it came, and to the process that opened its link, if it has one: others are refused.
- A message that breaks a rule (malformed, too many frames, too large) costs its sender the
  connection and its identity, is reported to `on_reject`, and affects no other peer. Sizes are checked
  before a message is collected.
- Only peers that `keep` names stay known until `release`. Of others, which may be gone, and as many as dial in, the
  latest are known: a refused one is refused again, and a forgotten one that sends is a new peer.
- Sending never blocks and loses nothing: messages beyond a peer's queue wait in an outbox with
  limits; beyond them, the peer is lost.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from pipedist.errors import LocalProtocolError, RemoteProtocolError
from pipedist.protocol.limits import LIMITS, MessageLimits
from pipedist.protocol.messages import Message, Refuse
from pipedist.protocol.wire import Reference, pack, seal, unpack, unseal, weave
from pipedist.transport.config import SETTINGS, SHARED_BYTES_MIN, SharedMemory, SocketSettings
from pipedist.transport.endpoints import Endpoint, parse_endpoint
from pipedist.transport.shared_memory.listener import Listener
from pipedist.transport.zeromq.server_socket import ServerSocket, Unwelcome, looked_up

if TYPE_CHECKING:
    from pipedist.transport.keys import ServerKeys


Outgoing = tuple[bytes, Message, Sequence[bytes | memoryview]]
"""The identity of a peer, a message for it, and its payload."""


class _Peer(Struct):
    user: str  # the key that it is bound to; "" without keys
    is_dropped: bool = False


class Router:
    """Receives from and sends to any number of Dealers; `async with` binds and closes it.

    `on_message` gets (identity, message, payload frames) in the loop, in the order of arrival; frames are read-only
    views of the received memory. UsageError: the endpoint is not allowed, or, when entered, can't be bound.
    """

    def __init__(
        self,
        endpoint: str,  # `tcp://host:port` (port 0: any free one) or `ipc://` in a private directory
        *,
        keys: ServerKeys | None,  # of a CURVE server; required for tcp
        on_message: Callable[[bytes, Message, list[memoryview]], None],  # must not block
        on_reject: Callable[[str], None],  # gets the reason when a peer is rejected or dropped
        on_lost: Callable[[bytes, str], None] | None = None,  # (identity, reason) of a dropped peer
        limits: MessageLimits = LIMITS,
        settings: SocketSettings = SETTINGS,
        shared_memory: SharedMemory | None = None,  # with Dealers on this host; None: not shared
    ) -> None:
        self._endpoint: Endpoint = parse_endpoint(endpoint, bind=True, has_keys=keys is not None)
        self._keys = keys
        self._on_message = on_message
        self._on_reject = on_reject
        self._on_lost = on_lost
        self._limits = limits
        self._settings = settings
        self._shared_memory = shared_memory
        self._listener: Listener | None = None
        self._peers: dict[bytes, _Peer] = {}
        self._others: OrderedDict[bytes, None] = OrderedDict()  # peers that are not kept, the oldest first
        self._is_open = False

    @property
    def endpoint(self) -> str:
        """Where workers connect to, with the real port; known after entering."""
        return self._endpoint.text

    async def __aenter__(self) -> Router:
        self._server = ServerSocket(
            self._endpoint,
            await looked_up(self._endpoint),
            keys=self._keys,
            on_message=self._hear,
            on_reject=self._on_reject,
            limits=self._limits,
            settings=self._settings,
        )
        self._endpoint = self._server.endpoint
        if self._shared_memory is not None and not self._endpoint.is_tcp and self._keys is None:
            # Without a socket, a kernel or the memory for it, frames will do.
            with contextlib.suppress(OSError):
                self._listener = Listener(
                    self._endpoint.path,
                    self._shared_memory,
                    grace_s=self._settings.linger_s,
                    on_link=self._on_link,
                    on_end=self.drop,
                    on_fault=self._on_link_fault,
                )
        self._is_open = True
        self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        if not self._is_open:
            return
        self._is_open = False
        if self._listener is not None:
            self._listener.close()
        await self._server.close()

    def send(self, identity: bytes, message: Message, payload: Sequence[bytes | memoryview] = ()) -> bool:
        """Send a message to a peer, now or as soon as its queue has room; never blocks.

        Frames above 64 KiB may be sent from their own memory, which must not change any more. Return False if the peer
        is gone, unknown or dropped; raise LocalProtocolError if the message is not allowed, or the Router is not open.
        """
        return self.send_all([(identity, message, payload)])[0]

    def send_all(self, messages: Sequence[Outgoing]) -> list[bool]:
        """Send messages to different peers, each as `send` does; return its values.

        All are packed before the first is sent. A receiver on this host can run in place of this process as soon as its
        message is sent, and the others would wait for theirs.
        """
        sealed = [self._sealed(*each) for each in messages]
        sent: list[bool] = []
        try:
            for (identity, _, _), parts in zip(messages, sealed, strict=True):
                try:
                    sent.append(parts is not None and self._server.send(identity, parts))
                except RemoteProtocolError as error:
                    self._lose(identity, f"peer {_shown(identity)} {error}")
                    sent.append(False)
        finally:
            self._server.look_again()
        return sent

    def _sealed(
        self, identity: bytes, message: Message, payload: Sequence[bytes | memoryview]
    ) -> list[bytes | memoryview] | None:
        """Return the frames of a message, None if the peer gets none."""
        if not self._is_open:
            raise LocalProtocolError("a Router sends only between entering and leaving `async with`")
        peer = self._peers.get(identity)
        if peer is None or peer.is_dropped:
            return None
        references: Sequence[Reference] = ()
        # One small frame, as in a step of a training loop, is never lent.
        may_lend = len(payload) > 2 or (len(payload) == 2 and len(payload[1]) >= SHARED_BYTES_MIN)
        if may_lend and self._listener is not None:
            references, payload = self._listener.lend(identity, payload)
        header = payload[0] if payload else b""
        return [seal(pack(message), header, references), *payload[1:]]

    def keep(self, identity: bytes) -> None:
        """Know a peer that has sent a message until `release`, or until it is dropped."""
        self._others.pop(identity, None)

    def release(self, identity: bytes) -> None:
        """Let a peer be forgotten."""
        if identity not in self._peers:
            return
        self._others[identity] = None
        while len(self._others) > self._settings.other_peers_max:
            oldest, _ = self._others.popitem(last=False)
            del self._peers[oldest]
            if self._is_open:
                self._server.silence(oldest)
            if self._listener is not None:
                self._listener.forget(oldest)

    def drop(self, identity: bytes, reason: str = "") -> None:
        """Drop a peer for good; its connection is closed at its next message. `reason`: "" without an error."""
        peer = self._peers.get(identity)
        if peer is None or peer.is_dropped:
            return
        if self._is_open:
            self._server.silence(identity, seal(pack(Refuse(reason[:1000]))) if reason else b"")
        if reason:
            self._on_reject(reason)
        peer.is_dropped = True
        if self._listener is not None:
            self._listener.forget(identity)
        self.release(identity)

    # --- receiving ------------------------------------------------------------------------

    def _hear(self, identity: bytes, user: str, parts: list[memoryview], fault: str) -> None:
        peer = self._peers.get(identity)
        if peer is None:
            peer = self._admit(identity, user)
        if peer is None:
            raise Unwelcome(f"more than {self._settings.peers_max} peers; {_shown(identity)} is refused")
        if peer.user != user:
            raise Unwelcome(f"the identity {_shown(identity)} of another key's peer")
        if peer.is_dropped:
            raise Unwelcome
        if fault:
            # It keeps its connection until its next message, so that it can read the reason.
            self._lose(identity, f"peer {_shown(identity)} sent {fault}")
            return
        try:
            message, frames = self._open_message(identity, parts)
        except RemoteProtocolError as error:
            self._lose(identity, f"peer {_shown(identity)} sent {error}")
            return
        self._on_message(identity, message, frames)

    def _open_message(self, identity: bytes, parts: list[memoryview]) -> tuple[Message, list[memoryview]]:
        head, header, references = unseal(parts[0], self._limits)
        message = unpack(head)
        if not header.nbytes:
            if len(parts) > 1 or references:
                raise RemoteProtocolError("frames without a header")
            return message, []
        frames = [header, *parts[1:]]
        if references:
            if self._listener is None:
                raise RemoteProtocolError("references to shared memory, which is off")
            weave(frames, references, self._listener.frames(identity, references), self._limits)
        return message, frames

    def _admit(self, identity: bytes, user: str) -> _Peer | None:
        if self._listener is not None:
            self._listener.look()  # a Dealer opens its link before its first message
        if len(self._peers) - len(self._others) >= self._settings.peers_max:
            return None
        peer = self._peers[identity] = _Peer(user)
        self.release(identity)
        return peer

    def _lose(self, identity: bytes, reason: str) -> None:
        self.drop(identity, reason)
        if self._on_lost is not None:
            self._on_lost(identity, reason)

    # --- shared memory --------------------------------------------------------------------

    def _on_link(self, identity: bytes) -> None:
        if identity in self._peers:
            raise RemoteProtocolError(f"the identity {_shown(identity)} of another process")

    def _on_link_fault(self, identity: bytes, reason: str) -> None:
        peer = self._peers.get(identity)
        if peer is None:
            self._on_reject(reason)
        elif not peer.is_dropped:
            self._lose(identity, f"peer {_shown(identity)}: {reason}")


def _shown(identity: bytes) -> str:
    return identity.decode("ascii") if identity.isascii() and identity.isalnum() else identity.hex()
