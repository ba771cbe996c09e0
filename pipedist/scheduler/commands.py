"""What the scheduler wants done. The driver carries out each one, in order, and decides nothing."""

from __future__ import annotations

from typing import NamedTuple

from pipedist.records import record


@record
class StartWorker:
    """Start a worker process."""

    worker: str
    incarnation: int


@record
class ExpelWorker:
    """End this incarnation: it is lost, stale or broke the protocol."""

    worker: str
    incarnation: int
    reason: str


@record
class SendBind:
    """Send the pass's program to a worker, before its first Assign of that pass."""

    worker: str
    pass_id: int


@record
class SendUnbind:
    """Tell a worker to drop a pass."""

    worker: str
    pass_id: int


@record
class SendAssign:
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


class GangPart(NamedTuple):
    """What one member of a gang is sent: calls [lo, hi)."""

    worker: str
    lease: int
    lo: int
    hi: int


@record
class SendGang:
    """Send each member of a gang its calls with their shards.

    Args:
        serial: number of this attempt; grows over the scheduler's life.
        parts: one a member, in order; together the calls of one step.
    """

    serial: int
    pass_id: int
    attempt: int
    parts: tuple[GangPart, ...]


@record
class StashResults:
    """Results of a gang came: keep them apart until its GangEnded."""

    serial: int
    lo: int
    hi: int
    worker: str


@record
class GangEnded:
    """A gang is over.

    Args:
        counts: what was stashed counts; otherwise it is dropped.
        aborted: calls of it may run still: whatever they wait for will not come.
    """

    serial: int
    counts: bool
    aborted: bool


@record
class SendRecall:
    """Ask a worker to report calls [lo, hi) under a lease; it has finished them for another scheduler."""

    worker: str
    lease: int
    pass_id: int
    lo: int
    hi: int


@record
class SendSettled:
    """Tell a worker that calls of a pass below `before` are durable."""

    worker: str
    pass_id: int
    before: int


@record
class SendCancel:
    """Tell a worker to drop what it has not begun of a lease."""

    worker: str
    lease: int


@record
class AcceptResults:
    """The results of calls [lo, hi) count: keep them, let their inputs go."""

    pass_id: int
    lo: int
    hi: int
    worker: str


@record
class SizeCall:
    """Say how many elements of a call can be tried apart (CallSized): it failed, and is to be bisected."""

    pass_id: int
    call: int


@record
class Cause:
    """Why a call failed, or one of its elements did.

    Args:
        stage: in which stage; "" where nobody knows.
        text: what was raised, or how the worker died, for people.
    """

    stage: str
    text: str


UNKNOWN = Cause("", "")


@record
class CallsQuarantined:
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


@record
class DropResults:
    """A result does not count: its lease is not held any more."""

    worker: str
    lease: int


@record
class RequestSteps:
    """Offer `count` more steps, beyond all that were requested before."""

    pass_id: int
    count: int


@record
class StepsReady:
    """Every call of steps [first, last) is done: they are visible."""

    pass_id: int
    first: int
    last: int


@record
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


@record
class StepFailed:
    """A step is complete, but calls of it failed for good; lowest call first."""

    pass_id: int
    step: int
    failures: tuple[Failure, ...]


@record
class PassComplete:
    """All steps of the pass were visible."""

    pass_id: int


@record
class PassQuiet:
    """Nothing of a held pass is running any more."""

    pass_id: int


@record
class ClusterFailed:
    """Workers die faster than they join."""

    reason: str


Command = (
    StartWorker
    | ExpelWorker
    | SendBind
    | SendUnbind
    | SendAssign
    | SendGang
    | SendRecall
    | SendSettled
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
    | PassQuiet
    | ClusterFailed
)
