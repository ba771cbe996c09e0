"""The values of states that this worker holds: they travel once a version, not once a call.

A lease names the version of each state that it reads. A value is decoded when the first lease reads
it, is never changed, and stands wherever a stage's arguments have a `StateValue`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipedist.core import trees
from pipedist.core.types import Tree
from pipedist.errors import RemoteProtocolError
from pipedist.protocol.program import StateValue
from pipedist.worker.binding import load_tree

VERSIONS_MAX = 2
"""The highest versions of a state are kept: what executes may read one, what waits behind it the next. An
older one that comes for the sake of a lease that is repeated is kept besides, until another one comes."""

States = Mapping[str, Sequence[int]]
"""Of a lease: name -> [space, version]."""


class StateStore:
    """Keeps the latest values of each state."""

    def __init__(self) -> None:
        self._frames: dict[int, dict[int, Sequence[memoryview]]] = {}
        """Space -> version -> a value that nobody has read yet."""
        self._values: dict[int, dict[int, Tree]] = {}
        """Space -> version -> a decoded value."""

    def receive(self, space: int, version: int, frames: Sequence[memoryview]) -> None:
        """Keep a value as it came."""
        self._make_room(space, version)
        self._frames.setdefault(space, {})[version] = frames

    def keep(self, space: int, version: int, value: Tree) -> None:
        """Keep a value that was made here; its arrays are read-only, and nobody else changes it."""
        self._make_room(space, version)
        self._values.setdefault(space, {})[version] = value

    def forget(self, space: int) -> None:
        """Let go of every version of a state."""
        self._frames.pop(space, None)
        self._values.pop(space, None)

    def values(self, states: States) -> dict[str, Tree]:
        """Return the values that a lease reads, by name.

        Raises:
            RemoteProtocolError: the scheduler has not sent one of them, or what it sent is malformed.
            Unloadable: one is of a class that can't be had here.
        """
        return {name: self._value(name, space, version) for name, (space, version) in states.items()}

    def _value(self, name: str, space: int, version: int) -> Tree:
        frames = self._frames.get(space, {}).pop(version, None)
        if frames is not None:
            try:
                self._values.setdefault(space, {})[version] = load_tree(
                    frames, f"version {version} of {name!r}"
                )
            except BaseException:
                self._frames[space][version] = frames  # the next lease that reads it is told the same
                raise
        known = self._values.get(space, {})
        if version not in known:
            raise RemoteProtocolError(
                f"a lease reads version {version} of {name!r} (state {space}), which is not here"
            )
        return known[version]

    def _make_room(self, space: int, version: int) -> None:
        frames, values = self._frames.get(space, {}), self._values.get(space, {})
        kept = {version, *sorted({version, *frames, *values})[-VERSIONS_MAX:]}
        for held in (frames, values):
            for other in [v for v in held if v == version or v not in kept]:
                del held[other]


def names_in(tree: Tree) -> frozenset[str]:
    """Return the names of the states that stand anywhere in a stage's arguments."""
    names: set[str] = set()
    trees.replace(tree, StateValue, lambda state: names.add(state.name))
    return frozenset(names)


def filled(tree: Tree, values: Mapping[str, Tree]) -> Tree:
    """Return a stage's arguments with its value in place of each state.

    Args:
        values: by name, of every state that stands in the tree.

    Raises:
        RemoteProtocolError: the lease does not name a state that stands there.
    """

    def value_of(state: StateValue) -> Tree:
        if state.name not in values:
            raise RemoteProtocolError(
                f"the arguments read state {state.name!r}, which the lease does not name"
            )
        return values[state.name]

    return trees.replace(tree, StateValue, value_of)
