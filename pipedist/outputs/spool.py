"""Values as named arrays: their leaves, and arrays that grow piece by piece in temporary files.

An `ArraySpool` needs bounded memory. Along axis 0, the bytes of the pieces, one after the other, are
the array. Along another axis the pieces are kept one after the other too, and put in order when the
array is read: a block of rows at a time, out of every piece. Texts (`<U3`, then `<U5`) grow to the
widest, as with `numpy.concatenate`; any other difference in dtype, or in shape apart from the axis,
is an error.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from pipedist.core import ragged, trees
from pipedist.core.types import Tree
from pipedist.errors import OutputError
from pipedist.outputs import encoding

Array = npt.NDArray[Any]

Columns = dict[str, Array]  # columns by name: arrays [rows, ...]

BLOCK_BYTES = 8 * 2**20  # bytes of an array that are in memory at a time

_IN_MEMORY_BYTES = 2**16  # a smaller leaf needs no temporary file: a value may have thousands of leaves


class Leaves:
    """Splits values of one structure, that of the first value, into named arrays.

    Args:
        bare: the name of the leaf of a value that is not a container.
        target: the file as errors name it.
        fixed_width: whether the file holds texts of one width only (`<U`).
    """

    def __init__(self, *, bare: str, target: str, fixed_width: bool = False) -> None:
        self._fixed_width = fixed_width
        self._bare = bare
        self._target = target
        self._structure: trees.Treedef | None = None
        self.names: list[str] = []
        self.order: list[int] = []  # the indices of the names in the order of the first value's own keys

    def take(self, tree: Tree) -> list[Array]:
        """Return the leaves of `tree` as arrays, in the order of `names`."""
        leaves, structure = trees.flatten(tree)
        if self._structure is None:
            names = [path or self._bare for path in trees.treedef_paths(structure)]
            if len(set(names)) < len(names):
                twice = min(name for name in names if names.count(name) > 1)
                raise OutputError(f"{self._target}: two leaves have the same path {twice!r}")
            self._structure, self.names = structure, names
            self.order = list(_in_order(trees.unflatten(structure, range(len(names)))))
        elif structure != self._structure:
            raise OutputError(
                f"{self._target}: all values must have one structure: first "
                f"{trees.describe(self._structure)}, now {trees.describe(structure)}"
            )
        return [self._array(leaf, name) for leaf, name in zip(leaves, self.names, strict=True)]

    def template(self, leaves: list[Any]) -> Tree:
        """Return a tree of the common structure that has `leaves`; None if there was no value."""
        return None if self._structure is None else trees.unflatten(self._structure, leaves)

    def _array(self, leaf: Any, name: str) -> Array:
        if isinstance(leaf, bytes | bytearray | memoryview):
            leaf = np.array(bytes(leaf), object)
        elif isinstance(leaf, str) and leaf[-1:] == "\0":
            leaf = np.array(leaf, object)
        array = np.asarray(leaf)
        if array.dtype.kind == "T":
            array = array.astype(object)
        kind = array.dtype.kind
        if kind == "O" and array is leaf:
            return self._fixed(array, name) if self._fixed_width else array
        if kind == "O":
            what = f"a {type(leaf).__qualname__}"
            if isinstance(leaf, int):
                what = f"the integer {leaf}, which has more than 64 bits"
            raise OutputError(
                f"{self._target}: leaf {name!r} must be an array of numbers or text, got {what}"
            )
        if not array.dtype.isnative:
            array = array.astype(array.dtype.newbyteorder("="))
        return array

    def _fixed(self, array: Array, name: str) -> Array:
        """Return an object array as `<U`, or as `S` if it is bytes."""
        cells = array.ravel().tolist()
        kind = "text" if all(isinstance(cell, str) for cell in cells) else "bytes"
        problem = ""
        if kind == "bytes" and not all(isinstance(cell, bytes) for cell in cells):
            problem = "is an object array of other values than text and bytes"
        elif any(cell[-1:] in ("\0", b"\0") for cell in cells):
            problem = f"has a value that ends with a zero byte, which NumPy's {kind} can't hold"
        elif cells and ragged.is_wasteful(len(cells), widest := max(map(len, cells)), sum(map(len, cells))):
            problem = f"would need {widest:,} characters for each of {len(cells):,} values"
        if problem:
            raise OutputError(f"{self._target}: leaf {name!r} {problem}. Write .parquet, .jsonl or .json.")
        return array.astype("U" if kind == "text" else "S")


def _in_order(tree: Tree) -> Iterator[int]:
    """Yield the leaves of a tree of indices in the order of its dicts' own keys."""
    inner = encoding.node(tree)
    if inner is None:
        if tree is not None:
            yield tree
        return
    for child in (value for _, value in inner[1]) if inner[0] == "object" else inner[1]:
        yield from _in_order(child)


