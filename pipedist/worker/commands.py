"""Outputs of the worker's state machine. The driver executes them in order, and makes no decisions."""

from __future__ import annotations

import enum

from msgspec import Struct

from pipedist.protocol import messages as msg


class Ending(enum.Enum):
    """The reason for which a worker leaves."""

    STOPPED = "stopped by the driver"
    REFUSED = "rejected by the driver"
    UNFIT = "the assignment needs a new process; the next incarnation may join"
    FENCED = "evicted by the driver; the next incarnation may join"
    UNANSWERED = "the driver did not reply"


class Send(Struct, frozen=True):
    message: msg.Message


class SendResults(Struct, frozen=True):
    """Send a message with the results that the driver has just reported."""

    message: msg.Results | msg.Elements
    cache_pass: int = 0  # they are cached first under the key of this pass; 0: no caching


class SendExchange(Struct, frozen=True):
    """Send a message with the replicas' contribution to a collective."""

    message: msg.Exchange


Applied = (
    msg.Welcome
    | msg.Code
    | msg.Bind
    | msg.Unbind
    | msg.Assign
    | msg.AssignGang
    | msg.Recall
    | msg.Committed
    | msg.Quota
    | msg.Relay
    | msg.StateVersion
    | msg.DropState
)


class Apply(Struct, frozen=True):
    """Store or drop what the message says; its payload came with the message that is being handled."""

    message: Applied


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


class Begin(Struct, frozen=True):
    """Begin the calls [lo, hi) of a lease beside all others; it ends with its `DropLease`."""

    lease: int
    pass_id: int
    lo: int
    hi: int


class Leave(Struct, frozen=True):
    ending: Ending
    reason: str


Command = Send | SendResults | SendExchange | Apply | DropLease | Execute | Begin | Leave
