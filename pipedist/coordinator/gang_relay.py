"""Gangs under way: their results until all of them are there, and what members say to each other.

Members on one host share memory (`pipedist.coordinator.segments`). Others meet here: what a member
brings to an exchange is passed on unread to each of the others, as long as its lease is held. No
member can go on to its next exchange before all others have brought their part or have ended; so at
most one part of each is on its way. A member that has brought something, and so may be waiting, is
told of those that have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pipedist.collectives.channel import RETURNED
from pipedist.coordinator.segments import Segment, Segments
from pipedist.coordinator.store import Chunk
from pipedist.coordinator.worker_pool import Fleet
from pipedist.coordinator.worker_registry import Peer
from pipedist.errors import RemoteProtocolError
from pipedist.protocol import messages as msg
from pipedist.protocol.codec import Frame
from pipedist.scheduler import commands as cmd


@dataclass(slots=True, eq=False)
class _Gang:
    """One attempt of a gang."""

    serial: int
    pass_id: int
    parts: tuple[cmd.GangAssignment, ...]
    """By member."""
    peers: list[Peer]
    segment: Segment | None
    stash: list[Chunk] = field(default_factory=list)
    brought: dict[int, int] = field(default_factory=dict)
    """By member, the number of its latest exchange through this process."""
    failed: dict[int, str] = field(default_factory=dict)
    """By member, what one of its calls raised."""
    told: set[tuple[int, int]] = field(default_factory=set)
    """(member, other member whose end it was told)."""


class Gangs:
    """The gangs that were sent and are not over.

    Args:
        fleet: speaks with workers.
        segments: of members on this host.
        is_held: whether a worker holds a lease.
    """

    def __init__(self, fleet: Fleet, segments: Segments, is_held: Callable[[str, int], bool]) -> None:
        self._fleet = fleet
        self._segments = segments
        self._is_held = is_held
        self._gangs: dict[int, _Gang] = {}
        self._by_lease: dict[int, tuple[_Gang, int]] = {}

    # -- from beginning to end -------------------------------------------------------------

    def begin(self, command: cmd.SendGang) -> str:
        """Enter a gang, and return where its members' shared memory is found, "" if they have none."""
        serial, parts = command.serial, command.parts
        peers = [peer for part in parts if (peer := self._fleet.of(part.worker)) is not None]
        segment = None
        if len(peers) == len(parts) > 1:
            segment = self._segments.begin(serial, peers, parts[-1].hi - parts[0].lo)
        gang = self._gangs[serial] = _Gang(serial, command.pass_id, parts, peers, segment)
        for member, part in enumerate(parts):
            self._by_lease[part.lease] = (gang, member)
        return segment.where if segment is not None else ""

    def stash(self, serial: int, chunk: Chunk) -> None:
        """Keep results of a gang until it is over."""
        gang = self._gangs[serial]
        gang.stash.append(chunk)
        if gang.brought:
            self._tell_ended(gang)

    def end(self, command: cmd.GangEnded) -> tuple[int, list[Chunk], Sequence[Peer]]:
        """Forget a gang, and return its pass, those of its results that count, and its members."""
        gang = self._gangs.pop(command.serial)
        for part in gang.parts:
            del self._by_lease[part.lease]
        if gang.segment is not None:
            gang.segment.end(gang.serial, aborted=command.aborted)
            if command.aborted:
                self._segments.let_go()
        return gang.pass_id, gang.stash if command.counts else [], gang.peers

    def close(self) -> None:
        """Let go of all shared memory."""
        self._segments.close()

    # -- what members say to each other ----------------------------------------------------

    def exchange(self, peer: Peer, told: msg.Exchange, frames: Sequence[Frame]) -> bool:
        """Pass on what a member brings to an exchange; return False if it holds no such lease.

        Raises:
            RemoteProtocolError: it is not the member's next exchange, or others have not come to the
                one before.
        """
        found = self._by_lease.get(told.lease)
        if found is None or not self._is_held(peer.worker, told.lease):
            return False
        gang, member = found
        before = gang.brought.get(member, 0)
        waits = [m for m in self._others(gang, member) if gang.brought.get(m, 0) < before]
        if told.number != before + 1 or waits:
            raise RemoteProtocolError(
                f"exchange {told.number} of lease {told.lease} after {before}, others are at {gang.brought}"
            )
        gang.brought[member] = told.number
        for other in self._others(gang, member):
            worker, lease, *_ = gang.parts[other]
            self._fleet.send(worker, msg.Relay(lease, member, told.number, ""), frames)
        self._tell_ended(gang)
        return True

    def failed(self, told: msg.Failed) -> None:
        """Take note that a call of a gang raised, before the scheduler hears of it."""
        found = self._by_lease.get(told.lease)
        if found is not None:
            gang, member = found
            gang.failed.setdefault(member, f"{told.name}: {told.text}")

    def reported(self, lease: int) -> None:
        """Take note that the scheduler has heard of a call that raised."""
        found = self._by_lease.get(lease)
        if found is not None and found[0].brought:
            self._tell_ended(found[0])

    def _others(self, gang: _Gang, member: int) -> list[int]:
        """Return the other members that have not ended."""
        return [
            m for m, part in enumerate(gang.parts) if m != member and self._is_held(part.worker, part.lease)
        ]

    def _tell_ended(self, gang: _Gang) -> None:
        """Tell members that may be waiting of those that have ended."""
        ended = [m for m, part in enumerate(gang.parts) if not self._is_held(part.worker, part.lease)]
        for member in gang.brought:
            if member in ended:
                continue
            worker, lease, *_ = gang.parts[member]
            for other in ended:
                if (member, other) not in gang.told:
                    gang.told.add((member, other))
                    text = gang.failed.get(other, RETURNED)
                    self._fleet.send(worker, msg.Relay(lease, other, 0, text))
