"""The memory that the members of gangs share on this host: one segment a group of workers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pipedist.coordinator.worker_pool import Fleet
from pipedist.coordinator.worker_registry import Peer

if TYPE_CHECKING:
    from pipedist.collectives.segment import SegmentOwner

SEGMENTS_MAX = 8
"""Segments that are kept, beside those that gangs are using."""


@dataclass(slots=True, eq=False)
class Segment:
    """The segment of a group; it serves the group's gangs one after the other.

    Args:
        peers: the group, in order of member.
        owner: None where none could be made.
    """

    peers: tuple[Peer, ...]
    owner: SegmentOwner | None
    serials: set[int] = field(default_factory=set)
    """Gangs that use it."""
    aborted: int = 0
    """The highest serial that is to be aborted, and was not yet."""

    @property
    def where(self) -> str:
        """How members find it; "" where there is none."""
        return self.owner.where if self.owner is not None else ""

    def end(self, serial: int, *, aborted: bool) -> None:
        """Take note that a gang is over.

        Aborting one ends all before it too: so it waits until those before it are over by themselves.
        """
        self.serials.discard(serial)
        if aborted:
            self.aborted = max(self.aborted, serial)
        if self.aborted and self.owner is not None and all(s > self.aborted for s in self.serials):
            self.owner.abort(self.aborted)
            self.aborted = 0


class Segments:
    """Makes segments, keeps those that were used last, and lets go of those of lost workers.

    Args:
        fleet: knows who is there.
        enabled: whether workers that were started here may share memory.
    """

    def __init__(self, fleet: Fleet, *, enabled: bool) -> None:
        self._fleet = fleet
        self._enabled = enabled
        self._segments: OrderedDict[tuple[int, tuple[bytes, ...]], Segment] = OrderedDict()

    def begin(self, serial: int, peers: Sequence[Peer], replicas: int) -> Segment | None:
        """Return the segment for a gang, None where its members can't share memory."""
        if not self._enabled or len(peers) < 2 or not all(map(self._fleet.is_ours, peers)):
            return None
        key = (replicas, tuple([peer.identity for peer in peers]))
        segment = self._segments.get(key)
        if segment is None:
            self.let_go()
            segment = self._segments[key] = Segment(tuple(peers), _owner(replicas))
        self._segments.move_to_end(key)
        segment.serials.add(serial)
        return segment

    def let_go(self) -> None:
        """Close the segments that nobody uses, of groups that lost a worker, and beyond the limit."""
        spare = len(self._segments) - SEGMENTS_MAX + 1
        for key, segment in list(self._segments.items()):
            lost = any(self._fleet.of(peer.worker) is not peer for peer in segment.peers)
            if not segment.serials and (lost or spare > 0):
                spare -= 1
                _close(self._segments.pop(key))

    def close(self) -> None:
        """Close all."""
        while self._segments:
            _close(self._segments.popitem()[1])


def _owner(replicas: int) -> SegmentOwner | None:
    from pipedist.collectives.segment import SegmentOwner, SegmentUnavailable  # only gangs need it

    try:
        return SegmentOwner(replicas)
    except SegmentUnavailable:  # the members talk through this process: the same bits, only slower
        return None


def _close(segment: Segment) -> None:
    if segment.owner is not None:
        segment.owner.close()
