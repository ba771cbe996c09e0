"""The states that a call read, as far as the journal of its run still has them.

A journal keeps the latest version of each state. Which version a call read follows from its place in the
training alone: so many steps or epochs were applied before it. The first version needs no journal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipedist.errors import UsageError
from pipedist.pipeline.call_keys import CallKey
from pipedist.pipeline.opening import READING, STATE
from pipedist.plan import PassPlan, Plan
from pipedist.program import Tree
from pipedist.records import record

if TYPE_CHECKING:
    from pipedist.pipeline.durable import PassJournal


@record
class Applied:
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
            raise UsageError(_not_kept(key, name, per, wanted, kept))
    return found


def _not_kept(key: CallKey, name: str, per: str, wanted: int | None, kept: int | None) -> str:
    read = "an earlier or later version" if wanted is None else f"version {wanted}"
    return (
        f"call {key} read {read} of state {name} (one a{'n' * (per == 'epoch')} {per}), which is not kept: "
        f"the journal has the latest alone, version {kept}. A run keeps the version that a call read if it "
        "ends there: run it again with another --output, and have the function raise at this step"
    )
