"""Sources whose elements are rows of text files: csv, jsonl, text.

The driver scans the files once, and keeps the offset of each row (8 bytes a row). A location
names byte ranges, so that a worker reads and parses just its own rows:

- rows that follow each other: a list of `[file, start, stop, rows]`, one for each file;
- scattered rows: `{"files": int64[n], "starts": int64[n], "stops": int64[n]}`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from pipedist.datasets.sources.base import Config, Ids, Reader, Source, SourceError, rows_of
from pipedist.datasets.sources.file_kinds import refuse_binary
from pipedist.datasets.sources.layout import Layout
from pipedist.datasets.sources.paths import DataFile, OpenFiles, expand
from pipedist.datasets.sources.row_scan import (
    RowError,
    RowRules,
    byte_order_mark,
    file_blocks,
    line_number,
    row_starts,
)
from pipedist.datasets.sources.unpack import Spool, unpacked
from pipedist.program import Tree

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows of one file, read together.

    Args:
        file: which file.
        data: their bytes, one row behind the other; ends with a line feed.
        rows: how many they are.
        start: offset of `data` in the file, where the rows follow each other.
        starts: offset of each row in the file, int64[rows], where they don't.
        begins: where each row begins in `data`, int64[rows]; with `starts`.
        order: position of each row in the shard, int64[rows], where that is not plain order.
    """

    file: int
    data: bytes
    rows: int
    start: int = 0
    starts: npt.NDArray[np.int64] | None = None
    begins: npt.NDArray[np.int64] | None = None
    order: npt.NDArray[np.int64] | None = None


class RowFiles:
    """Reads rows of text files.

    Args:
        files: the files.
        rules: what makes a row.
    """

    def __init__(self, files: Sequence[DataFile], rules: RowRules) -> None:
        self.files = tuple(files)
        self.rules = rules
        self._open = OpenFiles(files)

    def index(self, file: int) -> npt.NDArray[np.int64]:
        """Return where the rows of a file begin, and where the last one ends: int64[rows + 1].

        Raises:
            SourceError: the file can't be read, or is not made of rows.
        """
        descriptor, data_file = self._open.descriptor(file), self.files[file]
        refuse_binary(data_file, descriptor)
        start = byte_order_mark(data_file, descriptor)
        try:
            return row_starts(lambda: self.blocks(file), start, self.rules)
        except RowError as error:
            raise SourceError(f"{self.place(file, error.offset)}: {error.message}", key="path") from error

    def blocks(self, file: int) -> Iterator[bytes]:
        """Yield the bytes of a file behind its byte order mark, in blocks that end with a line feed."""
        descriptor, data_file = self._open.descriptor(file), self.files[file]
        return file_blocks(data_file, descriptor, byte_order_mark(data_file, descriptor))

    def read(self, file: int, start: int, stop: int) -> bytes:
        """Return the bytes [start, stop) of a file, with a line feed at the end."""
        data = self._open.read(file, start, stop)
        # Only a file's last row can lack it.
        return data if data.endswith(b"\n") or not data else data + b"\n"

    def chunks(self, location: Tree) -> Iterator[Chunk]:
        """Yield the rows at `location`, file by file."""
        if isinstance(location, dict):
            yield from self._scattered(location["files"], location["starts"], location["stops"])
            return
        for file, start, stop, rows in location:
            yield Chunk(file, self.read(file, start, stop), rows, start)

    def _scattered(
        self,
        files: npt.NDArray[np.int64],
        starts: npt.NDArray[np.int64],
        stops: npt.NDArray[np.int64],
    ) -> Iterator[Chunk]:
        for file in np.unique(files).tolist():
            order = np.flatnonzero(files == file)
            begins, ends = starts[order], stops[order]
            pieces = [
                self.read(file, start, stop)
                for start, stop in zip(begins.tolist(), ends.tolist(), strict=True)
            ]
            sizes = np.fromiter(map(len, pieces), np.int64, len(pieces))
            yield Chunk(
                file,
                b"".join(pieces),
                len(pieces),
                starts=begins,
                begins=np.cumsum(sizes) - sizes,
                order=order,
            )

    def row_place(self, chunk: Chunk, row: int) -> str:
        """Return `file:line` of a row of a chunk; the line is where the row begins."""
        if chunk.starts is not None:
            offset = int(chunk.starts[row])
        else:
            offset = int(row_starts(lambda: iter([chunk.data]), chunk.start, self.rules)[row])
        return self.place(chunk.file, offset)

    def byte_place(self, chunk: Chunk, offset: int) -> str:
        """Return `file:line` of byte `offset` of a chunk's data."""
        if chunk.starts is None or chunk.begins is None:
            return self.place(chunk.file, chunk.start + offset)
        row = int(np.searchsorted(chunk.begins, offset, side="right")) - 1
        return self.place(chunk.file, int(chunk.starts[row]) + offset - int(chunk.begins[row]))

    def place(self, file: int, offset: int) -> str:
        """Return `file:line` of a byte."""
        data_file = self.files[file]
        return f"{data_file.shown}:{line_number(data_file, self._open.descriptor(file), offset)}"

    def close(self) -> None:
        """Close the files."""
        self._open.close()


