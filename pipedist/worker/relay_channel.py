"""The channel to other members of a gang that the driver process relays.

Rules: `pipedist.collectives.channel`. One `Exchange` message is sent for each exchange: its payload is the word, then
the frames. The parts of other members arrive as `Relay` messages, which the worker's driver puts into the lease's
`RelayBuffer`, also while the lease waits in the queue, or another exchange is under way. A Relay with number 0
reports that a member has ended.
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


class RelayBuffer:
    """Parts of other members for one lease that no exchange has used yet."""

    def __init__(self) -> None:
        self._parts: dict[int, dict[int, Sequence[memoryview]]] = {}  # exchange -> member -> word, frames
        self._ended: dict[int, str] = {}  # members that have ended -> the reason

    def put(self, relay: Relay, frames: Sequence[memoryview]) -> None:
        """Store a part, or the end of a member."""
        if not relay.number:
            self._ended[relay.member] = relay.text
            return
        parts = self._parts.setdefault(relay.number, {})
        if relay.member in parts or not frames or frames[0].nbytes != WORD_BYTES:
            raise RemoteProtocolError(
                f"member {relay.member} sent a malformed or second part of exchange {relay.number}"
            )
        parts[relay.member] = frames

    def missing(self, number: int, members: Sequence[int]) -> tuple[int, ...]:
        """Return the members that have not sent a part, and still may.

        Raises GangAborted if a member has failed before its part. A later failure is ignored, so that the replicas
        which find a mismatch, and fail with it, do not depend on timing.
        """
        parts = self._parts.get(number, {})
        missing = tuple(m for m in members if m not in parts and self._ended.get(m) != RETURNED)
        for member in missing:
            if member in self._ended:
                raise GangAborted(self._ended[member])
        return missing

    def take(self, number: int) -> dict[int, Sequence[memoryview]]:
        return self._parts.pop(number, {})


class RelayClient(Protocol):
    """The methods of the worker's driver that gangs call, from any thread.

    They raise GangAborted when the lease is over, or the worker leaves.
    """

    def contribute(self, lease: int, number: int, payload: Sequence[Frame]) -> None:
        """Send a part."""

    def listen(self, lease: int, timeout_s: float) -> None:
        """Handle received messages; return when that is done, or after some time."""

    def report_stalled(self, lease: int, members: tuple[int, ...], text: str) -> None:
        """Report that a collective has waited too long for members."""


class RelayChannel:
    """A `pipedist.collectives.channel.Channel` through the driver process."""

    def __init__(
        self, client: RelayClient, lease: int, buffer: RelayBuffer, member: int, members: int
    ) -> None:
        self.member = member
        self.members = members
        self.group = ""  # nothing is kept for other gangs, as the identities of the processes are unknown
        self._client = client
        self._lease = lease
        self._buffer = buffer
        self._others = tuple(m for m in range(members) if m != member)

    def exchange(self, number: int, word: bytes, frames: Sequence[Frame], policy: StallPolicy) -> Exchanged:
        self._client.contribute(self._lease, number, [word, *frames])
        waits_until = time.monotonic() + policy.timeout_s
        while self._buffer.missing(number, self._others):
            rest_s = waits_until - time.monotonic()
            self._client.listen(self._lease, max(0.0, rest_s))  # also if it is late: parts may have arrived
            if rest_s <= 0 and (missing := self._buffer.missing(number, self._others)):
                policy.on_stalled(missing)
                waits_until = time.monotonic() + policy.timeout_s
        parts = self._buffer.take(number)
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
        """Do nothing: the results report the end to the scheduler."""

    def close(self) -> None:
        """Do nothing: the parts are dropped with the lease."""
