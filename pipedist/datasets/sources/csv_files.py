"""Source `csv`: rows of comma-separated files with a header row.

The dialect is that of Python's csv module: commas or another delimiter, double or other quotes, doubled within a
quoted field; rows end with LF or CRLF; blank lines are skipped. NumPy finds the delimiters and line feeds; since
each row has as many fields as the header, the cells of a column are a strided slice of them. The csv
module itself parses data with a quote in an unusual place.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pipedist.core.names import plural
from pipedist.core.types import Tree
from pipedist.datasets.sources.base import Config, SourceError
from pipedist.datasets.sources.columns import (
    CellError,
    Cells,
    Column,
    column_of_cells,
    inferred_type,
    joined,
    no_such_column,
)
from pipedist.datasets.sources.paths import DataFile
from pipedist.datasets.sources.row_files import (
    BARE_RETURN,
    CARRIAGE_RETURN,
    LINE_FEED,
    Offsets,
    RowChunk,
    RowError,
    RowFiles,
    RowReader,
    RowRules,
    RowSource,
    lenient_rows,
    open_rows,
    shard_order,
    well_placed,
)

INFERRED_ROWS = 1000  # at the beginning of the first file


def open_csv(config: Config, folder: Path) -> RowSource:
    """Open csv files.

    Settings: `columns`, the name and type of each column to be read, {} to infer them; `delimiter` and `quote`,
    characters; "none" is no quote.
    """
    columns: dict[str, str] = dict(config["columns"])
    note = ""

    def scan(rows: RowFiles) -> tuple[list[Offsets], Config]:
        nonlocal note
        starts, tables = [], []
        for number, file in enumerate(rows.files):
            index = rows.index(number)
            if len(index) < 2:
                raise SourceError(f"{file.label}: the file is empty", key="path", expected="a header row")
            names = _header(rows, number, int(index[0]), int(index[1]))
            if not columns:
                columns.update(_inferred(rows, names, index[1:]))
                sample = min(INFERRED_ROWS, len(index) - 2)
                note = f"the types of columns were inferred from the first {sample:,} rows of {file.label}"
            tables.append([len(names), [_position(names, name, file) for name in columns]])
            starts.append(index[1:])
        dialect: Config = {key: config[key] for key in ("delimiter", "quote") if key in config}
        return starts, {
            "columns": [[name, kind] for name, kind in columns.items()],
            "tables": tables,
            **dialect,
        }

    source = open_rows("csv", config, folder, CsvReader, scan)
    source.note = note
    return source


def _inferred(rows: RowFiles, names: list[str], index: Offsets) -> dict[str, str]:
    """Return the types of the columns of the first file, from its first rows."""
    file, count = rows.files[0], min(INFERRED_ROWS, len(index) - 1)
    for name in names:
        _position(names, name, file)  # a name that is there twice is an error
    if not count:
        return dict.fromkeys(names, "str")
    begin, end = int(index[0]), int(index[count])
    try:
        cells = column_cells(rows.read(0, begin, end), count, len(names), range(len(names)), rows.rules)
    except RowError as error:
        raise SourceError(f"{rows.place(0, begin + error.offset)}: {error.message}", key="path") from error
    return {name: inferred_type(column) for name, column in zip(names, cells, strict=True)}


def _header(rows: RowFiles, file: int, start: int, stop: int) -> list[str]:
    try:
        _, fields = next(lenient_rows(iter([rows.read(file, start, stop)]), start, rows.rules))
    except RowError as error:
        raise SourceError(f"{rows.place(file, start)}: {error.message}", key="path") from error
    try:
        return [field.encode("latin-1").decode() for field in fields]
    except UnicodeDecodeError as error:
        raise SourceError(f"{rows.place(file, start)}: the header is not UTF-8 text", key="path") from error


def _position(names: list[str], name: str, file: DataFile) -> int:
    found = [at for at, each in enumerate(names) if each == name]
    if not found:
        raise no_such_column(name, names, file.label)
    if len(found) > 1:
        raise SourceError(f"{file.label} has {len(found)} columns named {name!r}", key="columns", name=name)
    return found[0]


class CsvReader(RowReader):
    """Parses rows of csv files into typed columns.

    `tables` of the config: for each file, its number of fields and the positions of the columns.
    """

    rules = RowRules(quoted=True, keep_blank=False)

    @classmethod
    def rules_of(cls, config: Config) -> RowRules:
        """Return the dialect of the files."""
        delimiter, quote = config.get("delimiter", ","), config.get("quote", '"')
        if quote == "none":
            return RowRules(quoted=False, keep_blank=False, delimiter=ord(delimiter))
        return RowRules(quoted=True, keep_blank=False, delimiter=ord(delimiter), quote=ord(quote))

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._tables = config["tables"]

    def read(self, location: Tree) -> dict[str, Column]:
        """Return {column: array[n]} of the rows at `location`.

        An error begins with `file:line:column`, the column as its number.
        """
        chunks = list(self._rows.chunks(location)) or [RowChunk(0, b"", 0)]
        parts = [self._parse(chunk) for chunk in chunks]
        return joined(parts, shard_order(chunks))

    def _parse(self, chunk: RowChunk) -> dict[str, Column]:
        fields, positions = self._tables[chunk.file]
        try:
            cells = column_cells(chunk.data, chunk.rows, fields, positions, self._rows.rules)
        except RowError as error:
            raise SourceError(
                f"{self._rows.byte_place(chunk, error.offset)}: {error.message}", key="path"
            ) from error
        columns = {}
        for column, position, (name, kind) in zip(cells, positions, self._columns.items(), strict=True):
            try:
                columns[name] = column_of_cells(column, kind)
            except CellError as error:
                place = self._rows.row_place(chunk, error.row)
                raise SourceError(
                    f"{place}:{position + 1}: column {name!r}: {error.message}", key="columns", name=name
                ) from error
        return columns


def column_cells(
    data: bytes, rows: int, fields: int, positions: Sequence[int], rules: RowRules
) -> list[Cells]:
    """Return the cells of the fields at some (0-based) positions, in whole rows; raise RowError for a malformed row."""
    if not rows:
        return [Cells.of(()) for _ in positions]
    array = np.frombuffer(data, np.uint8)
    quotes = np.flatnonzero(array == rules.quote) if rules.quoted and rules.quote in data else None
    if quotes is not None and not well_placed(array, quotes, rules, inside=False):
        return _leniently(data, fields, positions, rules)
    stops = np.flatnonzero((array == rules.delimiter) | (array == LINE_FEED))
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
        _cells(data, array, quotes, starts[at::fields], stops[at::fields], rules, last=at == fields - 1)
        for at in positions
    ]


def _without_blank(
    array: npt.NDArray[np.uint8], stops: Offsets, feeds: npt.NDArray[np.bool_], fields: int
) -> tuple[Offsets, Offsets]:
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
    return f"the row has {plural(count, 'field')}, the header has {fields}"


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
    starts: Offsets,
    stops: Offsets,
    rules: RowRules,
    *,
    last: bool,
) -> Cells:
    if last:
        stops = stops - ((stops > starts) & (array[stops - 1] == CARRIAGE_RETURN))
    if quotes is None:
        return Cells(data, starts, stops)
    quoted = (stops > starts) & (array[starts] == rules.quote)
    starts, stops = starts + quoted, stops - quoted
    doubled = np.flatnonzero(np.searchsorted(quotes, stops) > np.searchsorted(quotes, starts))
    if not len(doubled):
        return Cells(data, starts, stops)
    quote = bytes([rules.quote])
    texts = [
        data[a:b].replace(quote * 2, quote)
        for a, b in zip(starts[doubled].tolist(), stops[doubled].tolist(), strict=True)
    ]
    plain = Cells.of(texts)
    starts[doubled], stops[doubled] = plain.starts + len(data), plain.stops + len(data)
    return Cells(data + plain.data, starts, stops)


def _leniently(data: bytes, fields: int, positions: Sequence[int], rules: RowRules) -> list[Cells]:
    columns: list[list[bytes]] = [[] for _ in positions]
    for offset, row in lenient_rows(iter([data]), 0, rules):
        if not row:
            break
        if len(row) != fields:
            raise RowError(offset, _wrong_count(len(row), fields))
        for column, at in zip(columns, positions, strict=True):
            column.append(row[at].encode("latin-1"))
    return [Cells.of(column) for column in columns]
