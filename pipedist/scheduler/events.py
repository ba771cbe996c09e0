"""What can happen to the scheduler. Ids, sizes and times only."""

from __future__ import annotations

from msgspec import Struct

from pipedist.scheduler.settings import PassSettings


class WorkerExpected(Struct, frozen=True):
    """A worker slot of the launcher exists; the scheduler starts it, and replaces it when it dies."""

    worker: str


class WorkerJoined(Struct, frozen=True):
    """A worker said Hello and speaks our protocol.

    Args:
        supervised: it dialled in, and is lost when its supervisor is not heard.
        gpus: how many it owns; a fraction where it shares one.
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


class PassOpened(Struct, frozen=True):
    """A pass begins; its steps will be offered in order."""

    pass_id: int
    settings: PassSettings


class StepsAvailable(Struct, frozen=True):
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


class StepsEnded(Struct, frozen=True):
    """No more steps will be offered."""

    pass_id: int


class CallsCached(Struct, frozen=True):
    """A worker has results of these calls, and of this very pass, from a scheduler that is gone.

    It may be said before the worker has joined: then it counts as soon as it has.

    Args:
        calls: ranges [lo, hi).
    """

    worker: str
    incarnation: int
    pass_id: int
    calls: tuple[tuple[int, int], ...]


class StepsCommitted(Struct, frozen=True):
    """All steps before `before` are durable: whoever kept results of them may let go."""

    pass_id: int
    before: int


class StepsConsumed(Struct, frozen=True):
    """The readers are done with all steps before `before`.

    Args:
        bytes: result bytes that were let go.
    """

    pass_id: int
    before: int
    bytes: int = 0


class PassDraining(Struct, frozen=True):
    """Issue nothing more of this pass; say PassDrained when nothing of it is running."""

    pass_id: int


class PassClosed(Struct, frozen=True):
    """Forget the pass; what is running of it is dropped."""

    pass_id: int


class CallsDone(Struct, frozen=True):
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


class CallFailed(Struct, frozen=True):
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


class CallSized(Struct, frozen=True):
    """The answer to SizeCall: how many elements of a call can be tried apart.

    Args:
        elements: 0 where it has none, or they can't be told apart.
    """

    pass_id: int
    call: int
    elements: int


class LeaseNotSent(Struct, frozen=True):
    """A lease could not be sent to its worker, nor can it be to any other: its calls failed for good."""

    lease: int


class GangStalled(Struct, frozen=True):
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


class CancelConfirmed(Struct, frozen=True):
    """A worker has heard that a lease was cancelled: it runs nothing of it any more."""

    worker: str
    incarnation: int
    lease: int


class Tick(Struct, frozen=True):
    """Nothing happened, but a deadline passed."""


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
