"""A variable that is cut into shards along its first axis (tf.distribute's ShardedVariable)."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any, SupportsIndex

import numpy as np

from pipedist.worker.variable_access import AnyVariable, ArrayOperators, Assignable
from pipedist.worker.variable_rules import Array, How


class ShardedVariable(Assignable):
    """Consecutive rows of one variable, each shard a variable of its own.

    It reads like an array and is assigned like a variable: NumPy takes it, and rows can be indexed:
    `v[ids]` with an array of row numbers is tf.nn.embedding_lookup, and reads only these rows. Assigning
    gives each shard its rows, and returns None; where the value does not fit, no shard is changed.

    Args:
        name: of the whole.
        shards: at least one, in the order of their rows.
    """

    __slots__ = ("_shards", "_starts", "name")

    def __init__(self, name: str, shards: Sequence[AnyVariable]) -> None:
        self.name = name
        self._shards = tuple(shards)
        self._starts: list[int] | None = None

    @property
    def variables(self) -> tuple[AnyVariable, ...]:
        """The shards, each a variable."""
        return self._shards

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole."""
        return (self._bounds()[-1], *self._shards[0].shape[1:])

    @property
    def dtype(self) -> Any:
        """The value's dtype."""
        return self._shards[0].dtype

    def value(self) -> Array:
        """Return the whole value, put together: an array, read-only."""
        whole = np.concatenate([shard.value() for shard in self._shards])
        whole.flags.writeable = False
        return whole

    def __getitem__(self, index: Any) -> Any:
        """Return what NumPy's indexing of the whole gives; rows alone are read from their shards."""
        if isinstance(index, SupportsIndex) and not isinstance(index, bool | np.ndarray):
            return self._rows(np.array([operator.index(index)]))[0]
        if isinstance(index, list) or (isinstance(index, np.ndarray) and index.dtype.kind in "iu"):
            rows = np.asarray(index)
            if rows.dtype.kind in "iu":
                return self._rows(rows)
        return self.value()[index]

    def __len__(self) -> int:
        return self._bounds()[-1]

    def __iter__(self) -> Iterator[Array]:
        for shard in self._shards:
            yield from shard.value()

    def __repr__(self) -> str:
        return f"<ShardedVariable {self.name!r} {self.dtype}{list(self.shape)} in {len(self._shards)} shards>"

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardedVariable, (self.name, self._shards)

    def _bounds(self) -> list[int]:
        """Return the first row of each shard, and the number of rows."""
        if self._starts is None:
            self._starts = [0]
            for shard in self._shards:
                self._starts.append(self._starts[-1] + shard.shape[0])
        return self._starts

    def _rows(self, rows: Any) -> Array:
        bounds = np.asarray(self._bounds())
        total = int(bounds[-1])
        places = np.where(rows < 0, rows + total, rows)
        if places.size and not 0 <= int(places.min()) <= int(places.max()) < total:
            raise IndexError(f"a row is out of range: {self!r} has {total} rows")
        owners = np.searchsorted(bounds, places, side="right") - 1
        found = np.empty((*places.shape, *self.shape[1:]), self.dtype)
        for owner in np.unique(owners):
            mine = owners == owner
            found[mine] = self._shards[int(owner)].value()[places[mine] - bounds[owner]]
        return found

    def _change(self, how: How, operand: object) -> None:
        whole = np.asarray(operand)
        if whole.shape != self.shape:
            raise ValueError(f"a value of shape {list(whole.shape)} for {self!r}: the shape must be the same")
        if not isinstance(operand, np.ndarray | ArrayOperators) and np.can_cast(
            whole.dtype, self.dtype, "same_kind"
        ):
            whole = whole.astype(self.dtype)  # plain numbers adapt, as they do to one variable
        elif whole.dtype != self.dtype:
            raise ValueError(f"a value of dtype {whole.dtype} for {self!r}: cast it first")
        bounds = self._bounds()
        for shard, lo, hi in zip(self._shards, bounds, bounds[1:], strict=False):
            shard._change(how, whole[lo:hi])
