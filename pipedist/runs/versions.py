"""The versions of a training's states, one after the other, for who looks at a call of it again.

To go on, a run needs the latest version alone. Which one an earlier call read is known from its place, so
whoever executes that call again (`pipedist replay`) needs that one. They are kept in a log of the journal,
as far as they are small, and in two parts, of which the older is dropped when the newer is full: so there
are always the last ones, and what they take does not grow with the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from pipedist.core.types import Tree
from pipedist.protocol.codec import encode

if TYPE_CHECKING:
    from pipedist.runs.pass_journal import PassJournal

LOG: Final = "versions."
"""Logs with versions are called so, and by a number."""

VERSION_BYTES_MAX: Final = 2**16
"""A larger value is not kept: writing it with each step would cost too much."""

PART_BYTES_MAX: Final = 2**25
"""A part of the log that is longer is full; there are two at most."""


class Versions:
    """Keeps the versions of states as they come.

    Args:
        durable: of the pass that feeds the updates.
    """

    def __init__(self, durable: PassJournal) -> None:
        self._durable = durable
        self._parts = _numbers(durable) or [0]
        for number in self._parts:
            self._log = durable.log(f"{LOG}{number}")
        self._known: dict[str, int] = {}

    def add(self, latest: Mapping[str, tuple[int, Tree]], *, steps: int, epochs: int) -> None:
        """Keep those that are new.

        Args:
            latest: version and value of each state.
            steps, epochs: that are applied in them.

        Raises:
            JournalError: the log can't be written.
        """
        for name, (version, value) in latest.items():
            if self._known.get(name, 0) == version:
                continue
            self._known[name] = version
            frames = encode(value)
            fits = sum(memoryview(frame).nbytes for frame in frames) <= VERSION_BYTES_MAX
            entry = self._log.put(frames if fits else encode(None), [name, version, steps, epochs, fits])
            if entry.at + sum(entry.sizes) > PART_BYTES_MAX:
                self._parts.append(self._parts[-1] + 1)
                self._log = self._durable.log(f"{LOG}{self._parts[-1]}")

    def dropped(self) -> list[str]:
        """Return the logs that nobody needs any more, and that are still there."""
        return [name for number in self._parts[:-2] if self._durable.is_open(name := f"{LOG}{number}")]


class Kept(Struct, frozen=True):
    """What there is of the versions of one state.

    Args:
        is_there: the one that was wanted.
        version, value: of it; version 0 has no value here: it is made anew.
        versions: all that there are.
    """

    is_there: bool
    version: int = 0
    value: Tree = None
    versions: tuple[int, ...] = ()


def find(durable: PassJournal, name: str, per: str, wanted: int) -> Kept:
    """Return the version of a state that a call read.

    Args:
        durable: of the pass that feeds the updates.
        per: how often the state changes: step, epoch.
        wanted: so many steps or epochs were applied, of those that are durable.

    Raises:
        JournalError: the log is damaged.
    """
    numbers = _numbers(durable)
    known = numbers[:1] == [0]
    version, value, fits = 0, None, True
    versions: list[int] = []
    for number in numbers:
        for entry, tree in durable.entries(f"{LOG}{number}"):
            whose, its_version, steps, epochs, its_fits = entry.meta
            if whose != name:
                continue
            if its_fits:
                versions.append(its_version)
            if (steps if per == "step" else epochs) <= wanted:
                known, version, value, fits = True, its_version, tree, its_fits
    return Kept(known and fits, version, value, tuple(dict.fromkeys(versions)))


def _numbers(durable: PassJournal) -> list[int]:
    return sorted(int(name.removeprefix(LOG)) for name in durable.logs(LOG))
