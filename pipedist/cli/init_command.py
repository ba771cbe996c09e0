"""The command `pipedist init`: write a project that reads the user's data, and runs as it is."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy.typing as npt

from pipedist.cli import terminal
from pipedist.cli.project_files import EXAMPLE, SCHEMA_FILE, Data, project_files
from pipedist.cli.terminal import write_out
from pipedist.core.names import plural, printable
from pipedist.datasets.sources import SourceError, open_source
from pipedist.datasets.sources.arrow_columns import OWN_TYPE
from pipedist.datasets.sources.columns import CellError, column_of_values, nearly_fitting_type
from pipedist.datasets.sources.paths import is_remote
from pipedist.errors import UsageError
from pipedist.spec.hints import SOURCES_BY_ENDING
from pipedist.spec.schema import json_schema

HEAD_ROWS = 1000  # from which the types of columns are read
COLUMNS_MAX = 40  # the first ones of a file that has more are read


def create_project(names: Sequence[str], pattern: str | None) -> int:
    """Write a project into a new folder, and print what to do next.

    Args:
        names: the folder; empty: `pipeline`.
        pattern: the files that hold the data; None: an example is written.

    Raises:
        UsageError: the folder is not empty, or the data can't be read.
    """
    if len(names) > 1:
        raise UsageError(
            f"give one NAME, got {', '.join(names)}. Put a pattern in quotes, so that the shell does not expand it: "
            "--from 'FOLDER/*.csv'"
        )
    name = names[0] if names else "pipeline"
    folder = Path(name)
    if folder.is_file():
        raise UsageError(
            f"{name} is a file. To read it: pipedist init --from {name}; to read several: --from 'FOLDER/*.csv', "
            "in quotes"
        )
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"the folder {name} is not empty. Give another one: pipedist init NAME")
    slug = re.sub(r"\W+", "_", folder.resolve().name).strip("_").lower()
    slug = slug if slug.isidentifier() else f"pipeline_{slug}".rstrip("_")
    data = EXAMPLE if pattern is None else _examined(pattern, folder)
    files = project_files(slug, data) | {SCHEMA_FILE: json.dumps(json_schema(), indent=2) + "\n"}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            (folder / file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"can't write {error.filename}: {error.strerror}. Give another folder") from None
    spec = folder / f"{slug}.yaml"
    inside = "" if folder.resolve() == Path.cwd() else f"cd {shlex.quote(str(folder))} && "
    made = {
        spec: f"the pipeline: {plural(data.length, 'element')} of {data.path}",
        folder / f"{slug}_functions.py": "its functions",
        folder / f"test_{slug}.py": "their test",
        folder / "README.md": "how to run and change them",
        folder / SCHEMA_FILE: "completion of specs, for editors",
    }
    width = max(len(str(path)) for path in made)
    listed = "".join(f"{path!s:<{width}}  {what}\n" for path, what in made.items())
    write_out(
        f"{listed}"
        f"{''.join(_advice(slug, data))}"
        f"Next: {inside}pipedist run {spec.name}\n"
        f"It writes {folder / 'out' / slug / 'totals.json'}. The test: {inside}python -m pytest\n"
    )
    return terminal.OK


def _advice(slug: str, data: Data) -> Iterator[str]:
    for column, (kind, why) in data.misfits.items():
        add = f", and add it to NUMBERS in {slug}_functions.py" if data.numbers and kind[-1].isdigit() else ""
        yield (
            f"{printable(column)} is read as text: {why}. To read it as {kind}, see its comment in {slug}.yaml{add}\n"
        )


def _examined(pattern: str, folder: Path) -> Data:
    """Return the data that a pattern matches, which is relative to the current folder."""
    path = pattern
    if not (is_remote(pattern) or os.path.isabs(pattern)):
        path = os.path.relpath(pattern, folder)
    kind = _kind_of(pattern)
    try:
        return _DATA[kind](kind, pattern, path)
    except SourceError as error:
        expected = f". Expected {error.expected}" if error.expected else ""
        raise UsageError(f"--from {pattern}: {error}{expected}") from None


def _kind_of(pattern: str) -> str:
    """Return the source that reads files of these names."""
    name = pattern.lower().removesuffix(".gz").removesuffix(".zip")
    kind = next((kind for ending, kind in SOURCES_BY_ENDING.items() if name.endswith(ending)), "")
    if not kind and os.path.splitext(name)[1] in ("", ".json", ".xlsx"):
        endings = ", ".join(SOURCES_BY_ENDING)
        raise UsageError(
            f"--from {pattern}: the name does not show the kind of the files. Give names that end in {endings}, or "
            "images and others, whose bytes are read, such as 'images/*.png'"
        )
    return kind or "files"


def _table(kind: str, pattern: str, path: str) -> Data:
    delimiter = "\t" if _is_tsv(pattern) else ""
    dialect = {"delimiter": delimiter} if delimiter else {}
    if kind == "csv":
        found = _config_columns("csv", {"path": pattern, "columns": {}, **dialect})
    elif kind == "parquet":
        found = _parquet_columns(pattern)
    else:
        found = _json_columns(_head("jsonl", pattern)[1])
    columns = dict(list(found.items())[:COLUMNS_MAX])
    if kind == "parquet" and not columns:
        raise SourceError("no column holds numbers, text or truth values")
    config: dict[str, Any] = {"path": pattern, **dialect} | ({"columns": columns} if columns else {})
    with closing(open_source(kind, config, folder=Path())) as source:
        return Data(
            kind,
            path,
            source.length or 0,
            columns,
            len(found) - len(columns),
            delimiter,
            numbers=tuple(name for name, of in columns.items() if of == "bool" or of[-1].isdigit()),
            misfits=_misfits(pattern, dialect, columns) if kind == "csv" else {},
        )


def _misfits(
    pattern: str, dialect: Mapping[str, str], columns: Mapping[str, str]
) -> dict[str, tuple[str, str]]:
    """Return `Data.misfits`: the columns of text that would be numbers or times without a few of their cells."""
    texts = {name: kind for name, kind in columns.items() if kind == "str"}
    if not texts:
        return {}
    found = {}
    for name, cells in _head("csv", pattern, columns=texts, **dialect)[1].items():
        kind = nearly_fitting_type(cells.tolist())
        if kind:
            try:
                _head("csv", pattern, columns={name: kind}, **dialect)
            except SourceError as error:
                place, _, fact = str(error).partition(f": column {name!r}: ")
                found[name] = (kind, printable(f"{fact} at {place}"))
    return found


def _is_tsv(pattern: str) -> bool:
    return ".tsv" in os.path.basename(pattern)


def _config_columns(kind: str, config: Mapping[str, object]) -> dict[str, str]:
    with closing(open_source(kind, config, folder=Path())) as source:
        return dict(source.config["columns"])


def _json_columns(rows: Sequence[object]) -> dict[str, str]:
    """Return the keys of JSON objects whose values are numbers, text or truth values, and their types."""
    objects = [row for row in rows if isinstance(row, dict)]
    columns = {}
    for name in dict.fromkeys(key for row in objects for key in row):
        values = [row.get(name) for row in objects]
        is_text = any(isinstance(value, str) for value in values)
        for kind in ("str",) if is_text else ("bool", "int64", "float64"):
            try:
                column_of_values(values, kind)
            except CellError:
                continue
            if any(value is not None for value in values):
                columns[name] = kind
            break
    return columns


def _parquet_columns(pattern: str) -> dict[str, str]:
    """Return the columns of parquet files that hold numbers, text or truth values, and their types.

    An integer column with nulls in the first rows is float64; a boolean one is skipped.
    """
    columns = _config_columns("parquet", {"path": pattern})
    while True:
        try:
            head = _head("parquet", pattern, columns=columns)[1]
        except SourceError as error:
            if error.name not in columns:
                raise
            if columns[error.name] == OWN_TYPE:
                columns[error.name] = "float64"
            else:
                del columns[error.name]
        else:
            return {name: kind for name, array in head.items() if (kind := _kind_of_array(array))}


def _kind_of_array(array: npt.NDArray[Any]) -> str:
    """Return the type of a column of numbers, text or truth values, else ""."""
    if array.ndim != 1:
        return ""
    if array.dtype.kind == "U" or (array.dtype == object and all(isinstance(cell, str) for cell in array)):
        return "str"
    return array.dtype.name if array.dtype.kind in "biuf" else ""


def _array(kind: str, pattern: str, path: str) -> Data:
    length, head = _head(kind, pattern)
    return Data(kind, path, length, shape=head.shape[1:], is_numeric=head.dtype.kind in "biuf")


def _arrays(kind: str, pattern: str, path: str) -> Data:
    length, head = _head(kind, pattern)
    numbers = tuple(name for name, array in head.items() if array.dtype.kind in "biuf")
    return Data(kind, path, length, arrays=tuple(head), numbers=numbers)


def _whole(kind: str, pattern: str, path: str) -> Data:
    return Data(kind, path, _head(kind, pattern)[0])


def _head(kind: str, pattern: str, **settings: object) -> tuple[int, Any]:
    """Return the number of elements of a source, and the first ones as a shard."""
    with closing(open_source(kind, {"path": pattern, **settings}, folder=Path())) as source:
        length = source.length or 0
        return length, source.read(source.locate(range(min(length, HEAD_ROWS))))


_DATA: Mapping[str, Callable[[str, str, str], Data]] = {
    "csv": _table,
    "parquet": _table,
    "jsonl": _table,
    "npy": _array,
    "npz": _arrays,
    "text": _whole,
    "files": _whole,
}
