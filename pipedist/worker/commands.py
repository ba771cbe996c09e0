"""Outputs of a worker's state machine. The driver executes each one, in order, and decides nothing."""

from __future__ import annotations

import enum

from msgspec import Struct

from pipedist.protocol.messages import AssignGang, Code, Exchange, Message, Relay, Results, Welcome


class Ending(enum.Enum):
    """Why a worker leaves."""

    STOPPED = "the scheduler told it to"
    REFUSED = "the scheduler did not let it in"
    UNFIT = "what was assigned needs another process; a new incarnation may join"
    FENCED = "the scheduler put it out; a new incarnation may join"
    UNANSWERED = "the scheduler did not answer"


class Send(Struct, frozen=True):
    """Send a message that has no payload."""

    message: Message


class SendResults(Struct, frozen=True):
    """Send a message with the results that were reported with it.

    Args:
        cache_pass: the pass under whose key the results are cached first; 0: they are not cached.
    """

    message: Results
    cache_pass: int = 0


class SendExchange(Struct, frozen=True):
    """Send a message with the contribution of a gang lease's replicas to a collective."""

    message: Exchange


class Join(Struct, frozen=True):
    """Apply the settings of the scheduler's Welcome."""

    welcome: Welcome


class OpenPass(Struct, frozen=True):
    """Keep the program that came with the message.

    Args:
        key: cache results of the pass under this key until they are durable; "": do not cache them.
        elsewhere: the scheduler's files are not this host's: check which are here (`events.DataFound`).
    """

    pass_id: int
    key: str = ""
    elsewhere: bool = False


class StoreCode(Struct, frozen=True):
    """Store the files that came with the message (`pipedist.worker.code_store`)."""

    code: Code


class DropPass(Struct, frozen=True):
    """Drop a pass: its functions, instances and reader."""

    pass_id: int


class StoreLease(Struct, frozen=True):
    """Store the shards that came with the message.

    Args:
        gang: the assignment, if the lease is a member's part of a gang.
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
    """Store another gang member's contribution until its lease needs it or is dropped."""

    relay: Relay


class StoreState(Struct, frozen=True):
    """Store the value that came with the message (`pipedist.worker.state_store`)."""

    space: int
    version: int


class ReleaseState(Struct, frozen=True):
    """Drop every version of a state."""

    space: int


class DropLease(Struct, frozen=True):
    """Drop a lease: its shards, contributions relayed for it, and its Execute, if there is one."""

    lease: int


class Execute(Struct, frozen=True):
    """Execute a slice of a lease: from its first call that is not reported, at most up to `hi`.

    The slice begins when no message is left to handle, and ends with `SliceEnded`.

    Args:
        slice_s: begin no call after this time, seconds.
        slice_bytes: begin no call after results of this size.
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
