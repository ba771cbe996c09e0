"""Streams of a run: what `steps` and `as_completed` hand to the user, holding the valve."""

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

ITEMS_MAX = 64
"""Items that wait for a slow subscriber; then the pass waits too."""

ITEM_BYTES_MAX = 64 * 2**20
"""Their bytes, unless a single item has more."""


class Step(Struct, frozen=True):
    """One step of a run, in step order.

    `step[NAME]` is a PerReplica for a run stage (None in the place of an empty shard), and for a
    reduce or gather THIS STEP's own value (None where the step made no call), whatever the
    stage's `per`: the value that `per: step` would give. The value over the whole run or epoch
    is in `Run.results`.

    Args:
        index: the step's number, over all epochs.
        epoch: its epoch.
        values: the values of the stages that are streamed, by name.
    """

    index: int
    epoch: int
    values: Mapping[str, Tree]

    def __getitem__(self, stage: str) -> Tree:
        """Return a stage's value of this step, see the class.

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
        value: what the function returned.
    """

    stage: str
    step: int
    replica: int
    value: Tree


class Subscription:
    """A bounded queue between the run and its subscriber.

    Args:
        kind: whole steps in order, or parts as they arrive.
        stages: what is subscribed.
        plan: of the run.

    Raises:
        UsageError: there is no such stage, or they are not made in one pass.
    """

    def __init__(self, kind: Literal["steps", "parts"], stages: Sequence[str], plan: Plan) -> None:
        self.kind = kind
        self.stages = tuple(dict.fromkeys(stages))
        self.pass_ = _pass_of(plan, self.stages)
        self.streamed = {name: plan.spec.stages[name] for name in self.stages}
        for name, stage in self.streamed.items():
            if kind == "parts" and not isinstance(stage, RunSpec):
                raise UsageError(f"{name!r} has no value per replica: `steps` streams it")
        self._items: deque[tuple[Step | Part, int]] = deque()
        self._bytes = 0
        self._changed: anyio.Event | None = None
        """What somebody waits for; None while nobody does."""
        self._ended = False
        self._left = False
        self._released = False
        self._given = 0
        """Items that were taken, and asked beyond."""
        self.mark = 0
        """Items that were put in so far."""

    def put(self, item: Step | Part, size: int) -> None:
        """Add an item; dropped if nobody reads any more.

        Args:
            size: its bytes.
        """
        if self._left:
            return
        self.mark += 1
        self._items.append((item, size))
        self._bytes += size
        self._wake()

    @property
    def is_full(self) -> bool:
        """Whether the run waits for the subscriber to take an item."""
        full = len(self._items) >= ITEMS_MAX or self._bytes >= ITEM_BYTES_MAX
        return bool(self._items) and full

    @property
    def waiting(self) -> int:
        """How many items nobody has taken."""
        return len(self._items)

    async def room(self) -> None:
        """Return as soon as there is room for an item."""
        while self.is_full:
            await self._change()

    def has_passed(self, mark: int) -> bool:
        """Return whether the subscriber has asked for more than the first `mark` items, or for the results.

        One that has left is not known to have seen what waits here: a run that is resumed streams it.
        """
        return self._released or self._given >= mark

    async def passed(self, mark: int) -> None:
        """Return as soon as `has_passed`."""
        while not self.has_passed(mark):
            await self._change()

    def release(self) -> None:
        """Nobody reads any more, and nobody will when the run is resumed."""
        self._released = True
        self.leave()

    def leave(self) -> None:
        """Nobody reads any more: the run need not wait."""
        self._left = True
        self._items.clear()
        self._bytes = 0
        self._wake()

    def end(self) -> None:
        """There is no more to come."""
        self._ended = True
        self._wake()

    async def take(self) -> Step | Part | None:
        """Return the next item, None at the end."""
        self._given = self.mark - len(self._items)
        if not self._items:
            self._wake()
        while not self._items:
            if self._ended:
                return None
            await self._change()
        item, size = self._items.popleft()
        self._bytes -= size
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
    """Items as they are made: what `Run.steps` and `Run.as_completed` return.

    A call that is cancelled while it waits loses nothing: the next one gets the item. `aclose` it, or
    forget it, and the run need not wait for it any more.

    Args:
        begin: begins the run; called with the first item that is asked for.
        end: called when there are no more items; raises what the run has ended with.
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
            RuntimeError: another task waits for one: it is not known then which of them was seen.
            Exception: as `Run.steps`.
        """
        if self._is_over:
            raise StopAsyncIteration
        if self._is_taking:
            raise RuntimeError("two tasks wait for one stream of a run: read it in one, and pass items on")
        if self._subscription is None:
            self._subscription = self._begin()
            self._loop = asyncio.get_running_loop()
        self._is_taking = True
        try:
            item: Any = await self._subscription.take()
        finally:
            self._is_taking = False
        if item is None:
            await self.aclose()
            self._end()
            raise StopAsyncIteration
        return item  # type: ignore[no-any-return]  # which kind it is the subscription decides

    async def aclose(self) -> None:
        """Leave it: there are no more items, and the run goes on without."""
        self._is_over = True
        if self._subscription is not None:
            self._subscription.leave()

    def __del__(self) -> None:
        if self._subscription is not None and not self._is_over:
            with suppress(RuntimeError):  # the loop is closed, and the run with it
                self._loop.call_soon_threadsafe(self._subscription.leave)


def _pass_of(plan: Plan, stages: Sequence[str]) -> PassPlan:
    """Return the pass in which all of `stages` get their values."""
    homes = {name: p for p in plan.passes for name in (*p.runs, *p.folds)}
    for name in stages:
        if name in plan.states:
            raise UsageError(f"{name!r} is a state: its last value is in `results`; stream what feeds it")
        if name not in homes:
            raise UsageError(f"there is no stage {name!r} to stream; there are: {', '.join(homes)}")
        if homes[name] != homes[stages[0]]:
            raise UsageError(
                f"stages {stages[0]!r} and {name!r} are not made in one reading of one dataset: "
                "a stream follows one; open a second run for the other"
            )
    if not stages:
        raise UsageError("name at least one stage to stream")
    return homes[stages[0]]
