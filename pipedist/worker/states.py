"""Where a worker stands, and which events lead from where to where."""

from __future__ import annotations

import enum

from pipedist.messages import (
    Assign,
    AssignGang,
    Bind,
    Cancel,
    Code,
    DropState,
    Recall,
    Refuse,
    Relay,
    Settled,
    Stop,
    Unbind,
    Welcome,
)
from pipedist.messages import State as StateMessage
from pipedist.worker.events import (
    Brought,
    Finished,
    Leaving,
    Missed,
    Raised,
    Saw,
    SliceEnded,
    Started,
    Tick,
    Unfit,
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
        Tick: frozenset({State.JOINING, State.STOPPING}),
        Welcome: frozenset({State.READY}),
        Refuse: frozenset({State.STOPPING}),
        Stop: frozenset({State.STOPPING}),
        Leaving: frozenset({State.STOPPING}),
    },
    State.READY: {
        Tick: frozenset({State.READY}),
        Code: frozenset({State.READY}),
        Bind: frozenset({State.READY}),
        Saw: frozenset({State.READY}),
        Unbind: frozenset({State.READY}),
        Assign: frozenset({State.EXECUTING}),
        Recall: frozenset({State.EXECUTING}),
        Settled: frozenset({State.READY}),
        Leaving: frozenset({State.STOPPING}),
        AssignGang: frozenset({State.EXECUTING}),
        StateMessage: frozenset({State.READY}),
        DropState: frozenset({State.READY}),
        Relay: frozenset({State.READY}),
        Cancel: frozenset({State.READY}),
        Refuse: frozenset({State.STOPPING}),
        Stop: frozenset({State.STOPPING}),
    },
    State.EXECUTING: {
        Tick: frozenset({State.EXECUTING}),
        Code: frozenset({State.EXECUTING}),
        Bind: frozenset({State.EXECUTING}),
        Saw: frozenset({State.EXECUTING}),
        Unbind: frozenset({State.EXECUTING, State.READY}),
        Assign: frozenset({State.EXECUTING}),
        Recall: frozenset({State.EXECUTING}),
        Settled: frozenset({State.EXECUTING}),
        Leaving: frozenset({State.STOPPING}),
        AssignGang: frozenset({State.EXECUTING}),
        StateMessage: frozenset({State.EXECUTING}),
        DropState: frozenset({State.EXECUTING}),
        Relay: frozenset({State.EXECUTING}),
        Cancel: frozenset({State.EXECUTING, State.READY}),
        Finished: frozenset({State.EXECUTING}),
        Raised: frozenset({State.EXECUTING}),
        Brought: frozenset({State.EXECUTING}),
        Missed: frozenset({State.EXECUTING}),
        SliceEnded: frozenset({State.EXECUTING, State.READY}),
        Refuse: frozenset({State.STOPPING}),
        Stop: frozenset({State.STOPPING}),
        Unfit: frozenset({State.STOPPING}),
    },
    State.STOPPING: {},
}
"""Which events each state allows, and the states that they may lead to."""
