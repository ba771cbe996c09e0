"""Reasons why a run waits, in the terms of its spec.

The scheduler explains its waits with numbers of passes, leases and calls; this module names them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from pipedist.coordinator.pass_handle import PassHandle
from pipedist.coordinator.worker_registry import Peer
from pipedist.scheduler.diagnostics import Explanation, Reason, Wait
from pipedist.worker.progress import Running


@dataclass(frozen=True, slots=True)
class Waiting:
    """Calls that wait."""

    pass_id: int
    stages: str  # names of the stages that the calls execute, "a, b"
    stage: str  # the one whose function runs; "" if unknown
    step: int  # that of the first call, as is `replica`
    replica: int
    calls: int  # how many calls wait; 0: the pass as a whole waits, before that step
    attempt: int  # how often they were tried before
    worker: str  # the worker that they are assigned to; "" if none
    for_s: float | None  # how long they have waited, seconds; None if unknown
    reason: str  # of `pipedist.scheduler.diagnostics.Reason`, or a more specific one of `pipedist.runs`
    text: str
    pid: int = 0  # the process id of that worker on its host; 0: unknown, or there is no worker
    host: str = ""  # the name of that host, if it is another one than this

    def refined(self, reason: str, text: str) -> Waiting:
        return replace(self, reason=reason, text=text)


@dataclass(frozen=True, slots=True)
class Stall:
    """All waits of a run: as the scheduler explains them, and with names."""

    scheduler: Explanation
    waits: tuple[Waiting, ...]


Seen = Callable[[str], tuple[int, ...] | None]  # the lease, call and stage (from 1) that a worker executes
Joined = Callable[[str], Peer | None]  # the worker of a name, if it has joined


def name_all(
    explanation: Explanation, handles: Mapping[int, PassHandle], seen: Seen, joined: Joined
) -> Stall:
    waits = [_named(x, handles[x.pass_id], seen, joined) for x in explanation.waits if x.pass_id in handles]
    return Stall(explanation, tuple(waits))


def _named(wait: Wait, handle: PassHandle, seen: Seen, joined: Joined) -> Waiting:
    step, replica = divmod(wait.lo, handle.settings.replicas)
    calls, text, stage = wait.hi - wait.lo, wait.text, ""
    if wait.reason is Reason.DATA and handle.has_feed:
        text = f"the data of step {step} is being read"
    if wait.reason is Reason.RUNNING:
        stage, where = _stage(wait, handle, seen(wait.worker))
        text = "; ".join(filter(None, (where, text)))
    attempt, worker, for_s = wait.attempt, wait.worker, wait.for_s
    reason = wait.reason.value
    peer = joined(worker) if worker else None
    pid, host = (0, "") if peer is None else (peer.pid, "" if peer.local else peer.host)
    return Waiting(
        wait.pass_id,
        handle.name,
        stage,
        step,
        replica,
        calls,
        attempt,
        worker,
        for_s,
        reason,
        text,
        pid,
        host,
    )


def _stage(wait: Wait, handle: PassHandle, seen: tuple[int, ...] | None) -> tuple[str, str]:
    """Return the stage that a call executes, and its place, for people; `seen`: as its worker has noted."""
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
    return stage, f"in stage {stage} of step {step}, replica {replica}: earlier results are not sent yet"
