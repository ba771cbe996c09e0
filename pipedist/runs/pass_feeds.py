"""What a pass is made of: the feed that it reads, its folds, their files and logs."""

from __future__ import annotations

import os
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, groupby
from typing import TYPE_CHECKING

import anyio
from msgspec.structs import replace

from pipedist.core.types import Tree
from pipedist.datasets.feeds import ElementRanges, Feed, IndexedFeed, SequentialFeed, StepBatch
from pipedist.errors import FoldError, OutputError, PipedistError
from pipedist.journal.log_format import EMPTY, LogEntry, RecordLog
from pipedist.plan import PassPlan, Plan
from pipedist.plan.model import Rhythm
from pipedist.protocol.codec import decode
from pipedist.protocol.program import ReaderConfig, Shards

if TYPE_CHECKING:
    pass


def feed_of(plan: Plan, pass_: PassPlan, spools: Mapping[str, Spool]) -> Feed:
    """Return what a pass reads."""
    spec = plan.spec
    dataset = spec.datasets[pass_.dataset]
    if pass_.root != pass_.dataset:
        return SpoolFeed(spools[pass_.root], spec.replicas, dataset.batch)
    source = plan.sources[pass_.dataset]
    division = plan.division(pass_.dataset)
    if division is None:
        return SequentialFeed(
            source,
            batch=dataset.batch,
            replicas=spec.replicas,
            drop_remainder=dataset.drop_remainder,
            epochs=plan.epochs(pass_),
        )
    return IndexedFeed(
        source,
        pass_.dataset,
        division,
        epochs=plan.epochs(pass_),
        shuffle_seed=spec.seed if dataset.shuffle else None,
    )


class Spool:
    """The committed values of one run stage, step by step, in a log.

    In memory there are a few numbers a step.

    Args:
        stage: whose values these are, for errors.
        log: the journal's, which survives the process. None: a temporary file of no name: whatever
            kills the process, nothing is left on disk.
    """

    def __init__(self, stage: str, log: RecordLog | None = None) -> None:
        self.stage = stage
        self._is_temporary = log is None
        self._log = log if log is not None else self._temporary()
        self._starts = array("q")
        """Where the frames of each step begin."""
        self._frames = array("q", [0])
        """Number of the first frame of each step, in `_sizes`."""
        self._sizes = array("q")
        """Bytes of each frame."""
        self._holes: dict[int, tuple[int, ...]] = {}
        """By step, shards without a value."""
        self._parts = array("l")
        self._bytes = array("q", [0])
        """Bytes of the frames before each step, and in all."""
        self._elements = array("q", [0])
        """Elements before each step, and in all."""
        self._epochs = array("l")
        self._latest: tuple[int, list[Tree], list[Tree]] = (-1, [], [])

    def _temporary(self) -> RecordLog:
        import tempfile  # few specs keep values

        with tempfile.TemporaryFile(prefix="pipedist-") as file:
            return RecordLog(os.dup(file.fileno()), EMPTY, self._unwritable)

    def __len__(self) -> int:
        """Return the number of steps."""
        return len(self._parts)

    def append(
        self,
        parts: Sequence[Tree],
        ids: Sequence[Tree],
        *,
        elements: int,
        epoch: int,
        holes: Sequence[int] = (),
    ) -> None:
        """Keep the values of the next step.

        Args:
            parts: those of the shards that are not empty, and maybe of empty ones behind them.
            ids: the element ids of the shards that are not empty.
            holes: those of them that have no value: all of it was set aside.

        Raises:
            OutputError, JournalError: the disk is full, or fails.
        """
        values = list(parts)
        for hole in holes:
            values.insert(hole, None)
        self._index(self._log.append([list(ids), values], [len(ids), elements, epoch, *holes]))

    def restore(self, entries: Iterable[LogEntry]) -> None:
        """Take up the steps that the log has already."""
        for entry in entries:
            self._index(entry)

    def _index(self, entry: LogEntry) -> None:
        parts, elements, epoch, *holes = entry.meta
        if holes:
            self._holes[len(self._parts)] = tuple(holes)
        self._sizes.extend(entry.sizes)
        self._frames.append(len(self._sizes))
        self._starts.append(entry.at)
        self._bytes.append(self._bytes[-1] + sum(entry.sizes))
        self._parts.append(parts)
        self._elements.append(self._elements[-1] + elements)
        self._epochs.append(epoch)

    def finish(self) -> None:
        """Take note that there are no more steps: they may be read now.

        Raises:
            OutputError, JournalError: the disk is full, or fails.
        """
        self._log.flush()

    def _unwritable(self, error: OSError) -> PipedistError:
        import tempfile

        return OutputError(
            f"can't keep the values of stage {self.stage} for a later phase in {tempfile.gettempdir()} "
            f"(TMPDIR): {error.strerror or error}"
        )

    def read(self, step: int) -> tuple[list[Tree], list[Tree]]:
        """Return the element ids and the values of a step's parts, as they were given."""
        if self._latest[0] != step:
            sizes = self._sizes[self._frames[step] : self._frames[step + 1]]
            starts = accumulate(sizes, initial=self._starts[step])
            fd = self._log.fd
            ids, parts = decode([os.pread(fd, n, at) for n, at in zip(sizes, starts, strict=False)])
            self._latest = (step, ids, parts)
        return self._latest[1], self._latest[2]

    def parts(self, step: int) -> int:
        """Return the number of shards of a step that are not empty."""
        return self._parts[step]

    def holes(self, step: int) -> tuple[int, ...]:
        """Return which of these shards have no value."""
        return self._holes.get(step, ())

    def bytes(self, first: int, last: int) -> int:
        """Return the size of steps [first, last)."""
        return self._bytes[last] - self._bytes[first]

    def elements(self, first: int, last: int) -> int:
        """Return the number of elements of steps [first, last)."""
        return self._elements[last] - self._elements[first]

    def epoch(self, step: int) -> int:
        """Return the epoch of a step."""
        return self._epochs[step]

    def close(self) -> None:
        """Let a temporary file go; the journal closes its own."""
        self._latest = (-1, [], [])
        if self._is_temporary:
            self.close_log()

    def close_log(self) -> None:
        """Close the file, whosoever it is."""
        self._log.close()


