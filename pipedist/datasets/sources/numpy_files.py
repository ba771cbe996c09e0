"""Sources `npy` and `npz`: arrays in NumPy's files, mapped into memory.

Uncompressed members of an `.npz` (`numpy.savez`) are mapped in place; compressed ones are unpacked
first. The config has the offset of each array of each file, so that readers parse no header.
"""

from __future__ import annotations

import functools
import math
import os
import struct
import tokenize
import zipfile
from pathlib import Path
from typing import IO, Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from pipedist.core.types import Tree
from pipedist.datasets.element import ArraySpec
from pipedist.datasets.sources.base import (
    Config,
    ElementReader,
    ReaderSource,
    RowLayout,
    SourceError,
    check_dtype,
    check_rows,
    index_of,
    rows_of,
)
from pipedist.datasets.sources.columns import joined
from pipedist.datasets.sources.file_kinds import UnpackStore, unreadable
from pipedist.datasets.sources.paths import FILES_OPEN_MAX, DataFile, OpenFiles, expand

Array = npt.NDArray[Any]

BARE = ""  # the name of the one array of a `.npy` file


class Stored(Struct, frozen=True, array_like=True):
    """One array in a file, with dtype and shape as in the file."""

    file: DataFile
    offset: int  # position of the array's first byte in the file
    dtype: str
    shape: tuple[int, ...]
    fortran: bool  # column-major

    def size_bytes(self) -> int:
        return np.dtype(self.dtype).itemsize * math.prod(self.shape)

    def element_spec(self) -> ArraySpec:
        return ArraySpec(np.dtype(self.dtype).newbyteorder("="), self.shape[1:])

    def map(self, descriptor: int) -> Array:
        """Return the array, mapped read-only."""
        dtype = np.dtype(self.dtype)
        order: Literal["F", "C"] = "F" if self.fortran else "C"
        if 0 in self.shape or not dtype.itemsize:  # nothing to map
            return np.zeros(self.shape, dtype)
        with os.fdopen(descriptor, "rb", closefd=False) as stream:
            offset = self.file.offset + self.offset
            return np.memmap(stream, dtype, "r", offset, self.shape, order)


def _source(arrays: dict[str, list[Stored]], store: UnpackStore) -> ReaderSource:
    """Return the source of one dataset through all files: {name: one array per file}, `BARE` for `.npy`."""
    lengths = [stored.shape[0] for stored in next(iter(arrays.values()))]
    config = {
        "kind": "npz" if BARE not in arrays else "npy",
        "lengths": lengths,
        "arrays": {name: msgspec.to_builtins(stored) for name, stored in arrays.items()},
    }
    return ReaderSource(sum(lengths), config, NumpyReader(config), store.close)


class NumpyReader(ElementReader):
    """Reads rows of mapped arrays."""

    def __init__(self, config: Config) -> None:
        self._layout = RowLayout(config["lengths"])
        self._arrays = {
            name: msgspec.convert(places, list[Stored]) for name, places in config["arrays"].items()
        }
        self._mapped = functools.lru_cache(max(FILES_OPEN_MAX, len(self._arrays)))(self._new_map)
        spec = {name: places[0].element_spec() for name, places in self._arrays.items()}
        self.element_spec = spec.get(BARE, spec)
        places = [stored.file for each in self._arrays.values() for stored in each]
        self._numbers = {file: number for number, file in enumerate(dict.fromkeys(places))}
        self._open = OpenFiles(list(self._numbers))

    def __len__(self) -> int:
        return self._layout.total

    def read(self, location: Tree) -> Array | dict[str, Array]:
        """Return the elements with the ids `location`: array[n, ...], or a dict of them.

        Consecutive rows of one file are a view of the mapped file, so a change of the file is noticed when
        rows are read, not while a function uses them.
        """
        rows = rows_of(location, self._layout.total)
        pieces, order = self._layout.pieces(rows)
        parts = [
            {name: self._map(name, file)[index_of(chosen)] for name in self._arrays}
            for file, chosen in pieces or [(0, range(0))]
        ]
        shard = joined(parts, order)
        return shard.get(BARE, shard)

    def _map(self, name: str, file: int) -> Array:
        array = self._mapped(name, file)
        self._open.check(self._numbers[self._arrays[name][file].file])
        return array

    def _new_map(self, name: str, file: int) -> Array:
        stored = self._arrays[name][file]
        return stored.map(self._open.descriptor(self._numbers[stored.file]))

    def close(self) -> None:
        """Close the files; they stay mapped for shards that were read."""
        self._mapped.cache_clear()
        self._open.close()


