"""What a scheduled closure will return."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Generator
from typing import Any, NoReturn

import anyio

from pipedist.core.types import Tree
from pipedist.errors import PipedistError
from pipedist.strategy.context import NotForReplicas
from pipedist.strategy.parameters import CommitOrder


class ClosureCancelled(PipedistError, concurrent.futures.CancelledError):
    """A closure was dropped because one that was scheduled before it failed: its `__cause__`.

    Nothing of it counts, even if it was executed. (tf.distribute raises tf.errors.CancelledError.)
    """


class RemoteValue:
    """The future of a closure (tf.distribute.coordinator.RemoteValue); made by `schedule`.

    `await value`, or `await value.fetch()`, gives what the closure returned. It can also be an argument of
    a closure that is scheduled later, which then gets what this one returned.
    """

    __slots__ = ("_done", "_error", "_result", "_turns", "label", "number")

    def __init__(self, number: int, label: str, turns: CommitOrder) -> None:
        self.number = number
        """How many closures were scheduled before."""
        self.label = label
        """The function's name."""
        self._turns = turns
        """Its strategy\'s."""
        self._done = anyio.Event()
        self._result: Tree = None
        self._error: Exception | None = None

    @property
    def done(self) -> bool:
        """Whether the closure's turn is over, however it ended."""
        return self._done.is_set()

    async def fetch(self) -> Tree:
        """Wait for the closure's turn, and return what it returned: NumPy arrays, read-only.

        Raises:
            CallError: it raised; `__cause__` is its exception.
            ClosureCancelled: one that was scheduled before it failed.
            OutOfRangeError: the per-worker dataset that it reads has no more elements.
            RunCancelled, WorkersLost: the cluster was closed, or has failed.
        """
        await self._done.wait()
        self._turns.see(self.number)
        return self._outcome()

    def __await__(self) -> Generator[Any, Any, Tree]:
        return self.fetch().__await__()

    def _outcome(self) -> Tree:
        """Return or raise what the closure did; its turn is over."""
        if self._error is not None:
            raise self._error
        return self._result

    def _resolve(self, result: Tree) -> None:
        """The closure has returned."""
        self._result = result
        self._done.set()

    def _fail(self, error: Exception) -> None:
        """The closure has not returned."""
        self._error = error
        self._done.set()

    def __reduce__(self) -> NoReturn:
        raise NotForReplicas("a RemoteValue can't be captured by a closure: give it as an argument")

    def __repr__(self) -> str:
        state = "pending" if not self.done else "failed" if self._error is not None else "done"
        return f"<RemoteValue of closure {self.number}, {self.label}: {state}>"
