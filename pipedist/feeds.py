"""Feeds: where the steps of a pass come from, and what is sent for each call.

A feed answers three questions of the coordinator: which steps are next (`pull`), what a range
of calls needs to be sent (`shards`), and which steps will not be asked for again (`release`).
Two kinds follow from the source: with random access and a known length, steps are arithmetic
and nothing is read here at all if the worker can read the source itself; a sequential source
is read here, block by block, in a thread, and held until its steps are visible.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Protocol

import anyio
import anyio.to_thread
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from pipedist import trees
from pipedist.datasets.division import Division, chunk_sizes, permutation
from pipedist.datasets.sources import Source, SourceError
from pipedist.errors import LocalProtocolError
from pipedist.program import ReaderConfig, Shards, Tree

READ_S = 0.01
READ_BYTES = 2**20
"""A sequential source is read on, without looking up, until so much time or so many bytes."""


Spans = Sequence[tuple[int, int]]
"""Positions in a shard, as ranges [lo, hi)."""


class Offer(Struct, frozen=True):
    """Steps [first, last), each of `parts` calls.

    Args:
        elements: of all of them together.
        bytes: held here for all of them together.
        holes: replicas whose shard has no value, in each of them: all of it was set aside before.
    """

    first: int
    last: int
    parts: int
    elements: int
    bytes: int = 0
    holes: tuple[int, ...] = ()


class Feed(Protocol):
    """What a pass is fed with."""

    steps_total: int | None
    """Number of steps, None where it is not known yet."""

    reader: ReaderConfig
    """How a worker finds a shard."""

    async def begin_at(self, step: int) -> None:
        """Pass over the steps before `step`: they are done. Before anything else is asked.

        Raises:
            SourceError: there are not so many.
        """
        ...

    async def pull(self, count: int) -> list[Offer]:
        """Return the next steps, at most `count`; none: the dataset has ended."""
        ...

    def shards(self, lo: int, hi: int, *, local: bool) -> Shards:
        """Return what is sent for calls [lo, hi).

        Args:
            local: the worker shares this host's files.
        """
        ...

    def separable(self, call: int) -> int:
        """Return how many elements of a call `some` can send without the others; 0: it can't."""
        return 0

    def some(self, call: int, elements: Spans, *, local: bool) -> Shards:
        """Return what is sent for some elements of a call.

        Args:
            elements: their positions in the call's shard.
            local: the worker shares this host's files.
        """
        raise LocalProtocolError(f"the elements of call {call} can't be told apart")

    def release(self, before: int) -> None:
        """Let go of everything for steps before `before`."""
        ...

    def elements(self, first: int, last: int) -> int:
        """Return the number of elements of steps [first, last), pulled and not released."""
        ...

    def epoch(self, step: int) -> int:
        """Return the epoch of such a step."""
        ...

    def ids(self, step: int) -> list[Tree]:
        """Return the element ids of each shard of such a step that is not empty."""
        ...


