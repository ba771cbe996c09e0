"""States of workers, passes and gangs, and the transitions between them.

The tables are normative: the diagrams in the docs are drawn from them, and a transition that is not listed is a
`LocalProtocolError`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Literal

from pipedist.errors import LocalProtocolError


class WorkerState(enum.Enum):
    """State of a worker slot."""

    STARTING = "starting"
    """Requested, for the first time or after a death; has not sent Hello."""
    READY = "ready"
    """Joined; may hold leases."""
    GONE = "gone"
    """Lost, and not replaced by the scheduler."""


WorkerEvent = Literal["joined", "lost", "lost unmanaged"]

WORKER_TRANSITIONS: Mapping[tuple[WorkerState, WorkerEvent], WorkerState] = {
    (WorkerState.STARTING, "joined"): WorkerState.READY,
    (WorkerState.STARTING, "lost"): WorkerState.STARTING,
    (WorkerState.READY, "lost"): WorkerState.STARTING,
    (WorkerState.READY, "lost unmanaged"): WorkerState.GONE,
    (WorkerState.GONE, "joined"): WorkerState.READY,
}


class PassState(enum.Enum):
    """State of a pass."""

    OPEN = "open"
    """More steps may become available."""
    ENDED = "ended"
    """All steps are available."""
    FAILING = "failing"
    """A call failed permanently: earlier steps finish, later ones do not start."""
    COMPLETE = "complete"
    """Every step was visible."""
    FAILED = "failed"
    """The failure was reported."""


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
    """State of one attempt of a gang."""

    RUNNING = "running"
    """Its calls are leased; none has raised."""
    ENDING = "ending"
    """A call raised; the others finish first, so that the reported error does not depend on timing."""
    COMPLETE = "complete"
    """All calls are done; their results count."""
    RAISED = "raised"
    """All calls were reported, and some raised: no result counts."""
    BROKEN = "broken"
    """A member was lost, or the step is of no use any more: no result counts, leases are cancelled."""


GangEvent = Literal["call raised", "all reported", "broken up"]

GANG_TRANSITIONS: Mapping[tuple[GangState, GangEvent], GangState] = {
    (GangState.RUNNING, "call raised"): GangState.ENDING,
    (GangState.RUNNING, "all reported"): GangState.COMPLETE,
    (GangState.RUNNING, "broken up"): GangState.BROKEN,
    (GangState.ENDING, "call raised"): GangState.ENDING,
    (GangState.ENDING, "all reported"): GangState.RAISED,
    (GangState.ENDING, "broken up"): GangState.BROKEN,
}


def next_worker_state(worker: str, state: WorkerState, what: WorkerEvent) -> WorkerState:
    """Return the next state, or raise LocalProtocolError."""
    try:
        return WORKER_TRANSITIONS[state, what]
    except KeyError:
        raise LocalProtocolError(f"worker {worker}: {what!r} can't happen while {state.value}") from None


def next_pass_state(pass_id: int, state: PassState, what: PassEvent) -> PassState:
    """Return the next state, or raise LocalProtocolError."""
    try:
        return PASS_TRANSITIONS[state, what]
    except KeyError:
        raise LocalProtocolError(f"pass {pass_id}: {what!r} can't happen while {state.value}") from None


def next_gang_state(serial: int, state: GangState, what: GangEvent) -> GangState:
    """Return the next state, or raise LocalProtocolError."""
    try:
        return GANG_TRANSITIONS[state, what]
    except KeyError:
        raise LocalProtocolError(f"gang {serial}: {what!r} can't happen while {state.value}") from None
