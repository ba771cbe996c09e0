"""The states of workers, passes and gangs, and the only ways between them.

The tables ARE the protocol: the docs' diagrams are drawn from them, and a step that is not
in them is a `LocalProtocolError` that tells its story.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

from pipedist.errors import LocalProtocolError


class WorkerState(enum.Enum):
    """Where a worker slot stands."""

    STARTING = "starting"
    """Asked for, or dead and asked for again; has not said Hello."""
    READY = "ready"
    """Joined: may hold leases."""
    GONE = "gone"
    """Lost, and not ours to replace."""


WORKER_TRANSITIONS: Mapping[tuple[WorkerState, str], WorkerState] = {
    (WorkerState.STARTING, "joined"): WorkerState.READY,
    (WorkerState.STARTING, "lost"): WorkerState.STARTING,
    (WorkerState.READY, "lost"): WorkerState.STARTING,
    (WorkerState.READY, "lost unmanaged"): WorkerState.GONE,
    (WorkerState.GONE, "joined"): WorkerState.READY,
}


class PassState(enum.Enum):
    """Where a pass stands."""

    OPEN = "open"
    """Steps may still be offered."""
    ENDED = "ended"
    """All steps were offered."""
    FAILING = "failing"
    """A call failed for good: earlier steps are finished, later ones are not begun."""
    COMPLETE = "complete"
    """Every step was visible."""
    FAILED = "failed"
    """The failure was told."""


PASS_TRANSITIONS: Mapping[tuple[PassState, str], PassState] = {
    (PassState.OPEN, "ended"): PassState.ENDED,
    (PassState.OPEN, "call failed"): PassState.FAILING,
    (PassState.ENDED, "call failed"): PassState.FAILING,
    (PassState.ENDED, "all visible"): PassState.COMPLETE,
    (PassState.FAILING, "call failed"): PassState.FAILING,
    (PassState.FAILING, "ended"): PassState.FAILING,
    (PassState.FAILING, "failure told"): PassState.FAILED,
    (PassState.FAILED, "ended"): PassState.FAILED,
}


class GangState(enum.Enum):
    """Where an attempt of a gang stands."""

    RUNNING = "running"
    """Its calls are under leases; none has raised."""
    ENDING = "ending"
    """A call raised: the others are waited for, so that what is told never depends on timing."""
    COMPLETE = "complete"
    """All calls are done: their results count."""
    RAISED = "raised"
    """All calls were reported, and some raised: no result counts."""
    BROKEN = "broken"
    """A member was lost, or the step is of no use any more: no result counts, leases are cancelled."""


GANG_TRANSITIONS: Mapping[tuple[GangState, str], GangState] = {
    (GangState.RUNNING, "call raised"): GangState.ENDING,
    (GangState.RUNNING, "all reported"): GangState.COMPLETE,
    (GangState.RUNNING, "broken up"): GangState.BROKEN,
    (GangState.ENDING, "call raised"): GangState.ENDING,
    (GangState.ENDING, "all reported"): GangState.RAISED,
    (GangState.ENDING, "broken up"): GangState.BROKEN,
}


def next_worker_state(worker: str, state: WorkerState, what: str) -> WorkerState:
    """Return the state that follows, or raise LocalProtocolError if there is none."""
    try:
        return WORKER_TRANSITIONS[state, what]
    except KeyError:
        raise LocalProtocolError(f"worker {worker}: {what!r} can't happen while {state.value}") from None


def next_pass_state(pass_id: int, state: PassState, what: str) -> PassState:
    """Return the state that follows, or raise LocalProtocolError if there is none."""
    try:
        return PASS_TRANSITIONS[state, what]
    except KeyError:
        raise LocalProtocolError(f"pass {pass_id}: {what!r} can't happen while {state.value}") from None


def next_gang_state(serial: int, state: GangState, what: str) -> GangState:
    """Return the state that follows, or raise LocalProtocolError if there is none."""
    try:
        return GANG_TRANSITIONS[state, what]
    except KeyError:
        raise LocalProtocolError(f"gang {serial}: {what!r} can't happen while {state.value}") from None
