"""How a call's shard is found in the worker: sent along, located, or read by arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipedist.errors import RemoteProtocolError
from pipedist.program import ReaderConfig, Shards, Tree


@dataclass(frozen=True, slots=True)
class Shard:
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
        if config is not None and config.length > 0:
            from pipedist.datasets.division import Division  # passes without a dataset need none

            self._division = Division(config.length, config.batch, replicas, config.drop_remainder)

    def find(self, shards: Shards, index: int, call: int) -> Shard:
        """Return the shard of call `call`, the `index`-th of its Assign.

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
        return Shard(self._open().read(self._rows(elements)), elements, epoch)

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

    def close(self) -> None:
        """Let go of the reader and its files."""
        reader, self._reader = self._reader, None
        close = getattr(reader, "close", None)
        if close is not None:
            close()
