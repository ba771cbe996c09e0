"""Inputs of calls: shards, and the values of states.

A call's shard is sent along, located, or computed from the number of the call. Shards of the last kind are adjacent
in the source, so short ones are read some hundred calls at a time, as one BLOCK, and are slices of it. The result
is the same: a slice has the bytes, dtype, order and flags of a separate read, or no block is made.

The value of a state is sent once for each version, not once for each call. A lease names the version of each state
that it reads. A value is decoded when the first lease reads it, never changes, and replaces each `StateValue` in
the arguments of a stage.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from pipedist.core import trees
from pipedist.core.types import Tree
from pipedist.errors import PipedistError, RemoteProtocolError
from pipedist.protocol.program import ReaderConfig, Shards, StateValue, load_tree

BLOCK_BYTES_MAX = 2**20  # maximum size of a read for more than one call
_VARIABLE_WIDTH = "USO"  # kinds of arrays whose dtype depends on the rows that are read


class Shard(NamedTuple):
    """The input of a call: a tree of read-only, C-contiguous arrays, and the ids of its elements, if any."""

    value: Tree
    elements: range | NDArray[np.int64] | None
    epoch: int


class ShardBlock(Struct):
    """The shards of consecutive calls, which were read together."""

    values: list[Tree]
    epoch: int
    # Ids: of the only shard, or of the whole epoch
    elements: range | NDArray[np.int64] | None
    # [start, stop) of each shard among the elements; (): there is one shard
    rows: Sequence[tuple[int, int]] = ()

    def shard(self, index: int) -> Shard:
        """Return one of the shards."""
        elements = self.elements
        if self.rows and elements is not None:
            start, stop = self.rows[index]
            elements = elements[start:stop]
        return Shard(self.values[index], elements, self.epoch)


class ShardFinder:
    """Finds the shards of one pass; `config` is None if values are sent that are no shards.

    `code`: the folders of the spec's modules, for a source that a class reads.
    """

    def __init__(self, config: ReaderConfig | None, replicas: int, code: Sequence[str] = ()) -> None:
        self._config = config
        self._code = code
        self._replicas = replicas
        self._division: Any = None
        self._reader: Any = None
        self.reading_ns = 0
        self._row_bytes: float | None = None  # of the shard that was read last; None if a block would differ
        if config is not None and config.length > 0:
            from pipedist.datasets.division import Division  # passes without a dataset need none

            self._division = Division(config.length, config.batch, replicas, config.drop_remainder)

    def find(self, shards: Shards, index: int, call: int) -> Shard:
        """Return the shard of call `call`, the `index`-th of its lease; raises errors of the reader."""
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
            return Shard(self._read(shards.locations[index]), elements, epoch)
        if elements is None or self._config is None:
            raise RemoteProtocolError(
                f"call {call} came without a shard, and its number does not determine one"
            )
        value = self._read(self._rows(elements))
        self._row_bytes = _row_bytes(value, len(elements))
        return Shard(value, elements, epoch)

    def block(self, call: int, hi: int) -> ShardBlock | None:
        """Return the shards of calls from `call` on, below `hi`, in one read: at least two.

        None if a block does not pay, or its data cannot be read. Then each call reads its own shard, and raises its
        own error. Any other exception is a defect of the reader, and is raised.
        """
        division = self._division
        if division is None or not self._row_bytes or self._config is None:
            return None
        rows_max = int(BLOCK_BYTES_MAX / self._row_bytes)
        step, replica = divmod(call, self._replicas)
        epoch, first, stop = division.bounds(step, replica)
        # A call may have no rows, so the number of rows limits the number of calls only roughly.
        count = min(hi - call, rows_max + self._replicas) if stop - first <= rows_max else 0
        bounds = division.bounds_from(step, replica, count)
        while bounds and bounds[-1][1] - first > rows_max:
            bounds.pop()
        if len(bounds) < 2:
            return None
        last_row = bounds[-1][1]
        try:
            rows = self._read(range(first, last_row))
        except (PipedistError, OSError, MemoryError):
            return None
        if type(rows) is dict:
            parts: list[Tree] = [{k: c[a - first : b - first] for k, c in rows.items()} for a, b in bounds]
        elif type(rows) is np.ndarray:
            parts = [rows[a - first : b - first] for a, b in bounds]
        else:
            return None
        base = epoch * self._config.length
        return ShardBlock(parts, epoch, range(base, base + self._config.length), bounds)

    def _rows(self, elements: range | NDArray[np.int64]) -> range | NDArray[np.int64]:
        """Return the row numbers of elements; a shard never crosses an epoch."""
        assert self._config is not None  # find() has checked it
        length = self._config.length
        if isinstance(elements, range):
            first = elements.start % length if len(elements) else 0
            return range(first, first + len(elements))
        return elements % length

    def _read(self, place: Any) -> Any:
        began = time.perf_counter_ns()
        try:
            return self._open().read(place)
        finally:
            self.reading_ns += time.perf_counter_ns() - began

    def _open(self) -> Any:
        if self._reader is None:
            if self._config is None or self._config.source is None:
                raise RemoteProtocolError("a pass without a source came with locations to read")
            from pipedist.datasets import open_reader  # passes without a dataset need no reader

            self._reader = open_reader(self._config.source, self._code)
        return self._reader

    def is_empty(self, shard: Shard) -> bool:
        """Return whether a shard of a dataset has no elements; other values are never empty."""
        if self._config is None:
            return False
        if shard.elements is not None:
            return len(shard.elements) == 0
        leaves = trees.flatten(shard.value)[0]
        return not leaves or (isinstance(leaves[0], np.ndarray) and leaves[0].shape[:1] == (0,))

    def close(self) -> None:
        reader, self._reader = self._reader, None
        close = getattr(reader, "close", None)
        if close is not None:
            close()


FinishedElements = Mapping[tuple[int, int], tuple[Tree, str]]
"""Results and failures of elements, by stage and id; see `messages.Elements`."""


class LeaseShards:
    """The shards of a lease's calls [lo, hi), as they were sent."""

    def __init__(self, finder: ShardFinder, shards: Shards, lo: int, hi: int) -> None:
        self._finder = finder
        self._shards = shards
        self._lo = lo
        self._hi = hi
        self._by_number = shards.ids is None and shards.values is None and shards.locations is None
        self._block: ShardBlock | None = None
        self._block_lo = lo

    def finished(self, call: int) -> FinishedElements:
        """Return the elements of a call that need no execution."""
        found = self._shards.finished or ()
        return {(stage, id_): (result, why) for number, stage, id_, result, why in found if number == call}

    def value(self, call: int) -> Tree:
        """Return the value that came for a call of a pass without a reader."""
        if self._shards.values is None:
            raise RemoteProtocolError(f"call {call} came without a value")
        return self._shards.values[call - self._lo]

    def find(self, call: int) -> Shard:
        if self._by_number:
            block, index = self.from_call(call)
            return block.shard(index)
        return self._finder.find(self._shards, call - self._lo, call)

    def from_call(self, call: int) -> tuple[ShardBlock, int]:
        """Return a block with the shard of a call, and its place there; the next calls follow.

        A value that was sent is returned once: its memory goes back to the driver while later calls of the lease run.
        """
        index = call - self._block_lo
        if self._block is not None and 0 <= index < len(self._block.values):
            return self._block, index
        if self._by_number:
            self._block, self._block_lo = self._finder.block(call, self._hi), call
            if self._block is not None:
                return self._block, 0
        found = self._finder.find(self._shards, call - self._lo, call)
        if self._shards.values is not None:
            self._shards.values[call - self._lo] = None
        return ShardBlock([found.value], found.epoch, found.elements), 0


