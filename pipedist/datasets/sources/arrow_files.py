"""Sources `parquet` and `arrow`: typed columns of files, with pyarrow.

The parts of a parquet file are its row groups, those of an Arrow IPC file (Feather version 2) its record batches. Arrow
files are mapped into memory; one in the streaming format has no index of its batches, and is an error.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from pipedist.datasets.sources.base import Config, ReaderSource, SourceError, imported
from pipedist.datasets.sources.file_kinds import unreadable
from pipedist.datasets.sources.paths import DataFile, is_remote
from pipedist.datasets.sources.table_files import TableFile, TableReader, open_tables

_MAGIC = b"ARROW1"
_FEATHER_1 = b"FEA1"


class ParquetFile(TableFile):
    """A parquet file; its footer is read when it is opened."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.schema = file.schema_arrow
        self.part_rows = [file.metadata.row_group(each).num_rows for each in range(file.num_row_groups)]

    def read(self, part: int, columns: list[str]) -> Any:
        # the worker decides how many threads run
        return self._file.read_row_group(part, columns=columns, use_threads=False)

    def close(self) -> None:
        self._file.close()


class ParquetReader(TableReader):
    """Reads rows of parquet files, row group by row group."""

    part_name = "row group"

    @staticmethod
    def open_file(file: DataFile) -> ParquetFile:
        arrow = imported("pyarrow", "parquet", "parquet")
        parquet = imported("pyarrow.parquet", "parquet", "parquet")
        file.check()  # pyarrow opens the file itself, to read without the GIL
        try:
            return ParquetFile(parquet.ParquetFile(file.for_library(), pre_buffer=is_remote(file.path)))
        except (arrow.ArrowException, OSError) as error:
            raise unreadable(file, "parquet", error) from error


def open_parquet(config: Config, folder: Path) -> ReaderSource:
    return open_tables("parquet", config, folder, ParquetReader)


class ArrowFile(TableFile):
    """An Arrow IPC file, mapped into memory."""

    def __init__(self, arrow: Any, memory: Any) -> None:
        self._arrow = arrow
        self._memory = memory
        self._columns: list[str] = []
        self._reader: Any = None
        self.schema = arrow.ipc.open_file(memory).schema

    @functools.cached_property
    def part_rows(self) -> list[int]:  # type: ignore[override]
        """The rows of each batch; only a batch has their number, so one column of each is read."""
        fields = range(len(self.schema))
        cheap = next((at for at in fields if self._arrow.types.is_primitive(self.schema.field(at).type)), 0)
        reader = self._opened([cheap])
        return [reader.get_batch(each).num_rows for each in range(reader.num_record_batches)]

    def _opened(self, fields: list[int]) -> Any:
        options = self._arrow.ipc.IpcReadOptions(included_fields=fields, use_threads=False)
        return self._arrow.ipc.open_file(self._memory, options=options)

    def read(self, part: int, columns: list[str]) -> Any:
        if self._reader is None or columns != self._columns:
            self._reader = self._opened(sorted(map(self.schema.get_field_index, columns)) or [0])
            self._columns = columns
        batch = self._reader.get_batch(part)
        batch.validate()
        return self._arrow.Table.from_batches([batch]).select(columns)

    def close(self) -> None:
        self._memory.close()


class ArrowReader(TableReader):
    """Reads rows of Arrow IPC files, record batch by record batch."""

    part_name = "record batch"

    @staticmethod
    def open_file(file: DataFile) -> ArrowFile:
        arrow = imported("pyarrow", "arrow", "arrow")
        imported("pyarrow.ipc", "arrow", "arrow")
        file.check()
        try:
            given = file.for_library()
            memory = arrow.PythonFile(given, "r") if is_remote(file.path) else arrow.memory_map(given)
            head = memory.read(len(_MAGIC))
            memory.seek(0)
            if head != _MAGIC:
                memory.close()
                raise _other_kind(file, head)
            return ArrowFile(arrow, memory)
        except (arrow.ArrowException, OSError) as error:
            raise unreadable(file, "Arrow", error) from error


def _other_kind(file: DataFile, head: bytes) -> SourceError:
    if head.startswith(b"\xff\xff\xff\xff"):
        return SourceError(
            f"{file.label}: it is in Arrow's streaming format, which has no index of its batches",
            key="path",
            expected="the file format: write it with pyarrow.ipc.new_file or pyarrow.feather.write_feather",
        )
    if head.startswith(_FEATHER_1):
        return SourceError(
            f"{file.label}: it is in version 1 of Feather",
            key="path",
            expected="version 2: read it with pyarrow.feather.read_table, and write it again",
        )
    return unreadable(file, "Arrow", "it does not begin with ARROW1")


def open_arrow(config: Config, folder: Path) -> ReaderSource:
    return open_tables("arrow", config, folder, ArrowReader)
