"""Source `jsonl`: one JSON object a line, as objects or as typed columns."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Sequence
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


class _TooLarge(ValueError):
    """A number is beyond float64."""


def _float(text: str) -> float:
    value = float(text)
    if math.isinf(value):  # what is called Infinity does not come here
        raise _TooLarge(f"the number {text if len(text) <= 60 else text[:57] + '...'} does not fit float64")
    return value


_decode = json.JSONDecoder(parse_float=_float).decode


def open_jsonl(config: Config, folder: Path) -> RowSource:
    """Open files of JSON objects, one a line; blank lines are passed over.

    Args:
        config: `path`, and optional `columns`: name -> type.
        folder: what `path` is relative to.

    Raises:
        SourceError: no file matches, a file can't be read, a type is unknown, or there are objects and none
            has the key of a column.
    """
    columns: dict[str, str] = dict(config.get("columns") or {})
    check_types(columns)

    def open_files(files: list[DataFile], spool: Spool) -> RowSource:
        rows = RowFiles(files, _RULES)
        try:
            starts = [rows.index(number) for number in range(len(files))]
            if any(len(each) > 1 for each in starts):
                _check_keys(rows, list(columns))
        finally:
            rows.close()
        reader_config = {
            "kind": "jsonl",
            "files": [file.to_config() for file in files],
            "columns": [[name, kind] for name, kind in columns.items()],
        }
        return RowSource(starts, reader_config, JsonlReader(reader_config), spool)

    return open_rows(config, folder, open_files)


def _check_keys(rows: RowFiles, names: Sequence[str]) -> None:
    """Refuse a column whose key no object has: all of its values would be missing, as those of a typo are.

    Only lines in which the key's text stands are parsed, as a rule a few at the beginning.
    """
    unseen = {name: re.compile(_spellings(name)) for name in names}
    keys: dict[str, None] = {}
    for number in range(len(rows.files)):
        for block in rows.blocks(number) if unseen else ():
            if not keys:
                keys.update(dict.fromkeys(_parsed(block[: block.find(b"\n")])))
            for name, pattern in list(unseen.items()):
                stop = 0
                while name in unseen and (found := pattern.search(block, stop)):
                    start = block.rfind(b"\n", 0, found.start()) + 1
                    stop = block.find(b"\n", start)
                    stop = len(block) if stop < 0 else stop
                    if name in _parsed(block[start:stop]):
                        del unseen[name]
    for name in unseen:
        several = f" and {len(rows.files) - 1} more" if len(rows.files) > 1 else ""
        near = difflib.get_close_matches(name, keys, 1)
        raise SourceError(
            f"no object of {rows.files[0].shown}{several} has the key {name!r}",
            key="columns",
            name=name,
            nearest=near[0] if near else "",
            expected="keys that some object has; the first one has " + (", ".join(keys) or "none"),
        )


def _spellings(name: str) -> bytes:
    """Return a pattern of all texts that stand for a key in JSON."""
    characters = []
    for character in name:
        units = character.encode("utf-16-be", "surrogatepass").hex()
        escaped = "".join(rf"\\u(?i:{units[at : at + 4]})" for at in range(0, len(units), 4)).encode()
        plain = [character.encode("utf-8", "surrogatepass"), json.dumps(character)[1:-1].encode()]
        plain += [b"\\/"] if character == "/" else []
        characters.append(b"(?:" + b"|".join([*map(re.escape, plain), escaped]) + b")")
    return b'"' + b"".join(characters) + b'"'


def _parsed(line: bytes) -> dict[str, Any]:
    """Return the object on a line; an empty one where there is none, which its reader will tell."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


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
                value = _decode(line.decode(json.detect_encoding(line), "surrogatepass"))
            except _TooLarge as error:
                raise SourceError(f"{self._rows.row_place(chunk, row)}: {error}", key="path") from error
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