class SpoolFeed(Feed):
    """Feeds the values of a run of an earlier phase, in the same steps and shards."""

    def __init__(self, spool: Spool, replicas: int, batch: int) -> None:
        self._spool = spool
        self._replicas = replicas
        self._next = 0
        self.steps_total: int | None = len(spool)
        self.reader = ReaderConfig(None, batch, -1, False)

    async def begin_at(self, step: int) -> None:
        """Pass over the steps before `step`."""
        self._next = step

    async def pull(self, count: int) -> list[StepBatch]:
        """Return the next steps."""
        spool, first = self._spool, self._next
        self._next = min(len(spool), first + count)
        offers = []
        kinds = groupby(
            range(first, self._next),
            key=lambda step: (spool.parts(step), spool.epoch(step), spool.holes(step)),
        )
        for (parts, _, holes), same in kinds:
            last = first + len(list(same))
            elements, size = spool.elements(first, last), spool.bytes(first, last)
            offers.append(StepBatch(first, last, parts, elements, size, holes))
            first = last
        return offers

    def shards(self, lo: int, hi: int, *, local: bool) -> Shards:
        """Return the kept values of calls [lo, hi).

        Raises:
            FoldError: an empty shard has none, because the stage was not called with it.
        """
        ids: list[Tree] = []
        values = []
        for call in range(lo, hi):
            step, part = divmod(call, self._replicas)
            step_ids, step_values = self._spool.read(step)
            if part in self._spool.holes(step):
                raise FoldError(
                    self._spool.stage,
                    f"step {step} has no value for replica {part}, whose shard was set aside, to join a "
                    "collective with: put both stages into one phase",
                )
            if part >= len(step_values):
                raise FoldError(
                    self._spool.stage,
                    f"step {step} has no shard for replica {part}, so there is no value for it to join a "
                    "collective with: add `collectives: true` here too, or `drop_remainder: true`",
                )
            ids.append(step_ids[part] if part < len(step_ids) else range(0))
            values.append(step_values[part])
        return Shards(ids=ids, values=values)

    def release(self, before: int) -> None:
        """Nothing is held here."""

    def elements(self, first: int, last: int) -> int:
        """Return the number of elements of steps [first, last)."""
        return self._spool.elements(first, last)

    def epoch(self, step: int) -> int:
        """Return the epoch of a step."""
        return self._spool.epoch(step)

    def ids(self, step: int) -> list[Tree]:
        """Return the element ids of each shard that is not empty."""
        return list(self._spool.read(step)[0])


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
        rhythm: Rhythm,
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
