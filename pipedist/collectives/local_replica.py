"""The replicas of a gang that live in this process: what each of them is doing."""

from __future__ import annotations

import copy
import enum
import threading

from pipedist.collectives.member import Merge
from pipedist.collectives.signatures import Call
from pipedist.errors import RemoteError
from pipedist.program import Tree


class State(enum.Enum):
    """What a replica does.

        NEW -> RUNNING -> WAITING, OUTSIDE -> READY -> RUNNING -> ... -> ENDED

    RUNNING: it has the baton. WAITING: it has called a collective, which not all have called. OUTSIDE: it
    waits for something else, without the baton. READY: it could go on, and waits for the baton.
    """

    NEW = enum.auto()
    READY = enum.auto()
    RUNNING = enum.auto()
    WAITING = enum.auto()
    OUTSIDE = enum.auto()
    ENDED = enum.auto()


class LocalReplica:
    """One of them.

    Args:
        number: its id.
    """

    __slots__ = ("call", "error", "failed", "is_stalled", "merge", "number", "result", "state", "turn")

    def __init__(self, number: int) -> None:
        self.number = number
        self.state = State.NEW
        self.turn = threading.Lock()
        """Released to give it the baton."""
        self.turn.acquire()
        self.call: Call | None = None
        """What it waits for; only while WAITING."""
        self.result: Tree = None
        """Of its last collective, until it takes it."""
        self.error: BaseException | None = None
        """The same, where that failed."""
        self.merge: Merge | None = None
        """A merged function that it is to call; replica 0's only."""
        self.failed = False
        """It ended by raising; only once ENDED."""
        self.is_stalled = False
        """Its collective's timeout has passed once."""

    def take(self) -> Tree:
        """Return the result of its collective, or raise what became of it."""
        result, error = self.result, self.error
        self.result = self.error = None
        if error is not None:
            raise error
        return result


def another(error: BaseException) -> BaseException:
    """Return an error like this one, for another replica: tracebacks are of one thread."""
    try:
        return copy.copy(error)
    except Exception:
        return RemoteError(f"{type(error).__name__}: {error}")
