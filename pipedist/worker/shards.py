"""How a call's shard is found in the worker: sent along, located, or read by arithmetic.

Shards that are read by arithmetic follow each other in the source, so short ones are read some
hundred calls at a time, as one BLOCK, and are slices of it. That shows in nothing: a slice has the
bytes, dtype, order and flags of what would have been read alone, or no block is made of it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipedist.core import trees
from pipedist.core.types import Tree
from pipedist.errors import RemoteProtocolError
from pipedist.protocol.program import ReaderConfig, Shards

BLOCK_BYTES_MAX = 2**20
"""The most that is read at once for more than one call."""

_WIDTH_VARIES = "USO"
"""Kinds of arrays whose dtype depends on which rows are read."""


class Shard(NamedTuple):
    """What a call works on.

    Args:
        value: read-only, C-contiguous arrays in a tree.
        elements: ids of its elements (a range or int64[n]), None where it has none.
        epoch: which reading of the dataset; 0 where there is none.
    """

    value: Tree
    elements: range | NDArray[np.int64] | None
    epoch: int


class ShardFinder:
    """Finds the shards of one pass.

    Args:
        config: how; None where values are sent that are no shards of a dataset.
        replicas: R.
    """

    def __init__(self, config: ReaderConfig | None, replicas: int) -> None:
        self._config = config
        self._replicas = replicas
        self._division: Any = None
        self._reader: Any = None
        self._row_bytes: float | None = None
        """Size of a row of the last shard that was read alone; None where a block would not be the same."""
        if config is not None and config.length > 0:
            from pipedist.datasets.division import Division  # passes without a dataset need none

            self._division = Division(config.length, config.batch, replicas, config.drop_remainder)

    def of_lease(self, shards: Shards, lo: int, hi: int) -> LeaseShards:
        """Return the shards of a lease's calls [lo, hi)."""
        return LeaseShards(self, shards, lo, hi)

    def find(self, shards: Shards, index: int, call: int) -> Shard:
        """Return the shard of call `call`, the `index`-th of its lease.

        Raises:
            RemoteProtocolError: if the scheduler sent nothing to find it with.
            Exception: whatever the reader raises.
        """
        step, replica = divmod(call, self._replicas)
        elements: range | NDArray[np.int64] | None = None
        epoch = 0
        if self._division is not None:
            epoch = step // self._division.steps_per_epoch
            elements = self._division.ids(step, replica) if shards.ids is None else None
        if shards.ids is not None:
            elements = shards.ids[index]
        if shards.values is not None:
            return Shard(shards.values[index], elements, epoch)
        if shards.locations is not None:
            return Shard(self._open().read(shards.locations[index]), elements, epoch)
        if elements is None or self._config is None:
            raise RemoteProtocolError(f"call {call} came without a shard, and can't be read by its number")
        value = self._open().read(self._rows(elements))
        self._row_bytes = _row_bytes(value, len(elements))
        return Shard(value, elements, epoch)

    def block(self, call: int, hi: int) -> list[Shard]:
        """Return the shards of calls from `call` on, before `hi`, that are worth being read at once.

        Nothing is returned where they are not, or can't be read: then each call reads its own, and
        meets its own error.
        """
        division = self._division
        if division is None or not self._row_bytes or self._config is None:
            return []
        rows_max = int(BLOCK_BYTES_MAX / self._row_bytes)
        step, replica = divmod(call, self._replicas)
        epoch, first, stop = division.bounds(step, replica)
        # A call may have no row, so that the number of calls is bounded by that of rows only roughly.
        count = min(hi - call, rows_max + self._replicas) if stop - first <= rows_max else 0
        bounds = division.bounds_from(step, replica, count)
        while bounds and bounds[-1][1] - first > rows_max:
            bounds.pop()
        if len(bounds) < 2:
            return []
        last_row = bounds[-1][1]
        try:
            rows = self._open().read(range(first, last_row))
        except Exception:
            return []
        base = epoch * self._config.length
        if type(rows) is np.ndarray:
            return [Shard(rows[a - first : b - first], range(base + a, base + b), epoch) for a, b in bounds]
        if type(rows) is not dict:
            return []
        columns = list(rows.items())
        return [
            Shard({k: c[a - first : b - first] for k, c in columns}, range(base + a, base + b), epoch)
            for a, b in bounds
        ]

    def _rows(self, elements: range | NDArray[np.int64]) -> range | NDArray[np.int64]:
        """Return the row numbers of elements; a shard never crosses an epoch."""
        assert self._config is not None  # find() has checked it
        length = self._config.length
        if isinstance(elements, range):
            first = elements.start % length if len(elements) else 0
            return range(first, first + len(elements))
        return elements % length

    def _open(self) -> Any:
        if self._reader is None:
            if self._config is None or self._config.source is None:
                raise RemoteProtocolError("a pass without a source came with locations to read")
            from pipedist.datasets import open_reader  # passes without a dataset need no reader

            self._reader = open_reader(self._config.source)
        return self._reader

    def is_empty(self, shard: Shard) -> bool:
        """Whether there is no element in it; what is no shard of a dataset is never empty."""
        if self._config is None:
            return False
        if shard.elements is not None:
            return len(shard.elements) == 0
        leaves = trees.flatten(shard.value)[0]
        return not leaves or (isinstance(leaves[0], np.ndarray) and leaves[0].shape[:1] == (0,))

    def close(self) -> None:
        """Let go of the reader and its files."""
        reader, self._reader = self._reader, None
        close = getattr(reader, "close", None)
        if close is not None:
            close()


class LeaseShards:
    """The shards of one lease's calls.

    Args:
        finder: of the pass.
        shards: as they came.
        lo, hi: the calls.
    """

    def __init__(self, finder: ShardFinder, shards: Shards, lo: int, hi: int) -> None:
        self._finder = finder
        self._shards = shards
        self._lo = lo
        self._hi = hi
        self._by_number = shards.ids is None and shards.values is None and shards.locations is None
        self._block: list[Shard] = []
        self._block_lo = lo

    def find(self, call: int) -> Shard:
        """Return the shard of a call; whoever asks in order is served from blocks.

        Raises:
            RemoteProtocolError: if the scheduler sent nothing to find it with.
            Exception: whatever the reader raises.
        """
        index = call - self._block_lo
        if 0 <= index < len(self._block):
            return self._block[index]
        if self._by_number:
            self._block, self._block_lo = self._finder.block(call, self._hi), call
            if self._block:
                return self._block[0]
        return self._finder.find(self._shards, call - self._lo, call)

    def is_empty(self, shard: Shard) -> bool:
        """Whether there is no element in a shard of a dataset."""
        return self._finder.is_empty(shard)


def _row_bytes(value: Tree, rows: int) -> float | None:
    """Return the size of a row, bytes; None where slices of more rows would not be the same arrays."""
    columns = [value] if type(value) is np.ndarray else list(value.values()) if type(value) is dict else []
    if (
        not rows
        or not columns
        or any(type(c) is not np.ndarray or c.dtype.kind in _WIDTH_VARIES for c in columns)
    ):
        return None
    return sum(c.nbytes for c in columns) / rows
