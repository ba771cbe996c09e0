"""Source `tar`: shards in WebDataset's naming, read by offset.

The files of one element have a common key: their path up to the first dot of its last part. `a/001.jpg`, `a/001.cls`
and `a/001.json` are the parts `jpg`, `cls` and `json` of the element `a/001`, and follow each other in the archive. The
driver reads the headers once, and keeps the offset of each part; workers read only the parts of their own elements.
"""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from pipedist.core import ragged
from pipedist.core.names import nearest
from pipedist.core.types import Tree
from pipedist.datasets.element import ArraySpec
from pipedist.datasets.sources.base import (
    Config,
    Ids,
    Reader,
    ReaderSource,
    SourceError,
    index_of,
    rows_of,
    sealed,
)
from pipedist.datasets.sources.columns import CellError, Cells, Column, column_of_cells, dtype_of
from pipedist.datasets.sources.file_kinds import UnpackStore, unpack_all, unreadable
from pipedist.datasets.sources.paths import DataFile, OpenFiles, expand

Offsets = npt.NDArray[np.int64]

ABSENT = -1  # the size of a part that an element does not have
_GAP_BYTES_MAX = 1 << 16  # parts of an element that are this near each other are read together


class TarReader(Reader):
    """Reads elements at `{"keys", "files", "starts", "sizes"}`: a row each, and a column for each part.

    `parts` of the config: [name, type] of each; the type is "bytes", "json", or that of a column.
    """

    def __init__(self, config: Config) -> None:
        self._parts: list[tuple[str, str]] = [(name, kind) for name, kind in config["parts"]]
        self._files = msgspec.convert(config["files"], list[DataFile])
        self._open = OpenFiles(self._files)

    def read(self, location: Tree) -> dict[str, Column]:
        """Return {"key": the keys, part: array[n]} of the elements at `location`."""
        keys: list[str] = location["keys"]
        rows = zip(
            location["files"].tolist(), location["starts"].tolist(), location["sizes"].tolist(), strict=True
        )
        texts = [self._texts(file, starts, sizes) for file, starts, sizes in rows]
        shard = {"key": sealed(ragged.of_texts(keys))}
        for place, (name, kind) in enumerate(self._parts):
            try:
                shard[name] = sealed(_column([each[place] for each in texts], kind))
            except CellError as error:
                file = self._files[int(location["files"][error.row])]
                raise SourceError(
                    f"{file.label}: {keys[error.row]}.{name}: {error.message}", key="columns", name=name
                ) from error
        return shard

    def _texts(self, file: int, starts: Sequence[int], sizes: Sequence[int]) -> list[bytes]:
        """Return the bytes of the parts of an element, b"" for one that is absent."""
        there = [(start, start + size) for start, size in zip(starts, sizes, strict=True) if size != ABSENT]
        lo, hi = min((lo for lo, _ in there), default=0), max((hi for _, hi in there), default=0)
        if hi - lo <= sum(b - a for a, b in there) + _GAP_BYTES_MAX:
            data = self._open.read(file, lo, hi)
            return [
                data[start - lo : start - lo + max(size, 0)]
                for start, size in zip(starts, sizes, strict=True)
            ]
        return [
            self._open.read(file, start, start + max(size, 0))
            for start, size in zip(starts, sizes, strict=True)
        ]

    def close(self) -> None:
        self._open.close()


def _column(texts: list[bytes], kind: str) -> Column:
    if kind == "bytes":
        return ragged.objects(texts)
    if kind != "json":
        stripped = texts if kind == "str" else [text.strip() for text in texts]
        return column_of_cells(Cells.of(stripped), kind)
    values = []
    for row, text in enumerate(texts):
        try:
            values.append(json.loads(text) if text else None)
        except (ValueError, RecursionError) as error:
            raise CellError(row, f"not valid JSON: {error}") from error
    return ragged.objects(values)


class TarFilesSource(ReaderSource):
    """Elements of archives, with the offsets of their parts: int64[n, parts]."""

    by_id = False

    def __init__(
        self,
        keys: list[str],
        files: Offsets,
        starts: Offsets,
        sizes: Offsets,
        config: Config,
        store: UnpackStore,
    ) -> None:
        self._keys, self._files, self._starts, self._sizes = keys, files, starts, sizes
        super().__init__(len(keys), config, TarReader(config), store.close)
        parts = {
            name: ArraySpec(object if kind in ("bytes", "json") else dtype_of(kind))
            for name, kind in config["parts"]
        }
        self.element_spec = {"key": ArraySpec(str), **parts}

    def locate(self, ids: Ids) -> Tree:
        rows = rows_of(ids, self.length)
        chosen = index_of(rows)
        return {
            "keys": [self._keys[row] for row in rows],
            "files": self._files[chosen],
            "starts": self._starts[chosen],
            "sizes": self._sizes[chosen],
        }

    def probe(self) -> None:
        """Read the first element."""
        if self.length:
            self.read(self.locate(range(1)))


