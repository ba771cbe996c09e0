"""Runs of one function for step after step, some of them begun before their turn."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterable, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import anyio

from pipedist.core import trees
from pipedist.core.misuse_hints import AsyncIterableOnly, AsyncOnly
from pipedist.core.types import Tree
from pipedist.datasets.element import kept
from pipedist.values import PerReplica

if TYPE_CHECKING:
    from pipedist.coordinator import PassHandle, Slots

STEPS_AHEAD: Final = 16
"""Steps that are begun before the first one's result is taken, if nothing else is said."""


class PendingRun:
    """A run that is sent, and whose result is asked for later.

    Args:
        using: gives the pass that executes it, and keeps it open.
        arguments: one a replica.
        join: makes the run's result of what its calls sent back.
    """

    def __init__(
        self,
        using: AbstractContextManager[PassHandle],
        arguments: list[Tree],
        join: Callable[[list[Slots]], Tree],
    ) -> None:
        self._stack = ExitStack()
        self._done = anyio.Event()
        self._results: list[Slots] = []
        self._error: BaseException | None = None
        self._join = join
        self._stack.enter_context(using).begin_step(arguments, self._answer)

    def _answer(self, results: list[Slots], error: BaseException | None) -> None:
        self._results, self._error = results, error
        self._done.set()

    async def result(self) -> Tree:
        """Wait for the result, and return it; once.

        Raises:
            Exception: whatever `Strategy.run` raises.
        """
        await self._done.wait()
        with self._stack:
            if self._error is not None:
                raise self._error
            return self._join(self._results)

    def drop(self) -> None:
        """Give it up: nobody asks for its result."""
        self._stack.close()


class StepRuns(AsyncOnly, AsyncIterableOnly):
    """The results of a function's runs, in the order of steps: `Strategy.run_steps`.

    Leave it with `aclose`, or `async with`, to end it before the last step: what is begun is dropped.

    Args:
        begin: begins a run: (function, its arguments); None where it must not begin before its turn.
        run: runs the function on arguments, now.
        fn: the function.
        steps: where its arguments come from.
        ahead: how many steps are begun at most.
    """

    def __init__(
        self,
        begin: Callable[[Callable[..., Any], Sequence[Any]], PendingRun | None],
        run: Callable[[Sequence[Any]], Awaitable[Tree]],
        fn: Callable[..., Any],
        steps: AsyncIterable[Tree],
        ahead: int,
    ) -> None:
        if not hasattr(type(steps), "__aiter__"):
            raise TypeError(
                f"run_steps needs an async iterable of steps, not {steps!r}: a distributed dataset"
            )
        self._begin = begin
        self._run = run
        self._fn = fn
        self._steps = aiter(steps)
        self._ahead = ahead
        self._waiting: deque[PendingRun | Exception | tuple[Any, ...]] = deque()
        """Of each step that was read: its run, why there is none, or the arguments of one to come."""
        self._ended = False
        self._lock = anyio.Lock(fast_acquire=True)
        """Held by who waits for a result; others wait for the ones after it."""

    def __aiter__(self) -> StepRuns:
        return self

    async def __anext__(self) -> Tree:
        """Return the next step's result.

        Raises:
            StopAsyncIteration: there are no more steps.
            Exception: whatever reading the step or running it raised; the steps after it are dropped.
        """
        async with self._lock:
            return await self._next()

    async def _next(self) -> Tree:
        while not self._ended and len(self._waiting) < self._ahead:
            await self._read()
        if not self._waiting:
            raise StopAsyncIteration
        first = self._waiting[0]
        try:
            if isinstance(first, Exception):
                raise first
            result = await (first.result() if isinstance(first, PendingRun) else self._run(first))
        except Exception:
            await self.aclose()
            raise
        if self._waiting:  # else it was closed meanwhile
            self._waiting.popleft()
        return result

    async def _read(self) -> None:
        """Read a step, and begin its run."""
        try:
            step = await anext(self._steps)
            args = step if type(step) is tuple else (step,)
            args = trees.tree_map(_kept, args)
            begun = self._begin(self._fn, args)
            self._waiting.append(args if begun is None else begun)
        except StopAsyncIteration:
            self._ended = True
        except Exception as error:  # it is told when its turn has come
            self._ended = True
            self._waiting.append(error)

    async def aclose(self) -> None:
        """Drop what is begun; there are no more results."""
        self._ended = True
        while self._waiting:
            left = self._waiting.popleft()
            if isinstance(left, PendingRun):
                left.drop()
        close = getattr(self._steps, "aclose", None)
        if close is not None:
            await close()

    async def __aenter__(self) -> StepRuns:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()


def _kept(leaf: trees.Leaf) -> trees.Leaf:
    """Return a leaf of a step that can wait: the next steps are read before this one is sent."""
    if isinstance(leaf, PerReplica):
        return type(leaf)([trees.tree_map(kept, component) for component in leaf.components])
    return kept(leaf)
