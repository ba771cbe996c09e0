"""Feeds of passes: from a dataset, or from kept values; and gated feeds."""

from __future__ import annotations

import os
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, groupby

import anyio
import anyio.to_thread
from msgspec.structs import replace

from pipedist.core.types import Tree
from pipedist.datasets.feeds import (
    READ_BYTES,
    ElementRanges,
    Feed,
    IndexedFeed,
    SequentialFeed,
    ShardRead,
    StepBatch,
)
from pipedist.errors import FoldError, OutputError, PipedistError
from pipedist.journal.log_format import EMPTY, LogEntry, RecordLog
from pipedist.plan import PassPlan, Plan
from pipedist.plan.model import Granularity
from pipedist.protocol.codec import decode
from pipedist.protocol.program import ReaderConfig, Shards


def feed_of(plan: Plan, pass_: PassPlan, spools: Mapping[str, Spool]) -> Feed:
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
    """The committed values of one run stage, step by step, in a log on disk.

    Memory holds only a few numbers for each step.

    Args:
        log: a log of the journal, which survives the process. None: a temporary file without a name, which
            disappears with the process.
    """

    def __init__(self, stage: str, log: RecordLog | None = None) -> None:
        self.stage = stage
        self._is_temporary = log is None
        self._log = log if log is not None else self._temporary()
        self._starts = array("q")
        """File offset of the frames of each step."""
        self._frames = array("q", [0])
        """Index of the first frame of each step in `_sizes`."""
        self._sizes = array("q")
        self._skipped: dict[int, tuple[int, ...]] = {}
        """Shards without a value, by step."""
        self.parts = array("l")
        """Number of non-empty shards, by step."""
        self._bytes = array("q", [0])
        """Bytes of the frames before each step, and in total."""
        self._elements = array("q", [0])
        """Elements before each step, and in total."""
        self.epochs = array("l")

    def _temporary(self) -> RecordLog:
        import tempfile  # rarely needed

        with tempfile.TemporaryFile(prefix="pipedist-") as file:
            return RecordLog(os.dup(file.fileno()), EMPTY, self._unwritable)

    def __len__(self) -> int:
        return len(self.parts)

    def append(
        self,
        parts: Sequence[Tree],
        ids: Sequence[Tree],
        *,
        elements: int,
        epoch: int,
        skipped: Sequence[int] = (),
    ) -> None:
        """Append the values of the next step.

        Args:
            parts: values of the shards that are not empty, possibly followed by those of empty shards.
            ids: the element ids of the shards that are not empty.
            skipped: the replicas among them without a value, because their whole shard was quarantined.
        """
        values = list(parts)
        for hole in skipped:
            values.insert(hole, None)
        self._index(self._log.append([list(ids), values], [len(ids), elements, epoch, *skipped]))

    async def restore(self, entries: Iterable[LogEntry]) -> None:
        """Restore the steps of a log, in a thread, because all of it is read and checked."""

        def index() -> None:
            for entry in entries:
                self._index(entry)

        await anyio.to_thread.run_sync(index)

    def _index(self, entry: LogEntry) -> None:
        parts, elements, epoch, *skipped = entry.meta
        if skipped:
            self._skipped[len(self.parts)] = tuple(skipped)
        self._sizes.extend(entry.sizes)
        self._frames.append(len(self._sizes))
        self._starts.append(entry.at)
        self._bytes.append(self._bytes[-1] + sum(entry.sizes))
        self.parts.append(parts)
        self._elements.append(self._elements[-1] + elements)
        self.epochs.append(epoch)

    def finish(self) -> None:
        """Flush the log after the last step, so that it can be read."""
        self._log.flush()

    def _unwritable(self, error: OSError) -> PipedistError:
        import tempfile

        return OutputError(
            f"can't store the values of stage {self.stage} for a later phase in {tempfile.gettempdir()} "
            f"(TMPDIR): {error.strerror or error}"
        )

    def read(self, step: int) -> tuple[list[Tree], list[Tree]]:
        """Return the ids and the values of a step, from the disk."""
        sizes = self._sizes[self._frames[step] : self._frames[step + 1]]
        starts = accumulate(sizes, initial=self._starts[step])
        fd = self._log.fd
        ids, parts = decode([os.pread(fd, n, at) for n, at in zip(sizes, starts, strict=False)])
        return ids, parts

    def skipped(self, step: int) -> tuple[int, ...]:
        """Return the replicas whose whole shard was quarantined."""
        return self._skipped.get(step, ())

    def bytes(self, first: int, last: int) -> int:
        return self._bytes[last] - self._bytes[first]

    def elements(self, first: int, last: int) -> int:
        return self._elements[last] - self._elements[first]

    def close(self) -> None:
        """Close a temporary file; a log of the journal is closed by the journal."""
        if self._is_temporary:
            self.close_log()

    def close_log(self) -> None:
        """Close the log, even if it belongs to the journal."""
        self._log.close()


