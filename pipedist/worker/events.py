"""Inputs of a worker's state machine besides the scheduler's messages. Ids, sizes and times only."""

from __future__ import annotations

from msgspec import Struct

from pipedist.protocol.messages import Message


class Started(Struct, frozen=True):
    """The process is up and connected."""


class DataFound(Struct, frozen=True):
    """The worker sees the same data files of a pass as the scheduler."""

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
    """The executing lease's replicas reached collective `number`; the driver holds their contribution."""

    lease: int
    number: int


class CollectiveOverdue(Struct, frozen=True):
    """A collective of the executing lease has waited for its `timeout_s`; see `messages.Stalled`."""

    lease: int
    members: tuple[str, ...]
    text: str


class RestartNeeded(Struct, frozen=True):
    """An assignment needs another process than this one."""

    reason: str


class LeaveRequested(Struct, frozen=True):
    """The worker's launcher or supervisor ends it; finished calls are reported first."""

    reason: str


class SliceEnded(Struct, frozen=True):
    """The driver is done with an Execute, and has reported all calls that finished."""

    lease: int


class TimePassed(Struct, frozen=True):
    """Time passed without another event."""


Event = (
    Message
    | Started
    | DataFound
    | CallsFinished
    | CallRaised
    | CollectiveReached
    | CollectiveOverdue
    | RestartNeeded
    | LeaveRequested
    | SliceEnded
    | TimePassed
)
