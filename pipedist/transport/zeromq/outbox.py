"""A bounded queue of messages for a peer that does not read fast enough."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from pipedist.errors import RemoteProtocolError
from pipedist.transport.config import SocketSettings


class Outbox:
    """Messages for one peer, in order.

    Args:
        settings: how many messages and bytes may wait.
    """

    __slots__ = ("_settings", "messages", "size_bytes")

    def __init__(self, settings: SocketSettings) -> None:
        self._settings = settings
        self.messages: deque[list[bytes | memoryview]] = deque()
        self.size_bytes = 0

    def add(self, parts: list[bytes | memoryview]) -> None:
        """Keep a message.

        Raises:
            RemoteProtocolError: the queue is full; the text continues the peer's name.
        """
        size_bytes = bytes_of(parts)
        count, settings = len(self.messages), self._settings
        if count >= settings.outbox_messages_max or self.size_bytes + size_bytes > settings.outbox_bytes_max:
            raise RemoteProtocolError(
                f"does not read: its send queue is full, {count} messages ({self.size_bytes} bytes) wait"
            )
        self.messages.append(parts)
        self.size_bytes += size_bytes

    def pop(self) -> None:
        """Remove the first message, which was sent."""
        self.size_bytes -= bytes_of(self.messages.popleft())

    def clear(self) -> None:
        """Remove all messages."""
        self.messages.clear()
        self.size_bytes = 0


def bytes_of(parts: Sequence[bytes | memoryview]) -> int:
    """Return the bytes of all parts."""
    return sum(size_of(part) for part in parts)


def size_of(part: bytes | memoryview) -> int:
    """Return the bytes of a part, whatever its items are."""
    return part.nbytes if isinstance(part, memoryview) else len(part)