class IndexedFeed(Feed):
    """Feeds a source with random access: steps are arithmetic.

    Args:
        source: the opened source; `length` is known.
        name: the dataset's name, part of the shuffle's seed.
        division: the contract's arithmetic.
        epochs: how often the dataset is read through.
        shuffle_seed: the spec's seed, None for the dataset's own order.
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
        self._element_bytes = 0.0
        """Size of an element, once some were sent as values: then leases are cut by bytes too."""
        self._full_parts = sum(1 for n in chunk_sizes(division.batch, division.replicas) if n)
        self.steps_total: int | None = division.steps_per_epoch * epochs
        self.reader = ReaderConfig(
            source=dict(source.config) if source.portable else None,
            batch=division.batch,
            length=division.length,
            drop_remainder=division.drop_remainder,
        )

    async def begin_at(self, step: int) -> None:
        """Pass over the steps before `step`; nothing is read."""
        self._next = step

    async def pull(self, count: int) -> list[Offer]:
        """Return the next steps; nothing is read."""
        total = self.steps_total or 0
        end = min(total, self._next + count)
        offers: list[Offer] = []
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
            offers.append(Offer(self._next, last, parts, elements, size))
            self._next = last
        return offers

    def _ids(self, call: int) -> range | NDArray[np.int64]:
        """Return the element ids of a call."""
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
        except (MemoryError, ValueError) as error:  # no array can be so large at all: a ValueError of NumPy's
            raise SourceError(
                f"`shuffle` of {self._name}: the order of {length:,} elements takes {16 * length:,} bytes, "
                "and there is no memory for them: shuffle fewer, or say `shuffle: false`",
                key="shuffle",
            ) from error

    def shards(self, lo: int, hi: int, *, local: bool) -> Shards:
        """Return ids, locations or values of calls [lo, hi), whatever is least."""
        read_there = local and self._source.portable
        shuffled = self._shuffle_seed is not None
        if read_there and self._source.by_id and not shuffled:
            return Shards()
        return self._shards([self._ids(call) for call in range(lo, hi)], read_there=read_there, tell=shuffled)

    def separable(self, call: int) -> int:
        """Return how many elements of a call `some` can send without the others."""
        return len(self._ids(call))

    def some(self, call: int, elements: Spans, *, local: bool) -> Shards:
        """Return the ids, and locations or values, of some elements of a call."""
        ids = np.asarray(self._ids(call), np.int64)[positions(elements)]
        return self._shards([ids], read_there=local and self._source.portable, tell=True)

    def _shards(self, ids: Sequence[range | NDArray[np.int64]], *, read_there: bool, tell: bool) -> Shards:
        """Return what is sent for calls with these elements.

        Args:
            read_there: the worker reads them itself.
            tell: their ids do not follow from the calls' numbers.
        """
        length = self._division.length
        rows = [
            range(i.start % length, i.start % length + len(i)) if isinstance(i, range) else i % length
            for i in ids
        ]
        told: list[Tree] | None = list(ids) if tell else None
        if read_there:
            return Shards(
                ids=told,
                locations=None if self._source.by_id else [self._source.locate(r) for r in rows],
            )
        values = [self._source.read(self._source.locate(r)) for r in rows]
        self._element_bytes = _array_bytes(values) / max(1, sum(map(len, rows)))
        return Shards(ids=told, values=values)

    def release(self, before: int) -> None:
        """Forget the orders of epochs that are over."""
        if self._orders and self._division.steps_per_epoch:
            epoch = before // self._division.steps_per_epoch
            for old in [e for e in self._orders if e < epoch]:
                del self._orders[old]

    def elements(self, first: int, last: int) -> int:
        """Return the number of elements of steps [first, last)."""
        division = self._division
        per_epoch = division.steps_per_epoch
        if not per_epoch:
            return 0
        missing = max(0, per_epoch * division.batch - division.length)  # in the last step of an epoch
        return (last - first) * division.batch - (last // per_epoch - first // per_epoch) * missing

    def epoch(self, step: int) -> int:
        """Return the epoch of a step."""
        return step // self._division.steps_per_epoch

    def ids(self, step: int) -> list[Tree]:
        """Return the element ids of each shard that is not empty."""
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


class SequentialFeed(Feed):
    """Feeds a source that can only be read from front to back, in this process.

    Args:
        source: the opened source.
        batch: global batch size, elements.
        replicas: shards a step.
        drop_remainder: whether an epoch's last step is dropped where it is short.
        epochs: how often the source is read through; it must have as many elements each time.
    """

    def __init__(
        self, source: Source, *, batch: int, replicas: int, drop_remainder: bool, epochs: int
    ) -> None:
        self._source = source
        self._batch = batch
        self._replicas = replicas
        self._drop_remainder = drop_remainder
        self._epochs = epochs
        self._steps = self._read()
        self._broken: Exception | None = None
        self._blocks: dict[int, _Block] = {}
        self._next = 0
        self._released = 0
        self.steps_total: int | None = None
        self.reader = ReaderConfig(None, batch, -1, drop_remainder)

    def _read(self) -> Iterator[_Block]:
        length = 0
        for epoch in range(self._epochs):
            index = 0
            for value in self._source.blocks(self._batch):
                rows = row_count(value)
                if epoch and index + rows > length:
                    raise _uneven(epoch, f"more than the {length} elements")
                if rows == self._batch or not self._drop_remainder:
                    yield _Block(value, rows, epoch, epoch * length + index, _array_bytes(value))
                index += rows
            if epoch and index < length:
                raise _uneven(epoch, f"{index} elements, not the {length}")
            length = index

    async def begin_at(self, step: int) -> None:
        """Read the steps before `step`, in a thread, and let them go.

        Raises:
            SourceError: there are not so many.
        """
        while self._next < step:
            blocks = await anyio.to_thread.run_sync(
                self._read_some, step - self._next, abandon_on_cancel=True
            )
            if not blocks:
                raise SourceError(
                    f"the dataset has {self._next} steps now, and had at least {step} before", key="call"
                )
            self._next += len(blocks)
        self._released = self._next

    async def pull(self, count: int) -> list[Offer]:
        """Read the next steps, in a thread: the user's iterator may take its time.

        Raises:
            SourceError: the iterator raised, or an epoch has another number of elements.
        """
        # Whoever leaves does not wait for the user's iterator: what it still reads, nobody gets.
        blocks = await anyio.to_thread.run_sync(self._read_some, count, abandon_on_cancel=True)
        if not blocks:
            self.steps_total = self._next
        offers = []
        for block in blocks:
            step = self._next
            self._next += 1
            self._blocks[step] = block
            parts = sum(1 for n in chunk_sizes(block.rows, self._replicas) if n)
            offers.append(Offer(step, step + 1, parts, block.rows, block.size))
        return offers

    def _read_some(self, count: int) -> list[_Block]:
        """Return the next blocks, at most `count`: a trip to a thread should be worth it."""
        if self._broken is not None:
            raise self._broken
        blocks: list[_Block] = []
        size, until = 0, time.monotonic() + READ_S
        try:
            for block in self._steps:
                blocks.append(block)
                size += block.size
                if len(blocks) == count or size >= READ_BYTES or time.monotonic() >= until:
                    break
        except Exception as error:
            self._broken = error  # what was read before it counts, and comes first
            if not blocks:
                raise
        return blocks

    def shards(self, lo: int, hi: int, *, local: bool) -> Shards:
        """Return the values of calls [lo, hi)."""
        ids: list[Tree] = []
        values: list[Tree] = []
        for call in range(lo, hi):
            step, replica = divmod(call, self._replicas)
            block = self._blocks[step]
            start, stop = self._bounds(block, replica)
            ids.append(range(block.first_id + start, block.first_id + stop))
            values.append(rows_between(block.value, start, stop))
        return Shards(ids=ids, values=values)

    def separable(self, call: int) -> int:
        """Return how many elements of a call `some` can send without the others."""
        step, replica = divmod(call, self._replicas)
        start, stop = self._bounds(self._blocks[step], replica)
        return stop - start

    def some(self, call: int, elements: Spans, *, local: bool) -> Shards:
        """Return the values of some elements of a call."""
        step, replica = divmod(call, self._replicas)
        block = self._blocks[step]
        start, _ = self._bounds(block, replica)
        rows = start + positions(elements)
        return Shards(ids=[block.first_id + rows], values=[rows_at(block.value, rows)])

    def _bounds(self, block: _Block, replica: int) -> tuple[int, int]:
        size = -(-block.rows // self._replicas)
        start = min(replica * size, block.rows)
        return start, min(start + size, block.rows)

    def release(self, before: int) -> None:
        """Let go of the blocks of steps that are visible."""
        for step in range(self._released, before):
            self._blocks.pop(step, None)
        self._released = max(self._released, before)

    def elements(self, first: int, last: int) -> int:
        """Return the number of elements of steps [first, last)."""
        return sum(self._blocks[step].rows for step in range(first, last))

    def epoch(self, step: int) -> int:
        """Return the epoch of a step."""
        return self._blocks[step].epoch

    def ids(self, step: int) -> list[Tree]:
        """Return the element ids of each shard that is not empty."""
        block = self._blocks[step]
        bounds = [self._bounds(block, replica) for replica in range(self._replicas)]
        return [range(block.first_id + a, block.first_id + b) for a, b in bounds if a < b]


def _array_bytes(tree: Tree) -> int:
    return sum(leaf.nbytes for leaf in trees.flatten(tree)[0] if isinstance(leaf, np.ndarray))


def row_count(block: Tree) -> int:
    """Return the number of elements of a sequential source's block: its arrays' leading dimension."""
    return int(trees.flatten(block)[0][0].shape[0])


def rows_between(block: Tree, start: int, stop: int) -> Tree:
    """Return elements [start, stop) of a sequential source's block."""
    return trees.tree_map(lambda leaf: leaf[start:stop], block)


def rows_at(block: Tree, rows: NDArray[np.int64]) -> Tree:
    """Return elements of a sequential source's block, by position."""
    return trees.tree_map(lambda leaf: leaf[rows], block)


def positions(elements: Spans) -> NDArray[np.int64]:
    """Return positions one by one."""
    return np.concatenate([np.arange(lo, hi, dtype=np.int64) for lo, hi in elements])
