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
    """The process has started and connected."""


class DataFound(Struct, frozen=True):
    """This host has the very data files that a pass reads."""

    pass_id: int


class CallsFinished(Struct, frozen=True):
    """Calls [lo, hi) returned; the driver holds their encoded results."""

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
    """An assignment needs a new process."""

    reason: str


class LeaveRequested(Struct, frozen=True):
    """The launcher or supervisor ends the worker."""

    reason: str


class SliceEnded(Struct, frozen=True):
    """The driver has ended an Execute, and reported all finished calls."""

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


class WorkerState(enum.Enum):
    """The state of a worker; see the diagram in `pipedist.worker.machine`."""

    JOINING = "joining"
    READY = "ready"
    EXECUTING = "executing"
    STOPPING = "stopping"


TRANSITIONS: dict[WorkerState, dict[type, frozenset[WorkerState]]] = {
    WorkerState.JOINING: {
        Started: frozenset({WorkerState.JOINING}),
        TimePassed: frozenset({WorkerState.JOINING, WorkerState.STOPPING}),
        Welcome: frozenset({WorkerState.READY}),
        Refuse: frozenset({WorkerState.STOPPING}),
        Stop: frozenset({WorkerState.STOPPING}),
        LeaveRequested: frozenset({WorkerState.STOPPING}),
    },
    WorkerState.READY: {
        TimePassed: frozenset({WorkerState.READY}),
        Code: frozenset({WorkerState.READY}),
        Bind: frozenset({WorkerState.READY}),
        DataFound: frozenset({WorkerState.READY}),
        Unbind: frozenset({WorkerState.READY}),
        Assign: frozenset({WorkerState.EXECUTING}),
        Recall: frozenset({WorkerState.EXECUTING}),
        Committed: frozenset({WorkerState.READY}),
        LeaveRequested: frozenset({WorkerState.STOPPING}),
        AssignGang: frozenset({WorkerState.EXECUTING}),
        StateVersion: frozenset({WorkerState.READY}),
        DropState: frozenset({WorkerState.READY}),
        Relay: frozenset({WorkerState.READY}),
        Cancel: frozenset({WorkerState.READY}),
        Refuse: frozenset({WorkerState.STOPPING}),
        Stop: frozenset({WorkerState.STOPPING}),
    },
    WorkerState.EXECUTING: {
        TimePassed: frozenset({WorkerState.EXECUTING}),
        Code: frozenset({WorkerState.EXECUTING}),
        Bind: frozenset({WorkerState.EXECUTING}),
        DataFound: frozenset({WorkerState.EXECUTING}),
        Unbind: frozenset({WorkerState.EXECUTING, WorkerState.READY}),
        Assign: frozenset({WorkerState.EXECUTING}),
        Recall: frozenset({WorkerState.EXECUTING}),
        Committed: frozenset({WorkerState.EXECUTING}),
        LeaveRequested: frozenset({WorkerState.STOPPING}),
        AssignGang: frozenset({WorkerState.EXECUTING}),
        StateVersion: frozenset({WorkerState.EXECUTING}),
        DropState: frozenset({WorkerState.EXECUTING}),
        Relay: frozenset({WorkerState.EXECUTING}),
        Cancel: frozenset({WorkerState.EXECUTING, WorkerState.READY}),
        CallsFinished: frozenset({WorkerState.EXECUTING}),
        CallRaised: frozenset({WorkerState.EXECUTING}),
        CollectiveReached: frozenset({WorkerState.EXECUTING}),
        CollectiveOverdue: frozenset({WorkerState.EXECUTING}),
        SliceEnded: frozenset({WorkerState.EXECUTING, WorkerState.READY}),
        Refuse: frozenset({WorkerState.STOPPING}),
        Stop: frozenset({WorkerState.STOPPING}),
        RestartNeeded: frozenset({WorkerState.STOPPING}),
    },
    WorkerState.STOPPING: {},
}
"""Events that each state accepts, and the states that may follow."""