class ArraySpool:
    """One array that grows in a file.

    Args:
        file: open for reading and writing; the spool owns everything from `offset` on.
        axis: the axis along which the pieces are concatenated; may be negative.
        label: file and leaf as errors name them.
        offset: where the data begins, bytes.
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
    def dtype(self) -> np.dtype[Any]:
        """The array's dtype; there must be a piece."""
        assert self._dtype is not None
        return self._dtype

    @property
    def axis(self) -> int:
        """The axis, counted from the front; there must be a piece."""
        return self._axis % len(self._shape)

    @property
    def shape(self) -> tuple[int, ...]:
        axis = self.axis
        return (*self._shape[:axis], sum(self._lengths), *self._shape[axis + 1 :])

    def append(self, piece: Array) -> None:
        """Append a piece that fits apart from the axis and the width of texts."""
        if self._dtype is None:
            self._begin(piece)
        axis = self.axis
        rest = (*piece.shape[:axis], *piece.shape[axis + 1 :])
        if piece.ndim != len(self._shape) or rest != (*self._shape[:axis], *self._shape[axis + 1 :]):
            raise OutputError(
                f"{self._label}: shapes must be equal except along axis {axis}: first {self._shape}, "
                f"now {piece.shape}"
            )
        if piece.dtype != self.dtype:
            piece = self._fit(piece)
        self._file.seek(0, os.SEEK_END)
        if piece.nbytes:  # as plain bytes: the buffer protocol has no format for dates
            self._file.write(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
        self._lengths.append(piece.shape[axis])

    def blocks(self, rows: int | None = None) -> Iterator[Array]:
        """Yield the array in C order, in blocks of rows (None: `BLOCK_BYTES`)."""
        total, *rest = self.shape
        row_bytes = math.prod(rest) * self.dtype.itemsize
        rows = rows or max(1, BLOCK_BYTES // max(1, row_bytes))
        self._file.flush()
        for first in range(0, total, rows):
            yield self._rows(first, min(total, first + rows))

    def close(self) -> None:
        self._file.close()

    def _begin(self, piece: Array) -> None:
        if not -piece.ndim <= self._axis < piece.ndim:
            raise OutputError(
                f"{self._label}: an array of shape {piece.shape} has no axis {self._axis} to gather along"
            )
        if piece.dtype.kind == "O":
            raise OutputError(f"{self._label}: an object array can be gathered along axis 0 only")
        if piece.dtype.kind == "V":
            raise OutputError(f"{self._label}: dtype {piece.dtype} can't be stored. Return float32 or bytes.")
        self._dtype, self._shape = piece.dtype, piece.shape

    def _fit(self, piece: Array) -> Array:
        if piece.dtype.kind != self.dtype.kind or piece.dtype.kind not in "US":
            raise OutputError(
                f"{self._label}: all pieces must have one dtype: first {self.dtype}, now {piece.dtype}. Return one "
                "dtype in every call, as with x.astype(np.float64)."
            )
        if piece.dtype.itemsize > self.dtype.itemsize:
            self._widen(piece.dtype)
        return piece.astype(self.dtype)

    def _widen(self, dtype: np.dtype[Any]) -> None:
        """Rewrite the texts in a wider dtype, in place, from the end to the front."""
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


class JsonSpool:
    """One array of texts or objects that grows along axis 0 in a file, as the JSON of its items."""

    def __init__(self, file: IO[bytes], label: str) -> None:
        self._file = file
        self._label = label
        self._first: Array | None = None
        self._is_empty = True

    def append(self, piece: Array) -> None:
        """Append a piece of texts or objects that fits apart from axis 0."""
        if self._first is None:
            self._first = piece[:0]
        if piece.dtype.kind not in "OU" or piece.shape[1:] != self._first.shape[1:]:
            raise OutputError(
                f"{self._label}: all pieces must have one dtype and shape: first {self._first.dtype}"
                f"{list(self._first.shape[1:])}, now {piece.dtype}{list(piece.shape[1:])}"
            )
        if len(piece):
            text = encoding.text(encoding.array_to_json(piece))[1:-1]
            self._file.write(("" if self._is_empty else ", ").encode() + text.encode())
            self._is_empty = False

    def chunks(self) -> Iterator[bytes]:
        self._file.seek(0)
        while chunk := self._file.read(BLOCK_BYTES):
            yield chunk

    def close(self) -> None:
        self._file.close()


class Piecewise:
    """The pieces of one tree of arrays, concatenated leaf by leaf.

    Args:
        path: the output; temporary files are made in its folder, and unlinked at once.
        axis: the axis along which the pieces are concatenated.
        label: the output as errors name it.
    """

    def __init__(self, path: Path, axis: int, leaves: Leaves, label: str) -> None:
        self._path = path
        self._axis = axis
        self._label = label
        self._leaves = leaves
        self.spools: dict[str, Any] = {}
        self._blank: set[str] = set()  # the leaves that had no other piece than `np.array([])`

    def append(self, piece: Tree, *, stack: bool = False, as_json: bool = False) -> None:
        """Append the next piece.

        Args:
            stack: the piece is one index of a new axis 0.
            as_json: store texts and objects as JSON.
        """
        for leaf, name in zip(self._leaves.take(piece), self._leaves.names, strict=True):
            spool = self.spools.get(name)
            is_blank = not stack and ragged.is_blank(leaf)
            if spool is not None and is_blank:
                continue
            if spool is None or name in self._blank:
                if spool is not None:
                    spool.close()
                file: IO[bytes] = tempfile.SpooledTemporaryFile(_IN_MEMORY_BYTES, dir=str(self._path.parent))  # noqa: SIM115
                label = f"{self._label}: leaf {name!r}"
                if as_json and leaf.dtype.kind in "OU" and leaf.ndim and self._axis % leaf.ndim == 0:
                    spool = self.spools[name] = JsonSpool(file, label)
                else:
                    spool = self.spools[name] = ArraySpool(file, axis=self._axis, label=label)
                (self._blank.add if is_blank else self._blank.discard)(name)
            spool.append(leaf[None] if stack else leaf)

    def tree(self) -> Tree:
        """Return the tree with a spool for each leaf; None if there were no pieces."""
        return self._leaves.template(list(self.spools.values()))

    def close(self) -> None:
        for spool in self.spools.values():
            spool.close()
        self.spools.clear()
