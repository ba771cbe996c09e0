"""What the scheduler wants done. The driver carries out each one, in order, and decides nothing."""

from __future__ import annotations

from dataclasses import dataclass
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
    """Tell a worker to drop a pass."""

    worker: str
    pass_id: int


class SendAssign(Struct, frozen=True):
    """Send calls [lo, hi) with their shards.

    Args:
        elements: of a single call, which of its elements are sent: ranges [a, b) of their positions in
            its shard; empty: all of them.
        twin: the lease of another worker that has the same calls, and takes too long; 0: there is none.
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
    """What one member of a gang is sent: calls [lo, hi)."""

    worker: str
    lease: int
    lo: int
    hi: int


class SendGang(Struct, frozen=True):
    """Send each member of a gang its calls with their shards.

    Args:
        serial: number of this attempt; grows over the scheduler's life.
        parts: one a member, in order; together the calls of one step.
    """

    serial: int
    pass_id: int
    attempt: int
    parts: tuple[GangAssignment, ...]


class StashResults(Struct, frozen=True):
    """Results of a gang came: keep them apart until its GangEnded."""

    serial: int
    lo: int
    hi: int
    worker: str


class GangEnded(Struct, frozen=True):
    """A gang is over.

    Args:
        counts: what was stashed counts; otherwise it is dropped.
        aborted: calls of it may run still: whatever they wait for will not come.
    """

    serial: int
    counts: bool
    aborted: bool


class SendRecall(Struct, frozen=True):
    """Ask a worker to report calls [lo, hi) under a lease; it has finished them for another scheduler."""

    worker: str
    lease: int
    pass_id: int
    lo: int
    hi: int


class SendCommitted(Struct, frozen=True):
    """Tell a worker that calls of a pass below `before` are durable."""

    worker: str
    pass_id: int
    before: int


class SendCancel(Struct, frozen=True):
    """Tell a worker to drop what it has not begun of a lease."""

    worker: str
    lease: int


class AcceptResults(Struct, frozen=True):
    """The results of calls [lo, hi) count: keep them, let their inputs go."""

    pass_id: int
    lo: int
    hi: int
    worker: str


class SizeCall(Struct, frozen=True):
    """Say how many elements of a call can be tried apart (CallSized): it failed, and is to be bisected."""

    pass_id: int
    call: int


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a call failed, or one of its elements did.

    Args:
        stage: in which stage; "" where nobody knows.
        text: what was raised, or how the worker died, for people.
    """

    stage: str
    text: str


UNKNOWN = Cause("", "")


class CallsQuarantined(Struct, frozen=True):
    """Elements of calls [lo, hi), one or a gang's, are set aside.

    Args:
        guilty: position in the call's shard and cause of each element that fails alone.
        whole: why all elements of the calls are set aside, though none is found guilty; None: the guilty.
        remains: the result of the other elements counts, and follows; otherwise the calls have none.
    """

    pass_id: int
    lo: int
    hi: int
    guilty: tuple[tuple[int, Cause], ...]
    whole: Cause | None = None
    remains: bool = False


class DropResults(Struct, frozen=True):
    """A result does not count: its lease is not held any more."""

    worker: str
    lease: int


class RequestSteps(Struct, frozen=True):
    """Offer `count` more steps, beyond all that were requested before."""

    pass_id: int
    count: int


class StepsReady(Struct, frozen=True):
    """Every call of steps [first, last) is done: they are visible."""

    pass_id: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a call failed for good.

    Args:
        call: its number in the pass.
        attempts: how many times it was tried.
        worker: where it ran last.
        cause: how the worker died; None where the call raised.
    """

    call: int
    attempts: int
    worker: str
    cause: str | None = None


class StepFailed(Struct, frozen=True):
    """A step is complete, but calls of it failed for good; lowest call first."""

    pass_id: int
    step: int
    failures: tuple[Failure, ...]


class PassComplete(Struct, frozen=True):
    """All steps of the pass were visible."""

    pass_id: int


class PassDrained(Struct, frozen=True):
    """Nothing of a held pass is running any more."""

    pass_id: int


class ClusterFailed(Struct, frozen=True):
    """Workers die faster than they join."""

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
