"""Feeds whose steps are let in one after the other: what a step reads must be there before it begins."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import anyio
from msgspec.structs import replace

from pipedist.core.types import Tree
from pipedist.datasets.feeds import ElementRanges, Feed, StepBatch
from pipedist.plan.model import Granularity
from pipedist.protocol.program import ReaderConfig, Shards

StatesRead = Callable[[], dict[str, list[int]]]
"""Returns name -> [space, version] of each state that a call reads which is issued now."""


class GatedFeed(Feed):
    """Holds a feed's steps back until they are let in.

    Args:
        feed: whose steps these are.
        rhythm: what is let in at a time.
        states: what the calls read.
        first_epoch: the first one that is let in from the beginning; -1: none is, and who lets them in says
            when it ends, also where there is no data (any more).
        steps_max: it ends here, whatever the feed has; None: where the feed does.
    """

    def __init__(
        self,
        feed: Feed,
        rhythm: Granularity,
        states: StatesRead | None = None,
        *,
        first_epoch: int = 0,
        steps_max: int | None = None,
    ) -> None:
        self._feed = feed
        self._rhythm = rhythm
        self._states = states
        self._steps_max = steps_max
        self._step = 0
        """By step: this one and those before it are let in."""
        self._epoch = first_epoch
        """By epoch: this one and those before it are let in."""
        self._ends_with_data = first_epoch >= 0
        self._ended = False
        self._ahead: deque[StepBatch] = deque()
        """Read from the feed, and not let in."""
        self._next = 0
        """Steps before this one were handed out."""
        self._reading = anyio.Lock()
        self._changed = anyio.Event()

    @property
    def reader(self) -> ReaderConfig:  # type: ignore[override]
        """How a worker finds a shard."""
        return self._feed.reader

    @property
    def steps_total(self) -> int | None:  # type: ignore[override]
        """Number of steps, None where it is not known yet."""
        total = self._feed.steps_total
        if self._ended:
            return self._next
        if total is None or self._steps_max is None:
            return total
        return min(total, self._steps_max)

    async def begin_at(self, step: int) -> None:
        """Pass over the steps before `step`."""
        await self._feed.begin_at(step)
        self._next = step

    # -- for who lets steps in -------------------------------------------------------------------

    def let(self, *, step: int, epoch: int) -> None:
        """Let in the steps up to `step`, or those of the epochs up to `epoch`, as the rhythm is."""
        self._step, self._epoch = step, epoch
        self._wake()

    def end(self) -> None:
        """Let in nothing more: what was handed out was all."""
        self._ended = True
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    @property
    def held_back(self) -> str:
        """What the next steps wait for, for people; "" where they wait for nothing but their data."""
        if not self._ahead or self._is_let_in(self._ahead[0].first):
            return ""
        first = self._ahead[0].first
        if self._rhythm == "step":
            return f"step {first} reads the states that the updates after step {self._step} make"
        return f"step {first} is read when epoch {self._feed.epoch(first)} has been trained"

    async def next_epoch(self) -> int | None:
        """Return the epoch of the first step that was not handed out; None: there is none.

        Raises:
            Exception: whatever reading the data raises.
        """
        async with self._reading:
            await self._look_ahead(1)
            return self._feed.epoch(self._ahead[0].first) if self._ahead else None

    async def ends_epoch(self, step: int) -> bool:
        """Return whether a step, handed out and not released, is the last of its epoch.

        Raises:
            Exception: whatever reading the data raises.
        """
        async with self._reading:
            if step + 1 == self._next:
                await self._look_ahead(1)
            there_is_more = step + 1 < self._next or len(self._ahead) > 0
            return not there_is_more or self._feed.epoch(step + 1) != self._feed.epoch(step)

    # -- a feed ----------------------------------------------------------------------------------

    async def pull(self, count: int) -> list[StepBatch]:
        """Return the next steps as soon as they are let in."""
        while not self._ended:
            changed = self._changed  # of now: what is let in while the data is read must not be missed
            async with self._reading:
                await self._look_ahead(1 if self._rhythm == "step" else count)
            if not self._ended and not self._ahead and self._ends_with_data:
                self.end()
            elif not self._ended and (offers := self._let_in(count)):
                return offers
            else:
                await changed.wait()
        return []

    async def _look_ahead(self, count: int) -> None:
        if self._steps_max is not None:
            count = min(count, self._steps_max - self._next)
        if not self._ahead and count > 0:
            self._ahead += await self._feed.pull(count)

    def _let_in(self, count: int) -> list[StepBatch]:
        offers = []
        while self._ahead and count > 0 and self._is_let_in(self._ahead[0].first):
            offer = self._ahead.popleft()
            if offer.last - offer.first > count:
                offer, rest = self._cut(offer, offer.first + count)
                self._ahead.appendleft(rest)
            count -= offer.last - offer.first
            self._next = offer.last
            offers.append(offer)
        return offers

    def _is_let_in(self, step: int) -> bool:
        match self._rhythm:
            case "step":
                return step <= self._step
            case "epoch":
                return self._feed.epoch(step) <= self._epoch
            case _:
                return True

    def _cut(self, offer: StepBatch, at: int) -> tuple[StepBatch, StepBatch]:
        elements = self._feed.elements(offer.first, at)
        size = offer.bytes * (at - offer.first) // (offer.last - offer.first)
        return (
            replace(offer, last=at, elements=elements, bytes=size),
            replace(offer, first=at, elements=offer.elements - elements, bytes=offer.bytes - size),
        )

    def shards(self, lo: int, hi: int, *, local: bool) -> Shards:
        """Return what is sent for calls [lo, hi), with the states that they read."""
        shards = self._feed.shards(lo, hi, local=local)
        return shards if self._states is None else replace(shards, states=self._states())

    def separable(self, call: int) -> int:
        """Return how many elements of a call `some` can send without the others."""
        return self._feed.separable(call)

    def some(self, call: int, elements: ElementRanges, *, local: bool) -> Shards:
        """Return what is sent for some elements of a call, with the states that it reads."""
        shards = self._feed.some(call, elements, local=local)
        return shards if self._states is None else replace(shards, states=self._states())

    def release(self, before: int) -> None:
        """Let go of everything for steps before `before`."""
        self._feed.release(before)

    def elements(self, first: int, last: int) -> int:
        """Return the number of elements of steps [first, last), pulled and not released."""
        return self._feed.elements(first, last)

    def epoch(self, step: int) -> int:
        """Return the epoch of such a step."""
        return self._feed.epoch(step)

    def ids(self, step: int) -> list[Tree]:
        """Return the element ids of each shard of such a step."""
        return self._feed.ids(step)
