"""What the scheduler wants done. The driver carries out each one, in order, and decides nothing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Start a worker process."""

    worker: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class ExpelWorker:
    """End this incarnation: it is lost, stale or broke the protocol."""

    worker: str
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class SendBind:
    """Send the pass's program to a worker, before its first Assign of that pass."""

    worker: str
    pass_id: int


@dataclass(frozen=True, slots=True)
class SendUnbind:
    """Tell a worker to drop a pass."""

    worker: str
    pass_id: int


@dataclass(frozen=True, slots=True)
class SendAssign:
    """Send calls [lo, hi) with their shards."""

    worker: str
    lease: int
    pass_id: int
    lo: int
    hi: int
    attempt: int


@dataclass(frozen=True, slots=True)
class SendCancel:
    """Tell a worker to drop what it has not begun of a lease."""

    worker: str
    lease: int


@dataclass(frozen=True, slots=True)
class AcceptResults:
    """The results of calls [lo, hi) count: keep them, let their inputs go."""

    pass_id: int
    lo: int
    hi: int
    worker: str


@dataclass(frozen=True, slots=True)
class DropResults:
    """A result does not count: its lease is not held any more."""

    worker: str
    lease: int


@dataclass(frozen=True, slots=True)
class RequestSteps:
    """Offer `count` more steps, beyond all that were requested before."""

    pass_id: int
    count: int


@dataclass(frozen=True, slots=True)
class StepsReady:
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
        token: the driver's number of the exception; -1 where the worker died.
        cause: how the worker died, "" otherwise.
    """

    call: int
    attempts: int
    worker: str
    token: int = -1
    cause: str = ""


@dataclass(frozen=True, slots=True)
class StepFailed:
    """A step is complete, but calls of it failed for good; lowest call first."""

    pass_id: int
    step: int
    failures: tuple[Failure, ...]


@dataclass(frozen=True, slots=True)
class PassComplete:
    """All steps of the pass were visible."""

    pass_id: int


@dataclass(frozen=True, slots=True)
class PassQuiet:
    """Nothing of a held pass is running any more."""

    pass_id: int


@dataclass(frozen=True, slots=True)
class ClusterFailed:
    """Workers die faster than they join."""

    reason: str


Command = (
    StartWorker
    | ExpelWorker
    | SendBind
    | SendUnbind
    | SendAssign
    | SendCancel
    | AcceptResults
    | DropResults
    | RequestSteps
    | StepsReady
    | StepFailed
    | PassComplete
    | PassQuiet
    | ClusterFailed
)
