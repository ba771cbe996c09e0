"""What the scheduler says of a run that does not go on, in the words of its spec: stages, steps, replicas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pipedist.coordinator.handle import PassHandle
from pipedist.scheduler.why import Explanation, Reason, Wait


@dataclass(frozen=True, slots=True)
class Waiting:
    """Calls that wait.

    Args:
        pass_id: of the coordinator.
        stages: that the calls execute, "a, b".
        step, replica: of the first of them.
        calls: how many they are; 0: a pass as a whole waits, before that step.
        attempt: how often they were tried before.
        worker: that has them; "" where none has.
        for_s: for how long, as far as that is known, seconds.
        reason: see `pipedist.scheduler.why.Reason`; readings know some more.
        text: for what, for people.
    """

    pass_id: int
    stages: str
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


def name_all(explanation: Explanation, handles: Mapping[int, PassHandle]) -> Stall:
    """Name what the scheduler has numbered."""
    waits = [_named(wait, handles[wait.pass_id]) for wait in explanation.waits if wait.pass_id in handles]
    return Stall(explanation, tuple(waits))


def _named(wait: Wait, handle: PassHandle) -> Waiting:
    step, replica = divmod(wait.lo, handle.settings.replicas)
    calls, text = wait.hi - wait.lo, wait.text
    if wait.reason is Reason.DATA and handle.has_feed:
        text = f"the data of step {step} is being read"
    attempt, worker, for_s = wait.attempt, wait.worker, wait.for_s
    reason = wait.reason.value
    return Waiting(wait.pass_id, handle.name, step, replica, calls, attempt, worker, for_s, reason, text)
