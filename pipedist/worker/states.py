"""Where a worker stands, and which events lead from where to where."""

from __future__ import annotations

import enum

from pipedist.protocol.messages import (
    Assign,
    AssignGang,
    Bind,
    Cancel,
    Code,
    Committed,
    DropState,
    Recall,
    Refuse,
    Relay,
    StateVersion,
    Stop,
    Unbind,
    Welcome,
)
from pipedist.worker.events import (
    CallRaised,
    CallsFinished,
    CollectiveOverdue,
    CollectiveReached,
    DataFound,
    LeaveRequested,
    RestartNeeded,
    SliceEnded,
    Started,
    TimePassed,
)


class State(enum.Enum):
    """Where a worker stands."""

    JOINING = "joining"
    READY = "ready"
    EXECUTING = "executing"
    STOPPING = "stopping"


TRANSITIONS: dict[State, dict[type, frozenset[State]]] = {
    State.JOINING: {
        Started: frozenset({State.JOINING}),
        TimePassed: frozenset({State.JOINING, State.STOPPING}),
        Welcome: frozenset({State.READY}),
        Refuse: frozenset({State.STOPPING}),
        Stop: frozenset({State.STOPPING}),
        LeaveRequested: frozenset({State.STOPPING}),
    },
    State.READY: {
        TimePassed: frozenset({State.READY}),
        Code: frozenset({State.READY}),
        Bind: frozenset({State.READY}),
        DataFound: frozenset({State.READY}),
        Unbind: frozenset({State.READY}),
        Assign: frozenset({State.EXECUTING}),
        Recall: frozenset({State.EXECUTING}),
        Committed: frozenset({State.READY}),
        LeaveRequested: frozenset({State.STOPPING}),
        AssignGang: frozenset({State.EXECUTING}),
        StateVersion: frozenset({State.READY}),
        DropState: frozenset({State.READY}),
        Relay: frozenset({State.READY}),
        Cancel: frozenset({State.READY}),
        Refuse: frozenset({State.STOPPING}),
        Stop: frozenset({State.STOPPING}),
    },
    State.EXECUTING: {
        TimePassed: frozenset({State.EXECUTING}),
        Code: frozenset({State.EXECUTING}),
        Bind: frozenset({State.EXECUTING}),
        DataFound: frozenset({State.EXECUTING}),
        Unbind: frozenset({State.EXECUTING, State.READY}),
        Assign: frozenset({State.EXECUTING}),
        Recall: frozenset({State.EXECUTING}),
        Committed: frozenset({State.EXECUTING}),
        LeaveRequested: frozenset({State.STOPPING}),
        AssignGang: frozenset({State.EXECUTING}),
        StateVersion: frozenset({State.EXECUTING}),
        DropState: frozenset({State.EXECUTING}),
        Relay: frozenset({State.EXECUTING}),
        Cancel: frozenset({State.EXECUTING, State.READY}),
        CallsFinished: frozenset({State.EXECUTING}),
        CallRaised: frozenset({State.EXECUTING}),
        CollectiveReached: frozenset({State.EXECUTING}),
        CollectiveOverdue: frozenset({State.EXECUTING}),
        SliceEnded: frozenset({State.EXECUTING, State.READY}),
        Refuse: frozenset({State.STOPPING}),
        Stop: frozenset({State.STOPPING}),
        RestartNeeded: frozenset({State.STOPPING}),
    },
    State.STOPPING: {},
}
"""Which events each state allows, and the states that they may lead to."""
