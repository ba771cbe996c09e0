"""Rows of text files, for the sources csv, jsonl and text.

The driver scans the files once, with NumPy, and keeps the offset of each row (8 bytes). A location has
byte ranges, so that a worker reads and parses only its own rows:

- consecutive rows: a list of `[file, start, stop, rows]`, one for each file;
- scattered rows: `{"files": int64[n], "starts": int64[n], "stops": int64[n]}`.

Rows end at a line feed. In csv, a line feed between quotes is part of a field, and the delimiter and the quote may be
other characters than `,` and `"`. If each quote is where
RFC 4180 allows one, the parity of the quotes before a byte shows whether it is quoted. Python's csv
module accepts more (`6" pipe` is a field with a quote in it) and defines the result: it scans files with
a quote in an unusual place, more slowly.
"""

from __future__ import annotations

import array
import functools
import importlib.util
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from pipedist.core.types import Tree
from pipedist.datasets.element import ArraySpec
from pipedist.datasets.sources.base import Config, Ids, Reader, ReaderSource, RowLayout, SourceError, rows_of
from pipedist.datasets.sources.columns import dtype_of
from pipedist.datasets.sources.file_kinds import OpeningNotice, UnpackStore, refuse_binary, unpack_all
from pipedist.datasets.sources.paths import DataFile, OpenFiles, expand

T = TypeVar("T")

Offsets = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RowChunk:
    """Rows of one file (by its index), read together."""

    file: int
    data: bytes  # the bytes of the rows; ends with a line feed
    rows: int
    start: int = 0  # offset of `data` in the file, for consecutive rows
    starts: Offsets | None = None  # offset of each row in the file, for scattered rows
    begins: Offsets | None = None  # offset of each row in `data`, for scattered rows
    order: Offsets | None = None  # position of each row in the shard; None: in order


