"""Which socket identity speaks for which incarnation of which worker."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

VERSIONS_KEPT = 2
"""Of each state, here and in a worker: a step that is executed again may read the one before."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is behind a socket identity.

    Args:
        local: it shares this host's files.
        sees: passes whose data files it sees too, as it has said.
        codes: digests of the code folders that it has copies of.
        told: code folders that it was told of.
        held: by space, the versions of the state that it holds.
    """

    identity: bytes
    worker: str
    incarnation: int
    local: bool
    held: dict[int, tuple[int, ...]] = field(default_factory=dict, compare=False)
    sees: set[int] = field(default_factory=set, compare=False)
    codes: set[str] = field(default_factory=set, compare=False)
    told: set[str] = field(default_factory=set, compare=False)

    def hold(self, space: int, version: int) -> None:
        """Enter a version of a state that it holds; it keeps the highest ones."""
        self.held[space] = tuple(sorted({*self.held.get(space, ()), version})[-VERSIONS_KEPT:])


class Roster:
    """The peers that have joined; one incarnation of a worker at a time."""

    def __init__(self) -> None:
        self._by_identity: dict[bytes, Peer] = {}
        self._by_worker: dict[str, Peer] = {}

    def __len__(self) -> int:
        return len(self._by_identity)

    def __iter__(self) -> Iterator[Peer]:
        return iter(list(self._by_identity.values()))

    def add(self, peer: Peer) -> None:
        """Enter a peer; neither its identity nor its worker is in."""
        self._by_identity[peer.identity] = peer
        self._by_worker[peer.worker] = peer

    def behind(self, identity: bytes) -> Peer | None:
        """Return who speaks through a socket identity."""
        return self._by_identity.get(identity)

    def of(self, worker: str, incarnation: int | None = None) -> Peer | None:
        """Return the peer of a worker, of this very incarnation if one is given."""
        peer = self._by_worker.get(worker)
        if peer is None or (incarnation is not None and peer.incarnation != incarnation):
            return None
        return peer

    def remove(self, worker: str, incarnation: int) -> Peer | None:
        """Strike out this incarnation of a worker, if it is in."""
        peer = self.of(worker, incarnation)
        if peer is not None:
            del self._by_identity[peer.identity]
            del self._by_worker[worker]
        return peer
