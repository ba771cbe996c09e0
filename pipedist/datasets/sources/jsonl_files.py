"""Source `jsonl`: one JSON object a line, as objects or as typed columns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipedist.datasets.sources.base import Config, Reader, SourceError, sealed
from pipedist.datasets.sources.columns import CellError, Column, check_types, column_of_values
from pipedist.datasets.sources.paths import DataFile
from pipedist.datasets.sources.row_files import Chunk, RowFiles, RowSource, in_order, open_rows
from pipedist.datasets.sources.row_scan import RowRules
from pipedist.datasets.sources.unpack import Spool
from pipedist.program import Tree

_RULES = RowRules(quoted=False, keep_blank=False)


def open_jsonl(config: Config, folder: Path) -> RowSource:
    """Open files of JSON objects, one a line; blank lines are passed over.

    Args:
        config: `path`, and optional `columns`: name -> type.
        folder: what `path` is relative to.

    Raises:
        SourceError: no file matches, a file can't be read, or a type is unknown.
    """
    columns: dict[str, str] = dict(config.get("columns") or {})
    check_types(columns)

    def open_files(files: list[DataFile], spool: Spool) -> RowSource:
        rows = RowFiles(files, _RULES)
        try:
            starts = [rows.index(number) for number in range(len(files))]
        finally:
            rows.close()
        reader_config = {
            "kind": "jsonl",
            "files": [file.to_config() for file in files],
            "columns": [[name, kind] for name, kind in columns.items()],
        }
        return RowSource(starts, reader_config, JsonlReader(reader_config), spool)

    return open_rows(config, folder, open_files)


class JsonlReader(Reader):
    """Reads JSON objects.

    Args:
        config: `files`; `columns`: [name, type] of each, empty for the objects themselves.
    """

    def __init__(self, config: Config) -> None:
        self._columns: dict[str, str] = dict(config["columns"])
        self._rows = RowFiles([DataFile.from_config(file) for file in config["files"]], _RULES)

    def read(self, location: Tree) -> list[dict[str, Any]] | dict[str, Column]:
        """Return the objects at `location`, or {column: array[n]} of them.

        A key that is absent or null is a missing value of its column.

        Raises:
            SourceError: a line is not an object, or a value is not of its column's type; the
                message begins with `file:line`.
        """
        chunks = list(self._rows.chunks(location))
        objects = in_order(chunks, [each for chunk in chunks for each in self._objects(chunk)])
        if not self._columns:
            return objects
        shard = {}
        for name, kind in self._columns.items():
            try:
                shard[name] = sealed(column_of_values([each.get(name) for each in objects], kind))
            except CellError as error:
                raise SourceError(
                    f"{self._place(chunks, error.row)}: column {name!r}: {error.message}",
                    key="columns",
                    name=name,
                ) from error
        return shard

    def _objects(self, chunk: Chunk) -> list[dict[str, Any]]:
        lines = [line for line in chunk.data.split(b"\n") if line and line != b"\r"]
        objects = []
        for row, line in enumerate(lines):
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                column = f":{error.colno}" if isinstance(error, json.JSONDecodeError) else ""
                text = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
                raise SourceError(
                    f"{self._rows.row_place(chunk, row)}{column}: not valid JSON: {text}", key="path"
                ) from error
            if not isinstance(value, dict):
                raise SourceError(
                    f"{self._rows.row_place(chunk, row)}: a {type(value).__name__}, not an object",
                    key="path",
                    expected="one JSON object on each line",
                )
            objects.append(value)
        return objects

    def _place(self, chunks: list[Chunk], position: int) -> str:
        """Return `file:line` of the element at a position of the shard."""
        counted = in_order(chunks, [(chunk, row) for chunk in chunks for row in range(chunk.rows)])
        return self._rows.row_place(*counted[position])

    def close(self) -> None:
        """Close the files."""
        self._rows.close()