def _row_bytes(value: Tree, rows: int) -> float | None:
    """Return the size of a row, bytes; None if slices of more rows would be other arrays."""
    columns = [value] if type(value) is np.ndarray else list(value.values()) if type(value) is dict else []
    if (
        not rows
        or not columns
        or any(type(c) is not np.ndarray or c.dtype.kind in _VARIABLE_WIDTH for c in columns)
    ):
        return None
    return sum(c.nbytes for c in columns) / rows


# -- states ------------------------------------------------------------------------------

VERSIONS_MAX = 2  # latest versions stored per state, besides an older one for a repeated lease
States = Mapping[str, Sequence[int]]  # the states that a lease reads: name -> [space, version]


class StateStore:
    """The latest values of each state."""

    def __init__(self) -> None:
        self._frames: dict[int, dict[int, Sequence[memoryview]]] = {}  # space -> version -> not decoded
        self._values: dict[int, dict[int, Tree]] = {}  # space -> version -> a decoded value

    def receive(self, space: int, version: int, frames: Sequence[memoryview]) -> None:
        self._discard_old(space, version)
        self._frames.setdefault(space, {})[version] = frames

    def put(self, space: int, version: int, value: Tree) -> None:
        """Store a value that this worker computed; its arrays never change again."""
        self._discard_old(space, version)
        self._values.setdefault(space, {})[version] = value

    def drop(self, space: int) -> None:
        self._frames.pop(space, None)
        self._values.pop(space, None)

    def values(self, states: States) -> dict[str, Tree]:
        return {name: self._value(name, space, version) for name, (space, version) in states.items()}

    def _value(self, name: str, space: int, version: int) -> Tree:
        frames = self._frames.get(space, {}).pop(version, None)
        if frames is not None:
            try:
                self._values.setdefault(space, {})[version] = load_tree(
                    frames, f"version {version} of {name!r}"
                )
            except BaseException:
                self._frames[space][version] = frames  # the next lease that reads it gets the same error
                raise
        known = self._values.get(space, {})
        if version not in known:
            raise RemoteProtocolError(
                f"a lease reads version {version} of {name!r} (state {space}), which was not sent"
            )
        return known[version]

    def _discard_old(self, space: int, version: int) -> None:
        frames, values = self._frames.get(space, {}), self._values.get(space, {})
        latest = {version, *sorted({version, *frames, *values})[-VERSIONS_MAX:]}
        for held in (frames, values):
            for other in [v for v in held if v == version or v not in latest]:
                del held[other]


def state_names(tree: Tree) -> frozenset[str]:
    names: set[str] = set()
    trees.replace(tree, StateValue, lambda state: names.add(state.name))
    return frozenset(names)


def fill_states(tree: Tree, values: Mapping[str, Tree]) -> Tree:
    """Return a stage's arguments with the value of each state in its place."""

    def value_of(state: StateValue) -> Tree:
        if state.name not in values:
            raise RemoteProtocolError(
                f"the arguments read state {state.name!r}, which the lease does not name"
            )
        return values[state.name]

    return trees.replace(tree, StateValue, value_of)
