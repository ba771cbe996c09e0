"""What a worker's machine wants done. The driver carries out each one, in order, and decides nothing."""

from __future__ import annotations

import enum

from msgspec import Struct

from pipedist.messages import AssignGang, Code, Exchange, Message, Relay, Results, Welcome


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
        cache_pass: the pass under whose key they are kept first; 0: they are not.
    """

    message: Results
    cache_pass: int = 0


class SendExchange(Struct, frozen=True):
    """Send a message with what the replicas of a gang's lease bring to a collective."""

    message: Exchange


class Join(Struct, frozen=True):
    """The worker is in: take over what the Welcome says."""

    welcome: Welcome


class OpenPass(Struct, frozen=True):
    """Keep the program that came with the message.

    Args:
        key: under which results of the pass are kept until they are durable; "": they are not.
        elsewhere: the scheduler's files are not this host's: see which of them are here (`events.DataFound`).
    """

    pass_id: int
    key: str = ""
    elsewhere: bool = False


class StoreCode(Struct, frozen=True):
    """Keep the files that came with the message; see `pipedist.worker.code_store`."""

    code: Code


class DropPass(Struct, frozen=True):
    """Let go of a pass: its functions, instances and reader."""

    pass_id: int


class StoreLease(Struct, frozen=True):
    """Keep the shards that came with the message.

    Args:
        gang: the assignment, where the lease is a member's part of a gang.
    """

    lease: int
    gang: AssignGang | None = None


class RecallLease(Struct, frozen=True):
    """The lease's calls are not executed: their results were kept."""

    lease: int


class ReleaseResults(Struct, frozen=True):
    """Calls of a pass below `before` are durable: do not keep their results any more."""

    pass_id: int
    before: int


class StoreRelay(Struct, frozen=True):
    """Keep what another member of the gang brought, until its lease waits for it or is dropped."""

    relay: Relay


class StoreState(Struct, frozen=True):
    """Keep the value that came with the message; see `pipedist.worker.state_store`."""

    space: int
    version: int


class ReleaseState(Struct, frozen=True):
    """Let go of every version of a state."""

    space: int


class DropLease(Struct, frozen=True):
    """Let go of a lease: its shards, what was relayed for it, and its Execute, if that has been given."""

    lease: int


class Execute(Struct, frozen=True):
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
