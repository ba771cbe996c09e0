"""Outputs of the scheduler. The driver executes each one, in order, and decides nothing."""

from __future__ import annotations

from typing import NamedTuple

from msgspec import Struct


class StartWorker(Struct, frozen=True):
    """Start a worker process."""

    worker: str
    incarnation: int


class EvictWorker(Struct, frozen=True):
    """End this incarnation: it is lost, stale or broke the protocol."""

    worker: str
    incarnation: int
    reason: str


class SendBind(Struct, frozen=True):
    """Send the pass's program to a worker, before its first Assign of that pass."""

    worker: str
    pass_id: int


class SendUnbind(Struct, frozen=True):
    """Send a worker the end of a pass."""

    worker: str
    pass_id: int


class SendAssign(Struct, frozen=True):
    """Send calls [lo, hi) with their shards.

    Args:
        elements: of a single call, the elements to send: ranges [a, b) of their positions in its shard;
            empty: all of them.
        twin: the lease of a slow worker with the same calls; 0: there is none.
    """

    worker: str
    lease: int
    pass_id: int
    lo: int
    hi: int
    attempt: int
    elements: tuple[tuple[int, int], ...] = ()
    twin: int = 0


class GangAssignment(NamedTuple):
    """The calls [lo, hi) of one member of a gang."""

    worker: str
    lease: int
    lo: int
    hi: int


class SendGang(Struct, frozen=True):
    """Send each member of a gang its calls with their shards.

    Args:
        serial: number of this attempt; grows while the scheduler runs.
        parts: one per member, in order; together the calls of one step.
    """

    serial: int
    pass_id: int
    attempt: int
    parts: tuple[GangAssignment, ...]


class StashResults(Struct, frozen=True):
    """Hold back results of a gang until its GangEnded."""

    serial: int
    lo: int
    hi: int
    worker: str


class GangEnded(Struct, frozen=True):
    """End a gang.

    Args:
        counts: accept the stashed results; otherwise drop them.
        aborted: calls of it may still run, and wait for contributions that will not come.
    """

    serial: int
    counts: bool
    aborted: bool


class SendRecall(Struct, frozen=True):
    """Request calls [lo, hi), which a worker has cached for an earlier scheduler, under a lease."""

    worker: str
    lease: int
    pass_id: int
    lo: int
    hi: int


class SendCommitted(Struct, frozen=True):
    """Report to a worker that calls of a pass below `before` are durable."""

    worker: str
    pass_id: int
    before: int


class SendCancel(Struct, frozen=True):
    """Cancel the calls of a worker's lease that have not begun."""

    worker: str
    lease: int


class AcceptResults(Struct, frozen=True):
    """Accept the results of calls [lo, hi), and release their inputs."""

    pass_id: int
    lo: int
    hi: int
    worker: str


class SizeCall(Struct, frozen=True):
    """Report how many elements of a failed call can be tried apart (CallSized), for its bisection."""

    pass_id: int
    call: int


class Cause(Struct, frozen=True):
    """Why a call or one of its elements failed.

    Args:
        stage: in which stage; "" if unknown.
        text: the exception, or how the worker died, for people.
    """

    stage: str
    text: str


UNKNOWN = Cause("", "")


class CallsQuarantined(Struct, frozen=True):
    """Quarantine elements of calls [lo, hi), one call's or a gang's.

    Args:
        culprits: position in the call's shard and cause of each element that fails alone.
        whole: why all elements of the calls are quarantined, though none fails alone; None: the
            culprits are.
        remains: the result of the other elements counts, and follows; otherwise the calls have none.
    """

    pass_id: int
    lo: int
    hi: int
    culprits: tuple[tuple[int, Cause], ...]
    whole: Cause | None = None
    remains: bool = False


class DropResults(Struct, frozen=True):
    """Drop a result whose lease is not held any more."""

    worker: str
    lease: int


class RequestSteps(Struct, frozen=True):
    """Request `count` more steps, beyond all that were requested before."""

    pass_id: int
    count: int


class StepsReady(Struct, frozen=True):
    """Publish steps [first, last): all of their calls are done."""

    pass_id: int
    first: int
    last: int


class Failure(Struct, frozen=True):
    """Why a call failed for good.

    Args:
        call: its number in the pass.
        attempts: number of attempts.
        worker: of the last one.
        cause: how the worker died; None if the call raised.
    """

    call: int
    attempts: int
    worker: str
    cause: str | None = None


class StepFailed(Struct, frozen=True):
    """Report a complete step with calls that failed for good; lowest call first."""

    pass_id: int
    step: int
    failures: tuple[Failure, ...]


class PassComplete(Struct, frozen=True):
    """Report that all steps of the pass were published."""

    pass_id: int


class PassDrained(Struct, frozen=True):
    """Report that nothing of a draining pass is running any more."""

    pass_id: int


class ClusterFailed(Struct, frozen=True):
    """Fail the cluster: workers die faster than they join."""

    reason: str


Command = (
    StartWorker
    | EvictWorker
    | SendBind
    | SendUnbind
    | SendAssign
    | SendGang
    | SendRecall
    | SendCommitted
    | SendCancel
    | AcceptResults
    | StashResults
    | GangEnded
    | SizeCall
    | CallsQuarantined
    | DropResults
    | RequestSteps
    | StepsReady
    | StepFailed
    | PassComplete
    | PassDrained
    | ClusterFailed
)