class SpoolFeed(Feed):
    """Feeds the kept values of an earlier phase, in the same steps and shards.

    Steps are read by `pull`, and held until they are released.
    """

    def __init__(self, spool: Spool, replicas: int, batch: int) -> None:
        self._spool = spool
        self._replicas = replicas
        self._next = 0
        self._held: dict[int, tuple[list[Tree], list[Tree]]] = {}
        """Ids and values by step."""
        self.steps_total: int | None = len(spool)
        self.reader = ReaderConfig(None, batch, -1, False)

    async def begin_at(self, step: int) -> None:
        self._next = step

    async def pull(self, count: int) -> list[StepBatch]:
        spool, first = self._spool, self._next
        read = await anyio.to_thread.run_sync(self._read, first, count, abandon_on_cancel=True)
        self._held.update(enumerate(read, first))
        self._next = first + len(read)
        batches = []
        kinds = groupby(
            range(first, self._next),
            lambda step: (spool.parts[step], spool.epochs[step], spool.skipped(step)),
        )
        for (parts, _, skipped), same in kinds:
            last = first + len(list(same))
            elements, size = spool.elements(first, last), spool.bytes(first, last)
            batches.append(StepBatch(first, last, parts, elements, size, skipped))
            first = last
        return batches

    def _read(self, first: int, count: int) -> list[tuple[list[Tree], list[Tree]]]:
        """Read at most `count` steps, and no more after READ_BYTES."""
        spool = self._spool
        read: list[tuple[list[Tree], list[Tree]]] = []
        for step in range(first, min(len(spool), first + count)):
            read.append(spool.read(step))
            if spool.bytes(first, step + 1) >= READ_BYTES:
                break
        return read

    def request(self, lo: int, hi: int, *, local: bool, elements: ElementRanges = ()) -> Shards:
        """Return the kept values of calls [lo, hi)."""
        ids: list[Tree] = []
        values = []
        for call in range(lo, hi):
            step, part = divmod(call, self._replicas)
            step_ids, step_values = self._held[step]
            if part in self._spool.skipped(step):
                raise FoldError(
                    self._spool.stage,
                    f"step {step} has no value for replica {part}, because its shard was quarantined, so the "
                    "replica can't join a collective. Put both stages into one phase",
                )
            if part >= len(step_values):
                raise FoldError(
                    self._spool.stage,
                    f"step {step} has no shard for replica {part}, so the replica has no value to join a "
                    "collective with. Add `collectives: true` here too, or `drop_remainder: true`",
                )
            ids.append(step_ids[part] if part < len(step_ids) else range(0))
            values.append(step_values[part])
        return Shards(ids=ids, values=values)

    def release(self, before: int) -> None:
        for step in [step for step in self._held if step < before]:
            del self._held[step]

    def elements(self, first: int, last: int) -> int:
        return self._spool.elements(first, last)

    def epoch(self, step: int) -> int:
        return self._spool.epochs[step]

    def ids(self, step: int) -> list[Tree]:
        return list(self._held[step][0])


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
        self._step = 0
        """With granularity "step": steps up to this one are admitted."""
        self._epoch = first_epoch
        """With granularity "epoch": epochs up to this one are admitted."""
        self._ends_with_data = first_epoch >= 0
        self._ended = False
        self._ahead: deque[StepBatch] = deque()
        """Read from the feed, but not admitted."""
        self._next = 0
        """Steps before this one were returned by `pull`."""
        self._reading = anyio.Lock()
        self._changed = anyio.Event()

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
                await changed.wait()
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

    async def aclose(self) -> None:
        await self._feed.aclose()
