"""Sources `hdf5` and `zarr`: arrays in chunks, divided along their first axis.

Rows that are near each other are read together, because a store decodes whole chunks.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from pipedist.core import ragged
from pipedist.core.names import nearest
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
    imported,
    plain_array,
    rows_of,
    sealed,
)
from pipedist.datasets.sources.file_kinds import unreadable
from pipedist.datasets.sources.paths import FILES_OPEN_MAX, DataFile, OpenFiles, expand, is_remote

Array = npt.NDArray[Any]
Rows = npt.NDArray[np.int64]

CHUNKS_BYTES_MAX = 64 << 20  # decoded chunks of one array of an HDF5 file that are cached
FILES_STAMPED_MAX = 100_000  # most files of a zarr store that are examined
BARE = ""  # the name of the one array of a dataset


def runs(rows: Rows, gap: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges [lo, hi) of sorted rows; rows that are at most `gap` apart are in one range."""
    ends = np.flatnonzero(np.diff(rows) > gap)
    starts = np.concatenate([rows[:1], rows[ends + 1]])
    stops = np.concatenate([rows[ends], rows[-1:]]) + 1
    yield from zip(starts.tolist(), stops.tolist(), strict=True)


def take(array: Any, rows: range | Rows, gap: int) -> Array:
    """Return some rows of an array-like object that can be sliced along its first axis."""
    if isinstance(rows, range):
        return np.asarray(array[rows.start : rows.stop])
    if not len(rows):
        return np.asarray(array[:0])
    unique, places = np.unique(rows, return_inverse=True)
    pieces = []
    for lo, hi in runs(unique, gap):
        wanted = unique[np.searchsorted(unique, lo) : np.searchsorted(unique, hi)] - lo
        pieces.append(np.asarray(array[lo:hi])[wanted])
    return np.concatenate(pieces)[places]


# -- HDF5 -----------------------------------------------------------------------------------------------


class Hdf5Reader(ElementReader):
    """Reads rows of datasets in HDF5 files.

    `files` of the config; `lengths`, the rows of each; `arrays`: [name, path in the file, dtype, shape of an element].
    """

    def __init__(self, config: Config) -> None:
        self._files = msgspec.convert(config["files"], list[DataFile])
        self._layout = RowLayout(config["lengths"])
        self._arrays: list[tuple[str, str, str, list[int]]] = [tuple(each) for each in config["arrays"]]
        self._opened = functools.lru_cache(FILES_OPEN_MAX)(self._open)
        self._watched = OpenFiles(self._files)

    @property
    def element_spec(self) -> Tree:  # type: ignore[override]
        spec = {name: ArraySpec(dtype, shape) for name, _, dtype, shape in self._arrays}
        return spec.get(BARE, spec)

    def __len__(self) -> int:
        return self._layout.total

    def read(self, location: Tree) -> Array | dict[str, Array]:
        """Return the elements with the ids `location`: array[n, ...], or a dict of them."""
        rows = rows_of(location, self._layout.total)
        shard = {name: sealed(self._read(path, rows)) for name, path, _, _ in self._arrays}
        return shard.get(BARE, shard)

    def _read(self, path: str, rows: range | Rows) -> Array:
        pieces, order = self._layout.pieces(rows)
        found = ragged.concatenate(
            [self._take(file, path, chosen) for file, chosen in pieces or [(0, range(0))]]
        )
        return found if order is None else found[order]

    def _take(self, file: int, path: str, rows: range | Rows) -> Array:
        try:
            array = self._opened(file)[path]
            gap = max(1, array.chunks[0]) if array.chunks else 1
            found = take(array.asstr() if _is_text(array) else array, rows, gap)
        except (OSError, KeyError, RuntimeError, UnicodeDecodeError) as error:  # h5py's for damaged data
            self._watched.check(file)
            raise SourceError(
                f"{self._files[file].label}: {_named(rows)} of {path!r} can't be read: {error}", key="path"
            ) from error
        self._watched.check(file)
        return plain_array(_with_texts(found), f"{self._files[file].label}: {path!r}", "dataset")

    def _open(self, file: int) -> Any:
        return _hdf5(self._files[file])

    def close(self) -> None:
        """Close the files; shards are copies."""
        self._opened.cache_clear()
        self._watched.close()


