"""Inputs, states and transition table of the worker's state machine. Ids, sizes and times only.

An event is a message from the scheduler, or one of the classes below, which the worker's driver sends.
`TRANSITIONS` is the whole protocol: an event that the table does not list for the current state is an error.
"""

from __future__ import annotations

import enum

from msgspec import Struct

from pipedist.protocol.messages import (
    Assign,
    AssignGang,
    Bind,
    Cancel,
    Code,
    Committed,
    DropState,
    Message,
    Recall,
    Refuse,
    Relay,
    StateVersion,
    Stop,
    Unbind,
    Welcome,
)


class Started(Struct, frozen=True):
    pass


class DataFound(Struct, frozen=True):
    """This host has the very data files that a pass reads."""

    pass_id: int


class CallsFinished(Struct, frozen=True):
    """Calls [lo, hi) returned; the driver holds their results."""

    lease: int
    lo: int
    hi: int
    busy_ns: int


class CallRaised(Struct, frozen=True):
    """A call raised, or its result cannot be sent; see `messages.Failed`."""

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


class SliceEnded(Struct, frozen=True):
    """The driver has ended an Execute, and reported all finished calls."""

    lease: int


class TimePassed(Struct, frozen=True):
    pass


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


class ProtocolState(enum.Enum):
    JOINING = "joining"
    READY = "ready"
    EXECUTING = "executing"
    STOPPING = "stopping"


TRANSITIONS: dict[ProtocolState, dict[type, frozenset[ProtocolState]]] = {
    ProtocolState.JOINING: {
        Started: frozenset({ProtocolState.JOINING}),
        TimePassed: frozenset({ProtocolState.JOINING, ProtocolState.STOPPING}),
        Welcome: frozenset({ProtocolState.READY}),
        Refuse: frozenset({ProtocolState.STOPPING}),
        Stop: frozenset({ProtocolState.STOPPING}),
        LeaveRequested: frozenset({ProtocolState.STOPPING}),
    },
    ProtocolState.READY: {
        TimePassed: frozenset({ProtocolState.READY}),
        Code: frozenset({ProtocolState.READY}),
        Bind: frozenset({ProtocolState.READY}),
        DataFound: frozenset({ProtocolState.READY}),
        Unbind: frozenset({ProtocolState.READY}),
        Assign: frozenset({ProtocolState.EXECUTING}),
        Recall: frozenset({ProtocolState.EXECUTING}),
        Committed: frozenset({ProtocolState.READY}),
        LeaveRequested: frozenset({ProtocolState.STOPPING}),
        AssignGang: frozenset({ProtocolState.EXECUTING}),
        StateVersion: frozenset({ProtocolState.READY}),
        DropState: frozenset({ProtocolState.READY}),
        Relay: frozenset({ProtocolState.READY}),
        Cancel: frozenset({ProtocolState.READY}),
        Refuse: frozenset({ProtocolState.STOPPING}),
        Stop: frozenset({ProtocolState.STOPPING}),
    },
    ProtocolState.EXECUTING: {
        TimePassed: frozenset({ProtocolState.EXECUTING}),
        Code: frozenset({ProtocolState.EXECUTING}),
        Bind: frozenset({ProtocolState.EXECUTING}),
        DataFound: frozenset({ProtocolState.EXECUTING}),
        Unbind: frozenset({ProtocolState.EXECUTING, ProtocolState.READY}),
        Assign: frozenset({ProtocolState.EXECUTING}),
        Recall: frozenset({ProtocolState.EXECUTING}),
        Committed: frozenset({ProtocolState.EXECUTING}),
        LeaveRequested: frozenset({ProtocolState.STOPPING}),
        AssignGang: frozenset({ProtocolState.EXECUTING}),
        StateVersion: frozenset({ProtocolState.EXECUTING}),
        DropState: frozenset({ProtocolState.EXECUTING}),
        Relay: frozenset({ProtocolState.EXECUTING}),
        Cancel: frozenset({ProtocolState.EXECUTING, ProtocolState.READY}),
        CallsFinished: frozenset({ProtocolState.EXECUTING}),
        CallRaised: frozenset({ProtocolState.EXECUTING}),
        CollectiveReached: frozenset({ProtocolState.EXECUTING}),
        CollectiveOverdue: frozenset({ProtocolState.EXECUTING}),
        SliceEnded: frozenset({ProtocolState.EXECUTING, ProtocolState.READY}),
        Refuse: frozenset({ProtocolState.STOPPING}),
        Stop: frozenset({ProtocolState.STOPPING}),
        RestartNeeded: frozenset({ProtocolState.STOPPING}),
    },
    ProtocolState.STOPPING: {},
}
"""Events that each state accepts, and the states that may follow."""
