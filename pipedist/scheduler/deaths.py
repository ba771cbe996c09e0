"""How workers were lost under a call, and which of it is told of the call."""

from __future__ import annotations

from msgspec import Struct


class Death(Struct, frozen=True):
    """How a worker was lost, and what that means for the call that it ran.

    Args:
        cause: for people.
        stage, timed_out, retries, quarantine: see `events.WorkerLost`.
    """

    cause: str
    stage: str = ""
    timed_out: bool = False
    retries: int = 0
    quarantine: bool = False


def likeliest(named: list[Death], death: Death) -> Death:
    """Return what is told of a call after one more death under it: what most of them were.

    A worker may also be killed from outside while it runs a call that kills; and of one that went with its
    fork server nobody knows the stage. What comes of the call must not hang on when that was.

    Args:
        named: the deaths before of which the stage is known; this one is added, if its own is.
        death: the latest.
    """
    if death.stage:
        named.append(death)
    return max(named, key=named.count, default=death)
