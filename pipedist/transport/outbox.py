"""What waits for one peer that does not read fast enough: a queue with limits."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from pipedist.errors import RemoteProtocolError
from pipedist.transport.settings import Settings


class Outbox:
    """Messages for one peer, in order.

    Args:
        settings: how many messages and bytes may wait.
    """

    __slots__ = ("_settings", "messages", "size_bytes")

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.messages: deque[list[bytes | memoryview]] = deque()
        self.size_bytes = 0

    def add(self, parts: list[bytes | memoryview]) -> None:
        """Keep a message, or what is left of one.

        Raises:
            RemoteProtocolError: there is no room; the text goes on from the peer's name.
        """
        size_bytes = bytes_of(parts)
        count, settings = len(self.messages), self._settings
        if count >= settings.outbox_messages_max or self.size_bytes + size_bytes > settings.outbox_bytes_max:
            raise RemoteProtocolError(
                f"is overrun: it does not read, and {count} messages of {self.size_bytes} bytes wait for it"
            )
        self.messages.append(parts)
        self.size_bytes += size_bytes

    def pop(self) -> None:
        """Forget the first message: it was sent."""
        self.size_bytes -= bytes_of(self.messages.popleft())

    def cut(self, left: list[bytes | memoryview]) -> None:
        """Replace the first message by what is left of it."""
        self.size_bytes += bytes_of(left) - bytes_of(self.messages[0])
        self.messages[0] = left

    def clear(self) -> None:
        """Forget everything."""
        self.messages.clear()
        self.size_bytes = 0


def bytes_of(parts: Sequence[bytes | memoryview]) -> int:
    """Return the bytes of all parts."""
    return sum(size_of(part) for part in parts)


def size_of(part: bytes | memoryview) -> int:
    """Return the bytes of a part, whatever its items are."""
    return part.nbytes if isinstance(part, memoryview) else len(part)