def open_tar(config: Config, folder: Path) -> TarFilesSource:
    """Open tar archives; `columns` (part -> type) chooses parts, by default all of them as bytes."""
    store = UnpackStore(config.get("unpacked_bytes_max"))
    try:
        files = unpack_all(expand(config["path"], folder), store)
        elements: list[tuple[int, str, dict[str, tuple[int, int]]]] = []
        for number, file in enumerate(files):
            store.notice.check(f"{file.label} is being indexed")
            elements += [(number, key, parts) for key, parts in _elements(file)]
        there = list(dict.fromkeys(name for _, _, parts in elements for name in parts))
        columns: dict[str, str] = dict(config.get("columns") or dict.fromkeys(there, "bytes"))
        for name in columns:
            if name == "key":
                raise SourceError(
                    f"the part 'key' of {files[0].label} can't be read: the column `key` has the common names",
                    key="columns",
                    expected="the other parts in `columns`",
                )
            if name not in there:
                raise SourceError(
                    f"no element of {files[0].label} has the part {name!r}",
                    key="columns",
                    name=name,
                    nearest=nearest(name, there),
                    expected="one of " + ", ".join(there),
                )
        shape = len(elements), len(columns)
        starts, sizes = np.zeros(shape, np.int64), np.full(shape, ABSENT, np.int64)
        for row, (_, _, parts) in enumerate(elements):
            for place, name in enumerate(columns):
                if name in parts:
                    starts[row, place], sizes[row, place] = parts[name]
        settings = {
            "kind": "tar",
            "files": msgspec.to_builtins(files),
            "parts": [[name, kind] for name, kind in columns.items()],
        }
        numbers = np.array([number for number, _, _ in elements], np.int64)
        return TarFilesSource([key for _, key, _ in elements], numbers, starts, sizes, settings, store)
    except BaseException:
        store.close()
        raise


def _elements(file: DataFile) -> Iterator[tuple[str, dict[str, tuple[int, int]]]]:
    """Yield the key of each element, and the offset and size of each of its parts."""
    key, parts = "", dict[str, tuple[int, int]]()
    for name, start, size in _members(file):
        folder, base = os.path.split(name)
        stem, _, part = base.partition(".")
        if not part or not stem or base.startswith("."):  # WebDataset skips files without a key, too
            continue
        found = f"{folder}/{stem}" if folder else stem
        if found != key:
            if parts:
                yield key, parts
            key, parts = found, {}
        if part.lower() in parts:
            raise SourceError(f"{file.label}: {name} is in it twice", key="path")
        parts[part.lower()] = start, size
    if parts:
        yield key, parts


def _members(file: DataFile) -> Iterator[tuple[str, int, int]]:
    """Yield the name of each plain file in an archive, its offset and its size in bytes."""
    after = ""
    with os.fdopen(file.open(), "rb") as stream:
        stream.seek(file.offset)
        try:
            with tarfile.open(fileobj=stream, mode="r:") as archive:
                for member in archive:
                    after = f" after {member.name}"
                    start = member.offset_data - file.offset
                    if start + (member.size if member.isreg() else 0) > file.size_bytes:
                        raise SourceError(
                            f"{file.label}: the archive ends within {member.name}; it was not written completely",
                            key="path",
                        )
                    if member.isreg() and not member.issparse():
                        yield member.name.removeprefix("./"), start, member.size
                    archive.members = []  # type: ignore[attr-defined]  # else it keeps an object for each member
                end = archive.offset - file.offset
        except (tarfile.TarError, EOFError, OSError) as error:
            if not after:
                raise unreadable(file, "tar", error) from error
            raise SourceError(f"{file.label}: damaged{after}: {error}", key="path") from error
        # tarfile takes a damaged header for the end, which is a block of zeros
        stream.seek(file.offset + end)
        if stream.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise SourceError(
                f"{file.label}: damaged{after}: there is neither a file nor the end", key="path"
            )
        rest = file.size_bytes - end - tarfile.BLOCKSIZE
        while rest > 0 and (zeros := stream.read(min(rest, tarfile.RECORDSIZE))):
            if zeros.strip(b"\0"):
                raise SourceError(
                    f"{file.label}: there is data behind the end of the archive, after which nothing is read",
                    key="path",
                    expected="archives that are joined by `tar --concatenate`, not by `cat`",
                )
            rest -= len(zeros)
