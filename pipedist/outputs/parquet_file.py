"""`.parquet`: a row for each index of axis 0, a column for each leaf path, through pyarrow."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipedist.errors import OutputError
from pipedist.outputs.leaves import Array
from pipedist.outputs.row_files import Columns, RowSink
from pipedist.outputs.sink import Mode
from pipedist.program import Tree

_GROUP_ROWS = 2**16
"""Rows of a row group: a reader's unit, whatever the steps were."""
_GROUP_BYTES_MAX = 64 * 2**20
"""Rows wait in memory for their group up to this size."""


class ParquetSink(RowSink):
    """Row groups of 65,536 rows, or of 64 MiB where rows are large."""

    def __init__(
        self, path: Path, mode: Mode, axis: int, label: str, table: Callable[[Tree], Columns] | None = None
    ) -> None:
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError:
            raise OutputError(f"{label}: .parquet needs pyarrow: pip install 'pipedist[parquet]'") from None
        super().__init__(path, mode, axis, label, table)
        self._arrow: Any = pyarrow
        self._writer: Any = None
        self._schema: Any = None
        self._waiting: list[Any] = []
        self._rows_waiting = 0
        self._bytes_waiting = 0

    def _check(self, columns: dict[str, Array], dtypes: dict[str, Any]) -> None:
        super()._check(columns, dtypes)
        if self._schema is None:  # what Arrow has no type for is known with the first value
            for name, array in columns.items():
                self._column(name, array[:1])

    def _rows(self, columns: dict[str, Array]) -> None:
        table = self._arrow.table({name: self._column(name, array) for name, array in columns.items()})
        self._schema = table.schema
        self._waiting.append(table)
        self._rows_waiting += table.num_rows
        self._bytes_waiting += table.nbytes
        while self._rows_waiting >= _GROUP_ROWS or self._bytes_waiting >= _GROUP_BYTES_MAX:
            self._write_group()

    def _complete(self) -> None:
        while self._rows_waiting:
            self._write_group()
        if self._writer is None:
            self._open(self._schema if self._schema is not None else self._arrow.schema([]))
        self._writer.close()

    def _column(self, name: str, array: Array) -> Any:
        try:
            values = array.tolist() if array.dtype.kind in "US" else array
            kinds = {"U": self._arrow.string(), "S": self._arrow.binary()}
            return self._arrow.array(values, type=kinds.get(array.dtype.kind))
        except (self._arrow.ArrowException, UnicodeEncodeError) as error:
            raise OutputError(
                f"{self.label}: leaf {name!r} of dtype {array.dtype} does not fit a parquet column: {error}"
            ) from error

    def _write_group(self) -> None:
        table = self._arrow.concat_tables(self._waiting).combine_chunks()
        if self._writer is None:
            self._open(table.schema)
        group, rest = table.slice(0, _GROUP_ROWS), table.slice(_GROUP_ROWS)
        self._writer.write_table(group, row_group_size=_GROUP_ROWS)
        self._waiting = [rest] if rest.num_rows else []
        self._rows_waiting = rest.num_rows
        self._bytes_waiting = rest.nbytes

    def _open(self, schema: Any) -> None:
        self._writer = self._arrow.parquet.ParquetWriter(self._out.file, schema)

    def _release(self) -> None:
        self._waiting = []
        if self._writer is not None and self._writer.is_open:
            # abandoned: else its finalizer would write to the closed file
            with contextlib.suppress(OSError, self._arrow.ArrowException):
                self._writer.close()
