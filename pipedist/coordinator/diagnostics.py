"""What the scheduler says of a run that does not go on, in the words of its spec: stages, steps, replicas."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from pipedist.coordinator.pass_handle import PassHandle
from pipedist.scheduler.diagnostics import Explanation, Reason, Wait
from pipedist.worker.progress import Running


@dataclass(frozen=True, slots=True)
class Waiting:
    """Calls that wait.

    Args:
        pass_id: of the coordinator.
        stages: that the calls execute, "a, b".
        stage: the one whose function runs; "" where nobody knows.
        step, replica: of the first of them.
        calls: how many they are; 0: a pass as a whole waits, before that step.
        attempt: how often they were tried before.
        worker: that has them; "" where none has.
        for_s: for how long, as far as that is known, seconds.
        reason: see `pipedist.scheduler.diagnostics.Reason`; readings know some more.
        text: for what, for people.
    """

    pass_id: int
    stages: str
    stage: str
    step: int
    replica: int
    calls: int
    attempt: int
    worker: str
    for_s: float | None
    reason: str
    text: str

    def refined(self, reason: str, text: str) -> Waiting:
        """Return it with what is known better elsewhere."""
        return replace(self, reason=reason, text=text)


@dataclass(frozen=True, slots=True)
class Stall:
    """What everything waits for.

    Args:
        scheduler: as it says so.
        waits: the same, with names.
    """

    scheduler: Explanation
    waits: tuple[Waiting, ...]


Seen = Callable[[str], tuple[int, ...] | None]
"""Takes a worker; returns lease, call and stage, from 1, that it executes, as far as that is seen."""


def name_all(explanation: Explanation, handles: Mapping[int, PassHandle], seen: Seen) -> Stall:
    """Name what the scheduler has numbered."""
    waits = [_named(x, handles[x.pass_id], seen) for x in explanation.waits if x.pass_id in handles]
    return Stall(explanation, tuple(waits))


def _named(wait: Wait, handle: PassHandle, seen: Seen) -> Waiting:
    step, replica = divmod(wait.lo, handle.settings.replicas)
    calls, text, stage = wait.hi - wait.lo, wait.text, ""
    if wait.reason is Reason.DATA and handle.has_feed:
        text = f"the data of step {step} is being read"
    if wait.reason is Reason.RUNNING:
        stage, where = _stage(wait, handle, seen(wait.worker))
        text = "; ".join(filter(None, (where, text)))
    attempt, worker, for_s = wait.attempt, wait.worker, wait.for_s
    reason = wait.reason.value
    return Waiting(
        wait.pass_id, handle.name, stage, step, replica, calls, attempt, worker, for_s, reason, text
    )


def _stage(wait: Wait, handle: PassHandle, seen: tuple[int, ...] | None) -> tuple[str, str]:
    """Return the stage in which a call is, "" where nobody knows; and where it is, for people.

    Args:
        seen: what its worker executes, as that has noted it.
    """
    stages = handle.policy.stages
    if len(stages) == 1:
        return stages[0], ""
    known = Running(*seen) if seen is not None and seen[0] == wait.lease else None
    stage = "" if known is None else handle.policy.stage_of(known)
    if known is None or not stage:
        return "", "in one of its stages"
    if known.call == wait.lo:
        return stage, f"in stage {stage}"
    step, replica = divmod(known.call, handle.settings.replicas)
    return stage, f"in stage {stage} of step {step}, replica {replica}: what it did before is not sent yet"
