"""Source `parquet`: typed columns of parquet files, with pyarrow.

The driver reads only the files' footers; workers read row groups. A reader caches the row groups it
read last, up to `ROW_GROUPS_BYTES_MAX`, because a shard is usually a small part of one. A null is a
missing value, as in csv.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from pipedist.core import ragged
from pipedist.core.types import Tree
from pipedist.datasets.sources.base import (
    Config,
    Reader,
    ReaderSource,
    RowLayout,
    SourceError,
    rows_of,
    sealed,
)
from pipedist.datasets.sources.columns import CellError, Column, joined, no_such_column
from pipedist.datasets.sources.file_kinds import unreadable
from pipedist.datasets.sources.paths import FILES_OPEN_MAX, DataFile, OpenFiles, expand, is_remote

ROW_GROUPS_BYTES_MAX = 256 << 20  # limit of a reader's decoded data; the last row group is always cached


def _pyarrow() -> Any:
    # an extra, whose import takes 0.3 s
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.parquet
    except ImportError as error:
        raise SourceError("parquet needs pyarrow: pip install 'pipedist[parquet]'") from error
    return pyarrow


class ParquetReader(Reader):
    """Reads rows of parquet files, row group by row group.

    `groups` of the config: [file, row group, rows] of each row group with rows; `columns`: [name, type or
    `OWN_TYPE`] of each column.
    """

    def __init__(self, config: Config) -> None:
        self._arrow = _pyarrow()
        self._files = msgspec.convert(config["files"], list[DataFile])
        self._groups: list[tuple[int, int, int]] = [tuple(group) for group in config["groups"]]
        self._columns: dict[str, str] = dict(config["columns"])
        self._layout = RowLayout([rows for _, _, rows in self._groups])
        self._file = functools.lru_cache(FILES_OPEN_MAX)(self._open)
        self._watched = OpenFiles(self._files)  # detects changes: pyarrow opens the files itself
        self._tables: OrderedDict[int, tuple[Any, int]] = OrderedDict()
        """Each with its bytes, because computing a size takes longer than slicing."""

    def read(self, location: Tree) -> dict[str, Column]:
        """Return {column: array[n]} of the elements with the ids `location`.

        An error begins with `file:row:column`, the row counted from 1.
        """
        rows = rows_of(location, self._layout.total)
        if isinstance(rows, range):
            segments = self._layout.segments(rows)
            if not segments:
                return {name: self._empty(name) for name in self._columns}
            parts = []
            for group, lo, hi in segments:
                parts.append(self._typed(group, self._table(group).slice(lo, hi - lo), range(lo, hi)))
                if hi == self._groups[group][2]:
                    self._free(group)
            order = None
        else:
            groups, places = self._layout.places(rows)
            chosen = [np.flatnonzero(groups == group) for group in np.unique(groups).tolist()]
            parts = [
                self._typed(int(groups[at[0]]), self._table(int(groups[at[0]])).take(places[at]), places[at])
                for at in chosen
            ]
            order = np.argsort(np.concatenate(chosen))
        return joined(parts, order)

    def _typed(
        self, group: int, table: Any, rows: Sequence[int] | npt.NDArray[np.int64]
    ) -> dict[str, Column]:
        columns = {}
        for name, kind in self._columns.items():
            try:
                columns[name] = numpy_column(self._arrow, table.column(name), kind)
            except CellError as error:
                place = self._place(group, int(rows[error.row]), name)
                raise SourceError(
                    f"{place}: column {name!r}: {error.message}", key="columns", name=name
                ) from error
        return columns

    def _place(self, group: int, row: int, name: str) -> str:
        number, row_group, _ = self._groups[group]
        file = self._file(number)
        row += sum(file.metadata.row_group(before).num_rows for before in range(row_group))
        return f"{self._files[number].label}:{row + 1}:{file.schema_arrow.get_field_index(name) + 1}"

    def _empty(self, name: str) -> Column:
        field = self._file(0).schema_arrow.field(name)
        empty = self._arrow.chunked_array([], type=field.type)
        return sealed(numpy_column(self._arrow, empty, self._columns[name]))

    def _table(self, group: int) -> Any:
        if group in self._tables:
            self._tables.move_to_end(group)
            return self._tables[group][0]
        file, number, _ = self._groups[group]
        # the worker decides how many threads run
        opened = self._file(file)
        try:
            table = opened.read_row_group(number, columns=list(self._columns), use_threads=False)
        except (self._arrow.ArrowException, OSError) as error:
            self._check(file)
            raise SourceError(
                f"{self._files[file].label}: row group {number} can't be read: {error}", key="path"
            ) from error
        self._check(file)
        self._tables[group] = table, table.nbytes
        while len(self._tables) > 1 and sum(size for _, size in self._tables.values()) > ROW_GROUPS_BYTES_MAX:
            self._tables.popitem(last=False)
        return table

    def _free(self, group: int) -> None:
        """Free a row group that was read to its end, if the cache can't hold it until the next epoch.

        The next one is then decoded into its memory; new pages would take a quarter of the decoding time.
        """
        _, _, rows = self._groups[group]
        if self._tables[group][1] * self._layout.total > ROW_GROUPS_BYTES_MAX * rows:
            del self._tables[group]

    def _check(self, file: int) -> None:
        if not is_remote(self._files[file].path):
            self._watched.check(file)

    def _open(self, number: int) -> Any:
        file = _open(self._arrow, self._files[number])
        self._check(number)
        return file

    def close(self) -> None:
        self._tables.clear()
        self._file.cache_clear()
        self._watched.close()


def open_parquet(config: Config, folder: Path) -> ReaderSource:
    """Open parquet files; without `columns` (name -> type or `OWN_TYPE`), all columns with their own types."""
    arrow = _pyarrow()
    wanted: dict[str, str] = config.get("columns", {})
    everything = not wanted
    files = expand(config["path"], folder)
    groups, first = [], None
    for number, data_file in enumerate(files):
        with _open(arrow, data_file) as file:
            schema = file.schema_arrow
            first = schema if first is None else first
            if not number and everything:
                wanted = dict.fromkeys(schema.names, OWN_TYPE)
            if everything and (more := [name for name in schema.names if name not in wanted]):
                raise SourceError(
                    f"{data_file.label} has a column {more[0]!r}, and {files[0].label} has none",
                    key="path",
                    expected="files with the same columns, or `columns` with those to be read",
                )
            for name, kind in wanted.items():
                _check(arrow, schema, name, kind, data_file.label)
                there, before = (plain_type(arrow, each.field(name).type) for each in (schema, first))
                if kind == OWN_TYPE and there != before:
                    raise SourceError(
                        f"column {name!r} is {before} in {files[0].label} and {there} in {data_file.label}",
                        key="path",
                        name=name,
                    )
            rows = [file.metadata.row_group(each).num_rows for each in range(file.num_row_groups)]
            groups += [[number, each, count] for each, count in enumerate(rows) if count]
    reader_config = {
        "kind": "parquet",
        "files": msgspec.to_builtins(files),
        "groups": groups,
        "columns": [[name, kind] for name, kind in wanted.items()],
    }
    return ReaderSource(sum(rows for _, _, rows in groups), reader_config, ParquetReader(reader_config))


def _open(arrow: Any, file: DataFile) -> Any:
    file.check()  # pyarrow opens the file itself, to read without the GIL
    try:
        if is_remote(file.path):
            from pipedist.datasets.sources.remote import open_stream

            return arrow.parquet.ParquetFile(open_stream(file.path), pre_buffer=True)
        return arrow.parquet.ParquetFile(file.path, pre_buffer=False)
    except (arrow.ArrowException, OSError) as error:
        raise unreadable(file, "parquet", error) from error


def _check(arrow: Any, schema: Any, name: str, kind: str, label: str) -> None:
    times = schema.names.count(name)
    if not times:
        raise no_such_column(name, schema.names, label)
    if times > 1:
        raise SourceError(f"{label} has {times} columns named {name!r}", key="columns", name=name)
    own = schema.field(name).type
    if not readable(arrow, own, kind):
        wanted = "read: name the columns to be read" if kind == OWN_TYPE else f"read as {kind}"
        raise SourceError(
            f"{label}: column {name!r} is {own}, which can't be {wanted}", key="columns", name=name
        )


OWN_TYPE = "own"  # in place of a column's type: the type in the file


def plain_type(arrow: Any, own: Any) -> Any:
    """Return the type of a column's values; for a dictionary, of its entries."""
    return own.value_type if arrow.types.is_dictionary(own) else own


