"""Tables that pyarrow writes: `.parquet`, `.arrow`, and data sets of parquet files in a folder.

Rows are written in groups, each in memory until it is complete. Where a group ends depends on its rows only: after
65,536 of them, or when their values have 64 MiB. So do the limits of the files of a data set.

An axis beside the rows is a fixed-size list; object arrays are text, binary, lists or structs, as their cells are. The
first group decides the types of all.

A data set is a folder of `part-00000.parquet`, `part-00001.parquet`, ... of at most `rows_per_file` rows, in the order
of the rows. With `partition_by`, it has a folder for each value of that column, `COLUMN=VALUE`, as Hive's, and the
files lack the column.
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote

import numpy as np
import numpy.typing as npt

from pipedist.core import ragged
from pipedist.core.files import AtomicFile, AtomicPath
from pipedist.core.types import Tree
from pipedist.datasets.sources.arrow_columns import arrow_column, numbers_of
from pipedist.errors import OutputError
from pipedist.outputs.row_files import RowSink
from pipedist.outputs.sink import Target, imported
from pipedist.outputs.spool import Array
from pipedist.reduction.keyed.keys import TextColumn
from pipedist.reduction.keyed.table import KeyedTable

GROUP_ROWS_MAX = 2**16  # rows of a group
GROUP_BYTES_MAX = 64 * 2**20  # bytes of the values of a group
ROWS_PER_FILE = 2**20  # rows of a file of a data set, unless it says otherwise
PARTITIONS_MAX = 1_000
_PARTITIONS_BYTES_MAX = 4 * GROUP_BYTES_MAX  # bytes that wait for their groups, of all partitions

NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"


class RowGroups:
    """Cuts rows into groups whose ends do not depend on the tables in which they come."""

    def __init__(self, arrow: Any, rows_max: int = GROUP_ROWS_MAX) -> None:
        self._arrow = arrow
        self._rows_max = rows_max
        self._waiting: list[Any] = []
        self._rows = 0
        self.bytes = 0

    def push(self, table: Any) -> Iterator[list[Any]]:
        """Add rows; yield the complete groups, as tables to concatenate."""
        ends = np.cumsum(_row_bytes(self._arrow, table)) + self.bytes
        start = before = 0
        while start < table.num_rows:
            full = int(np.searchsorted(ends[start:], GROUP_BYTES_MAX + before)) + 1
            size = min(full, self._rows_max - self._rows, table.num_rows - start)
            self._waiting.append(table.slice(start, size))
            start += size
            self._rows += size
            self.bytes = int(ends[start - 1]) - before
            if self._rows == self._rows_max or self.bytes >= GROUP_BYTES_MAX:
                before = int(ends[start - 1])
                yield self.rest()

    def rest(self) -> list[Any]:
        """Return the rows that wait, as tables, and keep none."""
        waiting, self._waiting = self._waiting, []
        self._rows = self.bytes = 0
        return waiting


def _row_bytes(arrow: Any, table: Any) -> npt.NDArray[np.int64]:
    """Return the bytes of the values of each row; a null has none, whatever its type is."""
    total = np.zeros(table.num_rows, np.int64)
    for column in table.columns:
        total += _value_bytes(arrow, column.combine_chunks())
    return total


def _value_bytes(arrow: Any, column: Any) -> npt.NDArray[np.int64]:
    types, own, compute = arrow.types, column.type, arrow.compute
    if isinstance(column, arrow.ChunkedArray):  # of no chunks, or too large for one
        parts = [np.zeros(0, np.int64), *(_value_bytes(arrow, each) for each in column.chunks)]
        return np.concatenate(parts, dtype=np.int64)
    if types.is_null(own):
        return np.zeros(len(column), np.int64)
    if (
        types.is_string(own)
        or types.is_binary(own)
        or types.is_large_string(own)
        or types.is_large_binary(own)
    ):
        return numbers_of(arrow, compute.binary_length(column).fill_null(0)).astype(np.int64)
    if types.is_list(own) or types.is_large_list(own) or types.is_fixed_size_list(own):
        ends = np.cumsum(numbers_of(arrow, compute.list_value_length(column).fill_null(0)), dtype=np.int64)
        inner = np.concatenate([[0], np.cumsum(_value_bytes(arrow, compute.list_flatten(column)))])
        return np.asarray(np.diff(inner[np.concatenate([[0], ends])]), np.int64)
    if types.is_struct(own):
        total = np.zeros(len(column), np.int64)
        for child in column.flatten():
            total += _value_bytes(arrow, child)
        return total
    valid = numbers_of(arrow, column.is_valid()).astype(np.int64)
    sizes: npt.NDArray[np.int64] = valid * max(1, own.bit_width // 8)
    return sizes


class TableSink(RowSink):
    """Writes groups of rows as Arrow tables of one schema."""

    flat = False
    extra: ClassVar[str] = "arrow"
    what: ClassVar[str] = ".arrow"

    def __init__(self, target: Target) -> None:
        for module in ("pyarrow.compute", "pyarrow.parquet"):
            imported(module, target.label, self.what, self.extra)
        self._arrow: Any = imported("pyarrow", target.label, self.what, self.extra)
        super().__init__(target)
        self._groups = RowGroups(self._arrow, self._rows_max(target))
        self._schema: Any = None  # the schema of all groups, after the first one
        self._seen: Any = None  # the schema of the last rows

    def _rows_max(self, target: Target) -> int:
        return GROUP_ROWS_MAX

    def _check(self, columns: dict[str, Array], dtypes: dict[str, Any]) -> None:
        super()._check(columns, dtypes)
        if self._seen is None:  # reports a dtype without an Arrow type at the first value
            for name, array in columns.items():
                self._column(name, array[:1])

    def _table_by_key(self, value: KeyedTable) -> None:
        for block in value.blocks(GROUP_ROWS_MAX, texts=True):
            self._rows(block)

    def _rows(self, columns: dict[str, Array]) -> None:
        table = self._arrow.table({name: self._column(name, array) for name, array in columns.items()})
        self._seen = table.schema
        for group in self._groups.push(table):
            self._write(self._together(group))

    def _complete(self) -> None:
        if rest := self._groups.rest():
            self._write(self._together(rest))
        if self._schema is None:
            self._begin(self._typed(self._seen) if self._seen is not None else self._arrow.schema([]))
        self._end()

    def _column(self, name: str, array: Array | TextColumn) -> Any:
        if isinstance(array, TextColumn):
            ends = array.texts.ends
            offsets = np.zeros(len(ends) + 1, np.int64)
            offsets[1:] = ends
            buffers = [None, self._arrow.py_buffer(offsets), self._arrow.py_buffer(array.texts.data)]
            texts = self._arrow.LargeStringArray.from_buffers(len(ends), buffers[1], buffers[2])
            return (
                texts if array.codes is None else texts.take(arrow_column(self._arrow, array.codes))
            ).cast("string")
        try:
            return arrow_column(self._arrow, array)
        except (self._arrow.ArrowException, ValueError, TypeError, OverflowError) as error:
            raise OutputError(
                f"{self.label}: leaf {name!r} of dtype {array.dtype} does not fit a {self.what} column: {error}. "
                "Return values of one type that Arrow has, or write .jsonl."
            ) from error

    def _together(self, tables: list[Any]) -> Any:
        """Return rows in the types of the file, which the first group decides."""
        try:
            table = self._arrow.concat_tables(tables, promote_options="permissive").combine_chunks()
            if self._schema is None:
                self._begin(self._typed(table.schema))
            if self._schema == table.schema:
                return table
            # `cast` alone would make texts of numbers, and True of 5
            self._arrow.unify_schemas([self._schema, table.schema], promote_options="permissive")
            return table.cast(self._schema)
        except (self._arrow.ArrowException, ValueError) as error:
            raise OutputError(
                f"{self.label}: the values of a column have several types: {error}. Convert them, or write .jsonl."
            ) from error

    def _typed(self, schema: Any) -> Any:
        """Return a schema in which a column of nulls is text."""
        is_null, text = self._arrow.types.is_null, self._arrow.string()
        return self._arrow.schema([each.with_type(text) if is_null(each.type) else each for each in schema])

    def _begin(self, schema: Any) -> None:
        """Begin with the schema of all groups; there may be no group."""
        self._schema = schema

    @abstractmethod
    def _write(self, table: Any) -> None:
        """Write a group."""

    @abstractmethod
    def _end(self) -> None:
        """Complete the file after the last group."""

    def _release(self) -> None:
        super()._release()
        self._groups.rest()


class ParquetSink(TableSink):
    """`.parquet`: a file of row groups."""

    extra = "parquet"
    what = "parquet"
    _out: AtomicFile
    _writer: Any = None

    def _begin(self, schema: Any) -> None:
        super()._begin(schema)
        self._writer = self._arrow.parquet.ParquetWriter(self._out.file, schema)

    def _write(self, table: Any) -> None:
        self._writer.write_table(table, row_group_size=GROUP_ROWS_MAX)

    def _end(self) -> None:
        self._writer.close()

    def _release(self) -> None:
        super()._release()
        if self._writer is not None and self._writer.is_open:
            # else its finalizer would write to the closed file
            with contextlib.suppress(OSError, self._arrow.ArrowException):
                self._writer.close()


class ArrowSink(TableSink):
    """`.arrow`: an IPC file of record batches, uncompressed, to be mapped into memory."""

    _out: AtomicFile
    _writer: Any = None

    def _begin(self, schema: Any) -> None:
        super()._begin(schema)
        self._writer = self._arrow.ipc.new_file(self._out.file, schema)

    def _write(self, table: Any) -> None:
        self._writer.write_table(table)

    def _end(self) -> None:
        writer, self._writer = self._writer, None
        writer.close()

    def _release(self) -> None:
        super()._release()
        writer, self._writer = self._writer, None
        if writer is not None:
            with contextlib.suppress(OSError, self._arrow.ArrowException):
                writer.close()


class _Part:
    """The files of one partition: the open one, and the rows that wait for its next row group."""

    def __init__(self, arrow: Any, folder: Path, rows_per_file: int) -> None:
        self._arrow = arrow
        self._folder = folder
        self._rows_per_file = rows_per_file
        self._groups = RowGroups(arrow, min(GROUP_ROWS_MAX, rows_per_file))
        self._files = self._rows = 0
        self._writer: Any = None

    @property
    def bytes_waiting(self) -> int:
        return self._groups.bytes

    def push(self, table: Any) -> None:
        for group in self._groups.push(table):
            self._write(group)

    def flush(self) -> None:
        if rest := self._groups.rest():
            self._write(rest)

    def _write(self, group: list[Any]) -> None:
        table = self._arrow.concat_tables(group).combine_chunks()
        if self._writer is not None and self._rows + table.num_rows > self._rows_per_file:
            self.close()
        if self._writer is None:
            self.begin(table.schema)
        self._writer.write_table(table, row_group_size=GROUP_ROWS_MAX)
        self._rows += table.num_rows

    def begin(self, schema: Any) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"part-{self._files:05}.parquet"
        self._writer = self._arrow.parquet.ParquetWriter(path, schema)
        self._files += 1
        self._rows = 0

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class ParquetPartsSink(TableSink):
    """`NAME.parquet/`: a data set of parquet files, see above."""

    extra = "parquet"
    what = "parquet"
    _writes = AtomicPath
    _out: AtomicPath

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._rows_per_file: int = target.options.get("rows_per_file") or ROWS_PER_FILE
        self._by: str | None = target.options.get("partition_by")
        self._parts: dict[str, _Part] = {}

    def _rows_max(self, target: Target) -> int:
        return min(GROUP_ROWS_MAX, target.options.get("rows_per_file") or ROWS_PER_FILE)

    def _check(self, columns: dict[str, Array], dtypes: dict[str, Any]) -> None:
        super()._check(columns, dtypes)
        if self._by is None:
            return
        array = columns.get(self._by)
        if array is None:
            raise OutputError(
                f"{self.label}: there is no column {self._by!r} to partition by: the columns are "
                f"{', '.join(columns)}"
            )
        if len(columns) == 1:
            raise OutputError(
                f"{self.label}: a data set that is partitioned by its only column has no values"
            )
        if array.ndim > 1 or array.dtype.kind not in "biuUOM":
            raise OutputError(
                f"{self.label}: column {self._by!r} of dtype {array.dtype} can't name folders: partition by "
                "text, integers, booleans or dates"
            )

    def _append(self, value: Tree) -> None:
        if not (isinstance(value, np.ndarray) and ragged.is_blank(value)):  # no call found a row
            super()._append(value)

    def _table_by_key(self, value: KeyedTable) -> None:
        if self._by is None:
            super()._table_by_key(value)
        else:  # with the check of the column
            RowSink._table_by_key(self, value)

    def _begin(self, schema: Any) -> None:
        super()._begin(schema)
        self._out.written.mkdir()

    def _write(self, table: Any) -> None:
        if self._by is None:
            self._part("").push(table)
            return
        keys = table.column(self._by).combine_chunks().dictionary_encode(null_encoding="encode")
        rest = table.drop_columns([self._by])
        codes = keys.indices.to_numpy()
        rows = np.argsort(codes, kind="stable")
        ends = np.searchsorted(codes[rows], np.arange(len(keys.dictionary)), side="right")
        for key, own in zip(keys.dictionary.to_pylist(), np.split(rows, ends[:-1]), strict=True):
            name = f"{quote(self._by, safe='')}={self._named(key)}"
            self._part(name).push(rest.take(self._arrow.array(own)))
        # groups have the same ends whatever the pieces are, so this does not depend on those either
        if sum(part.bytes_waiting for part in self._parts.values()) > _PARTITIONS_BYTES_MAX:
            for part in self._parts.values():
                part.flush()

    def _named(self, key: Any) -> str:
        if key is None or key == "":
            return NULL_PARTITION
        if isinstance(key, str | bytes | bool | int) or hasattr(key, "isoformat"):
            text = str(key).lower() if isinstance(key, bool) else key if isinstance(key, bytes) else str(key)
            return quote(text, safe="")
        raise OutputError(f"{self.label}: column {self._by!r} has {key!r}, which can't name a folder")

    def _part(self, name: str) -> _Part:
        part = self._parts.get(name)
        if part is None:
            if len(self._parts) == PARTITIONS_MAX:
                raise OutputError(
                    f"{self.label}: column {self._by!r} has more than {PARTITIONS_MAX:,} values, each a folder. "
                    "Partition by another column."
                )
            part = self._parts[name] = _Part(self._arrow, self._out.written / name, self._rows_per_file)
        return part

    def _end(self) -> None:
        if not self._parts and self._by is None:
            self._part("").begin(self._schema)
        for part in self._parts.values():
            part.flush()
            part.close()

    def _release(self) -> None:
        super()._release()
        for part in self._parts.values():
            with contextlib.suppress(OSError, self._arrow.ArrowException):
                part.close()