class RowFiles:
    """Reads rows of text files."""

    def __init__(
        self, files: Sequence[DataFile], rules: RowRules, notice: OpeningNotice | None = None
    ) -> None:
        self.files = tuple(files)
        self._notice = notice
        self.rules = rules
        self._open = OpenFiles(files)

    def index(self, file: int) -> Offsets:
        """Return the offset of each row of a file, and the end of the last one: int64[rows + 1]."""
        refuse_binary(self.files[file], self._open.descriptor(file))
        try:
            return row_starts(lambda: self.blocks(file), self._byte_order_mark(file), self.rules)
        except RowError as error:
            raise SourceError(f"{self.place(file, error.offset)}: {error.message}", key="path") from error

    def blocks(self, file: int) -> Iterator[bytes]:
        """Yield the bytes of a file after its byte order mark, in blocks that end with a line feed."""
        descriptor, data_file = self._open.descriptor(file), self.files[file]
        start = self._byte_order_mark(file)
        rest = b""
        while start < data_file.size_bytes:
            stop = min(start + BLOCK_BYTES, data_file.size_bytes)
            block = data_file.read(descriptor, start, stop)
            start = stop
            if self._notice is not None:
                self._notice.check(f"{data_file.label} is being indexed, {start:,} bytes so far")
            cut = block.rfind(b"\n") + 1
            if cut:
                yield rest + block[:cut]
                rest = block[cut:]
            else:
                rest += block
            if len(rest) > ROW_BYTES_MAX:
                raise SourceError(
                    f"{data_file.label}: a line is longer than {ROW_BYTES_MAX} bytes; is this a text file?",
                    key="path",
                )
        if rest:
            yield rest

    def _byte_order_mark(self, file: int) -> int:
        """Return the size of the UTF-8 byte order mark at the beginning of a file: 3 or 0."""
        data_file = self.files[file]
        head = data_file.read(self._open.descriptor(file), 0, min(3, data_file.size_bytes))
        if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
            raise SourceError(f"{data_file.label}: the text is UTF-16", key="path", expected="UTF-8")
        return 3 if head == b"\xef\xbb\xbf" else 0

    def read(self, file: int, start: int, stop: int) -> bytes:
        """Return the bytes [start, stop) of a file, with a line feed at the end."""
        data = self._open.read(file, start, stop)
        # the last row of a file may lack it
        return data if data.endswith(b"\n") or not data else data + b"\n"

    def chunks(self, location: Tree) -> Iterator[RowChunk]:
        """Yield the rows at `location`, file by file."""
        if isinstance(location, dict):
            yield from self._scattered(location["files"], location["starts"], location["stops"])
            return
        for file, start, stop, rows in location:
            yield RowChunk(file, self.read(file, start, stop), rows, start)

    def _scattered(self, files: Offsets, starts: Offsets, stops: Offsets) -> Iterator[RowChunk]:
        for file in np.unique(files).tolist():
            order = np.flatnonzero(files == file)
            begins, ends = starts[order], stops[order]
            ranges = zip(begins.tolist(), ends.tolist(), strict=True)
            pieces = [self.read(file, start, stop) for start, stop in ranges]
            sizes = np.fromiter(map(len, pieces), np.int64, len(pieces))
            offsets = np.cumsum(sizes) - sizes
            yield RowChunk(file, b"".join(pieces), len(pieces), starts=begins, begins=offsets, order=order)

    def row_place(self, chunk: RowChunk, row: int) -> str:
        """Return `file:line` of the beginning of a row of a chunk."""
        if chunk.starts is not None:
            offset = int(chunk.starts[row])
        else:
            offset = int(row_starts(lambda: iter([chunk.data]), chunk.start, self.rules)[row])
        return self.place(chunk.file, offset)

    def byte_place(self, chunk: RowChunk, offset: int) -> str:
        """Return `file:line` of byte `offset` of a chunk's data."""
        if chunk.starts is None or chunk.begins is None:
            return self.place(chunk.file, chunk.start + offset)
        row = int(np.searchsorted(chunk.begins, offset, side="right")) - 1
        return self.place(chunk.file, int(chunk.starts[row]) + offset - int(chunk.begins[row]))

    def place(self, file: int, offset: int) -> str:
        """Return `file:line` of a byte; lines are counted only when an error needs it."""
        data_file, line = self.files[file], 1
        for start in range(0, offset, BLOCK_BYTES):
            stop = min(start + BLOCK_BYTES, offset)
            line += data_file.read(self._open.descriptor(file), start, stop).count(b"\n")
        return f"{data_file.label}:{line}"

    def close(self) -> None:
        self._open.close()


class RowReader(Reader):
    """Reads rows of text files as columns, if the config has some."""

    rules: ClassVar[RowRules]

    def __init__(self, config: Config) -> None:
        self._columns: dict[str, str] = dict(config.get("columns", ()))
        self._rows = RowFiles(msgspec.convert(config["files"], list[DataFile]), self.rules_of(config))

    @classmethod
    def rules_of(cls, config: Config) -> RowRules:
        """Return the form of the rows of a source."""
        return cls.rules

    def close(self) -> None:
        self._rows.close()


class RowSource(ReaderSource):
    """Rows of text files, found by their offsets: for each file, `RowFiles.index`."""

    by_id = False

    def __init__(
        self, starts: Sequence[Offsets], config: Config, reader: Reader, on_close: Callable[[], None]
    ) -> None:
        self._starts = tuple(starts)
        self._layout = RowLayout([len(each) - 1 for each in starts])
        super().__init__(self._layout.total, config, reader, on_close)
        columns = dict(config.get("columns", ()))
        if columns:
            self.element_spec = {name: ArraySpec(dtype_of(kind)) for name, kind in columns.items()}

    def locate(self, ids: Ids) -> Tree:
        """Return the byte ranges of elements, as the module defines them."""
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

    def probe(self) -> None:
        """Read the first row of each file."""
        for file, starts in enumerate(self._starts):
            if len(starts) > 1:
                self.read([[file, int(starts[0]), int(starts[1]), 1]])


