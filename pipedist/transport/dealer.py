"""A worker's end: one connection to the scheduler's Router, blocking.

A Dealer never reconnects: once its connection is lost, messages may be lost in either direction, so it
raises ConnectionLost. To join again, open a new Dealer with a new identity.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipedist.errors import RemoteProtocolError, UsageError
from pipedist.protocol.limits import LIMITS, MessageLimits
from pipedist.protocol.messages import Message
from pipedist.protocol.wire import Reference, pack, seal, unpack, unseal, weave
from pipedist.transport.config import SETTINGS, SocketSettings
from pipedist.transport.endpoints import parse_endpoint
from pipedist.transport.shared_memory.link import join
from pipedist.transport.zeromq.client_socket import ClientSocket, ConnectionLost

if TYPE_CHECKING:
    from pipedist.transport.keys import ClientKeys

__all__ = ["ConnectionLost", "Dealer"]


class Dealer:
    """Sends to and receives from one Router; for one thread.

    All methods raise ConnectionLost once the connection is lost, and RemoteProtocolError if the scheduler refuses this
    worker.

    Args:
        identity: 1 to 255 bytes, not beginning with a zero byte; random, new for each Dealer.
        keys: of a CURVE client; required for tcp.

    Raises:
        UsageError: the endpoint or the identity is not allowed.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        identity: bytes,
        keys: ClientKeys | None,
        limits: MessageLimits = LIMITS,
        settings: SocketSettings = SETTINGS,
    ) -> None:
        parsed = parse_endpoint(endpoint, bind=False, has_keys=keys is not None)
        if not 1 <= len(identity) <= 255 or identity[0] == 0:
            raise UsageError("an identity has 1 to 255 bytes and does not begin with a zero byte")
        self._endpoint = endpoint
        self._limits = limits
        # The link comes first: the Router then knows of it before the first message.
        self._link = None if parsed.is_tcp or keys is not None else join(parsed.path, identity)
        try:
            self._socket = ClientSocket(
                parsed, identity, keys=keys, link=self._link, limits=limits, settings=settings
            )
        except BaseException:
            if self._link is not None:
                self._link.close()
            raise

    def __enter__(self) -> Dealer:
        return self

    def __exit__(self, *_: object) -> None:
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
            copy: False: frames above 64 KiB are sent from their own memory, later, so it must not change any more.
                The result of a replica function may still change.
            timeout_s: how long to wait for room at most, before ConnectionLost; may be infinite.

        Raises:
            LocalProtocolError: the message is not allowed.
        """
        head = pack(message)
        references: Sequence[Reference] = ()
        if len(payload) > 1 and self._link is not None:
            references, payload = self._link.lend(payload)
        header = payload[0] if payload else b""
        parts = [seal(head, header, references), *payload[1:]]
        self._socket.send(parts, copy=copy, timeout_s=timeout_s)

    def poll(self, timeout_s: float) -> bool:
        """Wait for a message (0 s: only look); return whether `recv` will return one at once."""
        return self._socket.poll(timeout_s)

    def recv(self, timeout_s: float = 60.0) -> tuple[Message, list[memoryview]]:
        """Receive the next message and its payload: read-only views of the received memory.

        Raises:
            ConnectionLost: the connection was lost, or nothing came in time.
            RemoteProtocolError: the message is malformed, or the scheduler refuses this worker.
        """
        if not self._socket.poll(timeout_s):
            raise ConnectionLost(f"{self._endpoint} sent no message for {timeout_s:g} s")
        frames = self._socket.recv()
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

    def close(self, linger_s: float | None = None) -> None:
        """Close, after waiting `linger_s` (None: the settings') for unsent messages; may be called twice."""
        self._socket.close(linger_s)
        if self._link is not None:
            self._link.close()  # after the last message that refers to its memory
            self._link = None
