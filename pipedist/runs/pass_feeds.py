"""Feeds of passes: from a dataset, or from kept values; and gated feeds."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from itertools import groupby

import anyio
import anyio.to_thread
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from pipedist.core import trees
from pipedist.core.types import Tree
from pipedist.datasets.feeds import (
    AHEAD_BYTES_MAX,
    AHEAD_STEPS_MAX,
    READ_BYTES,
    ElementRanges,
    Feed,
    IndexedFeed,
    SequentialFeed,
    ShardRead,
    StepBatch,
    positions,
)
from pipedist.errors import FoldError
from pipedist.plan import PassPlan, Plan
from pipedist.plan.model import Granularity
from pipedist.protocol.program import ReaderConfig, Shards
from pipedist.runs.kept_values import Spool
from pipedist.runs.rebatching import KeptShard, KeptStep, StepCutter, has_rows, kept_shards


def feed_of(
    plan: Plan, pass_: PassPlan, spools: Mapping[str, Spool], sequential: MutableMapping[str, SequentialFeed]
) -> Feed:
    """Return the feed of a pass.

    Args:
        sequential: the first feed of each dataset of the phase that can be read only in order, by dataset.
    """
    spec = plan.spec
    dataset = spec.datasets[pass_.dataset]
    division = plan.division_of(pass_)
    if pass_.root != pass_.dataset:
        reader = ReaderConfig(None, pass_.batch, -1, False)
        if division is not None:  # it decides the epoch of a step
            reader = replace(reader, length=division.length, drop_remainder=division.drop_remainder)
        batch = plan.rebatched(pass_)
        return SpoolFeed(pass_.root, spools.get(pass_.root), spec.replicas, batch, reader)
    source = plan.sources[pass_.dataset]
    if division is None:
        if pass_.dataset in sequential:
            return sequential[pass_.dataset].beside()
        sequential[pass_.dataset] = feed = SequentialFeed(
            source,
            batch=dataset.batch,
            replicas=spec.replicas,
            drop_remainder=dataset.drop_remainder,
            epochs=plan.epochs(pass_),
        )
        return feed
    return IndexedFeed(
        source,
        pass_.dataset,
        division,
        epochs=plan.epochs(pass_),
        shuffle_seed=spec.seed if dataset.shuffle else None,
    )


_Made = tuple[int, int, int, list[KeptShard]]  # epoch, elements, bytes and shards of a step


class SpoolFeed(Feed):
    """Feeds the kept values of a run stage, in its steps and shards or in others (`rebatching`).

    The values come from the spool, which an earlier phase or an earlier process has filled, and then from the pass
    that makes them, if that runs at the same time (`follow`, `put`). That pass waits (`room`) while AHEAD_BYTES_MAX
    or AHEAD_STEPS_MAX of its results are not divided into steps. Steps are held until they are released.

    Args:
        spool: None: no values are stored.
        batch: number of elements of a step; 0: the steps of the stage.
    """

    def __init__(
        self, stage: str, spool: Spool | None, replicas: int, batch: int, reader: ReaderConfig
    ) -> None:
        self.reader = reader
        self._stage = stage
        self._spool = spool
        self._replicas = replicas
        self._cutter = StepCutter(batch, replicas)
        self._stored = 0 if spool is None else len(spool)  # number of steps that are read from the spool
        self._read_to = 0
        self._ahead: deque[_Made] = deque()  # steps that the other pass has made, not cut yet
        self._ready: deque[KeptStep] = deque()
        self._held: dict[int, KeptStep] = {}  # steps that are pulled and not released
        self._next = 0
        self._ended = self._is_complete = True
        self._is_cut_off = False
        self._closed = False
        self._changed = anyio.Event()
        self.steps_total: int | None = None if batch else self._stored

    def follow(self) -> None:
        """Expect values from the pass that makes them, until `end`."""
        self._ended = False
        self.steps_total = None

    async def begin_at(self, step: int) -> None:
        spool = self._spool
        assert spool is not None  # a run with a journal has one
        self._stored = len(spool)
        sizes = ((spool.epochs[at], spool.elements(at, at + 1)) for at in range(self._stored))
        self._read_to = self._cutter.seek(step, sizes)
        self._next = step

    # -- for the pass that makes the values --------------------------------------------------------

    def put(self, epoch: int, elements: int, size: int, shards: list[KeptShard]) -> None:
        """Add the values of the next step, of `size` bytes."""
        if not self._closed:
            self._ahead.append((epoch, elements, size, shards))
            self._wake()

    async def room(self) -> None:
        """Wait until there is room for another step."""
        while self.is_full:
            await self._changed.wait()

    @property
    def is_full(self) -> bool:
        return len(self._ahead) >= AHEAD_STEPS_MAX or sum(each[2] for each in self._ahead) >= AHEAD_BYTES_MAX

    @property
    def is_live(self) -> bool:
        """Whether more values may come from the pass that makes them."""
        return not self._ended

    def end(self, *, complete: bool = True) -> None:
        """End the feed after the values that were put; `complete`: they are all there are."""
        self._ended = True
        self._is_complete = complete
        self._wake()

    def cut_off(self) -> None:
        """Expect no more values, because the pass that makes them has failed."""
        self._is_cut_off = not self._ended
        self._wake()

    def is_starved(self, steps: int) -> bool:
        """Return whether no step after the first `steps` ones will follow, although the feed has not ended."""
        return self._is_cut_off and not self._ahead and not self._ready and self._next == steps

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    # -- for the pass that reads them --------------------------------------------------------------

    async def pull(self, count: int) -> list[StepBatch]:
        while len(self._ready) < count:
            if self._read_to < self._stored:
                if self._ready:
                    break
                for read in await anyio.to_thread.run_sync(self._read, count, abandon_on_cancel=True):
                    self._ready += self._cutter.add(*read)
                    self._read_to += 1
            elif self._ahead:
                self._ready += self._cutter.add(*self._ahead.popleft())
                self._wake()
            elif self._ended:
                if self._is_complete:
                    self._ready += self._cutter.end()
                break
            elif self._ready:
                break
            else:
                began = time.monotonic_ns()
                await self._changed.wait()
                self.held_ns += time.monotonic_ns() - began
        first = self._next
        for _ in range(min(count, len(self._ready))):
            self._held[self._next] = self._ready.popleft()
            self._next += 1
        if first == self._next:
            self.steps_total = self._next
        return [self._batch(each) for each in self._alike(first)]

    def _alike(self, first: int) -> Iterator[list[int]]:
        """Yield ranges of pulled steps with the same shards."""
        held = self._held
        kinds = groupby(
            range(first, self._next), lambda step: (held[step].parts, held[step].epoch, held[step].skipped)
        )
        return (list(same) for _, same in kinds)

    def _batch(self, steps: list[int]) -> StepBatch:
        first, last, held = steps[0], steps[-1] + 1, self._held[steps[0]]
        size = sum(self._held[step].bytes for step in steps)
        return StepBatch(first, last, held.parts, self.elements(first, last), size, held.skipped)

    def _read(self, count: int) -> list[_Made]:
        """Read at most `count` stored steps, and no more after READ_BYTES."""
        spool, first = self._spool, self._read_to
        assert spool is not None  # it has steps
        read: list[_Made] = []
        for step in range(first, min(self._stored, first + count)):
            ids, values, *removed = spool.read(step)
            elements, size = spool.elements(step, step + 1), spool.bytes(step, step + 1)
            shards = kept_shards(ids, values, elements, self._replicas, *removed)
            read.append((spool.epochs[step], elements, size, shards))
            if spool.bytes(first, step + 1) >= READ_BYTES:
                break
        return read

    def request(self, lo: int, hi: int, *, local: bool, elements: ElementRanges = ()) -> Shards | ShardRead:
        """Return the values of calls [lo, hi), or the function that joins them."""
        calls = [(self._held[call // self._replicas], call % self._replicas) for call in range(lo, hi)]

        def read() -> Shards:
            ids = [held.ids(part) if part < len(held.shards) else range(0) for held, part in calls]
            try:
                values = [held.value(part) for held, part in calls]
            except (TypeError, ValueError) as error:
                raise FoldError(self._stage, f"its values can't be divided into calls: {error}") from error
            if elements:
                rows = positions(elements)
                ids = [np.asarray(ids[0], np.int64)[rows]]
                values = [trees.tree_map(lambda leaf: leaf[rows], values[0])]
            return Shards(ids=ids, values=values)

        return read() if all(held.is_whole(part) for held, part in calls) else read

    def separable(self, call: int) -> int:
        """Return the number of rows of a call's value, if that consists of arrays with one row per element."""
        held, part = self._held[call // self._replicas], call % self._replicas
        # other shards were quarantined as a whole, and have no value
        made = [shard for shard, *_ in held.shards[part] if len(shard.ids)]
        return len(held.ids(part)) if all(has_rows(shard.value, len(shard.ids)) for shard in made) else 0

    def release(self, before: int) -> None:
        for step in [step for step in self._held if step < before]:
            del self._held[step]

    def elements(self, first: int, last: int) -> int:
        return sum(self._held[step].elements for step in range(first, last))

    def epoch(self, step: int) -> int:
        return self._held[step].epoch

    def ids(self, step: int) -> list[Tree]:
        held = self._held[step]
        return [held.ids(part) for part in range(held.parts)]

    def removed(self, step: int) -> list[NDArray[np.int64]]:
        held = self._held[step]
        return [held.removed(part) for part in range(held.parts)]

    async def aclose(self) -> None:
        self._closed = True
        self._ahead.clear()
        self._wake()


StatesRead = Callable[[], dict[str, list[int]]]
"""Returns name -> [space, version] of each state that a call issued now reads."""


class GatedFeed(Feed):
    """Holds the steps of a feed back until `admit` allows them.

    Args:
        granularity: whether `admit` counts steps or epochs; "run": all steps are admitted.
        states: returns the states that calls read.
        first_epoch: the last epoch that is admitted from the beginning; -1: none is, and only `end` ends the
            feed, even if there is no more data.
        steps_max: maximum number of steps; None: as many as the feed has.
    """

    def __init__(
        self,
        feed: Feed,
        granularity: Granularity,
        states: StatesRead | None = None,
        *,
        first_epoch: int = 0,
        steps_max: int | None = None,
    ) -> None:
        self._feed = feed
        self._granularity = granularity
        self._states = states
        self._steps_max = steps_max
        self._step = 0  # with granularity "step": steps up to this one are admitted
        self._epoch = first_epoch  # with granularity "epoch": epochs up to this one are admitted
        self._ends_with_data = first_epoch >= 0
        self._ended = False
        self._ahead: deque[StepBatch] = deque()  # read from the feed, but not admitted
        self._next = 0  # steps before this one were returned by `pull`
        self._reading = anyio.Lock()
        self._changed = anyio.Event()
        self._gated_ns = 0

    @property
    def held_ns(self) -> int:  # type: ignore[override]
        return self._gated_ns + self._feed.held_ns

    @property
    def reader(self) -> ReaderConfig:  # type: ignore[override]
        return self._feed.reader

    @property
    def steps_total(self) -> int | None:  # type: ignore[override]
        if self._ended:
            return self._next
        limits = [steps for steps in (self._feed.steps_total, self._steps_max) if steps is not None]
        return None if self._feed.steps_total is None else min(limits)

    async def begin_at(self, step: int) -> None:
        await self._feed.begin_at(step)
        self._next = step

    def admit(self, *, step: int, epoch: int) -> None:
        """Admit steps up to `step` or epochs up to `epoch`, by granularity."""
        self._step, self._epoch = step, epoch
        self._wake()

    def end(self) -> None:
        """End the feed after the steps that were already returned."""
        self._ended = True
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    @property
    def held_back(self) -> str:
        """Why the next steps are held back; "" if they only wait for their data."""
        if not self._ahead or self._is_admitted(self._ahead[0].first):
            return ""
        first = self._ahead[0].first
        if self._granularity == "step":
            return f"step {first} reads the states that are updated after step {self._step}"
        return f"step {first} is read after epoch {self._feed.epoch(first)} of the training"

    async def next_epoch(self) -> int | None:
        """Return the epoch of the next step that `pull` will return, or None."""
        async with self._reading:
            await self._look_ahead(1)
            return self._feed.epoch(self._ahead[0].first) if self._ahead else None

    async def ends_epoch(self, step: int) -> bool:
        """Return whether a pulled, unreleased step is the last of its epoch."""
        async with self._reading:
            if step + 1 == self._next:
                await self._look_ahead(1)
            there_is_more = step + 1 < self._next or len(self._ahead) > 0
            return not there_is_more or self._feed.epoch(step + 1) != self._feed.epoch(step)

    async def pull(self, count: int) -> list[StepBatch]:
        while not self._ended:
            changed = self._changed  # fetched first, so that no `admit` during the read is missed
            async with self._reading:
                await self._look_ahead(1 if self._granularity == "step" else count)
            if not self._ended and not self._ahead and self._ends_with_data:
                self.end()
            elif not self._ended and (batches := self._take_admitted(count)):
                return batches
            else:
                began = time.monotonic_ns()
                await changed.wait()
                self._gated_ns += time.monotonic_ns() - began
        return []

    async def _look_ahead(self, count: int) -> None:
        if self._steps_max is not None:
            count = min(count, self._steps_max - self._next)
        if not self._ahead and count > 0:
            self._ahead += await self._feed.pull(count)

    def _take_admitted(self, count: int) -> list[StepBatch]:
        batches = []
        while self._ahead and count > 0 and self._is_admitted(self._ahead[0].first):
            steps = self._ahead.popleft()
            if steps.last - steps.first > count:
                steps, rest = self._cut(steps, steps.first + count)
                self._ahead.appendleft(rest)
            count -= steps.last - steps.first
            self._next = steps.last
            batches.append(steps)
        return batches

    def _is_admitted(self, step: int) -> bool:
        if self._granularity == "step":
            return step <= self._step
        return self._granularity == "run" or self._feed.epoch(step) <= self._epoch

    def _cut(self, steps: StepBatch, at: int) -> tuple[StepBatch, StepBatch]:
        elements = self._feed.elements(steps.first, at)
        size = steps.bytes * (at - steps.first) // (steps.last - steps.first)
        return (
            replace(steps, last=at, elements=elements, bytes=size),
            replace(steps, first=at, elements=steps.elements - elements, bytes=steps.bytes - size),
        )

    def request(self, lo: int, hi: int, *, local: bool, elements: ElementRanges = ()) -> Shards | ShardRead:
        found = self._feed.request(lo, hi, local=local, elements=elements)
        if self._states is None:
            return found
        states = self._states()  # those of now, whenever the shards are read
        return (lambda: replace(found(), states=states)) if callable(found) else replace(found, states=states)

    def separable(self, call: int) -> int:
        return self._feed.separable(call)

    def release(self, before: int) -> None:
        self._feed.release(before)

    def elements(self, first: int, last: int) -> int:
        return self._feed.elements(first, last)

    def epoch(self, step: int) -> int:
        return self._feed.epoch(step)

    def ids(self, step: int) -> list[Tree]:
        return self._feed.ids(step)

    def removed(self, step: int) -> list[NDArray[np.int64]]:
        return self._feed.removed(step)

    async def aclose(self) -> None:
        await self._feed.aclose()
