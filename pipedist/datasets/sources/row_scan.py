"""Where rows begin in a text file: one pass over its bytes, vectorised.

Rows end at a line feed. In csv, a line feed between quotes is part of a field; whether a byte is
between quotes is the parity of the quotes before it, as long as each quote stands where RFC 4180
allows one. Python's csv module is more lenient (`6" pipe` is a field with a quote in it), and is
the authority here: a file with a quote in an unusual place is scanned by that module instead,
slower, with the same answer that it gives everybody.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipedist.datasets.sources.base import SourceError
from pipedist.datasets.sources.paths import DataFile

BLOCK_BYTES = 1 << 23
"""How much of a file is scanned at a time."""

ROW_BYTES_MAX = 1 << 28
"""The longest stretch without a line feed; more means that the file is not made of lines."""

LINE_FEED, CARRIAGE_RETURN, QUOTE, COMMA = 10, 13, 34, 44

BARE_RETURN = "a carriage return without a line feed; rows must end with LF or CRLF"

Blocks = Callable[[], Iterator[bytes]]
"""Gives the data from its beginning, in blocks that end with a line feed (the last one may not)."""


@dataclass(frozen=True, slots=True)
class RowRules:
    """What makes a row.

    Args:
        quoted: a line feed between quotes does not end the row (csv).
        keep_blank: an empty line is a row (text).
    """

    quoted: bool
    keep_blank: bool


class RowError(Exception):
    """The data is not made of rows from byte `offset` on; never leaves this package."""

    def __init__(self, offset: int, message: str) -> None:
        self.offset = offset
        self.message = message
        super().__init__(message)


class _StrayQuote(Exception):
    """A quote stands where parity can't be trusted."""


def file_blocks(file: DataFile, descriptor: int, start: int) -> Iterator[bytes]:
    """Yield the bytes of `file` from `start`, in blocks that end with a line feed.

    Raises:
        SourceError: a line is longer than `ROW_BYTES_MAX`.
    """
    rest = b""
    while start < file.size_bytes:
        stop = min(start + BLOCK_BYTES, file.size_bytes)
        block = file.read(descriptor, start, stop)
        start = stop
        cut = block.rfind(b"\n") + 1
        if cut:
            yield rest + block[:cut]
            rest = block[cut:]
        else:
            rest += block
        if len(rest) > ROW_BYTES_MAX:
            raise SourceError(
                f"{file.shown}: a line is longer than {ROW_BYTES_MAX} bytes; is this a text file?",
                key="path",
            )
    if rest:
        yield rest


def row_starts(blocks: Blocks, start: int, rules: RowRules) -> npt.NDArray[np.int64]:
    """Return where each row begins, and behind the last one where the data ends.

    Args:
        blocks: the data.
        start: offset of its first byte; offsets count on from there.
        rules: what makes a row.

    Returns:
        int64[rows + 1]. A row's bytes end where the next one begins; blank lines that are not
        rows belong to the row before them.

    Raises:
        RowError: a quoted field is never closed.
    """
    try:
        return _scan(blocks(), start, rules)
    except _StrayQuote:
        return _scan_leniently(blocks(), start)


def _scan(blocks: Iterator[bytes], start: int, rules: RowRules) -> npt.NDArray[np.int64]:
    found: list[npt.NDArray[np.int64]] = []
    inside = False  # a quoted field is open at the beginning of the block
    opened_at = start  # where the row began whose quoted field is open
    begin = start  # of the row that the block continues
    last = b""  # byte
    for block in blocks:
        data = np.frombuffer(block, np.uint8)
        feeds = np.flatnonzero(data == LINE_FEED)
        if rules.quoted and (inside or b'"' in block):
            quotes = np.flatnonzero(data == QUOTE)
            if not well_placed(data, quotes, inside):
                raise _StrayQuote
            feeds = feeds[(np.searchsorted(quotes, feeds) + inside) & 1 == 0]
            inside = bool((len(quotes) + inside) & 1)
        stops = feeds + (start + 1)
        if len(stops):
            begins = np.empty(len(stops), np.int64)
            begins[0] = begin
            begins[1:] = stops[:-1]
            begin = int(stops[-1])
            found.append(begins if rules.keep_blank else _without_blank(begins, stops, data, start))
        opened_at = begin
        start += len(block)
        last = block[-1:]
    if inside:
        raise RowError(opened_at, "a quoted field of this row is never closed")
    if begin < start and (rules.keep_blank or start - begin > 1 or last != b"\r"):
        found.append(np.array([begin], np.int64))
    found.append(np.array([start], np.int64))
    return np.concatenate(found)


