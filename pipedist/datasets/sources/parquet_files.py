"""Source `parquet`: typed columns of parquet files, with pyarrow; the parts of a file are its row groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipedist.datasets.sources.base import Config, ReaderSource, imported
from pipedist.datasets.sources.file_kinds import unreadable
from pipedist.datasets.sources.paths import DataFile, is_remote
from pipedist.datasets.sources.table_files import TableFile, TableReader, open_tables


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
