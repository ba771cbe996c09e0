"""An array that grows piece by piece in a file, along any axis, in bounded memory.

Along axis 0 the pieces' bytes, one after the other, ARE the array. Along another axis they are
kept one after the other as well, and put in order when the array is read: a block of rows at
a time, taken out of every piece. Texts (`<U3`, then `<U5`) grow to the widest, as
`numpy.concatenate` does it; any other difference in dtype, or in shape apart from the axis,
is an error.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import IO, Any

import numpy as np

from pipedist.errors import OutputError
from pipedist.outputs.leaves import Array

BLOCK_BYTES = 8 * 2**20
"""How much of an array is in memory at a time."""


class ArraySpool:
    """One array that grows in a file.

    Args:
        file: open for reading and writing; the spool owns everything from `offset` on.
        axis: along which the pieces are put end to end; may be negative.
        label: names file and leaf in errors.
        offset: where the data begin, bytes.
    """

    def __init__(self, file: IO[bytes], *, axis: int, label: str, offset: int = 0) -> None:
        self._file = file
        self._axis = axis
        self._label = label
        self._offset = offset
        self._dtype: np.dtype[Any] | None = None
        self._shape: tuple[int, ...] = ()
        self._lengths: list[int] = []

    @property
    def empty(self) -> bool:
        """Whether nothing was appended yet."""
        return self._dtype is None

    @property
    def dtype(self) -> np.dtype[Any]:
        """The array's dtype; there must be a piece."""
        if self._dtype is None:
            raise ValueError("an empty spool has no dtype")
        return self._dtype

    @property
    def axis(self) -> int:
        """The axis, counted from the front; there must be a piece."""
        return self._axis % len(self._shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array so far."""
        axis = self.axis
        return (*self._shape[:axis], sum(self._lengths), *self._shape[axis + 1 :])

    def append(self, piece: Array) -> None:
        """Put a piece at the end.

        Args:
            piece: same dtype and shape as the pieces before, apart from the axis and from the
                width of texts.

        Raises:
            OutputError: it does not fit; the text names both dtypes or shapes.
            OSError: the file can't be written.
        """
        if self._dtype is None:
            self._begin(piece)
        axis = self.axis
        rest = (*piece.shape[:axis], *piece.shape[axis + 1 :])
        if piece.ndim != len(self._shape) or rest != (*self._shape[:axis], *self._shape[axis + 1 :]):
            raise OutputError(
                f"{self._label}: shapes may differ along axis {axis} only: first {self._shape}, "
                f"now {piece.shape}"
            )
        if piece.dtype != self.dtype:
            piece = self._fit(piece)
        self._file.seek(0, os.SEEK_END)
        if piece.nbytes:  # as plain bytes: the buffer protocol has no format for dates
            self._file.write(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
        self._lengths.append(piece.shape[axis])

    def blocks(self, rows: int | None = None) -> Iterator[Array]:
        """Yield the array in C order, a block of rows (indices of axis 0) at a time.

        Args:
            rows: rows in a block; default: as many as fit `BLOCK_BYTES`, at least one.
        """
        shape = self.shape
        total = shape[0]
        row_bytes = math.prod(shape[1:]) * self.dtype.itemsize
        if rows is None:
            rows = max(1, BLOCK_BYTES // max(1, row_bytes))
        self._file.flush()
        for first in range(0, total, rows):
            yield self._rows(first, min(total, first + rows))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _begin(self, piece: Array) -> None:
        if not -piece.ndim <= self._axis < piece.ndim:
            raise OutputError(
                f"{self._label}: an array of shape {piece.shape} has no axis {self._axis} to gather along"
            )
        if piece.dtype.hasobject or piece.dtype.kind == "V":
            raise OutputError(f"{self._label}: dtype {piece.dtype} can't be stored; return float32 or bytes")
        self._dtype, self._shape = piece.dtype, piece.shape

    def _fit(self, piece: Array) -> Array:
        if piece.dtype.kind != self.dtype.kind or piece.dtype.kind not in "US":
            raise OutputError(
                f"{self._label}: one array has one dtype: first {self.dtype}, now {piece.dtype}"
            )
        if piece.dtype.itemsize > self.dtype.itemsize:
            self._widen(piece.dtype)
        return piece.astype(self.dtype)

    def _widen(self, dtype: np.dtype[Any]) -> None:
        """Rewrite the texts so far in a wider dtype: in place, from the end to the front."""
        narrow = self.dtype
        size = math.prod(self.shape)
        step = max(1, BLOCK_BYTES // dtype.itemsize)
        for first in reversed(range(0, size, step)):
            count = min(step, size - first)
            texts = self._read(first * narrow.itemsize, (count,), narrow)
            self._file.seek(self._offset + first * dtype.itemsize)
            self._file.write(texts.astype(dtype).tobytes())
        self._dtype = dtype

    def _rows(self, first: int, last: int) -> Array:
        axis, shape, dtype = self.axis, self.shape, self.dtype
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        if axis == 0:
            return self._read(first * row_bytes, (last - first, *shape[1:]), dtype)
        out = np.empty((last - first, *shape[1:]), dtype)
        start = begin = 0
        for length in self._lengths:
            inner = (*shape[1:axis], length, *shape[axis + 1 :])
            bytes_of_row = math.prod(inner) * dtype.itemsize
            part = self._read(begin + first * bytes_of_row, (last - first, *inner), dtype)
            out[(slice(None),) * axis + (slice(start, start + length),)] = part
            start += length
            begin += shape[0] * bytes_of_row
        return out

    def _read(self, begin: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        size = math.prod(shape) * dtype.itemsize
        self._file.seek(self._offset + begin)
        data = self._file.read(size)
        if len(data) != size:
            raise OutputError(f"{self._label}: its temporary file was cut short by {size - len(data)} bytes")
        return np.frombuffer(data, dtype=dtype).reshape(shape)
