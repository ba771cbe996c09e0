"""Inputs, states and transition table of the worker's state machine. Ids, sizes and times only.

An event is a message from the scheduler, or one of the classes below, which the worker's driver sends.
`TRANSITIONS` is the whole protocol: an event that the table does not list for the current state is an error.
"""

from __future__ import annotations

import enum

from msgspec import Struct

from pipedist.protocol import messages as msg


class Started(Struct, frozen=True):
    """The process has started and connected."""


class DataFound(Struct, frozen=True):
    """This host has the very data files that a pass reads."""

    pass_id: int


class CallsFinished(Struct, frozen=True):
    """Calls [lo, hi) returned; the driver holds their results."""

    lease: int
    lo: int
    hi: int
    busy_ns: int


class ElementsFinished(Struct, frozen=True):
    """Elements of a call that still runs are over; the driver holds their results."""

    lease: int
    call: int


class QuotaReached(Struct, frozen=True):
    """At most as many calls run as a lower quota allows."""

    pass_id: int
    calls: tuple[int, ...]


class CallRaised(Struct, frozen=True):
    """A call raised, or its result cannot be sent."""

    failed: msg.Failed


class CollectiveReached(Struct, frozen=True):
    """The executing lease's replicas reached collective `number`."""

    lease: int
    number: int


class CollectiveOverdue(Struct, frozen=True):
    """A collective has exceeded its `timeout_s`; see `messages.Stalled`."""

    lease: int
    members: tuple[str, ...]
    text: str


class RestartNeeded(Struct, frozen=True):
    reason: str


class LeaveRequested(Struct, frozen=True):
    reason: str


class StepReturned(Struct, frozen=True):
    """All calls of a gang's lease returned before the machine saw it: `AssignGang`, `CallsFinished`, `SliceEnded`."""

    assigned: msg.AssignGang
    busy_ns: int


class SliceEnded(Struct, frozen=True):
    """The driver has ended an Execute, and reported all finished calls."""

    lease: int


class TimePassed(Struct, frozen=True):
    """Time passed without another event."""


Event = (
    msg.Message
    | Started
    | DataFound
    | CallsFinished
    | ElementsFinished
    | QuotaReached
    | CallRaised
    | CollectiveReached
    | CollectiveOverdue
    | RestartNeeded
    | LeaveRequested
    | StepReturned
    | SliceEnded
    | TimePassed
)


class ProtocolState(enum.StrEnum):  # hashed in C: an Enum is in Python
    JOINING = "joining"
    READY = "ready"
    EXECUTING = "executing"
    STOPPING = "stopping"


_JOINING, _READY, _EXECUTING, _STOPPING = ProtocolState


def _to(*states: ProtocolState, on: tuple[type, ...]) -> dict[type, frozenset[ProtocolState]]:
    return dict.fromkeys(on, frozenset(states))


_STORED = (
    msg.Code,
    msg.Bind,
    DataFound,
    msg.Committed,
    msg.Quota,
    QuotaReached,
    msg.StateVersion,
    msg.DropState,
    msg.Relay,
    TimePassed,
)
_ASSIGNED = (msg.Assign, msg.AssignGang, msg.Recall)
_REPORTED = (ElementsFinished, CollectiveReached, CollectiveOverdue)
_OVER = (CallsFinished, CallRaised)
_LAST = (msg.Refuse, msg.Stop, LeaveRequested)

TRANSITIONS: dict[ProtocolState, dict[type, frozenset[ProtocolState]]] = {
    _JOINING: {
        **_to(_JOINING, on=(Started,)),
        **_to(_JOINING, _STOPPING, on=(TimePassed,)),
        **_to(_READY, on=(msg.Welcome,)),
        **_to(_STOPPING, on=_LAST),
    },
    _READY: {
        **_to(_READY, on=(*_STORED, msg.Unbind, msg.Cancel, StepReturned)),
        **_to(_EXECUTING, on=_ASSIGNED),
        **_to(_STOPPING, on=_LAST),
    },
    _EXECUTING: {
        **_to(_EXECUTING, on=(*_STORED, *_ASSIGNED, *_REPORTED)),
        **_to(_EXECUTING, _READY, on=(*_OVER, msg.Unbind, msg.Cancel, SliceEnded)),
        **_to(_STOPPING, on=(*_LAST, RestartNeeded)),
    },
    _STOPPING: {},
}
"""Events that each state accepts, and the states that may follow."""
