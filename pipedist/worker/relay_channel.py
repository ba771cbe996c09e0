"""The way to the other members of a gang through the scheduler's process, which passes parts on unread.

Rules: `pipedist.collectives.channel`. One `Exchange` message an exchange: its payload is the word, then
the frames. The other members' parts come as `Relay` messages, which the worker's driver puts into the
lease's `Inbox`, also while the lease waits for its turn or another exchange is going on. A member that
has ended is told by a Relay with number 0.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from pipedist.collectives.channel import (
    ENDED,
    RETURNED,
    WORD_BYTES,
    Exchanged,
    GangAborted,
    MemberEnded,
    StallPolicy,
    agree,
)
from pipedist.errors import RemoteProtocolError
from pipedist.protocol.codec import Frame
from pipedist.protocol.messages import Relay


class Inbox:
    """What other members have brought for one lease, and not been asked for."""

    def __init__(self) -> None:
        self._parts: dict[int, dict[int, Sequence[memoryview]]] = {}
        """Number of an exchange -> member -> its word and frames."""
        self._ended: dict[int, str] = {}
        """Members that bring nothing more, and how they ended."""

    def put(self, relay: Relay, frames: Sequence[memoryview]) -> None:
        """Keep a part, or that a member has ended.

        Raises:
            RemoteProtocolError: a part that has no word, or came twice.
        """
        if not relay.number:
            self._ended[relay.member] = relay.text
            return
        parts = self._parts.setdefault(relay.number, {})
        if relay.member in parts or not frames or frames[0].nbytes != WORD_BYTES:
            raise RemoteProtocolError(
                f"member {relay.member} brings a malformed part of exchange {relay.number}, or a second one"
            )
        parts[relay.member] = frames

    def missing(self, number: int, members: Sequence[int]) -> tuple[int, ...]:
        """Return those of the members that have not brought a part, and may still do so.

        Raises:
            GangAborted: one of them has failed without it. One that failed afterwards does no harm: so
                which replicas find a mismatch, and fail with it, does not depend on who is first.
        """
        parts = self._parts.get(number, {})
        missing = tuple(m for m in members if m not in parts and self._ended.get(m) != RETURNED)
        for member in missing:
            if member in self._ended:
                raise GangAborted(self._ended[member])
        return missing

    def take(self, number: int) -> dict[int, Sequence[memoryview]]:
        """Return the parts of an exchange, by member, and forget them."""
        return self._parts.pop(number, {})


class Hub(Protocol):
    """What the channel needs of the worker's driver, from whichever thread of the gang."""

    def bring(self, lease: int, number: int, payload: Sequence[Frame]) -> None:
        """Send a part.

        Raises:
            GangAborted: the lease is over, or the worker leaves.
        """

    def listen(self, lease: int, timeout_s: float) -> None:
        """Handle what the scheduler says; return when that is done, or after some time.

        Raises:
            GangAborted: the lease is over, or the worker leaves.
        """


class HubChannel:
    """A `pipedist.collectives.channel.Channel` through the scheduler.

    Args:
        hub: sends and listens.
        lease: this member's.
        inbox: of the lease.
        member, members: which one this is, of how many.
    """

    def __init__(self, hub: Hub, lease: int, inbox: Inbox, member: int, members: int) -> None:
        self.member = member
        self.members = members
        self.group = ""
        """What is set up among these processes is not kept: the hub does not know who they are."""
        self._hub = hub
        self._lease = lease
        self._inbox = inbox
        self._others = tuple(m for m in range(members) if m != member)

    def exchange(self, number: int, word: bytes, frames: Sequence[Frame], policy: StallPolicy) -> Exchanged:
        """Bring a part, and wait for those of the others; see the protocol."""
        self._hub.bring(self._lease, number, [word, *frames])
        waits_until = time.monotonic() + policy.timeout_s
        while self._inbox.missing(number, self._others):
            left_s = waits_until - time.monotonic()
            self._hub.listen(self._lease, max(0.0, left_s))  # also when it is late: they may have come
            if left_s <= 0 and (missing := self._inbox.missing(number, self._others)):
                policy.on_stalled(missing)
                waits_until = time.monotonic() + policy.timeout_s
        parts = self._inbox.take(number)
        words: list[bytes | MemberEnded] = [
            word if m == self.member else bytes(parts[m][0]) if m in parts else ENDED
            for m in range(self.members)
        ]
        if not agree(words):
            return Exchanged(words, None)
        return Exchanged(
            words,
            [frames if m == self.member else parts[m][1:] if m in parts else () for m in range(self.members)],
        )

    def ended(self, *, returned: bool) -> None:
        """Nothing: the scheduler knows it from the results."""

    def close(self) -> None:
        """Nothing is held: parts go with the lease."""