def _without_blank(
    begins: npt.NDArray[np.int64],
    stops: npt.NDArray[np.int64],
    data: npt.NDArray[np.uint8],
    start: int,
) -> npt.NDArray[np.int64]:
    lengths = stops - begins
    blank = lengths == 1
    two = np.flatnonzero(lengths == 2)
    # A row of two bytes lies within the block: only a quoted field can reach into the next one.
    blank[two] = data[begins[two] - start] == CARRIAGE_RETURN
    return begins[~blank] if blank.any() else begins


def well_placed(data: npt.NDArray[np.uint8], quotes: npt.NDArray[np.intp], inside: bool) -> bool:
    """Tell whether each quote opens a field at its beginning, closes it at its end, or is doubled.

    Where that holds, quote parity says the same as Python's csv module.

    Args:
        data: bytes that begin behind a line feed, and end with one or with the file.
        quotes: where the quotes are.
        inside: a quoted field is open at the beginning.
    """
    openers = quotes[int(inside) :: 2]
    before = data[np.maximum(openers - 1, 0)]
    opens = (before == COMMA) | (before == LINE_FEED) | (before == QUOTE) | (openers == 0)
    if not opens.all():
        return False
    closers = quotes[int(not inside) :: 2]
    last = len(data) - 1
    after = data[np.minimum(closers + 1, last)]
    closes = (after == COMMA) | (after == LINE_FEED) | (after == QUOTE) | (closers == last)
    returns = np.flatnonzero(after == CARRIAGE_RETURN)
    closes[returns] = data[np.minimum(closers[returns] + 2, last)] == LINE_FEED
    return bool(closes.all())


def _scan_leniently(blocks: Iterator[bytes], start: int) -> npt.NDArray[np.int64]:
    return np.array([begin for begin, _ in lenient_rows(blocks, start)], np.int64)


def lenient_rows(blocks: Iterator[bytes], start: int) -> Iterator[tuple[int, list[str]]]:
    """Yield (offset, fields) of each row as Python's csv module reads it, then (end, []).

    The fields are the bytes of the file as Latin-1, so that nothing is lost or refused.

    Raises:
        RowError: the module refuses the data.
    """
    stop = start

    def lines() -> Iterator[str]:
        nonlocal stop
        for block in blocks:
            for line in io.BytesIO(block):  # bytes.splitlines would also split at carriage returns
                stop += len(line)
                yield line.decode("latin-1")

    with _long_fields():
        rows = csv.reader(lines())
        while True:
            begin = stop
            try:
                fields = next(rows)
            except StopIteration:
                break
            except csv.Error as error:
                # the module speaks of modes in which Python could have opened the file
                why = BARE_RETURN if "new-line character" in str(error) else f"not valid csv: {error}"
                raise RowError(begin, why) from error
            if fields:
                yield begin, fields
    yield stop, []


@contextmanager
def _long_fields() -> Iterator[None]:
    # The module's limit (131,072) is the whole process's, and our own is on rows.
    before = csv.field_size_limit(ROW_BYTES_MAX)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def line_number(file: DataFile, descriptor: int, offset: int) -> int:
    """Return the 1-based number of the line that byte `offset` of `file` is on.

    Only errors need it, so it is counted then and not kept.
    """
    line = 1
    for start in range(0, offset, BLOCK_BYTES):
        line += file.read(descriptor, start, min(start + BLOCK_BYTES, offset)).count(b"\n")
    return line


def byte_order_mark(file: DataFile, descriptor: int) -> int:
    """Return how many bytes of a UTF-8 byte order mark `file` begins with: 3 or 0.

    Raises:
        SourceError: the mark is of another encoding.
    """
    head = file.read(descriptor, 0, min(3, file.size_bytes))
    if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise SourceError(f"{file.shown}: the text is UTF-16", key="path", expected="UTF-8")
    return 3 if head == b"\xef\xbb\xbf" else 0
