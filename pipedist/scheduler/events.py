"""Inputs of the scheduler. Ids, sizes and times only."""

from __future__ import annotations

from msgspec import Struct

from pipedist.scheduler.settings import PassSettings


class WorkerExpected(Struct, frozen=True):
    """A worker slot of the launcher exists; the scheduler starts it, and replaces it when it dies."""

    worker: str


class WorkerJoined(Struct, frozen=True):
    """A worker sent Hello and was accepted.

    Args:
        supervised: it dialled in, and is lost when its supervisor's heartbeats end.
        gpus: number of GPUs it owns; a fraction if it shares one.
    """

    worker: str
    incarnation: int
    supervised: bool = False
    gpus: float = 0.0


class HeartbeatReceived(Struct, frozen=True):
    """The supervisor of a worker sent a heartbeat."""

    worker: str
    incarnation: int


class WorkerLost(Struct, frozen=True):
    """A worker process is gone, or is to be treated so.

    Args:
        cause: for people: "signal 9 (SIGKILL)".
        graceful: it sent Goodbye: no call is the cause.
        running: (lease, call) that it was executing; None if unknown.
        stage: the stage of that call; "" if unknown.
        timed_out: it was ended because the call exceeded its timeout: counts as if the call had raised.
        retries: retries of a call that exceeded its timeout in this stage.
        quarantine: after that, or after too many deaths, quarantine the culprits among its elements.
    """

    worker: str
    incarnation: int
    cause: str
    graceful: bool = False
    running: tuple[int, int] | None = None
    stage: str = ""
    timed_out: bool = False
    retries: int = 0
    quarantine: bool = False


class PassOpened(Struct, frozen=True):
    """A pass begins; its steps follow in order."""

    pass_id: int
    settings: PassSettings


class StepsAvailable(Struct, frozen=True):
    """Steps [first, last) can be executed.

    Args:
        parts: calls of each of them: replicas 0..parts-1.
        bytes: input bytes that the scheduler's process holds for all of them.
        skipped_replicas: replicas below `parts` that make no call, in each step; never of a gang.
    """

    pass_id: int
    first: int
    last: int
    parts: int
    bytes: int = 0
    skipped_replicas: tuple[int, ...] = ()


class StepsEnded(Struct, frozen=True):
    """The pass has no more steps."""

    pass_id: int


class CallsCached(Struct, frozen=True):
    """A worker has cached results of these calls, of the same pass, for an earlier scheduler.

    If the worker has not joined yet, the event counts as soon as it has.

    Args:
        calls: ranges [lo, hi).
    """

    worker: str
    incarnation: int
    pass_id: int
    calls: tuple[tuple[int, int], ...]


class StepsCommitted(Struct, frozen=True):
    """All steps before `before` are durable: workers may release their cached results."""

    pass_id: int
    before: int


class StepsConsumed(Struct, frozen=True):
    """The readers are done with all steps before `before`.

    Args:
        bytes: released result bytes.
    """

    pass_id: int
    before: int
    bytes: int = 0


class PassDraining(Struct, frozen=True):
    """Issue nothing more of this pass; emit PassDrained when nothing of it is running."""

    pass_id: int


class PassClosed(Struct, frozen=True):
    """Forget the pass; its running calls are dropped."""

    pass_id: int


class CallsDone(Struct, frozen=True):
    """Calls [lo, hi) of a lease returned.

    Args:
        busy_ns: the worker's time for them, nanoseconds.
        bytes: size of their results.
    """

    worker: str
    incarnation: int
    lease: int
    lo: int
    hi: int
    busy_ns: int
    bytes: int = 0


class CallFailed(Struct, frozen=True):
    """A call of a lease raised.

    Args:
        retries: retries of a call that raised in this stage; 0 if another attempt can't help.
        aborted: of a gang's call: it waited for a replica that had ended, and is not the cause.
        quarantine: after the last retry quarantine the culprits among its elements; otherwise it fails.
        stage: that raised.
        text: the exception, for people.
    """

    worker: str
    incarnation: int
    lease: int
    call: int
    retries: int = 0
    aborted: bool = False
    quarantine: bool = False
    stage: str = ""
    text: str = ""


class CallSized(Struct, frozen=True):
    """The result of SizeCall: the number of elements of a call that can be tried apart.

    Args:
        elements: 0 if it has none, or they can't be separated.
    """

    pass_id: int
    call: int
    elements: int


class LeaseNotSent(Struct, frozen=True):
    """A lease can't be sent to any worker: its calls failed for good."""

    lease: int


class GangStalled(Struct, frozen=True):
    """A member of a gang has waited too long for others: they hang.

    Args:
        lease: the one that waits.
        members: the missing ones.
        text: which replica waits for which, and where, for people.
    """

    worker: str
    incarnation: int
    lease: int
    members: tuple[int, ...]
    text: str


class CancelConfirmed(Struct, frozen=True):
    """A worker confirmed that it runs no call of a cancelled lease any more."""

    worker: str
    incarnation: int
    lease: int


class Tick(Struct, frozen=True):
    """A deadline passed without another event."""


Event = (
    WorkerExpected
    | WorkerJoined
    | HeartbeatReceived
    | WorkerLost
    | PassOpened
    | StepsAvailable
    | StepsEnded
    | StepsConsumed
    | CallsCached
    | StepsCommitted
    | PassDraining
    | PassClosed
    | CallsDone
    | CallFailed
    | CallSized
    | LeaseNotSent
    | GangStalled
    | CancelConfirmed
    | Tick
)
