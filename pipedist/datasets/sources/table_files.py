"""Rows of typed columns in files of several parts: row groups of parquet, record batches of Arrow.

The driver reads only the files' schemas; workers read parts. A reader caches the parts it read last, up to
`PARTS_BYTES_MAX`, because a shard is usually a small piece of one. Only the wanted columns are read. A null is a
missing value, as in csv. A folder `key=value` in the path of a file is a column of its rows, unless the file has a
column of that name.
"""

from __future__ import annotations

import abc
import functools
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar
from urllib.parse import unquote

import msgspec
import numpy as np

from pipedist.core.types import Tree
from pipedist.datasets.element import ArraySpec
from pipedist.datasets.sources.arrow_columns import OWN_TYPE, numpy_column, plain_type, readable
from pipedist.datasets.sources.base import (
    Config,
    ElementReader,
    Ids,
    ReaderSource,
    RowLayout,
    SourceError,
    imported,
    rows_of,
    sealed,
)
from pipedist.datasets.sources.columns import (
    CellError,
    Cells,
    Column,
    column_of_cells,
    joined,
    no_such_column,
)
from pipedist.datasets.sources.paths import FILES_OPEN_MAX, DataFile, OpenFiles, expand

PARTS_BYTES_MAX = 256 << 20  # limit of a reader's decoded data; the last part is always cached
_NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"  # the value of a folder whose rows have none


class TableFile(abc.ABC):
    """One open file; `part_rows` are the rows of its parts."""

    schema: Any
    part_rows: Sequence[int]

    @abc.abstractmethod
    def read(self, part: int, columns: list[str]) -> Any:
        """Return the columns of a part as a pyarrow.Table; pyarrow's errors are those of damaged data."""

    def close(self) -> None:
        """Close the file."""
        return


class TableReader(ElementReader):
    """Reads rows of files, part by part.

    `parts` of the config: [file, part, rows] of each part with rows; `columns`: [name, type or `OWN_TYPE`] of each
    column; `partitions`: for each column of the files' paths, the text of each file.
    """

    part_name: ClassVar[str]  # in errors

    def __init__(self, config: Config) -> None:
        self._arrow = imported("pyarrow", config["kind"], "parquet")
        self._files = msgspec.convert(config["files"], list[DataFile])
        self._parts: list[tuple[int, int, int]] = [tuple(part) for part in config["parts"]]
        self._columns: dict[str, str] = dict(config["columns"])
        self._partitions: dict[str, list[str]] = config["partitions"]
        self._layout = RowLayout([rows for _, _, rows in self._parts])
        self._file = functools.lru_cache(FILES_OPEN_MAX)(self._open)
        self._watched = OpenFiles(self._files)  # detects changes: pyarrow opens the files itself
        self._tables: OrderedDict[int, tuple[Any, int]] = OrderedDict()
        """Each with its bytes, because computing a size takes longer than slicing."""

    @staticmethod
    @abc.abstractmethod
    def open_file(file: DataFile) -> TableFile:
        """Open a file; raise SourceError if it is of another kind, or damaged."""

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
        pieces, order = self._layout.pieces(rows)
        if not pieces:
            return {name: self._empty(name) for name in self._columns}
        found = []
        for part, chosen in pieces:
            table = self._table(part)
            if isinstance(chosen, range):
                found.append(self._typed(part, table.slice(chosen.start, len(chosen)), chosen))
                if chosen.stop == self._parts[part][2]:
                    self._free(part)
            else:
                found.append(self._typed(part, table.take(chosen), chosen))
        return joined(found, order)

    def _typed(self, part: int, table: Any, rows: Ids) -> dict[str, Column]:
        columns = {}
        file = self._parts[part][0]
        for name, kind in self._columns.items():
            try:
                if name in self._partitions:
                    columns[name] = np.repeat(_partition(self._partitions[name][file], kind), len(rows))
                else:
                    columns[name] = numpy_column(self._arrow, table.column(name), kind)
            except CellError as error:
                place = self._place(part, int(rows[error.row]), name)
                raise SourceError(
                    f"{place}: column {name!r}: {error.message}", key="columns", name=name
                ) from error
        return columns

    def _place(self, part: int, row: int, name: str) -> str:
        number, first, _ = self._parts[part]
        if name in self._partitions:
            return self._files[number].label
        file = self._file(number)
        row += sum(file.part_rows[:first])
        return f"{self._files[number].label}:{row + 1}:{file.schema.get_field_index(name) + 1}"

    def _empty(self, name: str) -> Column:
        if name in self._partitions:
            return sealed(column_of_cells(Cells.of([]), self._columns[name]))
        field = self._file(0).schema.field(name)
        empty = self._arrow.chunked_array([], type=field.type)
        return sealed(numpy_column(self._arrow, empty, self._columns[name]))

    def _table(self, part: int) -> Any:
        if part in self._tables:
            self._tables.move_to_end(part)
            return self._tables[part][0]
        file, number, _ = self._parts[part]
        opened = self._file(file)
        try:
            table = opened.read(number, [name for name in self._columns if name not in self._partitions])
        except (self._arrow.ArrowException, OSError) as error:
            self._watched.check(file)
            raise SourceError(
                f"{self._files[file].label}: {self.part_name} {number} can't be read: {error}", key="path"
            ) from error
        self._watched.check(file)
        self._tables[part] = table, table.nbytes
        while len(self._tables) > 1 and sum(size for _, size in self._tables.values()) > PARTS_BYTES_MAX:
            self._tables.popitem(last=False)
        return table

    def _free(self, part: int) -> None:
        """Free a part that was read to its end, if the cache can't hold it until the next epoch.

        The next one is then decoded into its memory; new pages would take a quarter of the decoding time.
        """
        _, _, rows = self._parts[part]
        if self._tables[part][1] * self._layout.total > PARTS_BYTES_MAX * rows:
            del self._tables[part]

    def _open(self, number: int) -> TableFile:
        file = self.open_file(self._files[number])
        self._watched.check(number)
        return file

    def close(self) -> None:
        self._tables.clear()
        self._file.cache_clear()
        self._watched.close()


