"""The versions of a training's states, one after the other, for who looks at a call of it again.

To go on, a run needs the latest version alone. Which one an earlier call read is known from its place, so
whoever executes that call again (`pipedist replay`) needs that one. They are kept in a log of the journal,
as far as they are small, and in two parts, of which the older is dropped when the newer is full: so there
are always the last ones, and what they take does not grow with the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from pipedist.core.types import Tree
from pipedist.errors import UsageError
from pipedist.plan import PassPlan, Plan
from pipedist.protocol.codec import encode
from pipedist.runs.pass_journal import PASS_STATE, STATE
from pipedist.runs.programs import CallKey

if TYPE_CHECKING:
    from pipedist.runs.pass_journal import PassJournal

LOG: Final = "versions."
"""Logs with versions are called so, and by a number."""

VERSION_BYTES_MAX: Final = 2**16
"""A larger value is not kept: writing it with each step would cost too much."""

PART_BYTES_MAX: Final = 2**25
"""A part of the log that is longer is full; there are two at most."""


class StateHistory:
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


class FoundVersion(Struct, frozen=True):
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


def find(durable: PassJournal, name: str, per: str, wanted: int) -> FoundVersion:
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
    return FoundVersion(known and fits, version, value, tuple(dict.fromkeys(versions)))


def _numbers(durable: PassJournal) -> list[int]:
    return sorted(int(name.removeprefix(LOG)) for name in durable.logs(LOG))


class Applied(Struct, frozen=True):
    """How much of a training was applied at some moment.

    Args:
        steps: so many; None: nobody knows.
        epochs: so many.
        run: all of it.
    """

    steps: int | None
    epochs: int
    run: bool

    def count(self, per: str) -> int | None:
        """Return how often a state was changed until then that changes once a run, epoch or step."""
        return self.steps if per == "step" else self.epochs if per == "epoch" else int(self.run)


def before_call(plan: Plan, pass_: PassPlan, step: int, epoch: int, now: Applied) -> Applied:
    """Return what was applied when a call was issued.

    Args:
        pass_: of the call; it feeds updates, or is evaluated after each epoch.
        epoch: of its step.
        now: what the journal has.
    """
    if not pass_.follows:
        return Applied(step, epoch, False)
    is_last = now.run and epoch + 1 == now.epochs
    division = plan.division(pass_.follows)
    steps = None if division is None else (epoch + 1) * division.steps_per_epoch
    return Applied(now.steps if is_last else steps, epoch + 1, is_last)


def in_journal(training: PassJournal) -> Applied:
    """Return what is applied in the states that are durable."""
    found = training.part(PASS_STATE)
    if found is None:
        return Applied(0, 0, False)
    position = found["training"]
    ended = training.is_complete or position["over"]
    return Applied(training.steps, position["epochs"] if ended else position["let"][1], training.is_complete)


def states_of(
    plan: Plan, pass_: PassPlan, key: CallKey, epoch: int, training: PassJournal
) -> dict[str, tuple[int, Tree] | None]:
    """Return version and value of each state that a call read; None: its first one, which is made anew.

    Args:
        pass_: of the call.
        epoch: of its step.
        training: what is durable of the pass that feeds the updates.

    Raises:
        UsageError: the journal has another version.
        JournalError: it is damaged.
    """
    now = in_journal(training)
    then = before_call(plan, pass_, key.step, epoch, now)
    durable = training.parts(STATE)
    found: dict[str, tuple[int, Tree] | None] = {}
    for name in plan.states_read(pass_):
        per = plan.states[name].per
        wanted, kept = then.count(per), now.count(per)
        if wanted == 0:
            found[name] = None
        elif wanted == kept and name in durable:
            value, version = durable[name]
            found[name] = (version, value)
        else:
            found[name] = _earlier(key, name, per, wanted, kept, training)
    return found


def _earlier(
    key: CallKey, name: str, per: str, wanted: int | None, kept: int | None, training: PassJournal
) -> tuple[int, Tree] | None:
    """Return an earlier version of a state, and its value; None: its first one."""
    latest = training.parts(STATE).get(name)
    among = FoundVersion(False) if wanted is None else find(training, name, per, wanted)
    if among.is_there and wanted is not None and kept is not None and wanted < kept:
        return (among.version, among.value) if among.version else None
    versions = sorted({*among.versions, *(() if latest is None else (latest[1],))})
    read = "an earlier or later version" if wanted is None else f"version {wanted}"
    often = f"one a{'n' * (per == 'epoch')} {per}"
    raise UsageError(
        f"call {key} read {read} of state {name} ({often}), which is not kept: the journal has "
        f"{_shown(versions)}. It keeps the latest one, and of those before it the last "
        f"{PART_BYTES_MAX // 2**20} MiB, without any above {VERSION_BYTES_MAX // 2**10} KiB; of a run that "
        "was killed, as far as it was committed. A run has the version that a call read as its latest if it "
        "ends there: run it again with another --output, and have the function raise at this step"
    )


def _shown(versions: Sequence[int]) -> str:
    """Return versions as ranges, for people."""
    spans: list[list[int]] = []
    for version in versions:
        if spans and spans[-1][1] == version - 1:
            spans[-1][1] = version
        else:
            spans.append([version, version])
    shown = [str(lo) if lo == hi else f"{lo} to {hi}" for lo, hi in spans]
    few = shown if len(shown) <= 10 else [*shown[:5], "...", *shown[-4:]]
    noun = "version" if len(versions) == 1 else "versions"
    return f"{noun} {', '.join(few)}" if few else "none"
