"""States: values that change from version to version, and travel to a worker once per version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipedist.coordinator.worker_pool import Fleet
from pipedist.coordinator.worker_registry import VERSIONS_KEPT
from pipedist.core.types import Tree
from pipedist.errors import LocalProtocolError
from pipedist.protocol import messages as msg
from pipedist.protocol.codec import Frame, encode


class States:
    """The latest versions of every space, and which worker holds which.

    What a worker holds is noted with its `Peer`, so that it is forgotten when the worker is lost.

    Args:
        fleet: speaks with workers.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._last_space = 0
        self._spaces: dict[int, dict[int, list[Frame]]] = {}
        """The encoded versions of each space, the oldest first."""

    def open_space(self) -> int:
        """Return the number of a new state, which has no version yet."""
        self._last_space += 1
        self._spaces[self._last_space] = {}
        return self._last_space

    def put(self, space: int, version: int, tree: Tree) -> None:
        """Keep a version; the one before the last is forgotten.

        Args:
            tree: its arrays must not change any more.

        Raises:
            UnsendableError: the tree can't be sent; the text names the place.
            LocalProtocolError: the space is not open, or has a version that is not lower.
        """
        versions = self._spaces.get(space)
        if versions is None or any(version <= earlier for earlier in versions):
            kept = "is not open" if versions is None else f"has the versions {list(versions)}"
            raise LocalProtocolError(f"version {version} of state {space}, which {kept}")
        versions[version] = encode(tree)
        if len(versions) > VERSIONS_KEPT:
            del versions[next(iter(versions))]

    def drop(self, space: int) -> None:
        """Forget a state, here and in the workers; one that is not open is no fault."""
        if self._spaces.pop(space, None) is None:
            return
        for peer in self._fleet.peers:
            if peer.held.pop(space, None) is not None:
                self._fleet.send(peer.worker, msg.DropState(space))

    def send(self, worker: str, states: Mapping[str, Sequence[int]]) -> None:
        """Send a worker each version that a lease of it will read, and that it does not hold.

        Args:
            states: name -> [space, version].

        Raises:
            LocalProtocolError: a version is not kept here.
        """
        for name, (space, version) in states.items():
            frames = self._spaces.get(space, {}).get(version)
            if frames is None:
                raise LocalProtocolError(
                    f"state {name!r} is read in version {version} of space {space}, which is not kept: "
                    f"only {list(self._spaces.get(space, {}))} are"
                )
            peer = self._fleet.of(worker)
            if peer is not None and version not in peer.held.get(space, ()):
                peer.hold(space, version)
                self._fleet.send(worker, msg.StateVersion(space, version), frames)
