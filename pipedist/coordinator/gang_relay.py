"""Running gangs: their results, and the data that members exchange.

Members on one host share memory: one segment for each group of workers. Others exchange through this process:
the part that a member contributes is forwarded, undecoded, to each of the others, while its lease is held.
A member can't begin its next exchange before all others have contributed their part or have ended; so at most
one part of each member is in flight. A member that has contributed may be waiting, so it is notified of
members that have ended.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct, field

from pipedist.collectives.channel import RETURNED
from pipedist.coordinator.results import Chunk
from pipedist.coordinator.worker_pool import WorkerPool
from pipedist.coordinator.worker_registry import Peer
from pipedist.errors import RemoteProtocolError
from pipedist.protocol import messages as msg
from pipedist.protocol.codec import Frame
from pipedist.scheduler import commands as cmd

if TYPE_CHECKING:
    from pipedist.collectives.segment import SegmentOwner

SEGMENTS_MAX = 8  # segments that are kept, beside those that gangs are using


class Segment(Struct, eq=False):
    """The shared memory of a group of workers, used by one gang at a time."""

    peers: tuple[Peer, ...]  # the group, in order of member
    owner: SegmentOwner | None  # None if no segment could be created
    serials: set[int] = field(default_factory=set)  # gangs that use it
    aborted: int = 0  # the highest serial whose abort is pending; 0: none

    @property
    def where(self) -> str:
        return "" if self.owner is None else self.owner.where

    def end(self, serial: int, *, aborted: bool) -> None:
        """Record that a gang has ended.

        Aborting a gang ends all earlier ones too, so the abort waits until those have ended.
        """
        self.serials.discard(serial)
        if aborted:
            self.aborted = max(self.aborted, serial)
        if self.aborted and self.owner is not None and all(s > self.aborted for s in self.serials):
            self.owner.abort(self.aborted)
            self.aborted = 0


class SegmentPool:
    """Creates segments, keeps the latest, and closes those of lost workers."""

    def __init__(self, pool: WorkerPool, *, enabled: bool) -> None:
        self._pool = pool
        self._enabled = enabled
        self._segments: OrderedDict[tuple[int, tuple[bytes, ...]], Segment] = OrderedDict()

    def begin(self, serial: int, peers: Sequence[Peer], replicas: int) -> Segment | None:
        """Return the segment for a gang; None if its members can't share memory."""
        if not self._enabled or len(peers) < 2 or not all(map(self._pool.was_started_here, peers)):
            return None
        key = (replicas, tuple([peer.identity for peer in peers]))
        segment = self._segments.get(key)
        if segment is None:
            self.close_unused()
            segment = self._segments[key] = Segment(tuple(peers), _owner(replicas))
        self._segments.move_to_end(key)
        segment.serials.add(serial)
        return segment

    def close_unused(self) -> None:
        """Close unused segments of lost workers, or beyond the limit."""
        spare = len(self._segments) - SEGMENTS_MAX + 1
        for key, segment in list(self._segments.items()):
            lost = any(self._pool.of(peer.worker) is not peer for peer in segment.peers)
            if not segment.serials and (lost or spare > 0):
                spare -= 1
                _close(self._segments.pop(key))

    def close(self) -> None:
        while self._segments:
            _close(self._segments.popitem()[1])


class _Gang(Struct, eq=False):
    serial: int
    pass_id: int
    parts: tuple[cmd.GangAssignment, ...]  # by member
    peers: list[Peer]
    segment: Segment | None
    stash: list[Chunk] = field(default_factory=list)
    brought: dict[int, int] = field(default_factory=dict)  # number of the latest exchange, by member
    failed: dict[int, str] = field(default_factory=dict)  # by member, the exception of one of its calls
    notified: set[tuple[int, int]] = field(default_factory=set)  # (member, other that has ended)