def readable(arrow: Any, own: Any, kind: str) -> bool:
    """Return whether a column of type `own` in a file can be read as `kind`."""
    types, own = arrow.types, plain_type(arrow, own)
    text = _is_text(types, own)
    integer, floating = types.is_integer(own), types.is_floating(own)
    if kind == OWN_TYPE:
        time = types.is_timestamp(own) or types.is_date(own) or types.is_duration(own)
        return bool(
            text
            or time
            or _is_plain(types, own)
            or (_is_list(types, own) and _is_item(arrow, own.value_type))
            or _is_nested(types, own)
        )
    if kind == "str":
        return bool(text or types.is_null(own))
    if kind == "bool":
        return bool(types.is_boolean(own))
    return bool(integer or ((floating or types.is_null(own)) and kind.startswith("float")))


def _is_plain(types: Any, own: Any) -> bool:
    number = types.is_integer(own) or types.is_floating(own) or types.is_boolean(own)
    return bool(number or _is_text(types, own) or _is_binary(types, own))


def _is_binary(types: Any, own: Any) -> bool:
    fixed = types.is_fixed_size_binary(own) or str(own) == "binary_view"
    return bool(types.is_binary(own) or types.is_large_binary(own) or fixed)


def _is_list(types: Any, own: Any) -> bool:
    return bool(types.is_list(own) or types.is_large_list(own) or types.is_fixed_size_list(own))


