"""Keeps versions of a training's states, and finds the one a call read.

To resume, a run needs only the latest version of each state. To execute an earlier call again, `pipedist replay`
needs the version that the call read, which follows from the call's place in the training: the number of steps or
epochs that were applied before it. Small versions are therefore kept in a log of the journal. The log has two
parts, and the older one is dropped when the newer one is full, so its size does not grow with the run. The first
version needs no journal, because `init` makes it again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from pipedist.core.record_format import frame_bytes
from pipedist.core.types import Tree
from pipedist.errors import UsageError
from pipedist.plan import PassPlan, Plan
from pipedist.protocol.codec import encode
from pipedist.runs.call_keys import CallKey
from pipedist.runs.pass_journal import PASS_STATE

if TYPE_CHECKING:
    from pipedist.runs.pass_journal import PassJournal

LOG: Final = "versions."  # prefix of the names of the logs; a number follows

VERSION_BYTES_MAX: Final = 2**16
"""Larger values are not kept, because writing them with each step would cost too much."""

PART_BYTES_MAX: Final = 2**25  # size at which a part of the log is full; there are at most two parts


class StateHistory:
    """Logs the versions of states, in the part of the pass that feeds them."""

    def __init__(self, durable: PassJournal) -> None:
        self._durable = durable
        self._parts = _numbers(durable) or [0]
        for number in self._parts:
            self._log = durable.log(f"{LOG}{number}")
        self._known: dict[str, int] = {}

    def add(self, latest: Mapping[str, tuple[int, Tree]], *, steps: int, epochs: int) -> None:
        """Log new versions, in which `steps` and `epochs` were applied."""
        for name, (version, value) in latest.items():
            if self._known.get(name, 0) == version:
                continue
            self._known[name] = version
            frames = encode(value)
            fits = frame_bytes(frames) <= VERSION_BYTES_MAX
            entry = self._log.put(frames if fits else encode(None), [name, version, steps, epochs, fits])
            if entry.at + sum(entry.sizes) > PART_BYTES_MAX:
                self._parts.append(self._parts[-1] + 1)
                self._log = self._durable.log(f"{LOG}{self._parts[-1]}")

    def dropped(self) -> list[str]:
        """Return the open logs that are no longer needed."""
        return [name for number in self._parts[:-2] if self._durable.is_open(name := f"{LOG}{number}")]


def _numbers(durable: PassJournal) -> list[int]:
    return sorted(int(name.removeprefix(LOG)) for name in durable.logs(LOG))


class Applied(Struct, frozen=True):
    """The progress of a training's updates at some moment.

    Args:
        steps, epochs: number of steps and epochs applied; None: unknown.
        run: whether the updates of the whole run are applied.
    """

    steps: int | None
    epochs: int
    run: bool

    def count(self, per: str) -> int | None:
        return self.steps if per == "step" else self.epochs if per == "epoch" else int(self.run)


def before_call(plan: Plan, pass_: PassPlan, step: int, epoch: int, now: Applied) -> Applied:
    """Return the updates that were applied when a call was issued."""
    if not pass_.follows:
        return Applied(step, epoch, False)
    is_last = now.run and epoch + 1 == now.epochs
    division = plan.division(pass_.follows)
    steps = None if division is None else (epoch + 1) * division.steps_per_epoch
    return Applied(now.steps if is_last else steps, epoch + 1, is_last)


def in_journal(training: PassJournal) -> Applied:
    found = training.part(PASS_STATE)
    if found is None:
        return Applied(0, 0, False)
    position = found["training"]
    complete = training.before.complete
    epochs = position["epochs"] if complete or position["over"] else position["admitted"][1]
    return Applied(training.before.steps, epochs, complete)


def states_of(
    plan: Plan, pass_: PassPlan, key: CallKey, epoch: int, training: PassJournal
) -> dict[str, tuple[int, Tree] | None]:
    """Return (version, value) of each state that a call read, None: first."""
    now = in_journal(training)
    then = before_call(plan, pass_, key.step, epoch, now)
    durable = training.states()
    found: dict[str, tuple[int, Tree] | None] = {}
    for name in plan.states_read(pass_):
        per = plan.states[name].per
        wanted, kept = then.count(per), now.count(per)
        if wanted == 0:
            found[name] = None
        elif wanted == kept and name in durable:
            found[name] = list(durable[name].items())[-1]
        else:
            found[name] = _earlier(key, name, per, wanted, kept, training, durable.get(name, {}))
    return found


def _earlier(
    key: CallKey,
    name: str,
    per: str,
    wanted: int | None,
    kept: int | None,
    training: PassJournal,
    durable: Mapping[int, Tree],
) -> tuple[int, Tree] | None:
    """Return an earlier version of a state, None: the first, from `init`.

    `durable` are the versions in snapshots.
    """
    versions = {*durable}
    numbers = _numbers(training) if wanted is not None else []
    known = numbers[:1] == [0]
    found: tuple[int, Tree] | None = None
    for number in numbers:
        for entry, tree in training.entries(f"{LOG}{number}"):
            state, version, steps, epochs, fits = entry.meta
            if state != name:
                continue
            if fits:
                versions.add(version)
            if wanted is not None and (steps if per == "step" else epochs) <= wanted:
                known = fits or version in durable
                found = (version, tree if fits else durable.get(version)) if version else None
    if known and wanted is not None and kept is not None and wanted < kept:
        return found
    read = "an earlier or later version" if wanted is None else f"version {wanted}"
    often = f"one a{'n' * (per == 'epoch')} {per}"
    raise UsageError(
        f"call {key} read {read} of state {name} ({often}), which is not kept: the journal has "
        f"{_ranges(sorted(versions))}. It keeps the versions of the last snapshots (`checkpoint`), and of the "
        f"others the last {PART_BYTES_MAX // 2**20} MiB, without versions above {VERSION_BYTES_MAX // 2**10} KiB. "
        "To replay this call, run the spec again with another --output and let the function raise at this step: the "
        "version is then the latest one"
    )


def _ranges(versions: Sequence[int]) -> str:
    """Return versions as ranges, for an error message."""
    shown = []
    for _, group in groupby(enumerate(versions), lambda each: each[1] - each[0]):
        span = [version for _, version in group]
        shown.append(str(span[0]) if len(span) == 1 else f"{span[0]} to {span[-1]}")
    few = shown if len(shown) <= 10 else [*shown[:5], "...", *shown[-4:]]
    noun = "version" if len(versions) == 1 else "versions"
    return f"{noun} {', '.join(few)}" if few else "none"
