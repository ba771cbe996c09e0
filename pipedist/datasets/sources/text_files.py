"""Sources `text`, `jsonl` and `files`: elements are lines, JSON objects, or whole files."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from pipedist.core import ragged
from pipedist.core.names import excerpt, nearest
from pipedist.core.types import Tree
from pipedist.datasets.element import ArraySpec
from pipedist.datasets.sources.base import (
    Config,
    Ids,
    Reader,
    ReaderSource,
    SourceError,
    rows_of,
    sealed,
)
from pipedist.datasets.sources.columns import CellError, Column, column_of_values
from pipedist.datasets.sources.paths import DataFile, expand
from pipedist.datasets.sources.row_files import (
    Offsets,
    RowChunk,
    RowFiles,
    RowReader,
    RowRules,
    RowSource,
    in_order,
    open_rows,
)


def open_text(config: Config, folder: Path) -> RowSource:
    """Open text files: UTF-8, lines end with LF or CRLF, which the last one may lack."""
    return open_rows("text", config, folder, TextReader, lambda rows: (_indexes(rows), {}))


def _indexes(rows: RowFiles) -> list[Offsets]:
    return [rows.index(number) for number in range(len(rows.files))]


class TextReader(RowReader):
    """Reads lines of text files."""

    rules = RowRules(quoted=False, keep_blank=True)

    def read(self, location: Tree) -> list[str]:
        """Return the lines at `location` without their ends; an error begins with `file:line`."""
        chunks = list(self._rows.chunks(location))
        return in_order(chunks, [line for chunk in chunks for line in self._lines(chunk)])

    def _lines(self, chunk: RowChunk) -> list[str]:
        # str.splitlines also splits at form feeds and Unicode separators
        data = chunk.data.replace(b"\r\n", b"\n")
        try:
            return data.decode().split("\n")[:-1]
        except UnicodeDecodeError as error:
            place = self._rows.row_place(chunk, data.count(b"\n", 0, error.start))
            raise SourceError(f"{place}: the line is not UTF-8 text", key="path") from error


class _TooLarge(ValueError):
    pass


def _float(text: str) -> float:
    value = float(text)
    if math.isinf(value):  # a literal Infinity is parsed elsewhere
        raise _TooLarge(f"the number {excerpt(text, 60)} does not fit float64")
    return value


_decode = json.JSONDecoder(parse_float=_float).decode


def open_jsonl(config: Config, folder: Path) -> RowSource:
    """Open files of JSON objects, one per line; blank lines are skipped."""
    columns: dict[str, str] = config.get("columns", {})

    def scan(rows: RowFiles) -> tuple[list[Offsets], Config]:
        starts = _indexes(rows)
        if any(len(each) > 1 for each in starts):
            _check_keys(rows, list(columns))
        return starts, {"columns": [[name, kind] for name, kind in columns.items()]}

    return open_rows("jsonl", config, folder, JsonlReader, scan)


def _check_keys(rows: RowFiles, names: Sequence[str]) -> None:
    """Check that some object has the key of each column, which may be mistyped.

    Only lines with the key's text are parsed, usually a few at the beginning.
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
        raise SourceError(
            f"no object of {rows.files[0].label}{several} has the key {name!r}",
            key="columns",
            name=name,
            nearest=nearest(name, keys),
            expected="keys that some object has; the first one has " + (", ".join(keys) or "none"),
        )


def _spellings(name: str) -> bytes:
    """Return a pattern of all JSON texts of a key."""
    characters = []
    for character in name:
        units = character.encode("utf-16-be", "surrogatepass").hex()
        escaped = "".join(rf"\\u(?i:{units[at : at + 4]})" for at in range(0, len(units), 4)).encode()
        plain = [character.encode("utf-8", "surrogatepass"), json.dumps(character)[1:-1].encode()]
        plain += [b"\\/"] if character == "/" else []
        characters.append(b"(?:" + b"|".join([*map(re.escape, plain), escaped]) + b")")
    return b'"' + b"".join(characters) + b'"'


def _parsed(line: bytes) -> dict[str, Any]:
    """Return the object on a line, an empty one for an invalid line, which the reader reports."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


class JsonlReader(RowReader):
    """Reads JSON objects, as columns if the config has some."""

    rules = RowRules(quoted=False, keep_blank=False)

    def read(self, location: Tree) -> list[dict[str, Any]] | dict[str, Column]:
        """Return the objects at `location`, or {column: array[n]} of them.

        A key that is absent or null is a missing value of its column. An error begins with `file:line`.
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

    def _objects(self, chunk: RowChunk) -> list[dict[str, Any]]:
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

    def _place(self, chunks: list[RowChunk], position: int) -> str:
        """Return `file:line` of the element at a position of the shard."""
        counted = in_order(chunks, [(chunk, row) for chunk in chunks for row in range(chunk.rows)])
        return self._rows.row_place(*counted[position])


FILE_BYTES_MAX = 1 << 30  # the largest file that can be an element


class RawFilesSource(ReaderSource):
    """Whole files; a location is a list of them, so that workers need not know all."""

    by_id = False

    def __init__(self, files: Sequence[DataFile], config: Config, reader: Reader) -> None:
        self._files = tuple(files)
        self.element_spec = {"path": ArraySpec(str), "bytes": ArraySpec(object)}
        super().__init__(len(files), config, reader)

    def locate(self, ids: Ids) -> Tree:
        rows = rows_of(ids, self.length)
        numbers = rows if isinstance(rows, range) else rows.tolist()
        return msgspec.to_builtins([self._files[number] for number in numbers])


class RawFilesReader(Reader):
    """Reads whole files."""

    def __init__(self, _config: Config) -> None:
        """Create a reader; locations name the files."""

    def read(self, location: Tree) -> dict[str, Column]:
        """Return {path: texts, bytes: object array of bytes} of the files at `location`.

        A path is relative to the spec's folder if the source's was, so that it is equal on every host.
        """
        files = msgspec.convert(location, list[DataFile])
        shard = {
            "path": ragged.of_texts([file.label for file in files]),
            "bytes": ragged.objects([file.contents() for file in files]),
        }
        return {name: sealed(column) for name, column in shard.items()}


def open_files(config: Config, folder: Path) -> RawFilesSource:
    """Open files of any kind, one per element, of at most `FILE_BYTES_MAX`."""
    files = expand(config["path"], folder)
    for file in files:
        if file.size_bytes > FILE_BYTES_MAX:
            raise SourceError(
                f"{file.label}: {file.size_bytes} bytes; an element has at most {FILE_BYTES_MAX}",
                key="path",
            )
    settings = {"kind": "files"}
    return RawFilesSource(files, settings, RawFilesReader(settings))
