"""The states that a call read, as far as the journal of its run still has them.

A journal has the latest version of each state, and the small ones before it (`versions`). Which one a call
read follows from its place in the training alone: so many steps or epochs were applied before it. The first
version needs no journal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from pipedist.core.types import Tree
from pipedist.errors import UsageError
from pipedist.plan import PassPlan, Plan
from pipedist.runs.call_keys import CallKey
from pipedist.runs.pass_inputs import READING, STATE
from pipedist.runs.versions import PART_BYTES_MAX, VERSION_BYTES_MAX, Kept, find

if TYPE_CHECKING:
    from pipedist.runs.pass_journal import PassJournal


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
    found = training.part(READING)
    if found is None:
        return Applied(0, 0, False)
    lane = found["lane"]
    ended = training.is_complete or lane["over"]
    return Applied(training.steps, lane["epochs"] if ended else lane["let"][1], training.is_complete)


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
    among = Kept(False) if wanted is None else find(training, name, per, wanted)
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
