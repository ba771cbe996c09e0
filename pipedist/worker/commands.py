"""Outputs of the worker's state machine. The driver executes them in order, and makes no decisions."""

from __future__ import annotations

import enum

from msgspec import Struct

from pipedist.protocol.messages import AssignGang, Code, Exchange, Message, Relay, Results, Welcome


class Ending(enum.Enum):
    """The reason for which a worker leaves."""

    STOPPED = "stopped by the scheduler"
    REFUSED = "rejected by the scheduler"
    UNFIT = "the assignment needs a new process; the next incarnation may join"
    FENCED = "evicted by the scheduler; the next incarnation may join"
    UNANSWERED = "the scheduler did not reply"


class Send(Struct, frozen=True):
    """Send a message without payload."""

    message: Message


class SendResults(Struct, frozen=True):
    """Send a message with the results that the driver has just reported.

    Args:
        cache_pass: the pass under whose key the results are cached first; 0: no caching.
    """

    message: Results
    cache_pass: int = 0


class SendExchange(Struct, frozen=True):
    """Send a message with the replicas' contribution to a collective."""

    message: Exchange


class Join(Struct, frozen=True):
    """Apply the settings in the scheduler's Welcome."""

    welcome: Welcome


class OpenPass(Struct, frozen=True):
    """Store the program that came with the message.

    Args:
        key: cache results of the pass under this key until they are durable; "": do not cache them.
        elsewhere: the scheduler runs on another host: check for the data files here (`events.DataFound`).
    """

    pass_id: int
    key: str = ""
    elsewhere: bool = False


class StoreCode(Struct, frozen=True):
    """Store the files that came with the message (`code_archive.CodeStore`)."""

    code: Code


class DropPass(Struct, frozen=True):
    """Drop a pass: its functions, instances and reader."""

    pass_id: int


class StoreLease(Struct, frozen=True):
    """Store the shards that came with the message.

    Args:
        gang: the assignment, if the lease is one member's part of a gang.
    """

    lease: int
    gang: AssignGang | None = None


class RecallLease(Struct, frozen=True):
    """Report the lease's calls from the cache instead of executing them."""

    lease: int


class ReleaseResults(Struct, frozen=True):
    """Drop cached results of a pass's calls below `before`: they are durable."""

    pass_id: int
    before: int


class StoreRelay(Struct, frozen=True):
    """Store another gang member's contribution until its lease uses it."""

    relay: Relay


class StoreState(Struct, frozen=True):
    """Store the value that came with the message (`inputs.StateStore`)."""

    space: int
    version: int


class ReleaseState(Struct, frozen=True):
    """Drop every version of a state."""

    space: int


class DropLease(Struct, frozen=True):
    """Drop a lease: its shards, relayed contributions, and its Execute, if any."""

    lease: int


class Execute(Struct, frozen=True):
    """Execute a slice of a lease, from its first unreported call on.

    The slice begins when all received messages are handled, and ends with `SliceEnded`.

    Args:
        slice_s: start no call after this time, seconds.
        slice_bytes: start no call once results of this size are waiting.
    """

    lease: int
    pass_id: int
    lo: int
    hi: int
    slice_s: float
    slice_bytes: int


class Leave(Struct, frozen=True):
    """End the process."""

    ending: Ending
    reason: str


Command = (
    Send
    | SendResults
    | SendExchange
    | Join
    | StoreCode
    | OpenPass
    | DropPass
    | StoreLease
    | RecallLease
    | ReleaseResults
    | StoreRelay
    | StoreState
    | ReleaseState
    | DropLease
    | Execute
    | Leave
)
