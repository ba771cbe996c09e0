"""What can happen to the scheduler. Ids, sizes and times only."""

from __future__ import annotations

from pipedist.records import record
from pipedist.scheduler.settings import PassSettings


@record
class WorkerExpected:
    """A worker slot of the launcher exists; the scheduler starts it, and replaces it when it dies."""

    worker: str


@record
class WorkerJoined:
    """A worker said Hello and speaks our protocol.

    Args:
        supervised: it dialled in, and is lost when its supervisor is not heard.
        gpus: how many it owns; a fraction where it shares one.
    """

    worker: str
    incarnation: int
    supervised: bool = False
    gpus: float = 0.0


@record
class WorkerHeard:
    """The supervisor of a worker sent a heartbeat."""

    worker: str
    incarnation: int


@record
class WorkerLost:
    """A worker process is gone, or must be treated so.

    Args:
        cause: for people: "signal 9 (SIGKILL)".
        graceful: it said Goodbye: no call is blamed for it.
        running: (lease, call) that it was executing; None where nobody knows.
        stage: in which stage that call was; "" where nobody knows.
        timed_out: it was ended because the call took too long: that counts as if the call had raised.
        retries: how often a call that took too long in this stage is tried again.
        quarantine: after that, or after too many deaths, its guilty elements are set aside.
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


@record
class PassOpened:
    """A pass begins; its steps will be offered in order."""

    pass_id: int
    settings: PassSettings


@record
class StepsOffered:
    """Steps [first, last) are there to be executed.

    Args:
        parts: calls of each of them: replicas 0..parts-1.
        bytes: input bytes that the scheduler's process holds for all of them.
        holes: of these calls, in each step, the replicas that make none; never of a gang.
    """

    pass_id: int
    first: int
    last: int
    parts: int
    bytes: int = 0
    holes: tuple[int, ...] = ()


@record
class StepsEnded:
    """No more steps will be offered."""

    pass_id: int


@record
class CallsKept:
    """A worker has results of these calls, and of this very pass, from a scheduler that is gone.

    It may be said before the worker has joined: then it counts as soon as it has.

    Args:
        calls: ranges [lo, hi).
    """

    worker: str
    incarnation: int
    pass_id: int
    calls: tuple[tuple[int, int], ...]


@record
class StepsSettled:
    """All steps before `before` are durable: whoever kept results of them may let go."""

    pass_id: int
    before: int


@record
class StepsConsumed:
    """The readers are done with all steps before `before`.

    Args:
        bytes: result bytes that were let go.
    """

    pass_id: int
    before: int
    bytes: int = 0


@record
class PassHeld:
    """Issue nothing more of this pass; say PassQuiet when nothing of it is running."""

    pass_id: int


@record
class PassClosed:
    """Forget the pass; what is running of it is dropped."""

    pass_id: int


@record
class CallsDone:
    """Calls [lo, hi) of a lease came back.

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


@record
class CallFailed:
    """A call of a lease raised.

    Args:
        retries: how often a call that raised in this stage is tried again; 0 where another attempt
            can't help.
        aborted: of a gang's call: it did nothing wrong, but waited for a replica that had ended.
        quarantine: after the last retry its guilty elements are set aside; otherwise it fails.
        stage: that raised.
        text: what it raised, for people.
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


@record
class CallSized:
    """The answer to SizeCall: how many elements of a call can be tried apart.

    Args:
        elements: 0 where it has none, or they can't be told apart.
    """

    pass_id: int
    call: int
    elements: int


@record
class LeaseNotSent:
    """A lease could not be sent to its worker, nor can it be to any other: its calls failed for good."""

    lease: int


@record
class GangStalled:
    """A member of a gang has waited too long for others: they hang.

    Args:
        lease: the one that waits.
        members: for whom.
        text: who waits for whom, where, for people.
    """

    worker: str
    incarnation: int
    lease: int
    members: tuple[int, ...]
    text: str


@record
class CancelHeard:
    """A worker has heard that a lease was cancelled: it runs nothing of it any more."""

    worker: str
    incarnation: int
    lease: int


@record
class Tick:
    """Nothing happened, but a deadline passed."""


Event = (
    WorkerExpected
    | WorkerJoined
    | WorkerHeard
    | WorkerLost
    | PassOpened
    | StepsOffered
    | StepsEnded
    | StepsConsumed
    | CallsKept
    | StepsSettled
    | PassHeld
    | PassClosed
    | CallsDone
    | CallFailed
    | CallSized
    | LeaseNotSent
    | GangStalled
    | CancelHeard
    | Tick
)
