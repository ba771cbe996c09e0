"""Whole rows of csv -> the cells of the columns that are wanted.

The dialect is that of Python's csv module: commas, double quotes, doubled inside a quoted field,
rows end with LF or CRLF, blank lines are no rows. Commas and line feeds that separate are found
by NumPy; with each row having as many fields as the header, those of a column are a strided
slice. Rows with a quote in an unusual place are given to the module itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pipedist.datasets.sources.columns import Cells
from pipedist.datasets.sources.row_scan import (
    BARE_RETURN,
    CARRIAGE_RETURN,
    COMMA,
    LINE_FEED,
    QUOTE,
    RowError,
    lenient_rows,
    well_placed,
)

_Offsets = npt.NDArray[np.int64]


def column_cells(data: bytes, rows: int, fields: int, positions: Sequence[int]) -> list[Cells]:
    """Return the cells of some columns.

    Args:
        data: whole rows; ends with a line feed.
        rows: how many they are.
        fields: how many fields each row must have.
        positions: which of them are wanted, 0-based.

    Returns:
        For each of `positions`, `rows` cells.

    Raises:
        RowError: a row has more or fewer fields, or is not csv; its `offset` is the row's.
    """
    if not rows:
        return [Cells.of(()) for _ in positions]
    array = np.frombuffer(data, np.uint8)
    quotes = np.flatnonzero(array == QUOTE) if b'"' in data else None
    if quotes is not None and not well_placed(array, quotes, inside=False):
        return _leniently(data, fields, positions)
    stops = np.flatnonzero((array == COMMA) | (array == LINE_FEED))
    if quotes is not None:
        stops = stops[np.searchsorted(quotes, stops) & 1 == 0]
    if b"\r" in data:
        _check_returns(array, quotes)
    feeds = array[stops] == LINE_FEED
    if len(stops) == rows * fields and feeds[fields - 1 :: fields].all() and feeds.sum() == rows:
        starts = np.empty_like(stops)
        starts[0] = 0
        np.add(stops[:-1], 1, out=starts[1:])
    else:
        starts, stops = _without_blank(array, stops, feeds, fields)
    return [
        _cells(data, array, quotes, starts[at::fields], stops[at::fields], last=at == fields - 1)
        for at in positions
    ]


def _without_blank(
    array: npt.NDArray[np.uint8], stops: _Offsets, feeds: npt.NDArray[np.bool_], fields: int
) -> tuple[_Offsets, _Offsets]:
    starts = np.concatenate([np.zeros(1, np.int64), stops[:-1] + 1])
    first = np.concatenate([np.ones(1, np.bool_), feeds[:-1]])
    empty = (stops == starts) | ((stops == starts + 1) & (array[starts] == CARRIAGE_RETURN))
    kept = ~(feeds & first & empty)
    starts, stops = starts[kept], stops[kept]
    ends = np.flatnonzero(feeds[kept])
    counts = np.diff(ends, prepend=-1)
    wrong = np.flatnonzero(counts != fields)
    if len(wrong):
        row = int(wrong[0])
        begin = int(starts[ends[row] - counts[row] + 1])
        raise RowError(begin, _wrong_count(int(counts[row]), fields))
    return starts, stops


def _wrong_count(count: int, fields: int) -> str:
    return f"the row has {count} field{'s' * (count != 1)}, the header has {fields}"


def _check_returns(array: npt.NDArray[np.uint8], quotes: npt.NDArray[np.intp] | None) -> None:
    returns = np.flatnonzero(array == CARRIAGE_RETURN)
    bare = returns[array[np.minimum(returns + 1, len(array) - 1)] != LINE_FEED]
    if quotes is not None:
        bare = bare[np.searchsorted(quotes, bare) & 1 == 0]
    if len(bare):
        raise RowError(int(bare[0]), BARE_RETURN)


def _cells(
    data: bytes,
    array: npt.NDArray[np.uint8],
    quotes: npt.NDArray[np.intp] | None,
    starts: _Offsets,
    stops: _Offsets,
    *,
    last: bool,
) -> Cells:
    if last:
        stops = stops - ((stops > starts) & (array[stops - 1] == CARRIAGE_RETURN))
    if quotes is None:
        return Cells(data, starts, stops)
    quoted = (stops > starts) & (array[starts] == QUOTE)
    starts, stops = starts + quoted, stops - quoted
    doubled = np.flatnonzero(np.searchsorted(quotes, stops) > np.searchsorted(quotes, starts))
    if not len(doubled):
        return Cells(data, starts, stops)
    texts = [
        data[a:b].replace(b'""', b'"')
        for a, b in zip(starts[doubled].tolist(), stops[doubled].tolist(), strict=True)
    ]
    plain = Cells.of(texts)
    starts[doubled], stops[doubled] = plain.starts + len(data), plain.stops + len(data)
    return Cells(data + plain.data, starts, stops)


def _leniently(data: bytes, fields: int, positions: Sequence[int]) -> list[Cells]:
    columns: list[list[bytes]] = [[] for _ in positions]
    for offset, row in lenient_rows(iter([data]), 0):
        if not row:
            break
        if len(row) != fields:
            raise RowError(offset, _wrong_count(len(row), fields))
        for column, at in zip(columns, positions, strict=True):
            column.append(row[at].encode("latin-1"))
    return [Cells.of(column) for column in columns]
