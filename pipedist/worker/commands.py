"""What a worker's machine wants done. The driver carries out each one, in order, and decides nothing."""

from __future__ import annotations

import enum

from pipedist.messages import AssignGang, Code, Exchange, Message, Relay, Results, Welcome
from pipedist.records import record


class Ending(enum.Enum):
    """Why a worker leaves."""

    STOPPED = "the scheduler told it to"
    REFUSED = "the scheduler did not let it in"
    UNFIT = "what was assigned needs another process; a new incarnation may join"
    FENCED = "the scheduler put it out; a new incarnation may join"
    UNANSWERED = "the scheduler did not answer"


@record
class Send:
    """Send a message that has no payload."""

    message: Message


@record
class SendResults:
    """Send a message with the results that were reported with it.

    Args:
        kept_of: the pass under whose key they are kept first; 0: they are not.
    """

    message: Results
    kept_of: int = 0


@record
class SendExchange:
    """Send a message with what the replicas of a gang's lease bring to a collective."""

    message: Exchange


@record
class Join:
    """The worker is in: take over what the Welcome says."""

    welcome: Welcome


@record
class OpenPass:
    """Keep the program that came with the message.

    Args:
        key: under which results of the pass are kept until they are durable; "": they are not.
        elsewhere: the scheduler's files are not this host's: see which of them are here (`events.Saw`).
    """

    pass_id: int
    key: str = ""
    elsewhere: bool = False


@record
class KeepCode:
    """Keep the files that came with the message; see `pipedist.worker.code_store`."""

    code: Code


@record
class DropPass:
    """Let go of a pass: its functions, instances and reader."""

    pass_id: int


@record
class KeepLease:
    """Keep the shards that came with the message.

    Args:
        gang: the assignment, where the lease is a member's part of a gang.
    """

    lease: int
    gang: AssignGang | None = None


@record
class RecallLease:
    """The lease's calls are not executed: their results were kept."""

    lease: int


@record
class LetGo:
    """Calls of a pass below `before` are durable: do not keep their results any more."""

    pass_id: int
    before: int


@record
class KeepRelay:
    """Keep what another member of the gang brought, until its lease waits for it or is dropped."""

    relay: Relay


@record
class KeepState:
    """Keep the value that came with the message; see `pipedist.worker.state_store`."""

    space: int
    version: int


@record
class ForgetState:
    """Let go of every version of a state."""

    space: int


@record
class DropLease:
    """Let go of a lease: its shards, what was relayed for it, and its Execute, if that has been given."""

    lease: int


@record
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


@record
class Leave:
    """End the process."""

    ending: Ending
    reason: str


Command = (
    Send
    | SendResults
    | SendExchange
    | Join
    | KeepCode
    | OpenPass
    | DropPass
    | KeepLease
    | RecallLease
    | LetGo
    | KeepRelay
    | KeepState
    | ForgetState
    | DropLease
    | Execute
    | Leave
)