class RowSource(Source):
    """Rows of text files, found by their offsets.

    Args:
        starts: for each file, where its rows begin and the last one ends: int64[rows + 1].
        config: what `reader` needs.
        reader: reads rows in this process.
        spool: holds what was unpacked; closed with the source.
    """

    def __init__(
        self, starts: Sequence[npt.NDArray[np.int64]], config: Config, reader: Reader, spool: Spool
    ) -> None:
        self._starts = tuple(starts)
        self._layout = Layout([len(each) - 1 for each in starts])
        self._reader = reader
        self._spool = spool
        self.length: int = self._layout.total
        self.config = config

    def locate(self, ids: Ids) -> Tree:
        """Return the byte ranges of elements; see the module's docstring."""
        rows = rows_of(ids, self.length)
        if isinstance(rows, range):
            return [
                [file, int(self._starts[file][lo]), int(self._starts[file][hi]), hi - lo]
                for file, lo, hi in self._layout.segments(rows)
            ]
        files, places = self._layout.places(rows)
        starts, stops = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
        for file in np.unique(files).tolist():
            chosen = np.flatnonzero(files == file)
            starts[chosen] = self._starts[file][places[chosen]]
            stops[chosen] = self._starts[file][places[chosen] + 1]
        return {"files": files, "starts": starts, "stops": stops}

    def read(self, location: Tree) -> Tree:
        """Return the shard at `location`."""
        return self._reader.read(location)

    def probe(self) -> None:
        """Read the first row of each file."""
        for file, starts in enumerate(self._starts):
            if len(starts) > 1:
                self.read([[file, int(starts[0]), int(starts[1]), 1]])

    def close(self) -> None:
        """Close the files, and remove what was unpacked."""
        self._reader.close()
        self._spool.close()


def open_rows(
    config: Config, folder: Path, open_files: Callable[[list[DataFile], Spool], RowSource]
) -> RowSource:
    """Return a source of rows of the files that `config["path"]` means.

    Args:
        config: the source's settings.
        folder: what its `path` is relative to.
        open_files: makes the source of the files, which are unpacked already, and the spool.

    Raises:
        SourceError: no file matches, or `open_files` says so; nothing is left behind then.
    """
    spool = Spool()
    try:
        return open_files(unpacked(expand(config.get("path", ()), folder), spool), spool)
    except BaseException:
        spool.close()
        raise


def shard_order(chunks: Sequence[Chunk]) -> npt.NDArray[np.int64] | None:
    """Return which row of the chunks, one behind the other, stands at each position of the shard.

    Returns:
        int64[n], or None where the rows are in order.
    """
    orders = [chunk.order for chunk in chunks if chunk.order is not None]
    # One chunk alone holds its rows in the order of the shard.
    return np.argsort(np.concatenate(orders)) if len(orders) > 1 else None


def in_order(chunks: Sequence[Chunk], rows: Sequence[T]) -> list[T]:
    """Return the rows of all chunks, one behind the other, in the order of the shard."""
    order = shard_order(chunks)
    return list(rows) if order is None else [rows[at] for at in order.tolist()]