def _is_item(arrow: Any, own: Any) -> bool:
    """Return whether lists of a type are arrays."""
    return not arrow.types.is_struct(own) and readable(arrow, own, OWN_TYPE)


def _is_nested(types: Any, own: Any) -> bool:
    """Return whether values of a type are dicts and lists of plain values."""
    if types.is_struct(own):
        return all(_is_nested(types, field.type) or _is_plain(types, field.type) for field in own)
    if _is_list(types, own):
        return _is_nested(types, own.value_type) or _is_plain(types, own.value_type)
    return False


def _is_text(types: Any, own: Any) -> bool:
    # by name: the oldest supported pyarrow has no views
    return bool(types.is_string(own) or types.is_large_string(own) or str(own) == "string_view")


def numpy_column(arrow: Any, column: Any, kind: str) -> Column:
    """Return a `readable` ChunkedArray as an array, or raise CellError.

    A null is NaN in floats, "" in text, b"" in binary, NaT in dates, an empty list in lists, None in structs.
    """
    types = arrow.types
    if types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if types.is_null(column.type):  # a column without any value
        column = column.cast(arrow.string() if kind == "str" else arrow.float64())
    own = column.type
    if _is_text(types, own):
        return ragged.of_texts(["" if text is None else text for text in _texts(column)])
    if _is_binary(types, own):
        return ragged.objects([b"" if data is None else data for data in column.to_pylist()])
    if _is_list(types, own):
        if not _is_item(arrow, own.value_type):
            return ragged.objects(column.to_pylist())
        return _lists(arrow, column)
    if types.is_struct(own):
        return ragged.objects(column.to_pylist())
    counted = types.is_boolean(own) or (types.is_integer(own) and not kind.startswith("float"))
    if counted and column.null_count:
        row = int(np.flatnonzero(column.is_null().to_numpy())[0])
        named = str(own) if kind == OWN_TYPE else kind
        raise CellError(row, f"a value of type {named} is missing; float columns read one as NaN")
    values: Column = column.to_numpy()
    return values if kind == OWN_TYPE else _fitted(values, np.dtype(kind))


def _lists(arrow: Any, column: Any) -> Column:
    """Return lists: of a fixed size as array[n, size], others as an object array of arrays."""
    size = column.type.list_size if arrow.types.is_fixed_size_list(column.type) else None
    lengths = arrow.compute.list_value_length(column).fill_null(size or 0).to_numpy().astype(np.int64)
    if size is not None and column.null_count:  # `flatten` drops the values of a null
        null = arrow.scalar([None] * size, column.type)
        column = column.fill_null(null)
    items = arrow.compute.list_flatten(column)
    ends = np.cumsum(lengths, dtype=np.int64)
    try:
        values = numpy_column(arrow, items, OWN_TYPE)
    except CellError as error:
        raise CellError(int(np.searchsorted(ends, error.row, side="right")), error.message) from None
    if size is not None:
        return values.reshape(len(column), size, *values.shape[1:])
    starts = ends - lengths
    return ragged.objects([values[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)])


def _texts(column: Any) -> list[str | None]:
    try:
        texts: list[str | None] = column.to_pylist()
    except UnicodeDecodeError:  # Arrow's writers need not check
        for row, text in enumerate(column):
            try:
                text.as_py()
            except UnicodeDecodeError as error:
                raise CellError(row, f"{error.object!r} is not UTF-8 text") from error
        raise
    return texts


def _fitted(values: Column, dtype: np.dtype[Any]) -> Column:
    if values.dtype == dtype:
        return values
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            result: Column = values.astype(dtype)
        wrong = np.isinf(result) & ~np.isinf(values)
    else:
        limits = np.iinfo(dtype)
        result = values.astype(dtype)
        wrong = (values < limits.min) | (values > limits.max)
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise CellError(row, f"{values[row]} does not fit {dtype}")
    return result
