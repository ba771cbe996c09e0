"""What can happen to a worker, besides the scheduler's messages. Ids, sizes and times only."""

from __future__ import annotations

from dataclasses import dataclass

from pipedist.messages import Message


@dataclass(frozen=True, slots=True)
class Started:
    """The process is up and can talk."""


@dataclass(frozen=True, slots=True)
class Finished:
    """Calls [lo, hi) of the executing lease returned; the driver holds their encoded results."""

    lease: int
    lo: int
    hi: int
    busy_ns: int


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class SliceEnded:
    """The driver is done with an Execute, and has reported everything that it finished."""

    lease: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Nothing happened, but time passed."""


Event = Message | Started | Finished | Raised | SliceEnded | Tick
