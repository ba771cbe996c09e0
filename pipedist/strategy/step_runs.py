"""Runs of one function for a sequence of steps, some of them started in advance."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import AsyncIterable, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import anyio

from pipedist.core import trees
from pipedist.core.misuse_hints import AsyncIterableOnly, AsyncOnly
from pipedist.core.types import Tree
from pipedist.datasets.element import kept
from pipedist.errors import CallError, LocalProtocolError
from pipedist.strategy.passes import SLOT, UsedPass
from pipedist.values import PerReplica

if TYPE_CHECKING:
    from pipedist.coordinator import PassHandle, Slots

STEPS_AHEAD: Final = 16  # default limit of steps that are started before the result of the first is taken
GROUP_STEPS_MAX: Final = 8
"""Maximum number of steps in one message to each worker, and of results in one message back."""
GROUP_S: Final = 0.01  # target amount of work in one message


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
        self.began_s = time.monotonic()
        self.ended_s = math.inf
        self._stack.enter_context(using).begin_step(arguments, self._on_result)

    def _on_result(self, results: list[Slots], error: BaseException | None) -> None:
        self._results, self._error = results, error
        self.ended_s = time.monotonic()
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


class PendingGroup:
    """Runs that were sent together, as one step of the scheduler.

    The results are those of runs that are sent one by one. A step that raised, or called a collective, and all steps
    after it are executed again, alone: `join` makes a run's result from those of its calls, given its place;
    `run_alone` returns the result of a run that was not executed.
    """

    def __init__(
        self,
        using: UsedPass,
        values: list[Tree],  # for each replica, the arguments of each run
        steps: int,
        join: Callable[[int, list[Slots]], Tree],
        run_alone: Callable[[int, int], Awaitable[Tree]],
    ) -> None:
        self._stack = ExitStack()
        self._done = anyio.Event()
        self._results: list[Any] = []  # by replica: a list of the results of the steps that it has executed
        self._error: BaseException | None = None
        self._join = join
        self._run_alone = run_alone
        self._left = self.steps = steps
        self._using = using
        self.began_s = time.monotonic()
        self.ended_s = math.inf
        handle = self._stack.enter_context(using)
        self._first = handle.next_number
        handle.begin_step(values, self._on_result, steps=steps)

    def _on_result(self, results: list[Slots], error: BaseException | None) -> None:
        self._error = error
        self._results = [slots.get(SLOT) for slots in results]
        self.ended_s = time.monotonic()
        self._done.set()

    async def result(self, place: int) -> Tree:
        """Wait for the result of a run, and return it or raise as `Strategy.run`; call it once, in order."""
        await self._done.wait()
        self._left -= 1
        with self._stack if not self._left else nullcontext():
            if self._error is not None and not isinstance(self._error, CallError):
                raise self._error
            executed = 0 if self._error is not None else self._executed()
            if executed < self.steps:
                self._using.forbid_groups()
            if place < executed:
                return self._join(place, [{SLOT: own[place]} for own in self._results])
            return await self._run_alone(place, self._first + place)

    def _executed(self) -> int:
        """Return the number of steps that all replicas have executed."""
        if not all(type(own) is list and len(own) <= self.steps for own in self._results):
            raise LocalProtocolError("the results of several steps are not lists of them")
        return min(map(len, self._results))

    def drop(self) -> None:
        self._stack.close()


class StepRuns(AsyncOnly, AsyncIterableOnly):
    """The results of a function's runs, in the order of steps: `Strategy.run_steps`.

    To end it before the last step, use `aclose` or `async with`: results of started steps are discarded.

    Short steps are sent in groups: the workers get several in one message, and return their results in one.

    Args:
        begin: starts a run on arguments; returns None if the run must not start in advance.
        begin_group: starts runs on the arguments of several steps; returns None if they must be started one by one.
        run: runs the function on arguments.
        steps: the arguments of each step.
        ahead: limit of started steps.
    """

    def __init__(
        self,
        begin: Callable[[Sequence[Any]], PendingRun | None],
        begin_group: Callable[[Sequence[tuple[Any, ...]]], PendingGroup | None],
        run: Callable[[Sequence[Any]], Awaitable[Tree]],
        steps: AsyncIterable[Tree],
        ahead: int,
    ) -> None:
        if not hasattr(type(steps), "__aiter__"):
            raise TypeError(
                f"run_steps needs an async iterable of steps, such as a distributed dataset, not {steps!r}"
            )
        self._begin = begin
        self._begin_group = begin_group
        self._run = run
        self._steps = aiter(steps)
        self._ahead = ahead
        self._waiting: deque[PendingRun | _Place | Exception | tuple[Any, ...]] = deque()
        """For each started step: its run, or place in a group; an error; or the arguments of a run to start later."""
        self._group: list[tuple[Any, ...]] = []  # the arguments of steps that were read, and not started
        self._step_s: float | None = None  # moving mean of the time of a step
        self._last_end_s = 0.0  # when the latest step whose result was taken had ended
        self._ended = False
        self._lock = anyio.Lock(fast_acquire=True)  # held by the caller that waits for the next result

    def __aiter__(self) -> StepRuns:
        return self

    async def __anext__(self) -> Tree:
        """Return the next step's result; after an exception of reading or running it, later steps are dropped."""
        async with self._lock:
            while not self._ended and len(self._waiting) + self._group_steps <= self._ahead:
                await self._read()
            if not self._waiting:
                raise StopAsyncIteration
            first = self._waiting[0]
            try:
                if isinstance(first, Exception):
                    raise first
                if isinstance(first, PendingRun):
                    result = await first.result()
                    self._measure(first, 1)
                elif isinstance(first, _Place):
                    result = await first.group.result(first.place)
                    if first.place == 0:
                        self._measure(first.group, first.group.steps)
                else:
                    result = await self._run(first)
            except Exception:
                await self.aclose()
                raise
            if self._waiting:  # it was not closed meanwhile
                self._waiting.popleft()
            return result

    @property
    def _group_steps(self) -> int:
        """The number of steps to start next: about `GROUP_S` of work, at most half of those that are started."""
        if self._step_s is None:
            return 1
        return max(1, min(GROUP_STEPS_MAX, self._ahead // 2, int(GROUP_S / max(self._step_s, 1e-9))))

    def _measure(self, run: PendingRun | PendingGroup, steps: int) -> None:
        took_s = (run.ended_s - max(run.began_s, self._last_end_s)) / steps
        self._step_s = took_s if self._step_s is None else 0.7 * self._step_s + 0.3 * took_s
        self._last_end_s = run.ended_s

    async def _read(self) -> None:
        """Read the steps of a group, and start their runs."""
        error: Exception | None = None
        steps = self._group_steps
        try:
            while len(self._group) < steps:
                step = await anext(self._steps)
                args = step if type(step) is tuple else (step,)
                self._group.append(trees.tree_map(_kept, args))
        except StopAsyncIteration:
            self._ended = True
        except Exception as raised:  # raised after the results before it
            self._ended, error = True, raised
        group, self._group = self._group, []
        try:
            self._start(group)
        except Exception as raised:
            self._ended, error = True, raised
        if error is not None:
            self._waiting.append(error)

    def _start(self, group: list[tuple[Any, ...]]) -> None:
        if len(group) > 1 and (started := self._begin_group(group)) is not None:
            self._waiting.extend(_Place(started, place) for place in range(len(group)))
            return
        for args in group:
            run = self._begin(args)
            self._waiting.append(args if run is None else run)

    async def aclose(self) -> None:
        """Discard the started runs; there are no more results."""
        self._ended = True
        while self._waiting:
            run = self._waiting.popleft()
            if isinstance(run, PendingRun):
                run.drop()
            elif isinstance(run, _Place):
                run.group.drop()
        close = getattr(self._steps, "aclose", None)
        if close is not None:
            await close()

    async def __aenter__(self) -> StepRuns:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.aclose()


class _Place(NamedTuple):
    group: PendingGroup
    place: int  # of the step in the group


def _kept(leaf: trees.Leaf) -> trees.Leaf:
    """Return a leaf that stays valid while later steps are read."""
    if isinstance(leaf, PerReplica):
        return type(leaf)([trees.tree_map(kept, component) for component in leaf.components])
    return kept(leaf)
