"""Runs of one function for a sequence of steps, some of them started in advance."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterable, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any, Final

import anyio

from pipedist.core import trees
from pipedist.core.misuse_hints import AsyncIterableOnly, AsyncOnly
from pipedist.core.types import Tree
from pipedist.datasets.element import kept
from pipedist.values import PerReplica

if TYPE_CHECKING:
    from pipedist.coordinator import PassHandle, Slots

STEPS_AHEAD: Final = 16  # default limit of steps that are started before the result of the first is taken


class PendingRun:
    """A run that was sent; `join` makes its result, which is fetched later, from those of its calls."""

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
        self._stack.enter_context(using).begin_step(arguments, self._on_result)

    def _on_result(self, results: list[Slots], error: BaseException | None) -> None:
        self._results, self._error = results, error
        self._done.set()

    async def result(self) -> Tree:
        """Wait for the result, and return it or raise as `Strategy.run`; call it once."""
        await self._done.wait()
        with self._stack:
            if self._error is not None:
                raise self._error
            return self._join(self._results)

    def drop(self) -> None:
        self._stack.close()


class StepRuns(AsyncOnly, AsyncIterableOnly):
    """The results of a function's runs, in the order of steps: `Strategy.run_steps`.

    To end it before the last step, use `aclose` or `async with`: results of started steps are discarded.

    Args:
        begin: starts a run on arguments; returns None if the run must not start in advance.
        run: runs the function on arguments.
        steps: the arguments of each step.
        ahead: limit of started steps.
    """

    def __init__(
        self,
        begin: Callable[[Sequence[Any]], PendingRun | None],
        run: Callable[[Sequence[Any]], Awaitable[Tree]],
        steps: AsyncIterable[Tree],
        ahead: int,
    ) -> None:
        if not hasattr(type(steps), "__aiter__"):
            raise TypeError(
                f"run_steps needs an async iterable of steps, such as a distributed dataset, not {steps!r}"
            )
        self._begin = begin
        self._run = run
        self._steps = aiter(steps)
        self._ahead = ahead
        self._waiting: deque[PendingRun | Exception | tuple[Any, ...]] = deque()
        """For each step that was read: its run, an error, or the arguments of a run to start later."""
        self._ended = False
        self._lock = anyio.Lock(fast_acquire=True)  # held by the caller that waits for the next result

    def __aiter__(self) -> StepRuns:
        return self

    async def __anext__(self) -> Tree:
        """Return the next step's result; after an exception of reading or running it, later steps are dropped."""
        async with self._lock:
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
            if self._waiting:  # it was not closed meanwhile
                self._waiting.popleft()
            return result

    async def _read(self) -> None:
        """Read a step, and start its run."""
        try:
            step = await anext(self._steps)
            args = step if type(step) is tuple else (step,)
            args = trees.tree_map(_kept, args)
            started = self._begin(args)
            self._waiting.append(args if started is None else started)
        except StopAsyncIteration:
            self._ended = True
        except Exception as error:  # raised after the results before it
            self._ended = True
            self._waiting.append(error)

    async def aclose(self) -> None:
        """Discard the started runs; there are no more results."""
        self._ended = True
        while self._waiting:
            run = self._waiting.popleft()
            if isinstance(run, PendingRun):
                run.drop()
        close = getattr(self._steps, "aclose", None)
        if close is not None:
            await close()

    async def __aenter__(self) -> StepRuns:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.aclose()


def _kept(leaf: trees.Leaf) -> trees.Leaf:
    """Return a leaf that stays valid while later steps are read."""
    if isinstance(leaf, PerReplica):
        return type(leaf)([trees.tree_map(kept, component) for component in leaf.components])
    return kept(leaf)