def open_rows(
    kind: str,
    config: Config,
    folder: Path,
    reader: type[RowReader],
    scan: Callable[[RowFiles], tuple[list[Offsets], Config]],
) -> RowSource:
    """Return a source of the rows of the files that `config["path"]` matches.

    `scan` returns the index of each file, and further settings of the reader.
    """
    store = UnpackStore(config.get("unpacked_bytes_max"))
    try:
        files = unpack_all(expand(config["path"], folder), store)
        with closing(RowFiles(files, reader.rules_of(config), store.notice)) as rows:
            starts, settings = scan(rows)
        settings = {"kind": kind, "files": msgspec.to_builtins(files), **settings}
        return RowSource(starts, settings, reader(settings), store.close)
    except BaseException:
        store.close()
        raise


def shard_order(chunks: Sequence[RowChunk]) -> Offsets | None:
    """Return the row of the concatenated chunks at each position of the shard; None: they are in order."""
    orders = [chunk.order for chunk in chunks if chunk.order is not None]
    # the rows of a single chunk are in the order of the shard
    return np.argsort(np.concatenate(orders)) if len(orders) > 1 else None


def in_order(chunks: Sequence[RowChunk], rows: Sequence[T]) -> list[T]:
    """Return the rows of the concatenated chunks in the order of the shard."""
    order = shard_order(chunks)
    return list(rows) if order is None else [rows[at] for at in order.tolist()]


BLOCK_BYTES = 1 << 21  # size of the blocks that are scanned
ROW_BYTES_MAX = 1 << 28  # the longest line; a longer one shows that the file does not consist of lines
LINE_FEED, CARRIAGE_RETURN, QUOTE, COMMA = 10, 13, 34, 44

NEVER_CLOSED = "a quoted field of this row is never closed"
BARE_RETURN = "a carriage return without a line feed; rows must end with LF or CRLF"

# Yields the data in blocks that end with a line feed (the last one may not).
Blocks = Callable[[], Iterator[bytes]]


@dataclass(frozen=True, slots=True)
class RowRules:
    """The form of a row."""

    quoted: bool  # a line feed between quotes does not end the row (csv)
    keep_blank: bool  # an empty line is a row (text)
    delimiter: int = COMMA  # the byte between two fields (csv)
    quote: int = QUOTE  # the byte around fields with delimiters or line feeds (csv)


class RowError(Exception):
    """The data is not a row from byte `offset` on; internal to this package."""

    def __init__(self, offset: int, message: str) -> None:
        self.offset = offset
        self.message = message
        super().__init__(message)


class _StrayQuote(Exception):
    """A quote is in an unusual place, so parity does not decide."""


def row_starts(blocks: Blocks, start: int, rules: RowRules) -> Offsets:
    """Return the offset of each row, and the end of the data: int64[rows + 1]; RowError for a quote never closed.

    A row's bytes end where the next one begins; blank lines that are not rows belong to the row before them.
    `start` is the offset of the first byte.
    """
    try:
        return _scan(blocks(), start, rules)
    except _StrayQuote:
        return np.array([begin for begin, _ in lenient_rows(blocks(), start, rules)], np.int64)


def _scan(blocks: Iterator[bytes], start: int, rules: RowRules) -> Offsets:
    found = array.array("q")  # grows in place: arrays and their concatenation need twice the memory
    inside = False  # whether a quoted field is open at the beginning of the block
    opened_at = start  # offset of the row whose quoted field is open
    begin = start  # offset of the row that the block continues
    last = b""  # byte
    for block in blocks:
        data = np.frombuffer(block, np.uint8)
        feeds = np.flatnonzero(data == LINE_FEED)
        if rules.quoted and (inside or rules.quote in block):
            quotes = np.flatnonzero(data == rules.quote)
            if not well_placed(data, quotes, rules, inside=inside):
                raise _StrayQuote
            feeds = feeds[(np.searchsorted(quotes, feeds) + inside) & 1 == 0]
            inside = bool((len(quotes) + inside) & 1)
        stops = feeds + (start + 1)
        if len(stops):
            begins = np.empty(len(stops), np.int64)
            begins[0] = begin
            begins[1:] = stops[:-1]
            begin = int(stops[-1])
            rows = begins if rules.keep_blank else _without_blank(begins, stops, data, start)
            found.frombytes(rows.tobytes())
        opened_at = begin
        start += len(block)
        last = block[-1:]
    if inside:
        raise RowError(opened_at, NEVER_CLOSED)
    if begin < start and (rules.keep_blank or start - begin > 1 or last != b"\r"):
        found.append(begin)
    found.append(start)
    return np.frombuffer(found, np.int64)


