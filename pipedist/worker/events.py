"""What can happen to a worker, besides the scheduler's messages. Ids, sizes and times only."""

from __future__ import annotations

from pipedist.messages import Message
from pipedist.records import record


@record
class Started:
    """The process is up and can talk."""


@record
class Saw:
    """The data files of a pass are here, the very ones."""

    pass_id: int


@record
class Finished:
    """Calls [lo, hi) of the executing lease returned; the driver holds their encoded results."""

    lease: int
    lo: int
    hi: int
    busy_ns: int


@record
class Raised:
    """A call of the executing lease raised, or its result can't be sent; see `messages.Failed`."""

    lease: int
    call: int
    stage: str
    module: str
    name: str
    text: str
    traceback: str
    retryable: bool
    aborted: bool = False


@record
class Brought:
    """The executing lease's replicas have come to collective `number`; the driver holds what they bring."""

    lease: int
    number: int


@record
class Missed:
    """A collective of the executing lease has waited for its `timeout_s`; see `messages.Stalled`."""

    lease: int
    members: tuple[str, ...]
    text: str


@record
class Unfit:
    """What was assigned needs another process than this one."""

    reason: str


@record
class Leaving:
    """The worker was asked to leave by whoever runs it; what it has finished is reported."""

    reason: str


@record
class SliceEnded:
    """The driver is done with an Execute, and has reported everything that it finished."""

    lease: int


@record
class Tick:
    """Nothing happened, but time passed."""


Event = Message | Started | Saw | Finished | Raised | Brought | Missed | Unfit | Leaving | SliceEnded | Tick
