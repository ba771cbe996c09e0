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

from pipedist.core.types import Tree
from pipedist.datasets.element import ArraySpec
from pipedist.datasets.sources.arrow_columns import OWN_TYPE, numpy_column, plain_type, readable
from pipedist.datasets.sources.base import (
    Config,
    ElementReader,
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


class ParquetReader(ElementReader):
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

    @property
    def element_spec(self) -> Tree:  # type: ignore[override]  # computed when it is needed: it opens a file
        columns = {name: self._empty(name) for name in self._columns}
        return {name: ArraySpec(column.dtype, column.shape[1:]) for name, column in columns.items()}

    def __len__(self) -> int:
        return self._layout.total

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
