"""Inputs of the scheduler. Ids, sizes and times only."""

from __future__ import annotations

from msgspec import Struct

from pipedist.scheduler.settings import PassSettings


class Event(Struct, frozen=True):
    """An input of the scheduler."""


class WorkerExpected(Event, frozen=True):
    """A worker slot of the launcher exists; the scheduler starts it, and replaces it when it dies."""

    worker: str


class WorkerJoined(Event, frozen=True):
    """A worker sent Hello and was accepted."""

    worker: str
    incarnation: int
    supervised: bool = False  # it dialled in, and is lost when its supervisor's heartbeats end
    gpus: float = 0.0  # number of GPUs it owns; a fraction if it shares one


class HeartbeatReceived(Event, frozen=True):
    """The supervisor of a worker sent a heartbeat."""

    worker: str
    incarnation: int


class WorkerLost(Event, frozen=True):
    """A worker process is gone, or is to be treated so."""

    worker: str
    incarnation: int
    cause: str  # for people: "signal 9 (SIGKILL)"
    graceful: bool = False  # it sent Goodbye: no call is the cause
    running: tuple[int, int] | None = None  # (lease, call) that it was executing; None if unknown
    stage: str = ""  # the stage of that call; "" if unknown
    # It was ended because the call exceeded its timeout: counts as if the call had raised
    timed_out: bool = False
    retries: int = 0  # retries of a call that exceeded its timeout in this stage
    # After that, or after too many deaths, quarantine the culprits among its elements
    quarantine: bool = False


class PassOpened(Event, frozen=True):
    """A pass begins; its steps follow in order."""

    pass_id: int
    settings: PassSettings


class StepsAvailable(Event, frozen=True):
    """Steps [first, last) can be executed."""

    pass_id: int
    first: int
    last: int
    parts: int  # calls of each of them: replicas 0..parts-1
    bytes: int = 0  # input bytes that the driver holds for all of them
    # Replicas below `parts` that make no call, in each step; never of a gang
    skipped_replicas: tuple[int, ...] = ()


class StepExecuted(Event, frozen=True):
    """The next step of a pass was executed by the gang that `Scheduler.foresee` returned.

    It stands for the step's `StepsAvailable`, and a `CallsDone` of each member. Its results were given to the caller.
    """

    pass_id: int
    serial: int  # that of the gang
    reports: tuple[tuple[str, int, int], ...]  # worker, busy_ns, bytes of each member, in order of arrival


class StepsEnded(Event, frozen=True):
    """The pass has no more steps."""

    pass_id: int


class CallsCached(Event, frozen=True):
    """A worker has cached results of these calls [lo, hi), of the same pass, for an earlier scheduler.

    If the worker has not joined yet, the event counts as soon as it has.
    """

    worker: str
    incarnation: int
    pass_id: int
    calls: tuple[tuple[int, int], ...]


class StepsCommitted(Event, frozen=True):
    """All steps before `before` are durable: workers may release their cached results."""

    pass_id: int
    before: int


class StepsConsumed(Event, frozen=True):
    """The readers are done with all steps before `before`, and released `bytes` of results."""

    pass_id: int
    before: int
    bytes: int = 0


class PassDraining(Event, frozen=True):
    """Issue nothing more of this pass; emit PassDrained when nothing of it is running."""

    pass_id: int


class PassClosed(Event, frozen=True):
    """Forget the pass; its running calls are dropped."""

    pass_id: int


class CallsDone(Event, frozen=True):
    """Calls [lo, hi) of a lease returned `bytes` of results, after `busy_ns` of work."""

    worker: str
    incarnation: int
    lease: int
    lo: int
    hi: int
    busy_ns: int
    bytes: int = 0


class CallFailed(Event, frozen=True):
    """A call of a lease raised."""

    worker: str
    incarnation: int
    lease: int
    call: int
    retries: int = 0  # retries of a call that raised in this stage; 0 if another attempt can't help
    # The call only waited: for a replica of its gang that had ended, or for an attempt in a pass that drains
    aborted: bool = False
    # After the last retry quarantine the culprits among its elements; otherwise it fails
    quarantine: bool = False
    stage: str = ""
    text: str = ""  # the exception, for people
    # Positions of elements that failed alone for good, and exceptions
    culprits: tuple[tuple[int, str], ...] = ()


class CallSized(Event, frozen=True):
    """The result of SizeCall: how many elements of a call can be tried apart; 0: none, or inseparable."""

    pass_id: int
    call: int
    elements: int


class ElementsQuarantined(Event, frozen=True):
    """The number of elements of calls that were quarantined as a whole."""

    pass_id: int
    elements: int


class LeaseNotSent(Event, frozen=True):
    """A lease can't be sent to any worker: its calls failed for good."""

    lease: int


class GangStalled(Event, frozen=True):
    """A member of a gang has waited too long for others: they hang."""

    worker: str
    incarnation: int
    lease: int  # the one that waits
    members: tuple[int, ...]  # the missing ones
    text: str  # which replica waits for which, and where, for people


class QuotaConfirmed(Event, frozen=True):
    """A worker runs no more calls of a pass than its quota, which had become lower."""

    worker: str
    incarnation: int
    pass_id: int
    calls: tuple[int, ...]


class CancelConfirmed(Event, frozen=True):
    """A worker confirmed that it runs no call of a cancelled lease any more."""

    worker: str
    incarnation: int
    lease: int


class Tick(Event, frozen=True):
    """A deadline passed without another event."""
