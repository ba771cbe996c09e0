"""What can happen to a worker, besides the scheduler's messages. Ids, sizes and times only."""

from __future__ import annotations

from msgspec import Struct

from pipedist.messages import Message


class Started(Struct, frozen=True):
    """The process is up and can talk."""


class DataFound(Struct, frozen=True):
    """The data files of a pass are here, the very ones."""

    pass_id: int


class CallsFinished(Struct, frozen=True):
    """Calls [lo, hi) of the executing lease returned; the driver holds their encoded results."""

    lease: int
    lo: int
    hi: int
    busy_ns: int


class CallRaised(Struct, frozen=True):
    """A call of the executing lease raised, or its result can't be sent; see `messages.Failed`."""

    lease: int
    call: int
    stage: str
    module: str
    name: str
    text: str
    traceback: str
    retryable: bool
    aborted: bool = False


class CollectiveReached(Struct, frozen=True):
    """The executing lease's replicas have come to collective `number`; the driver holds what they bring."""

    lease: int
    number: int


class CollectiveOverdue(Struct, frozen=True):
    """A collective of the executing lease has waited for its `timeout_s`; see `messages.Stalled`."""

    lease: int
    members: tuple[str, ...]
    text: str


class RestartNeeded(Struct, frozen=True):
    """What was assigned needs another process than this one."""

    reason: str


class LeaveRequested(Struct, frozen=True):
    """The worker was asked to leave by whoever runs it; what it has finished is reported."""

    reason: str


class SliceEnded(Struct, frozen=True):
    """The driver is done with an Execute, and has reported everything that it finished."""

    lease: int


class TimePassed(Struct, frozen=True):
    """Nothing happened, but time passed."""


Event = Message | Started | DataFound | CallsFinished | CallRaised | CollectiveReached | CollectiveOverdue | RestartNeeded | LeaveRequested | SliceEnded | TimePassed
