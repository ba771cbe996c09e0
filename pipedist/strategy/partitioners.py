"""Partitioners: the number of shards of a variable (tf.distribute.experimental.partitioners).

A partitioner is called with a variable's shape and dtype, and returns the number of shards along each
axis, all 1 except one. Shards are consecutive rows, the longer ones first (`shard_sizes`): 10 rows in 3
shards are 4, 3, 3.

Differences from tf.distribute: invalid numbers of shards (0, -1) are rejected; `MinSizePartitioner` keeps
its minimum for EVERY shard; the result is never 0, and a shape with empty axes causes no division by zero.
"""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, SupportsIndex

import numpy as np
from numpy.typing import DTypeLike

from pipedist.core.arguments import check_int

BYTES_PER_STRING: Final = 16  # assumed size of a string whose dtype has no length


class Partitioner(ABC):
    """Base class of partitioners; any callable with this signature can be used instead."""

    __slots__ = ()

    def __call__(self, shape: Sequence[int], dtype: DTypeLike, axis: int = 0) -> list[int]:
        """Return the number of shards along each axis.

        Args:
            shape: shape of the variable, at least one axis.
            dtype: dtype of the variable.
            axis: the axis that is split.

        Returns:
            A list as long as `shape`: 1, and at `axis` from 1 to the axis's length.

        Raises:
            ValueError: the shape has no axes, a length is negative, or `axis` is out of range.
            TypeError: a length is not an int, or elements of the dtype have no size (objects).
        """
        if isinstance(shape, str | bytes) or not isinstance(shape, Sequence):
            raise TypeError(f"`shape` must be a tuple or list of ints, got {shape!r}")
        lengths = [check_int("a length of shape", length, at_least=0) for length in shape]
        if not lengths:
            raise ValueError("a scalar has no axis to split: expected a shape of at least one axis")
        if isinstance(axis, bool) or not isinstance(axis, SupportsIndex):
            raise TypeError(f"`axis` must be an int, got {axis!r}")
        index = operator.index(axis)
        if not -len(lengths) <= index < len(lengths):
            raise ValueError(f"axis is {index}, but the shape {lengths} has {len(lengths)} axes")
        rows = lengths.pop(index)
        shards = max(1, min(rows, self._shards(rows, math.prod(lengths), np.dtype(dtype))))
        return [shards if i == index % (len(lengths) + 1) else 1 for i in range(len(lengths) + 1)]

    @abstractmethod
    def _shards(self, rows: int, row_elements: int, dtype: np.dtype) -> int:
        """Return the number of shards of `rows` rows; `__call__` limits it to the valid range."""


@dataclass(frozen=True, slots=True)
class FixedShardsPartitioner(Partitioner):
    """A fixed number of shards, at most one per row.

    Args:
        num_shards: at least 1.

    Raises:
        ValueError: `num_shards` is less than 1.
        TypeError: `num_shards` is not an int.

    Example:
        pipedist.FixedShardsPartitioner(num_shards=2)
    """

    num_shards: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_shards", check_int("num_shards", self.num_shards))

    def _shards(self, rows: int, row_elements: int, dtype: np.dtype) -> int:
        return self.num_shards


@dataclass(frozen=True, slots=True)
class MinSizePartitioner(Partitioner):
    """As many shards as possible of a minimum size.

    A variable smaller than the minimum is one shard. tf.distribute divides the variable's size by the
    minimum and rounds up, so that its shards may be smaller: 40 bytes in shards of 16 become 16, 12,
    12 there, and 20, 20 here.

    Args:
        min_shard_bytes: minimum size of a shard, at least 1.
        max_shards: at least 1; the default does not split, as in tf.distribute.
        bytes_per_string: assumed size of a string whose dtype has no length.

    Raises:
        ValueError: a number is less than 1.
        TypeError: a number is not an int.

    Example:
        pipedist.MinSizePartitioner(min_shard_bytes=256 << 10, max_shards=8)
    """

    min_shard_bytes: int = 256 << 10
    max_shards: int = 1
    bytes_per_string: int = BYTES_PER_STRING

    def __post_init__(self) -> None:
        for name in ("min_shard_bytes", "max_shards", "bytes_per_string"):
            object.__setattr__(self, name, check_int(name, getattr(self, name)))

    def _shards(self, rows: int, row_elements: int, dtype: np.dtype) -> int:
        row_bytes = row_elements * _element_bytes(dtype, self.bytes_per_string)
        if row_bytes == 0:
            return 1
        rows_min = -(-self.min_shard_bytes // row_bytes)
        return min(self.max_shards, rows // rows_min)


@dataclass(frozen=True, slots=True)
class MaxSizePartitioner(Partitioner):
    """As few shards as possible of a maximum size.

    A row larger than the maximum is one shard, and `max_shards` takes precedence.

    Args:
        max_shard_bytes: maximum size of a shard, at least 1.
        max_shards: at least 1; None: no limit.
        bytes_per_string: assumed size of a string whose dtype has no length.

    Raises:
        ValueError: a number is less than 1.
        TypeError: a number is not an int.

    Example:
        pipedist.MaxSizePartitioner(max_shard_bytes=4 << 20)
    """

    max_shard_bytes: int
    max_shards: int | None = None
    bytes_per_string: int = BYTES_PER_STRING

    def __post_init__(self) -> None:
        for name in ("max_shard_bytes", "max_shards", "bytes_per_string"):
            value = getattr(self, name)
            if name != "max_shards" or value is not None:
                object.__setattr__(self, name, check_int(name, value))

    def _shards(self, rows: int, row_elements: int, dtype: np.dtype) -> int:
        row_bytes = row_elements * _element_bytes(dtype, self.bytes_per_string)
        if row_bytes == 0:
            return 1
        rows_max = max(1, self.max_shard_bytes // row_bytes)
        shards = -(-rows // rows_max)
        return shards if self.max_shards is None else min(self.max_shards, shards)


def shard_sizes(rows: int, shards: int) -> list[int]:
    """Return the number of rows of each shard; sizes differ by at most one, longer shards first."""
    each, longer = divmod(check_int("rows", rows, at_least=0), check_int("shards", shards))
    return [each + 1] * longer + [each] * (shards - longer)


def _element_bytes(dtype: np.dtype, bytes_per_string: int) -> int:
    if dtype.hasobject:
        raise TypeError(f"elements of dtype {dtype} are Python objects: they have no size in bytes")
    return dtype.itemsize or bytes_per_string  # 0: a string dtype without a length