def open_tables(kind: str, config: Config, folder: Path, reader: type[TableReader]) -> ReaderSource:
    """Open files of tables; without `columns` (name -> type or `OWN_TYPE`), all columns with their own types."""
    arrow = imported("pyarrow", kind, "parquet")
    wanted: dict[str, str] = dict(config.get("columns", {}))
    everything = not wanted
    files = expand(config["path"], folder)
    partitions = _partitions(files)
    parts, first = [], None
    for number, data_file in enumerate(files):
        file = reader.open_file(data_file)
        try:
            schema = file.schema
            first = schema if first is None else first
            if not number:
                partitions = {name: each for name, each in partitions.items() if name not in schema.names}
                if everything:
                    wanted = dict.fromkeys(schema.names, OWN_TYPE)
            if everything and (more := [name for name in schema.names if name not in wanted]):
                raise SourceError(
                    f"{data_file.label} has a column {more[0]!r}, and {files[0].label} has none",
                    key="path",
                    expected="files with the same columns, or `columns` with those to be read",
                )
            for name, column_type in wanted.items():
                if name in partitions:
                    continue
                _check(arrow, schema, name, column_type, data_file.label, partitions)
                there, before = (plain_type(arrow, each.field(name).type) for each in (schema, first))
                if column_type == OWN_TYPE and there != before:
                    raise SourceError(
                        f"column {name!r} is {before} in {files[0].label} and {there} in {data_file.label}",
                        key="path",
                        name=name,
                    )
            try:
                parts += [[number, each, count] for each, count in enumerate(file.part_rows) if count]
            except (arrow.ArrowException, OSError) as error:
                raise SourceError(f"{data_file.label}: damaged: {error}", key="path") from error
        finally:
            file.close()
    wanted |= dict.fromkeys(partitions, OWN_TYPE) if everything else {}
    settings = {
        "kind": kind,
        "files": msgspec.to_builtins(files),
        "parts": parts,
        "columns": list(_with_types(wanted, partitions, files)),
        "partitions": {name: each for name, each in partitions.items() if name in wanted},
    }
    return ReaderSource(sum(rows for _, _, rows in parts), settings, reader(settings))


def _check(
    arrow: Any, schema: Any, name: str, kind: str, label: str, partitions: dict[str, list[str]]
) -> None:
    times = schema.names.count(name)
    if not times:
        raise no_such_column(name, [*schema.names, *partitions], label)
    if times > 1:
        raise SourceError(f"{label} has {times} columns named {name!r}", key="columns", name=name)
    own = schema.field(name).type
    if not readable(arrow, own, kind):
        wanted = "read: name the columns to be read" if kind == OWN_TYPE else f"read as {kind}"
        raise SourceError(
            f"{label}: column {name!r} is {own}, which can't be {wanted}", key="columns", name=name
        )


# -- columns in the paths of files ---------------------------------------------------------------------


def _partitions(files: Sequence[DataFile]) -> dict[str, list[str]]:
    """Return the text of each file for each column in the files' paths: `a=1/b=2/part.parquet`."""
    found = [dict(_folders(file)) for file in files]
    for file, there in zip(files, found, strict=True):
        if there.keys() != found[0].keys():
            raise SourceError(
                f"{files[0].label} is in folders of {_listed(found[0])}, {file.label} in folders of {_listed(there)}",
                key="path",
                expected="files in folders with the same keys, as in `year=2024/month=1/part.parquet`",
            )
    return {name: [there[name] for there in found] for name in found[0]}


def _folders(file: DataFile) -> Iterator[tuple[str, str]]:
    for part in PurePosixPath(file.label.partition("::")[0]).parts[:-1]:
        name, equals, text = part.partition("=")
        if name and equals:
            yield unquote(name), "" if text == _NULL_PARTITION else unquote(text)


def _listed(names: dict[str, str]) -> str:
    return ", ".join(f"`{name}=`" for name in names) or "no keys"


def _with_types(
    wanted: dict[str, str], partitions: dict[str, list[str]], files: Sequence[DataFile]
) -> Iterator[list[str]]:
    """Yield [name, type] of each column; those of paths are checked, and int64 or str if no type is given."""
    for name, kind in wanted.items():
        texts = partitions.get(name)
        if texts is None:
            yield [name, kind]
            continue
        if kind == OWN_TYPE:
            kind = "int64" if _are_integers(texts) else "str"
        for file, text in zip(files, texts, strict=True):
            try:
                _partition(text, kind)
            except CellError as error:
                raise SourceError(
                    f"{file.label}: column {name!r} of its path: {error.message}", key="columns", name=name
                ) from error
        yield [name, kind]


def _are_integers(texts: Sequence[str]) -> bool:
    try:
        return all(str(int(text)) == text for text in texts)
    except ValueError:
        return False


def _partition(text: str, kind: str) -> Column:
    """Return the value of a column in a path as an array of one row."""
    if kind == "str":  # the folder of `NA` is not that of a missing value
        return np.array([text])
    return column_of_cells(Cells.of([text.encode()]), kind)