def open_npy(config: Config, folder: Path) -> ReaderSource:
    arrays = []
    for file in expand(config["path"], folder):
        with _open(file) as stream:
            try:
                stored = _stored(stream, file, file.label)
            except _NoHeader as error:
                raise unreadable(file, ".npy", error.why) from error
            if (rest := file.size_bytes - stored.offset - stored.size_bytes()) > 0:
                raise SourceError(
                    f"{file.label}: {rest} bytes follow its array; was another one saved behind it?",
                    key="path",
                    expected="one array per file; several arrays are an .npz, or separate files",
                )
            arrays.append(stored)
    return _source({BARE: _agreeing(arrays, "")}, UnpackStore())


def open_npz(config: Config, folder: Path) -> ReaderSource:
    """Open `.npz` files, whose arrays have one leading dimension."""
    files = expand(config["path"], folder)
    store = UnpackStore(config.get("unpacked_bytes_max"))
    try:
        members = [_members(file, store) for file in files]
        names = list(members[0])
        for file, found in zip(files, members, strict=True):
            if set(found) != set(names):
                raise SourceError(
                    f"{files[0].label} has the arrays {', '.join(sorted(names))}; "
                    f"{file.label} has {', '.join(sorted(found))}",
                    key="path",
                )
        return _source(
            {name: _agreeing([found[name] for found in members], f" of {name!r}") for name in names}, store
        )
    except BaseException:
        store.close()
        raise


class _NoHeader(SourceError):
    def __init__(self, what: str, why: Exception) -> None:
        self.why = why
        super().__init__(f"{what}: not a readable .npy file: {why}", key="path")


def _open(file: DataFile) -> IO[bytes]:
    return os.fdopen(file.open(), "rb")


def _stored(stream: IO[bytes], file: DataFile, what: str) -> Stored:
    try:
        version = np.lib.format.read_magic(stream)
        if version == (1, 0):
            shape, fortran, dtype = np.lib.format.read_array_header_1_0(stream)
        elif version == (2, 0):
            shape, fortran, dtype = np.lib.format.read_array_header_2_0(stream)
        else:
            raise ValueError(f"its format version {version} is only used for structured arrays")
    except (ValueError, SyntaxError, tokenize.TokenError) as error:  # NumPy parses the header as Python
        raise _NoHeader(what, error) from error
    check_dtype(dtype, what, "path")
    if not shape:
        raise SourceError(f"{what}: a scalar has no leading dimension", key="path")
    stored = Stored(file, stream.tell() - file.offset, dtype.str, tuple(shape), fortran)
    if stored.offset + stored.size_bytes() > file.size_bytes:
        raise SourceError(
            f"{what}: the file is too short for {dtype}{list(shape)}; it was not written completely",
            key="path",
        )
    return stored


def _members(file: DataFile, store: UnpackStore) -> dict[str, Stored]:
    found: dict[str, Stored] = {}
    try:
        with _open(file) as stream, zipfile.ZipFile(stream) as archive:
            for info in archive.infolist():
                name = info.filename.removesuffix(".npy")
                what = f"{file.label}: array {name!r}"
                if name in found:
                    raise SourceError(f"{what} is in it twice", key="path")
                if info.compress_type == zipfile.ZIP_STORED and not info.flag_bits & 1:
                    # the lengths in the local header can differ from those in the directory
                    stream.seek(info.header_offset + 26)
                    name_bytes, extra_bytes = struct.unpack("<HH", stream.read(4))
                    stream.seek(name_bytes + extra_bytes, os.SEEK_CUR)
                    found[name] = _stored(stream, file, what)
                else:
                    with archive.open(info) as packed:
                        plain = store.add(
                            what, packed, packed_bytes=info.compress_size, announced_bytes=info.file_size
                        )
                    with _open(plain) as unpacked:
                        unpacked.seek(plain.offset)
                        found[name] = _stored(unpacked, plain, what)
    except SourceError:
        raise
    except Exception as error:  # a damaged offset raises anything: OSError, struct.error, ...
        raise unreadable(file, ".npz", error) from error
    if not found:
        raise SourceError(f"{file.label} contains no array", key="path")
    check_rows({name: stored.shape[0] for name, stored in found.items()}, file.label)
    return found


def _agreeing(arrays: list[Stored], what: str) -> list[Stored]:
    """Return `arrays` after a check that their dtypes and trailing shapes are equal."""
    first = arrays[0]
    for each in arrays[1:]:
        if _element(each) != _element(first):
            raise SourceError(
                f"{first.file.label}{what} has elements {_element(first)}, "
                f"{each.file.label} has {_element(each)}",
                key="path",
                expected="the same dtype and trailing shape in all files",
            )
    return arrays


def _element(stored: Stored) -> str:
    dtype = np.dtype(stored.dtype)
    kind = {"U": "str", "S": "bytes"}.get(dtype.kind)  # the width of text differs between files
    return f"{kind or dtype.newbyteorder('=')}{list(stored.shape[1:])}"