def _named(rows: range | Rows) -> str:
    return f"row {rows[0]}" if len(rows) == 1 else f"rows {min(rows)} to {max(rows)}"


def _is_text(array: Any) -> bool:
    return bool(imported("h5py", "hdf5", "hdf5").check_string_dtype(array.dtype) is not None)


def _with_texts(found: Array) -> Array:
    """Return text in the form of every source: `<U`, or an object array of str."""
    if found.dtype.kind in "OT" and found.ndim == 1 and all(type(cell) is str for cell in found.tolist()):
        return ragged.of_texts(found.tolist())
    return found


def _hdf5(file: DataFile) -> Any:
    h5py = imported("h5py", "hdf5", "hdf5")
    file.check()
    try:
        return h5py.File(file.for_library(), "r", rdcc_nbytes=CHUNKS_BYTES_MAX)
    except (OSError, RuntimeError) as error:
        raise unreadable(file, "HDF5", error) from error


def open_hdf5(config: Config, folder: Path) -> ReaderSource:
    """Open HDF5 files; `dataset` is a path in them, or a list of paths."""
    files = expand(config["path"], folder)
    wanted = config["dataset"]
    lengths: list[int] = []
    arrays: list[list[Any]] = []
    for file in files:
        with _hdf5(file) as opened:
            found = [_array_of(opened, path, file) for path in wanted]
            described = [
                [
                    BARE if len(wanted) == 1 else path.strip("/"),
                    path,
                    _dtype(array, file, path),
                    list(array.shape[1:]),
                ]
                for path, array in zip(wanted, found, strict=True)
            ]
            check_rows({path: array.shape[0] for path, array in zip(wanted, found, strict=True)}, file.label)
            lengths.append(int(found[0].shape[0]))
        arrays = arrays or described
        if described != arrays:
            differing = next(i for i, (a, b) in enumerate(zip(arrays, described, strict=True)) if a != b)
            raise SourceError(
                f"{files[0].label}: {wanted[differing]!r} has elements {_element(arrays[differing])}, "
                f"{file.label} has {_element(described[differing])}",
                key="path",
                expected="the same dtype and trailing shape in all files",
            )
    settings = {
        "kind": "hdf5",
        "files": msgspec.to_builtins(files),
        "lengths": lengths,
        "arrays": arrays,
    }
    return ReaderSource(sum(lengths), settings, Hdf5Reader(settings))


def _array_of(opened: Any, path: str, file: DataFile) -> Any:
    found: list[str] = []
    opened.visititems(lambda name, each: found.append(name) if hasattr(each, "dtype") else None)
    array = opened.get(path)
    if array is None or not hasattr(array, "dtype"):
        what = "no dataset" if array is None else "a group, not a dataset,"
        raise SourceError(
            f"{file.label} has {what} {path!r}",
            key="dataset",
            name=path,
            nearest=nearest(path.strip("/"), found),
            expected="one of " + ", ".join(found) if found else "a file with datasets",
        )
    if not array.shape:
        raise SourceError(f"{file.label}: {path!r} is a scalar, which has no rows", key="dataset")
    return array


def _dtype(array: Any, file: DataFile, path: str) -> str:
    if _is_text(array):
        return "str"
    check_dtype(array.dtype, f"{file.label}: {path!r}", "dataset")
    dtype: str = array.dtype.newbyteorder("=").str
    return dtype


def _element(described: Sequence[Any]) -> str:
    return f"{described[2]}{described[3]}"


# -- zarr -----------------------------------------------------------------------------------------------