class GangRelay:
    """The gangs that were sent and have not ended; `is_held`: whether a worker holds a lease."""

    def __init__(self, pool: WorkerPool, segments: SegmentPool, is_held: Callable[[str, int], bool]) -> None:
        self._pool = pool
        self._segments = segments
        self._is_held = is_held
        self._gangs: dict[int, _Gang] = {}
        self._by_lease: dict[int, tuple[_Gang, int]] = {}

    # -- from beginning to end -------------------------------------------------------------

    def begin(self, command: cmd.SendGang) -> str:
        """Add a gang, and return the name of its segment; "": it has none."""
        serial, parts = command.serial, command.parts
        peers = [peer for part in parts if (peer := self._pool.of(part.worker)) is not None]
        segment = None
        if len(peers) == len(parts) > 1:
            segment = self._segments.begin(serial, peers, parts[-1].hi - parts[0].lo)
        gang = self._gangs[serial] = _Gang(serial, command.pass_id, parts, peers, segment)
        for member, part in enumerate(parts):
            self._by_lease[part.lease] = (gang, member)
        return "" if segment is None else segment.where

    def stash(self, serial: int, chunk: Chunk) -> None:
        gang = self._gangs[serial]
        gang.stash.append(chunk)
        if gang.brought:
            self._notify_of_ended(gang)

    def end(self, command: cmd.GangEnded) -> tuple[int, list[Chunk], Sequence[Peer]]:
        """Remove a gang; return its pass, accepted results, and members."""
        gang = self._gangs.pop(command.serial)
        for part in gang.parts:
            del self._by_lease[part.lease]
        if gang.segment is not None:
            gang.segment.end(gang.serial, aborted=command.aborted)
            if command.aborted:
                self._segments.close_unused()
        return gang.pass_id, gang.stash if command.counts else [], gang.peers

    def close(self) -> None:
        self._segments.close()

    # -- exchanges between members -----------------------------------------------------------

    def exchange(self, peer: Peer, message: msg.Exchange, frames: Sequence[Frame]) -> bool:
        """Forward a member's part of an exchange; return whether it has a lease.

        Raise RemoteProtocolError if it is not its next exchange, or others have not contributed to the previous one.
        """
        found = self._by_lease.get(message.lease)
        if found is None or not self._is_held(peer.worker, message.lease):
            return False
        gang, member = found
        before = gang.brought.get(member, 0)
        waits = [m for m in self._others(gang, member) if gang.brought.get(m, 0) < before]
        if message.number != before + 1 or waits:
            raise RemoteProtocolError(
                f"exchange {message.number} of lease {message.lease} after {before}; the members are at "
                f"{gang.brought}"
            )
        gang.brought[member] = message.number
        for other in self._others(gang, member):
            worker, lease, *_ = gang.parts[other]
            self._pool.send(worker, msg.Relay(lease, member, message.number, ""), frames)
        self._notify_of_ended(gang)
        return True

    def failed(self, message: msg.Failed) -> None:
        """Record that a call of a gang raised, before the scheduler handles it."""
        found = self._by_lease.get(message.lease)
        if found is not None:
            gang, member = found
            gang.failed.setdefault(member, f"{message.name}: {message.text}")

    def reported(self, lease: int) -> None:
        """Notify waiting members after the scheduler has handled a failure."""
        found = self._by_lease.get(lease)
        if found is not None and found[0].brought:
            self._notify_of_ended(found[0])

    def _others(self, gang: _Gang, member: int) -> list[int]:
        return [
            m for m, part in enumerate(gang.parts) if m != member and self._is_held(part.worker, part.lease)
        ]

    def _notify_of_ended(self, gang: _Gang) -> None:
        """Notify members that may be waiting of those that have ended."""
        ended = [m for m, part in enumerate(gang.parts) if not self._is_held(part.worker, part.lease)]
        for member in gang.brought:
            if member in ended:
                continue
            worker, lease, *_ = gang.parts[member]
            for other in ended:
                if (member, other) not in gang.notified:
                    gang.notified.add((member, other))
                    text = gang.failed.get(other, RETURNED)
                    self._pool.send(worker, msg.Relay(lease, other, 0, text))


def _owner(replicas: int) -> SegmentOwner | None:
    from pipedist.collectives.segment import SegmentOwner, SegmentUnavailable  # only gangs need it

    try:
        return SegmentOwner(replicas)
    except SegmentUnavailable:  # the members exchange through this process: the same bits, but slower
        return None


def _close(segment: Segment) -> None:
    if segment.owner is not None:
        segment.owner.close()