def _without_blank(begins: Offsets, stops: Offsets, data: npt.NDArray[np.uint8], start: int) -> Offsets:
    lengths = stops - begins
    blank = lengths == 1
    two = np.flatnonzero(lengths == 2)
    # a row of two bytes is within the block: only a quoted field can continue in the next one
    blank[two] = data[begins[two] - start] == CARRIAGE_RETURN
    return begins[~blank] if blank.any() else begins


def well_placed(
    data: npt.NDArray[np.uint8], quotes: npt.NDArray[np.intp], rules: RowRules, *, inside: bool
) -> bool:
    """Return whether each quote opens a field at its beginning, closes it at its end, or is doubled.

    If so, quote parity gives the same rows as Python's csv module. `data` begins after a line feed, and ends
    with one or with the file; `inside`: a quoted field is open at its beginning.
    """
    openers = quotes[int(inside) :: 2]
    before = data[np.maximum(openers - 1, 0)]
    opens = (before == rules.delimiter) | (before == LINE_FEED) | (before == rules.quote) | (openers == 0)
    if not opens.all():
        return False
    closers = quotes[int(not inside) :: 2]
    last = len(data) - 1
    after = data[np.minimum(closers + 1, last)]
    closes = (after == rules.delimiter) | (after == LINE_FEED) | (after == rules.quote) | (closers == last)
    returns = np.flatnonzero(after == CARRIAGE_RETURN)
    closes[returns] = data[np.minimum(closers[returns] + 2, last)] == LINE_FEED
    return bool(closes.all())


def lenient_rows(blocks: Iterator[bytes], start: int, rules: RowRules) -> Iterator[tuple[int, list[str]]]:
    """Yield (offset, fields) of each row as Python's csv module parses it, then (end, []), or raise RowError.

    The fields are the bytes of the file as Latin-1, which preserves any byte.
    """
    stop, is_over = start, False

    def lines() -> Iterator[str]:
        nonlocal stop, is_over
        for block in blocks:
            for line in io.BytesIO(block):  # bytes.splitlines would also split at carriage returns
                stop += len(line)
                yield line.decode("latin-1")
        is_over = True

    csv = csv_of_long_fields(ROW_BYTES_MAX)
    quoting = csv.QUOTE_MINIMAL if rules.quoted else csv.QUOTE_NONE
    rows = csv.reader(lines(), delimiter=chr(rules.delimiter), quotechar=chr(rules.quote), quoting=quoting)
    while True:
        begin = stop
        try:
            fields = next(rows)
        except StopIteration:
            break
        except csv.Error as error:
            # the module's message is about the mode in which a file was opened
            why = BARE_RETURN if "new-line character" in str(error) else f"not valid csv: {error}"
            raise RowError(begin, why) from error
        if is_over:  # the module closes the field at the end
            raise RowError(begin, NEVER_CLOSED)
        if fields:
            yield begin, fields
    yield stop, []


@functools.cache
def csv_of_long_fields(bytes_max: int) -> Any:
    """Return a csv module of our own, with a limit for the bytes of a field.

    The limit of Python's module (131,072) belongs to the whole process: user code may rely on it, or set it. It is
    kept for each instance of the C module, so another instance has a limit of its own.
    """
    spec = importlib.util.find_spec("_csv")
    assert spec is not None  # it is part of Python
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.field_size_limit(bytes_max)
    return module
