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
    """

    worker: str
    incarnation: int
    supervised: bool = False


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
    """

    worker: str
    incarnation: int
    cause: str
    graceful: bool = False
    running: tuple[int, int] | None = None


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
    """

    pass_id: int
    first: int
    last: int
    parts: int
    bytes: int = 0


@record
class StepsEnded:
    """No more steps will be offered."""

    pass_id: int


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
    """

    worker: str
    incarnation: int
    lease: int
    call: int
    retries: int = 0
    aborted: bool = False


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
    | PassHeld
    | PassClosed
    | CallsDone
    | CallFailed
    | LeaseNotSent
    | GangStalled
    | Tick
)