class ZarrReader(ElementReader):
    """Reads rows of zarr arrays: those of `arrays` in a group, or the one array of a store ([""])."""

    def __init__(self, config: Config) -> None:
        self._label: str = config["label"]
        store = _zarr(config["store"], self._label)
        self._arrays = {name: store[name] if name else store for name in config["arrays"]}
        self._store: str = config["store"]
        self._length: int = config["length"]

    @property
    def element_spec(self) -> Tree:  # type: ignore[override]
        spec = {
            name: ArraySpec("str" if _is_zarr_text(array) else array.dtype.newbyteorder("="), array.shape[1:])
            for name, array in self._arrays.items()
        }
        return spec.get(BARE, spec)

    def fingerprint(self) -> str:
        return _fingerprint(self._store, self._arrays)

    def __len__(self) -> int:
        return self._length

    def read(self, location: Tree) -> Array | dict[str, Array]:
        """Return the elements with the ids `location`: array[n, ...], or a dict of them."""
        rows = rows_of(location, self._length)
        shard = {name: self._take(name, rows) for name in self._arrays}
        return shard.get(BARE, shard)

    def _take(self, name: str, rows: range | Rows) -> Array:
        array = self._arrays[name]
        try:
            found = take(array, rows, max(1, array.chunks[0]))
        except Exception as error:  # the codecs of chunks raise anything: RuntimeError, ValueError, ...
            text = f"{type(error).__name__}: {error}"
            raise SourceError(
                f"{self._label}: {_named(rows)}{f' of {name!r}' if name else ''} can't be read: {text}",
                key="path",
            ) from error
        return sealed(plain_array(_with_texts(found), f"{self._label}: {name!r}", "path"))


def _is_zarr_text(array: Any) -> bool:
    return array.dtype.kind in "OT"


def _zarr(store: str, label: str) -> Any:
    zarr = imported("zarr", "zarr", "zarr")
    try:
        return zarr.open(store, mode="r")
    except Exception as error:  # FileNotFoundError, KeyError, JSON errors, those of fsspec, ...
        raise SourceError(
            f"{label}: not a readable zarr store: {type(error).__name__}: {error}",
            key="path",
            expected="the folder of a zarr array or group",
        ) from error


def open_zarr(config: Config, folder: Path) -> ReaderSource:
    """Open a zarr array, or the arrays of a group."""
    path: str = config["path"]
    store = path if is_remote(path) else os.path.abspath(os.path.join(folder, path.removeprefix("file://")))
    if not is_remote(path) and not os.path.exists(store):
        raise SourceError(f"there is no {path!r} in {os.path.abspath(folder)}", key="path")
    opened = _zarr(store, path)
    wanted: list[str] = list(config.get("arrays", ()))
    if hasattr(opened, "dtype"):
        if wanted:
            raise SourceError(f"{path} is an array, not a group", key="arrays", expected="no `arrays`")
        wanted = [BARE]
        arrays = {BARE: opened}
    else:
        there = sorted(name for name, _ in opened.arrays())
        wanted = wanted or there
        if not wanted:
            raise SourceError(f"{path}: the group has no array", key="path")
        for name in wanted:
            if name not in opened or not hasattr(opened[name], "dtype"):
                raise SourceError(
                    f"{path} has no array {name!r}",
                    key="arrays",
                    nearest=nearest(name, there),
                    expected="one of " + ", ".join(there),
                )
        arrays = {name: opened[name] for name in wanted}
    for name, array in arrays.items():
        what = f"{path}: {name!r}" if name else path
        if not array.shape:
            raise SourceError(f"{what} is a scalar, which has no rows", key="path")
        if not _is_zarr_text(array):
            check_dtype(array.dtype, what, "path")
    try:
        check_rows({name: array.shape[0] for name, array in arrays.items()}, path)
    except SourceError as error:
        raise SourceError(
            str(error), key="path", expected="`arrays`: those with one element a row"
        ) from error
    length = int(next(iter(arrays.values())).shape[0])
    settings = {
        "kind": "zarr",
        "store": store,
        "label": path,
        "arrays": wanted,
        "length": length,
        "fingerprint": _fingerprint(store, arrays),
    }
    return ReaderSource(length, settings, ZarrReader(settings))


def _fingerprint(store: str, arrays: Mapping[str, Any]) -> str:
    """Return a digest of the arrays' metadata, and of the sizes and times of a local store's files."""
    found = hashlib.sha256()
    for name, array in arrays.items():
        found.update(f"{name} {array.shape} {array.dtype} {array.chunks} {dict(array.attrs)}\n".encode())
    if is_remote(store):
        return found.hexdigest()
    count = 0
    for place, folders, names in os.walk(store):
        folders.sort()
        for name in sorted(names):
            facts = os.stat(os.path.join(place, name))
            found.update(
                f"{os.path.relpath(place, store)}/{name} {facts.st_size} {facts.st_mtime_ns}\n".encode()
            )
            count += 1
        if count > FILES_STAMPED_MAX:
            break
    return found.hexdigest()
