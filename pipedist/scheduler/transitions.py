"""States of workers, passes and gangs, and the transitions between them.

The tables are normative: the diagrams in the docs are drawn from them, and a transition that is not listed is a
`LocalProtocolError`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Literal, TypeVar

from pipedist.errors import LocalProtocolError

S = TypeVar("S", bound=enum.Enum)
E = TypeVar("E", bound=str)


class WorkerState(enum.Enum):
    STARTING = "starting"  # requested, for the first time or after a death; has not sent Hello
    READY = "ready"  # joined; may hold leases
    GONE = "gone"  # lost, and not replaced by the scheduler


WorkerEvent = Literal["joined", "lost", "lost unmanaged"]

WORKER_TRANSITIONS: Mapping[tuple[WorkerState, WorkerEvent], WorkerState] = {
    (WorkerState.STARTING, "joined"): WorkerState.READY,
    (WorkerState.STARTING, "lost"): WorkerState.STARTING,
    (WorkerState.READY, "lost"): WorkerState.STARTING,
    (WorkerState.READY, "lost unmanaged"): WorkerState.GONE,
    (WorkerState.GONE, "joined"): WorkerState.READY,
}


class PassState(enum.Enum):
    OPEN = "open"  # more steps may become available
    ENDED = "ended"  # all steps are available
    FAILING = "failing"  # a call failed permanently: earlier steps finish, later ones do not start
    COMPLETE = "complete"  # every step was visible
    FAILED = "failed"  # the failure was reported


PassEvent = Literal["ended", "call failed", "all visible", "failure reported"]

PASS_TRANSITIONS: Mapping[tuple[PassState, PassEvent], PassState] = {
    (PassState.OPEN, "ended"): PassState.ENDED,
    (PassState.OPEN, "call failed"): PassState.FAILING,
    (PassState.ENDED, "call failed"): PassState.FAILING,
    (PassState.ENDED, "all visible"): PassState.COMPLETE,
    (PassState.FAILING, "call failed"): PassState.FAILING,
    (PassState.FAILING, "ended"): PassState.FAILING,
    (PassState.FAILING, "failure reported"): PassState.FAILED,
    (PassState.FAILED, "ended"): PassState.FAILED,
}


class GangState(enum.Enum):
    RUNNING = "running"  # its calls are leased; none has raised
    ENDING = "ending"  # a call raised; the others finish first, so the error does not depend on timing
    COMPLETE = "complete"  # all calls are done; their results count
    RAISED = "raised"  # all calls were reported, and some raised: no result counts
    BROKEN = "broken"  # a member was lost, or the step is not needed: no result counts


GangEvent = Literal["call raised", "all reported", "broken up"]

GANG_TRANSITIONS: Mapping[tuple[GangState, GangEvent], GangState] = {
    (GangState.RUNNING, "call raised"): GangState.ENDING,
    (GangState.RUNNING, "all reported"): GangState.COMPLETE,
    (GangState.RUNNING, "broken up"): GangState.BROKEN,
    (GangState.ENDING, "call raised"): GangState.ENDING,
    (GangState.ENDING, "all reported"): GangState.RAISED,
    (GangState.ENDING, "broken up"): GangState.BROKEN,
}


def next_state(subject: str, table: Mapping[tuple[S, E], S], state: S, what: E) -> S:
    """Return the next state, or raise LocalProtocolError."""
    try:
        return table[state, what]
    except KeyError:
        raise LocalProtocolError(f"{subject}: {what!r} can't happen while {state.value}") from None
