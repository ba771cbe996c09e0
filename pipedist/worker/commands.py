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
    message: Message


class SendResults(Struct, frozen=True):
    """Send a message with the results that the driver has just reported."""

    message: Results
    cache_pass: int = 0  # they are cached first under the key of this pass; 0: no caching


class SendExchange(Struct, frozen=True):
    """Send a message with the replicas' contribution to a collective."""

    message: Exchange


class Join(Struct, frozen=True):
    """Apply the settings in the scheduler's Welcome."""

    welcome: Welcome


class OpenPass(Struct, frozen=True):
    """Store the program that came with the message."""

    pass_id: int
    key: str = ""  # results are cached under it until they are durable; "": no caching
    elsewhere: bool = False  # the scheduler runs on another host: look for the data files (`DataFound`)


class StoreCode(Struct, frozen=True):
    """Store the files that came with the message (`code_archive.CodeStore`)."""

    code: Code


class DropPass(Struct, frozen=True):
    """Drop a pass: its functions, instances and reader."""

    pass_id: int


class StoreLease(Struct, frozen=True):
    """Store the shards that came with the message; `gang`: its assignment if it belongs to one."""

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
    """

    lease: int
    pass_id: int
    lo: int
    hi: int
    slice_s: float  # start no call after this time
    slice_bytes: int  # start no call once results of this size are waiting


class Leave(Struct, frozen=True):
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
