"""What a worker's machine wants done. The driver carries out each one, in order, and decides nothing."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from pipedist.messages import Message, Results, Welcome


class Ending(enum.Enum):
    """Why a worker leaves."""

    STOPPED = "the scheduler told it to"
    REFUSED = "the scheduler did not let it in"
    FENCED = "the scheduler put it out; a new incarnation may join"
    UNANSWERED = "the scheduler did not answer"


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message that has no payload."""

    message: Message


@dataclass(frozen=True, slots=True)
class SendResults:
    """Send a message with the results that were reported with it."""

    message: Results


@dataclass(frozen=True, slots=True)
class Join:
    """The worker is in: take over what the Welcome says."""

    welcome: Welcome


@dataclass(frozen=True, slots=True)
class OpenPass:
    """Keep the program that came with the message."""

    pass_id: int


@dataclass(frozen=True, slots=True)
class DropPass:
    """Let go of a pass: its functions, instances and reader."""

    pass_id: int


@dataclass(frozen=True, slots=True)
class KeepLease:
    """Keep the shards that came with the message."""

    lease: int


@dataclass(frozen=True, slots=True)
class DropLease:
    """Let go of a lease: its shards, and its Execute, if that has been given."""

    lease: int


@dataclass(frozen=True, slots=True)
class Execute:
    """Execute a slice of a lease: from its first call that is not reported, at most up to `hi`.

    It is begun when there is no message left to handle, and then stands until `SliceEnded`.

    Args:
        slice_s: begin no call after this time, seconds.
        slice_bytes: begin no call when this much has gathered.
    """

    lease: int
    pass_id: int
    lo: int
    hi: int
    slice_s: float
    slice_bytes: int


@dataclass(frozen=True, slots=True)
class Leave:
    """End the process."""

    ending: Ending
    reason: str


Command = Send | SendResults | Join | OpenPass | DropPass | KeepLease | DropLease | Execute | Leave
