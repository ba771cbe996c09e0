"""`.npy`: one array. `.npz`: the leaves of a tree of arrays. Read back with `numpy.load`.

A growing `.npy` is written behind space for its header, which NumPy makes equally long for each length of
axis 0. A `.npz` is an uncompressed zip whose members are in order of name and
dated 1980-01-01, so that equal values give equal bytes.
"""

from __future__ import annotations

import io
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy_format

from pipedist.core import ragged
from pipedist.core.files import AtomicFile
from pipedist.core.types import Tree
from pipedist.errors import OutputError
from pipedist.outputs import encoding
from pipedist.outputs.sink import Sink
from pipedist.outputs.spool import Array, ArraySpool, Leaves
from pipedist.reduction.keyed.table import KeyedTable

_EPOCH = (1980, 1, 1, 0, 0, 0)


def npy_header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """Return a .npy header whose length the length of axis 0 does not change."""
    header = io.BytesIO()
    described = {"descr": npy_format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    npy_format.write_array_header_1_0(header, described)
    return header.getvalue()


class NpySink(Sink):
    """`.npy`: one array; or the arrays of all steps or epochs, stacked."""

    _out: AtomicFile
    _bare = "data"
    _fixed_width = True
    _array: Array | None = None
    _spool: ArraySpool | None = None
    _temporary: IO[bytes] | None = None

    def _append(self, value: Tree) -> None:
        array = self._one_array(value, self._leaves)
        if self._mode == "one":
            self._array = _storable(array, self.label)
            return
        if self._mode == "each":
            array = array[None]
        if self._spool is None:
            self._spool = self._begin(array)
        self._spool.append(array)

    def check(self, value: Tree) -> None:
        _storable(self._one_array(value, self._new_leaves()), self.label)

    def _one_array(self, value: Tree, leaves: Leaves) -> Array:
        if value is None or encoding.node(value) is not None:
            what = "null" if value is None else f"a {type(value).__qualname__}"
            _refuse_records(value, self.label)
            raise OutputError(f"{self.label}: .npy holds one array, got {what}. Write .npz or .json.")
        (array,) = leaves.take(value)
        return array

    def _begin(self, array: Array) -> ArraySpool:
        # not for texts, whose header gets longer when a later one is wider
        if array.ndim and self._axis % array.ndim == 0 and array.dtype.kind not in "US":
            header = npy_header(array.dtype, array.shape)
            self._out.file.write(bytes(len(header)))
            return ArraySpool(self._out.file, axis=self._axis, label=self.label, offset=len(header))
        self._temporary = tempfile.TemporaryFile(dir=self.path.parent)  # noqa: SIM115
        return ArraySpool(self._temporary, axis=self._axis, label=self.label)

    def _complete(self) -> None:
        if self._array is not None:
            _write(self._out.file, self._array.dtype, self._array.shape, [self._array])
        elif self._spool is None:
            raise OutputError(f"{self.label}: no call was made, so there is no array to write")
        elif self._temporary is None:
            self._out.file.seek(0)
            self._out.file.write(npy_header(self._spool.dtype, self._spool.shape))
        else:
            _write(self._out.file, self._spool.dtype, self._spool.shape, self._spool.blocks())

    def _release(self) -> None:
        super()._release()
        if self._temporary is not None:
            self._temporary.close()


class NpzSink(Sink):
    """`.npz`: the leaves of one tree; or of the trees of all steps or epochs, stacked."""

    _out: AtomicFile
    _bare = "data"
    _fixed_width = True
    _arrays: Mapping[str, Array] = MappingProxyType({})

    def _append(self, value: Tree) -> None:
        if self._mode == "pieces":
            _refuse_records(value, self.label)
        if self._mode == "one":
            self._arrays = self._storables(value, self._leaves)
        else:
            self._pieces.append(value, stack=self._mode == "each")

    def check(self, value: Tree) -> None:
        for name in self._storables(value, self._new_leaves()):
            self._info(name)

    def _storables(self, value: Tree, leaves: Leaves) -> dict[str, Array]:
        arrays = leaves.take(value.columns() if isinstance(value, KeyedTable) else value)
        return {
            name: _storable(array, f"{self.label}: leaf {name!r}")
            for name, array in zip(leaves.names, arrays, strict=True)
        }

    def _members(self) -> dict[str, Array | ArraySpool]:
        """Return all leaves by name, when there is no more to come."""
        return {**self._arrays, **self._pieces.spools}

    def _complete(self) -> None:
        members = self._members()
        with zipfile.ZipFile(self._out.file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
            for name in sorted(members):
                member = members[name]
                with archive.open(self._info(name), "w", force_zip64=True) as file:
                    blocks = member.blocks() if isinstance(member, ArraySpool) else [member]
                    _write(file, member.dtype, member.shape, blocks)

    def _info(self, name: str) -> zipfile.ZipInfo:
        try:
            name.encode()
        except UnicodeEncodeError:
            name = "\0"
        if "\0" in name:
            raise OutputError(
                f"{self.label}: a leaf path has a character that zip names can't hold. Write .json."
            )
        return zipfile.ZipInfo(f"{name}.npy", date_time=_EPOCH)


def members(path: Path) -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
    """Yield (name, (dtype, shape)) of each array in a file; the array of a `.npy` has no name."""
    if path.suffix == ".npy":
        with path.open("rb") as file:
            yield "", _header(file)
        return
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            with archive.open(name) as member:
                yield name.removesuffix(".npy"), _header(member)


def _header(file: IO[bytes]) -> tuple[str, tuple[int, ...]]:
    npy_format.read_magic(file)  # ours are of version 1.0
    shape, _, dtype = npy_format.read_array_header_1_0(file)
    return str(dtype), shape


def _write(file: IO[bytes], dtype: np.dtype[Any], shape: tuple[int, ...], blocks: Iterable[Array]) -> None:
    file.write(npy_header(dtype, shape))
    for block in blocks:
        if block.nbytes:
            file.write(np.ascontiguousarray(block).reshape(-1).view(np.uint8).data)


def _refuse_records(value: Tree, label: str) -> None:
    if ragged.are_records(value):
        raise OutputError(f"{label}: a list of records is no array. Write .jsonl, .csv, .parquet or .json.")


def _storable(array: Array, label: str) -> Array:
    if array.dtype.kind == "V":
        raise OutputError(f"{label}: dtype {array.dtype} can't be stored. Return float32 or bytes.")
    return array
