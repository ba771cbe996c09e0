"""`.zarr` and `.h5`: the leaves of a tree of arrays, as arrays in groups.

A leaf has the path of a `.npz` member: keys joined with "/" are groups, a bare array is "data". Texts are strings of
any length. Pieces grow in temporary files beside the output, so only blocks of rows are in memory.

| | `.zarr` | `.h5` |
|---|---|---|
| format | a folder, Zarr version 3 | one file, without times in it |
| chunks | 8 MiB of whole rows | none: contiguous |
| dates | as they are | an error: HDF5 has none |
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np

from pipedist.core.files import AtomicPath
from pipedist.core.types import Tree
from pipedist.errors import OutputError
from pipedist.outputs.array_files import NpzSink
from pipedist.outputs.sink import imported
from pipedist.outputs.spool import BLOCK_BYTES, Array, ArraySpool


class ArrayStoreSink(NpzSink):
    """Writes the leaves of one tree; or of the trees of all steps or epochs, stacked."""

    _writes = AtomicPath
    _out: AtomicPath  # type: ignore[assignment]  # a library writes
    package: ClassVar[str]
    _refused: ClassVar[str] = ""  # kinds of dtypes that the format lacks
    _ending: ClassVar[str]

    def check(self, value: Tree) -> None:
        for name, array in self._storables(value, self._new_leaves()).items():
            self._check_leaf(name, array.dtype)

    def _complete(self) -> None:
        members = self._members()
        for name, member in members.items():
            self._check_leaf(name, member.dtype)
        names = sorted(members)
        for name in names:
            if any(other.startswith(f"{name}/") for other in names):
                raise OutputError(f"{self.label}: leaf {name!r} is an array, and also a group of others")
        self._store({name: members[name] for name in names})

    def _check_leaf(self, name: str, dtype: np.dtype[Any]) -> None:
        if dtype.kind in self._refused:
            raise OutputError(
                f"{self.label}: leaf {name!r} has dtype {dtype}, which {self._ending} lacks. Write .npz or .parquet."
            )
        if "\0" in name or any(part in ("", ".", "..") for part in name.split("/")):
            raise OutputError(f"{self.label}: the leaf path {name!r} can't be a name in a {self._ending}")

    def _store(self, members: dict[str, Array | ArraySpool]) -> None:
        raise NotImplementedError

    @contextlib.contextmanager
    def _writing(self, name: str) -> Iterator[None]:
        try:
            yield
        except (ValueError, TypeError) as error:  # half of a surrogate pair, a zero in a text, a long double
            raise OutputError(
                f"{self.label}: leaf {name!r} can't be in a {self._ending}: {error}. Write .npz or .json."
            ) from error


class ZarrSink(ArrayStoreSink):
    """`.zarr`: a group in a folder."""

    package = "zarr"
    _ending = ".zarr"
    _refused = "S"

    def _store(self, members: dict[str, Array | ArraySpool]) -> None:
        zarr = imported("zarr", self.label, ".zarr", "zarr")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of data types that are not in the specification yet: dates
            group = zarr.open_group(str(self._out.written), mode="w", zarr_format=3)
            for name, member in members.items():
                rows = _rows_per_block(member)
                dtype: Any = str if member.dtype.kind == "U" else member.dtype
                shape = member.shape
                chunks = (max(1, min(rows, shape[0])), *(max(1, size) for size in shape[1:])) if shape else ()
                with self._writing(name):
                    array = group.create_array(name, shape=shape, dtype=dtype, chunks=chunks)
                    for place, block in _blocks(member, rows):
                        array[place] = block


class Hdf5Sink(ArrayStoreSink):
    """`.h5`: one file."""

    package = "h5py"
    _ending = ".h5"
    _refused = "Mm"

    def _store(self, members: dict[str, Array | ArraySpool]) -> None:
        h5py = imported("h5py", self.label, ".h5", "hdf5")
        with h5py.File(self._out.written, "w") as file:
            for name, member in members.items():
                dtype = h5py.string_dtype() if member.dtype.kind == "U" else member.dtype
                with self._writing(name):
                    dataset = file.create_dataset(name, shape=member.shape, dtype=dtype, track_times=False)
                    for place, block in _blocks(member, _rows_per_block(member)):
                        dataset[place] = block


def _rows_per_block(member: Array | ArraySpool) -> int:
    row_bytes = math.prod(member.shape[1:]) * member.dtype.itemsize
    return max(1, BLOCK_BYTES // max(1, row_bytes))


def _blocks(member: Array | ArraySpool, rows: int) -> Iterator[tuple[Any, Any]]:
    """Yield places and blocks of an array; texts as objects, because the formats have no `<U`."""
    if not member.shape:
        value = member[()] if isinstance(member, np.ndarray) else None
        yield (), str(value) if member.dtype.kind == "U" else value
        return
    if 0 in member.shape:
        return
    start = 0
    whole = isinstance(member, np.ndarray)
    for block in [member] if isinstance(member, np.ndarray) else member.blocks(rows):
        cells = block.astype(object) if block.dtype.kind == "U" else block
        yield (slice(None) if whole else slice(start, start + len(block))), cells
        start += len(block)
