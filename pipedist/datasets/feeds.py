"""Feeds: the steps of a pass, and the data sent for each call.

A feed returns the next steps (`pull`) and the data of a range of calls (`shards`), and discards steps that
are no longer needed (`release`). With random access and a known length, steps are arithmetic, and nothing
is read here if the worker can read the source itself. A sequential source is read here, block by block,
and held until its steps are visible.

Everything that may block is read in a thread (`pull`, `request`), and one thread at a time uses a source.
A read that is cancelled is left to its thread; the next `pull` returns the steps that it has read.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Protocol

import anyio
import anyio.to_thread
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from pipedist.core import ragged, trees
from pipedist.core.types import Tree
from pipedist.datasets.division import Division, chunks, permutation
from pipedist.datasets.sources import Source, SourceError
from pipedist.protocol.program import ReaderConfig, Shards

READ_S = 0.01
READ_BYTES = 2**20  # with READ_S, the limit of one uninterrupted read of a sequential source


AHEAD_STEPS_MAX = 256  # with AHEAD_BYTES_MAX, the limit of what waits between two passes
AHEAD_BYTES_MAX = 4 * 2**20

CLOSE_S = 1.0  # how long `aclose` waits for user code and reads, which cannot be interrupted
ElementRanges = Sequence[tuple[int, int]]  # positions in a shard, as ranges [lo, hi)
ShardRead = Callable[[], Shards]  # reads shards, may block, and may run in any thread


class StepBatch(Struct, frozen=True):
    """Steps [first, last), each of `parts` calls."""

    first: int
    last: int
    parts: int
    elements: int  # number of elements of all steps
    bytes: int = 0  # size of the data held here for all steps
    skipped_replicas: tuple[int, ...] = ()  # their shards are quarantined completely


class Feed(Protocol):
    """Source of a pass's steps.

    `elements`, `epoch` and `ids` are for steps that are pulled and not released. `local`: the worker shares
    this host's files.
    """

    steps_total: int | None  # None while unknown
    reader: ReaderConfig  # configuration with which a worker reads a shard
    held_ns: int = 0  # how long `pull` has waited for updates, or for values of another pass

    async def begin_at(self, step: int) -> None:
        """Skip the steps before `step`, which are done; called first. Raise SourceError if there are fewer steps."""

    async def pull(self, count: int) -> list[StepBatch]:
        """Return the next steps, at most `count`; none at the end of the dataset."""

    def request(self, lo: int, hi: int, *, local: bool, elements: ElementRanges = ()) -> Shards | ShardRead:
        """Return the data sent for calls [lo, hi), or the function that reads it, for a thread.

        `elements`: those of a single `separable` call that are sent; none: all.
        """

    def shards(self, lo: int, hi: int, *, local: bool, elements: ElementRanges = ()) -> Shards:
        """Return the data of `request`, read in this thread."""
        found = self.request(lo, hi, local=local, elements=elements)
        return found() if callable(found) else found

    def separable(self, call: int) -> int:
        """Return how many elements of a call can be sent separately; 0 if none can."""
        return 0

    def release(self, before: int) -> None:
        """Discard the data of steps before `before`."""

    def elements(self, first: int, last: int) -> int:
        """Return the number of elements of steps [first, last)."""

    def epoch(self, step: int) -> int: ...

    def ids(self, step: int) -> list[Tree]:
        """Return the element ids of each non-empty shard of a step."""

    def removed(self, step: int) -> list[NDArray[np.int64]]:
        """Return the positions of elements that `ids` lacks, by shard, because an earlier pass quarantined them."""
        return []

    async def aclose(self) -> None:
        """End reads that were cancelled, so that the source can be closed; waits at most CLOSE_S for them."""
        return


class IndexedFeed(Feed):
    """Feeds a source with random access and known length: steps are arithmetic.

    The dataset's name is part of the shuffle; a `shuffle_seed` of None is the dataset's own order.
    """

    def __init__(
        self, source: Source, name: str, division: Division, *, epochs: int, shuffle_seed: int | None
    ) -> None:
        self._source = source
        self._name = name
        self._division = division
        self._shuffle_seed = shuffle_seed
        self._next = 0
        self._orders: dict[int, NDArray[np.int64]] = {}
        self._reading = threading.Lock()  # held while a thread reads the source
        self._element_bytes = 0.0  # average, once values were sent; then bytes limit leases too
        self._full_parts = chunks(division.batch, division.replicas)
        self.steps_total: int | None = division.steps_per_epoch * epochs
        self.reader = ReaderConfig(
            source=dict(source.config) if source.portable else None,
            batch=division.batch,
            length=division.length,
            drop_remainder=division.drop_remainder,
        )

    async def begin_at(self, step: int) -> None:
        self._next = step

    async def pull(self, count: int) -> list[StepBatch]:
        total = self.steps_total or 0
        end = min(total, self._next + count)
        offers: list[StepBatch] = []
        per_epoch = self._division.steps_per_epoch
        whole = self._division.length // self._division.batch
        while self._next < end:
            in_epoch = self._next % per_epoch
            if in_epoch < whole:
                last = min(end, self._next + whole - in_epoch)
                elements = (last - self._next) * self._division.batch
                parts = self._full_parts
            else:
                last = self._next + 1
                parts, elements = self._division.parts(self._next), self._division.rows(self._next)
            size = round(elements * self._element_bytes)
            offers.append(StepBatch(self._next, last, parts, elements, size))
            self._next = last
        return offers

    def _ids(self, call: int) -> range | NDArray[np.int64]:
        step, replica = divmod(call, self._division.replicas)
        if self._shuffle_seed is None:
            return self._division.ids(step, replica)
        epoch, start, stop = self._division.bounds(step, replica)
        order = self._orders.get(epoch)
        if order is None:
            order = self._orders[epoch] = self._order(self._shuffle_seed, epoch)
        return order[start:stop] + epoch * self._division.length

    def _order(self, seed: int, epoch: int) -> NDArray[np.int64]:
        length = self._division.length
        try:
            return permutation(seed, self._name, epoch, length)
        except (MemoryError, ValueError) as error:  # ValueError: the array exceeds NumPy's size limit
            raise SourceError(
                f"`shuffle` of {self._name}: the order of {length:,} elements takes {16 * length:,} bytes, "
                "more than the memory available: shuffle fewer, or set `shuffle: false`",
                key="shuffle",
            ) from error

    def request(self, lo: int, hi: int, *, local: bool, elements: ElementRanges = ()) -> Shards | ShardRead:
        """Return ids, locations or values of calls [lo, hi), the smallest that suffices."""
        read_there = local and self._source.portable
        send_ids = self._shuffle_seed is not None or len(elements) > 0  # they don't follow from the calls
        if read_there and self._source.by_id and not send_ids:
            return Shards()
        length = self._division.length
        ids: list[Tree] = []
        rows: list[range | NDArray[np.int64]] = []
        for call in range(lo, hi):
            found = self._ids(call)
            if elements:
                found = np.asarray(found, np.int64)[positions(elements)]
            ids.append(found)
            if isinstance(found, range):
                first = found.start % length
                rows.append(range(first, first + len(found)))
            else:
                rows.append(found % length)
        sent_ids = ids if send_ids else None
        if read_there:
            return Shards(
                ids=sent_ids,
                locations=None if self._source.by_id else [self._source.locate(r) for r in rows],
            )
        read = partial(self._read, rows, sent_ids)
        return read() if self._source.in_memory else read

    def _read(self, rows: list[range | NDArray[np.int64]], ids: list[Tree] | None) -> Shards:
        values: list[Tree] = []
        size = count = 0
        with self._reading:
            for each in rows:
                value = self._source.read(each if self._source.by_id else self._source.locate(each))
                values.append(value)
                size += _array_bytes(value)
                count += len(each)
        self._element_bytes = size / max(1, count)
        return Shards(ids=ids, values=values)

    def separable(self, call: int) -> int:
        return len(self._ids(call))

    async def aclose(self) -> None:
        if self._reading.locked():
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(self._wait_for_read)

    def _wait_for_read(self) -> None:
        if self._reading.acquire(timeout=CLOSE_S):
            self._reading.release()

    def release(self, before: int) -> None:
        """Discard the orders of finished epochs."""
        if self._orders:
            epoch = before // self._division.steps_per_epoch
            self._orders = {each: order for each, order in self._orders.items() if each >= epoch}

    def elements(self, first: int, last: int) -> int:
        division = self._division
        per_epoch = division.steps_per_epoch
        if not per_epoch:
            return 0
        missing = max(0, per_epoch * division.batch - division.length)  # in the last step of an epoch
        return (last - first) * division.batch - (last // per_epoch - first // per_epoch) * missing

    def epoch(self, step: int) -> int:
        return step // self._division.steps_per_epoch

    def ids(self, step: int) -> list[Tree]:
        first = step * self._division.replicas
        return [self._ids(call) for call in range(first, first + self._division.parts(step))]


class _Block(Struct, frozen=True):
    """One step of a sequential source: its elements, the id of the first, and its bytes."""

    value: Tree
    rows: int
    epoch: int
    first_id: int
    size: int


def _uneven(epoch: int, what: str) -> SourceError:
    return SourceError(
        f"epoch {epoch} has {what} of epoch 0: element ids count on over the epochs",
        key="call",
        expected="the same elements each time, or epochs: 1",
    )


class _SequentialRead:
    """One read of a sequential source, for one feed or several; a slow feed holds back the others."""

    def __init__(self, steps: Generator[_Block, None, None]) -> None:
        self.steps = steps
        self.feeds: list[SequentialFeed] = []
        self.reading = threading.Lock()  # held by the thread that advances `steps`
        self.broken: Exception | None = None
        self.ended = False
        self.changed = anyio.Event()

    def wake(self) -> None:
        self.changed.set()
        self.changed = anyio.Event()

    def advance(self, feed: SequentialFeed, count: int) -> None:
        """Read the next `count` blocks for a feed, within READ_S and READ_BYTES, and give them to all feeds."""
        size, until = 0, time.monotonic() + READ_S
        try:
            for block in self.steps:
                for each in list(self.feeds):
                    each.receive(block)
                size += block.size
                count -= 1
                if not count or size >= READ_BYTES or time.monotonic() >= until or feed.closed:
                    return
            self.ended = True
        except Exception as error:
            self.broken = error  # blocks read before the error are delivered first

    def close(self) -> None:
        if self.reading.acquire(blocking=False):
            try:
                self.steps.close()
            finally:
                self.reading.release()


class SequentialFeed(Feed):
    """Feeds a sequential source, read in this process; each epoch must have the same number of elements."""

    def __init__(
        self, source: Source, *, batch: int, replicas: int, drop_remainder: bool, epochs: int
    ) -> None:
        self._source = source
        self._batch = batch
        self._drop_remainder = drop_remainder
        self._epochs = epochs
        self._share(_SequentialRead(self._read()), replicas)
        self.reader = ReaderConfig(None, batch, -1, drop_remainder)

    def _share(self, read: _SequentialRead, replicas: int) -> None:
        self._replicas = replicas
        self._shared = read
        self._ahead: deque[_Block] = deque()  # read, and not pulled yet
        self._skipped = 0  # number of blocks that are dropped before the first one
        self.closed = False
        self._blocks: dict[int, _Block] = {}
        self._next = 0
        self._released = 0
        self.steps_total: int | None = None
        read.feeds.append(self)

    def beside(self) -> SequentialFeed:
        """Return another feed of the same read, before it begins; each element is read once for all of them."""
        feed = SequentialFeed.__new__(SequentialFeed)
        feed._share(self._shared, self._replicas)
        feed.reader = self.reader
        return feed

    def _read(self) -> Generator[_Block, None, None]:
        length = 0
        for epoch in range(self._epochs):
            index = 0
            for value in self._source.blocks(self._batch):
                rows = int(trees.flatten(value)[0][0].shape[0])
                if epoch and index + rows > length:
                    raise _uneven(epoch, f"more than the {length} elements")
                if rows == self._batch or not self._drop_remainder:
                    yield _Block(value, rows, epoch, epoch * length + index, _array_bytes(value))
                index += rows
            if epoch and index < length:
                raise _uneven(epoch, f"{index} elements, not the {length}")
            length = index

    async def begin_at(self, step: int) -> None:
        self._skipped = self._next = self._released = step

    async def pull(self, count: int) -> list[StepBatch]:
        """Read the next steps, in a thread, because the user's iterator may block."""
        blocks = await self._read_in_thread(count)
        if not blocks:
            self.steps_total = self._next
        offers = []
        for block in blocks:
            step = self._next
            self._next += 1
            self._blocks[step] = block
            parts = chunks(block.rows, self._replicas)
            offers.append(StepBatch(step, step + 1, parts, block.rows, block.size))
        return offers

    def receive(self, block: _Block) -> None:
        """Take the next block of the shared read."""
        if self._skipped:
            self._skipped -= 1
        elif not self.closed:
            self._ahead.append(block)

    @property
    def _is_behind(self) -> bool:
        return (
            len(self._ahead) >= AHEAD_STEPS_MAX or sum(each.size for each in self._ahead) >= AHEAD_BYTES_MAX
        )

    async def _read_in_thread(self, count: int) -> list[_Block]:
        shared = self._shared
        while not self._ahead and not shared.ended:
            if shared.broken is not None:
                raise shared.broken
            if any(each._is_behind for each in shared.feeds if each is not self):
                await shared.changed.wait()
                continue
            # On cancellation, do not wait for the user's iterator; its later blocks are for the next call.
            await anyio.to_thread.run_sync(self._read_some, count, abandon_on_cancel=True)
        if not self._ahead and self._skipped:
            done = self._next - self._skipped
            raise SourceError(
                f"the dataset has {done} steps now, and had at least {self._next} before", key="call"
            )
        blocks = [self._ahead.popleft() for _ in range(min(count, len(self._ahead)))]
        shared.wake()
        return blocks

    def _read_some(self, count: int) -> None:
        """Read the next blocks, at most `count`, unless a cancelled or another read has brought some."""
        with self._shared.reading:
            if not self._ahead and not self.closed and self._shared.broken is None:
                self._shared.advance(self, count + self._skipped)
        if self.closed:
            self._close()

    async def aclose(self) -> None:
        """Close the user's iterator after the last feed, or have the thread close it that is reading it."""
        self.closed = True
        self._ahead.clear()
        if self in self._shared.feeds:
            self._shared.feeds.remove(self)
        self._shared.wake()
        with anyio.move_on_after(CLOSE_S, shield=True):
            await anyio.to_thread.run_sync(self._close, abandon_on_cancel=True)

    def _close(self) -> None:
        if not self._shared.feeds:
            self._shared.close()

    def request(self, lo: int, hi: int, *, local: bool, elements: ElementRanges = ()) -> Shards:
        shards = [self._shard(call) for call in range(lo, hi)]
        if elements:
            [(block, start, _)] = shards
            rows = start + positions(elements)
            return Shards(ids=[block.first_id + rows], values=[_rows(block.value, rows)])
        return Shards(
            ids=[range(block.first_id + start, block.first_id + stop) for block, start, stop in shards],
            values=[_rows(block.value, slice(start, stop)) for block, start, stop in shards],
        )

    def separable(self, call: int) -> int:
        _, start, stop = self._shard(call)
        return stop - start

    def _shard(self, call: int) -> tuple[_Block, int, int]:
        """Return the block of a call, and the range of its rows."""
        step, replica = divmod(call, self._replicas)
        block = self._blocks[step]
        size = -(-block.rows // self._replicas)
        start = min(replica * size, block.rows)
        return block, start, min(start + size, block.rows)

    def release(self, before: int) -> None:
        """Discard the blocks of visible steps."""
        for step in range(self._released, before):
            self._blocks.pop(step, None)
        self._released = max(self._released, before)

    def elements(self, first: int, last: int) -> int:
        return sum(self._blocks[step].rows for step in range(first, last))

    def epoch(self, step: int) -> int:
        return self._blocks[step].epoch

    def ids(self, step: int) -> list[Tree]:
        shards = [self._shard(step * self._replicas + replica) for replica in range(self._replicas)]
        return [range(block.first_id + a, block.first_id + b) for block, a, b in shards if a < b]


def _array_bytes(tree: Tree) -> int:
    if type(tree) is np.ndarray:
        return ragged.size_bytes(tree)
    return sum(ragged.size_bytes(leaf) for leaf in trees.flatten(tree)[0] if isinstance(leaf, np.ndarray))


def _rows(block: Tree, rows: slice | NDArray[np.int64]) -> Tree:
    return trees.tree_map(lambda leaf: leaf[rows], block)


def positions(elements: ElementRanges) -> NDArray[np.int64]:
    return np.concatenate([np.arange(lo, hi, dtype=np.int64) for lo, hi in elements])
