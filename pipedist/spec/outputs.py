"""Outputs: the files of finished values, and the keys of those that have options.

| written | kind |
|---|---|
| `rows.csv` | that of the ending |
| `rows.parquet/` | a data set of parquet files, in a folder |
| `thumbs/{key}.png` | a file for each row, in a folder |
| `{parquet: {path: rows.parquet/, partition_by: carrier}}` | that of the key |
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Mapping
from typing import Annotated, Any, Final

from msgspec import Struct
from pydantic import Discriminator, Field, Tag

from pipedist.spec.fields import Arguments, Expected, ExpectedShape, Function, Section, filled_mapping

OUTPUT_ENDINGS: Final = (
    ".json",
    ".npy",
    ".npz",
    ".csv",
    ".parquet",
    ".jsonl",
    ".arrow",
    ".zarr",
    ".h5",
    ".sqlite",
    ".duckdb",
)
"""The endings of output files; each is a format."""

ROWS_PER_FILE_MAX = 2**40

_Table = Annotated[
    str | None,
    Field(min_length=1, max_length=255),
    Expected("the name of a table"),
]


def _path(description: str, example: str) -> Any:
    return Field(description=description, examples=[example])


class ParquetOutput(Section):
    """A data set of parquet files, in a folder."""

    path: Annotated[str, Expected("a relative path")] = _path(
        "The folder, below the output folder; its name ends in `.parquet`.", "flights.parquet/"
    )
    partition_by: Annotated[str, Expected("the name of a column")] | None = Field(
        default=None,
        description="The column by whose values the rows are divided among folders, `COLUMN=VALUE`, as Hive's. The "
        "files lack it.",
        examples=["carrier"],
    )
    rows_per_file: Annotated[
        Annotated[int, Field(ge=1, le=ROWS_PER_FILE_MAX)] | None, Expected("a positive whole number of rows")
    ] = Field(
        default=None,
        description="The largest number of rows of a file. Default: 1,048,576.",
        examples=[100_000],
    )


class SqliteOutput(Section):
    """A table of an SQLite database."""

    path: Annotated[str, Expected("a path")] = _path(
        "The database: a relative path is a file of the output folder, made anew by each run; an absolute path is a "
        "database that is kept, and may have other tables.",
        "${spec.dir}/results.sqlite",
    )
    table: _Table = Field(
        default=None,
        description="The table, which is replaced when the rows are complete. Default: the name of the stage.",
        examples=["flights"],
    )


class DuckdbOutput(SqliteOutput):
    """A table of a DuckDB database."""


class ClassOutput(Section):
    """A file or folder that a class writes: of your own, or of another package.

    It is made in the driver as `Class(path, **with)`. `append(columns)` gets the next rows, arrays [rows, ...] by
    name, and `close()` completes the file (`pipedist.SinkWriter`). A class that a package registers in the group
    `pipedist.sinks` of its entry points has a key of its own: `dicom: {path: scans, level: 3}`.
    """

    path: Annotated[str, Expected("a relative path")] = _path(
        "The file or folder, below the output folder.", "scans.dicom"
    )
    class_: Function = Field(alias="class", description="The class.", examples=["writers:Scans"])
    with_: Arguments = Field(
        default_factory=dict,
        alias="with",
        description="The keyword arguments of the class beside the path: any tree of values.",
        examples=[{"level": 3}],
    )


class SinkSection(Section):
    """An output with options: exactly one kind."""

    parquet: ParquetOutput | None = None
    sqlite: SqliteOutput | None = None
    duckdb: DuckdbOutput | None = None
    sink: ClassOutput | None = None


SINK_SECTIONS: Final[Mapping[str, type[Section]]] = {
    "parquet": ParquetOutput,
    "sqlite": SqliteOutput,
    "duckdb": DuckdbOutput,
    "sink": ClassOutput,
}


def is_sink(value: object) -> bool:
    """Return whether an output is a kind with options, rather than a mapping of parts."""
    return (
        isinstance(value, dict)
        and len(value) == 1
        and all(kind in SINK_SECTIONS and isinstance(keys, dict) for kind, keys in value.items())
    )


def _form(value: object) -> str:
    if isinstance(value, SinkSection) or is_sink(value):
        return "output:sink"
    return "output:parts" if isinstance(value, dict) else "output:path"


OUTPUT_EXPECTED: Final = "a relative path, a kind with options, or a mapping of paths in the value to these"

_Path = Annotated[Annotated[str, Expected("a relative path, or a kind with options")], Tag("output:path")]
_Sink = Annotated[SinkSection, Tag("output:sink")]
_Parts = dict[str, Annotated[_Path | _Sink, Discriminator(_form)]]


def _path_or_mapping(value: object) -> object:
    """Return a text, or a mapping that is not empty; raise ValueError for anything else."""
    return value if isinstance(value, str | SinkSection) else filled_mapping(value)


AnyOutput = Annotated[
    Annotated[_Path | _Sink | Annotated[_Parts, Tag("output:parts")], Discriminator(_form)],
    ExpectedShape(OUTPUT_EXPECTED, _path_or_mapping),
]
"""An output, or the outputs of parts of a value."""


class OutputFile(Struct, frozen=True):
    """A file or folder to which a value is written.

    Args:
        kind: the format: that of the ending, "parquet_parts", "files", or "sink" for a class.
        path: normalised, relative to the output folder.
        options: for its sink.
    """

    kind: str
    path: str
    options: Mapping[str, Any]

    @property
    def options_text(self) -> str:
        """Kind and options as JSON, "" if the path alone says them."""
        if not self.options and self.kind == posixpath.splitext(self.path)[1][1:]:
            return ""
        return json.dumps([self.kind, dict(self.options)], sort_keys=True, default=repr)


def output_of(name: str, written: str | SinkSection) -> OutputFile:
    """Return the file of a valid output; `name` is its stage."""
    if isinstance(written, SinkSection):
        kind = next(iter(written.model_fields_set))
        section = getattr(written, kind)
        keys = {key.removesuffix("_"): getattr(section, key) for key in section.model_fields_set}
        path = keys.pop("path")
        options = {key: value for key, value in keys.items() if value is not None}
        if kind == "parquet":
            return OutputFile("parquet_parts", posixpath.normpath(path), options)
        if posixpath.isabs(path):
            return OutputFile(kind, f"{name.replace('/', '.')}.json", {"database": path, **options})
        return OutputFile(kind, posixpath.normpath(path), options)
    if "{" in written:
        folder, names = split_template(written)
        return OutputFile("files", folder or name.replace("/", "."), {"names": names})
    path = posixpath.normpath(written)
    kind = posixpath.splitext(path)[1][1:]
    return OutputFile("parquet_parts" if written.endswith("/") else kind, path, {})


def split_template(written: str) -> tuple[str, str]:
    """Return the folder of `thumbs/{key}.png`, and the template of the names below it; the folder may be ""."""
    parts = written.split("/")
    first = next(place for place, part in enumerate(parts) if "{" in part)
    folder = posixpath.normpath("/".join(parts[:first])) if first else ""
    return folder, "/".join(parts[first:])
