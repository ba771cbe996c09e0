"""Streams of a run (`steps`, `as_completed`), with backpressure."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Generic, Literal, TypeVar

import anyio
from msgspec import Struct

from pipedist.core.misuse_hints import AsyncIterableOnly
from pipedist.core.types import Tree
from pipedist.errors import UsageError
from pipedist.plan import PassPlan, Plan
from pipedist.spec import RunSpec

ITEMS_MAX = 64  # number of items that can wait for a slow subscriber before the pass waits too

ITEM_BYTES_MAX = 64 * 2**20  # total size of these items, unless a single item is larger


class Step(Struct, frozen=True):
    """One step of a run, in step order.

    `step[NAME]` is a PerReplica for a run stage (None for an empty shard). For a reduce or gather it is the value
    of this step alone (None if the step made no call), whatever the stage's `per`: the value that `per: step`
    would give. The value over the whole run or epoch is in `Run.results`.

    Args:
        index: the step's number, over all epochs.
        epoch: its epoch.
        values: the values of the streamed stages, by name.

    Example:
        async for step in run.steps("scores", "total"):
            print(step.index, step["scores"][0], step["total"])
    """

    index: int
    epoch: int
    values: Mapping[str, Tree]

    def __getitem__(self, stage: str) -> Tree:
        """Return a stage's value for this step; see the class.

        Raises:
            KeyError: the stage is not streamed.
        """
        return self.values[stage]


class Part(Struct, frozen=True):
    """One replica's value of one step, in order of arrival.

    Args:
        stage: the run stage.
        step: the step's number, over all epochs.
        replica: its replica id.
        value: the value that the function returned.

    Example:
        async for part in run.as_completed("scores"):
            print(part.step, part.replica, part.value)
    """

    stage: str
    step: int
    replica: int
    value: Tree


class Subscription:
    """A bounded queue between the run and its subscriber."""

    def __init__(self, kind: Literal["steps", "parts"], stages: Sequence[str], plan: Plan) -> None:
        self.kind = kind
        self.stages = tuple(dict.fromkeys(stages))
        self.pass_ = _pass_of(plan, self.stages)
        self.streamed = {name: plan.spec.stages[name] for name in self.stages}
        for name, stage in self.streamed.items():
            if kind == "parts" and not isinstance(stage, RunSpec):
                raise UsageError(f"stage {name!r} has no value per replica: stream it with `steps`")
        self._items: deque[tuple[Step | Part, int]] = deque()
        self._bytes = 0
        self._changed: anyio.Event | None = None  # set with the next change; None if no task waits for one
        self._ended = False
        self._left = False
        self._released = False
        self._given = 0  # number of items that the subscriber has finished, because it asked for the next one
        self.mark = 0  # number of items put in so far

    def put(self, item: Step | Part, size: int) -> None:
        """Add an item of `size` bytes; drop it if the subscriber has left."""
        if self._left:
            return
        self.mark += 1
        self._items.append((item, size))
        self._bytes += size
        if self._changed is not None:
            self._wake()

    @property
    def is_full(self) -> bool:
        """Whether the run waits for the subscriber to take an item."""
        full = len(self._items) >= ITEMS_MAX or self._bytes >= ITEM_BYTES_MAX
        return bool(self._items) and full

    @property
    def waiting(self) -> int:
        return len(self._items)

    async def room(self) -> None:
        while self.is_full:
            await self._change()

    def has_passed(self, mark: int) -> bool:
        """Return whether the subscriber has finished the first `mark` items.

        A subscriber that has left may not have seen the waiting items, so a resumed run streams them again.
        """
        return self._released or self._given >= mark

    async def passed(self, mark: int) -> None:
        while not self.has_passed(mark):
            await self._change()

    def release(self) -> None:
        """End the stream for good: a resumed run does not repeat it either."""
        self._released = True
        self.leave()

    def leave(self) -> None:
        """End the stream, so that the run does not wait for the subscriber."""
        self._left = True
        self._items.clear()
        self._bytes = 0
        self._wake()

    def end(self) -> None:
        self._ended = True
        self._wake()

    async def take(self) -> Step | Part | None:
        self._given = self.mark - len(self._items)
        if not self._items:
            self._wake()
        while not self._items:
            if self._ended:
                return None
            await self._change()
        return self.take_waiting()

    def take_waiting(self) -> Step | Part | None:
        """Return the next item, None if none waits."""
        if not self._items:
            return None
        self._given = self.mark - len(self._items)
        item, size = self._items.popleft()
        self._bytes -= size
        if self._changed is not None:
            self._wake()
        return item

    async def _change(self) -> None:
        if self._changed is None:
            self._changed = anyio.Event()
        await self._changed.wait()

    def _wake(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None


Item = TypeVar("Item", Step, Part)


class Stream(AsyncIterableOnly, Generic[Item]):
    """A stream of items, as `Run.steps` and `Run.as_completed` return it.

    If a wait for an item is cancelled, the next wait gets the item. The run stops waiting for a stream that is
    closed with `aclose` or garbage collected.

    Args:
        begin: begins the run; called when the first item is requested.
        end: called after the last item; raises the error of the run, if it has one.
    """

    def __init__(self, begin: Callable[[], Subscription], end: Callable[[], None]) -> None:
        self._begin = begin
        self._end = end
        self._subscription: Subscription | None = None
        self._is_over = self._is_taking = False

    def __aiter__(self) -> Stream[Item]:
        return self

    async def __anext__(self) -> Item:
        """Return the next item.

        Raises:
            StopAsyncIteration: there is none.
            RuntimeError: another task is waiting for an item.
            Exception: as `Run.steps`.
        """
        if self._is_over:
            raise StopAsyncIteration
        if self._is_taking:
            raise RuntimeError(
                "two tasks are waiting for one stream of a run: read it in one task, and pass the items on"
            )
        if self._subscription is None:
            self._subscription = self._begin()
            self._loop = asyncio.get_running_loop()
        item: Any = self._subscription.take_waiting()  # the common case, cheaper
        if item is not None:
            return item  # type: ignore[no-any-return]  # as below
        self._is_taking = True
        try:
            item = await self._subscription.take()
        finally:
            self._is_taking = False
        if item is None:
            await self.aclose()
            self._end()
            raise StopAsyncIteration
        return item  # type: ignore[no-any-return]  # the subscription decides which kind it is

    async def aclose(self) -> None:
        """Close the stream; the run continues without it."""
        self._is_over = True
        if self._subscription is not None:
            self._subscription.leave()

    def __del__(self) -> None:
        if self._subscription is not None and not self._is_over:
            with suppress(RuntimeError):  # if the loop is closed, the run has ended
                self._loop.call_soon_threadsafe(self._subscription.leave)


def _pass_of(plan: Plan, stages: Sequence[str]) -> PassPlan:
    homes = {name: p for p in plan.passes for name in (*p.runs, *p.folds)}
    for name in stages:
        if name in plan.states:
            raise UsageError(
                f"stage {name!r} is a state: its final value is in `results`. Stream the stage that feeds it"
            )
        if name not in homes:
            raise UsageError(f"there is no stage {name!r} to stream; available: {', '.join(homes)}")
        if homes[name] != homes[stages[0]]:
            raise UsageError(
                f"stages {stages[0]!r} and {name!r} belong to different passes, and a stream follows one pass: "
                "open a second run for the other stage"
            )
    if not stages:
        raise UsageError("name at least one stage to stream")
    return homes[stages[0]]
