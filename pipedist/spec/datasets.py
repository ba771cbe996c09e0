"""Datasets: where the elements come from, and how they are divided into steps."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import Field, WithJsonSchema

from pipedist.spec.fields import (
    BATCH_ELEMENTS_MAX,
    Arguments,
    ColumnType,
    Expected,
    ExpectedShape,
    Function,
    Int64,
    Paths,
    PathText,
    Section,
    filled_mapping,
    mapping,
    one_or_more,
    satisfies,
    summary,
)

EPOCHS_MAX = 2**31 - 1
UNPACKED_BYTES_MAX = 2**40

_COLUMNS_EXPECTED = "a mapping of column names to types"


def _columns(more: str = "", **options: Any) -> Any:
    return Field(
        **options,
        description="The columns to read, and their types. In text formats a missing value (empty, `NA`, "
        "`NaN`) is NaN in floats, an empty text in `str`, NaT in dates, and an error with file, row and column in "
        f"other types.{more}",
        examples=[{"carrier": "str", "dep_delay": "float32"}],
    )


def _is_delimiter(text: str) -> bool:
    return len(text) == 1 and text.isascii() and text not in "\r\n\0"


def _unpacked() -> Any:
    return Field(
        default=None,
        description="How many bytes one compressed file may have when it is unpacked; more is an error of `plan`. "
        "Default: 100 times its compressed size, but at least 1 GiB.",
        examples=[20_000_000_000],
    )


_UnpackedBytes = Annotated[
    int, Field(ge=1, le=UNPACKED_BYTES_MAX), Expected("a positive whole number of bytes")
]


_Text = Annotated[
    str, satisfies(bool), WithJsonSchema({"type": "string", "minLength": 1}), Expected("a name")
]
_Names = Annotated[
    tuple[_Text, ...],
    ExpectedShape(
        "a name or a list of names", one_or_more, _Text | Annotated[list[_Text], Field(min_length=1)]
    ),
]

_OwnColumns = Annotated[dict[str, Literal[ColumnType, "own"]], ExpectedShape(_COLUMNS_EXPECTED, mapping)]


def _own_columns() -> Any:
    return Field(
        default=None,
        description="The columns to read, and their types; `own` is the column's type in the file, which may "
        "also be a date, binary, a list or a struct. Only these are read from the file. Default: all columns, each "
        "with its own type.",
        examples=[{"carrier": "str", "dep_delay": "float32", "day": "own"}],
    )


class RangeSource(Section):
    """The integers from `start` up to, but not including, `stop`. A shard of n elements is int64[n]."""

    start: Int64 = Field(default=0, description="The first integer.", examples=[0])
    stop: Int64 = Field(description="The end of the integers, itself excluded.", examples=[10])
    step: Annotated[Int64, satisfies(lambda step: step != 0), Expected("an integer other than 0")] = Field(
        default=1, description="The distance between two integers; a negative one counts down.", examples=[2]
    )


class FileSource(Section):
    """Files that hold the data."""

    path: Paths = Field(
        description="The files that hold the data: a glob (`**` includes subfolders) or a list of globs, "
        "relative to the spec's folder. Matches are expanded once and sorted; several files are one dataset in "
        "that order; no match is an error.",
        examples=["data/*.csv"],
    )


class NpySource(FileSource):
    """`.npy` files, divided along the first axis. A shard of n elements is array[n, ...]."""


class NpzSource(FileSource):
    """`.npz` files of arrays of one length. A shard of n elements is a dict of array[n, ...]."""

    unpacked_bytes_max: _UnpackedBytes | None = _unpacked()


class CsvSource(FileSource):
    """CSV files with a header row.

    `.gz` and one-member `.zip` files are read too. A missing value (empty, NA, NaN) is NaN in a float column,
    "" in a str column, NaT in dates and timestamps, and an error with file:row:column in other columns. The first
    row of each file is read before anything runs, unless a stage quarantines elements: `plan` finds a column whose
    type is not the declared one. A `date` is written as 2024-03-01 and read as datetime64[D]; a `timestamp`, as
    2024-03-01T12:30:00.5 or with a blank for `T`, is datetime64[us], in UTC if it ends with `Z` or an offset. A shard
    of n elements is a dict of columns, array[n].
    """

    columns: Annotated[
        dict[str, ColumnType],
        ExpectedShape(
            f"{_COLUMNS_EXPECTED}, or infer",
            lambda value: {} if value == "infer" else filled_mapping(value),
            Literal["infer"] | Annotated[dict[str, ColumnType], Field(min_length=1)],
        ),
    ] = _columns(
        more=" `infer`: all columns, with types that fit the first 1,000 rows of the first file; `plan` prints them, "
        "and a later cell that does not fit is an error. Numbers with leading zeros are text."
    )
    delimiter: Annotated[
        str, satisfies(_is_delimiter), Expected('one character of ASCII, as in ";" or "\\t"')
    ] = Field(default=",", description="The character between two fields.", examples=[";"])
    quote: Annotated[
        str,
        satisfies(lambda text: text == "none" or _is_delimiter(text)),
        Expected("one character of ASCII, or none"),
    ] = Field(
        default='"',
        description="The character around fields that contain delimiters or line feeds; doubled in a field, it stands "
        "for itself. `none`: quotes are text.",
        examples=["none"],
    )
    unpacked_bytes_max: _UnpackedBytes | None = _unpacked()


class ParquetSource(FileSource):
    """Parquet files. A shard of n elements is a dict of columns, array[n].

    Lists of a fixed size are array[n, size]; binary, other lists, and structs are object arrays (see Text, bytes,
    lists and records). A null is NaN in floats, "" in `str`, NaT in dates, an empty list, None for a struct, and an
    error in other types; a time with a zone is read in UTC. A folder `key=value` in the path of a file is a column of
    its rows (hive partitions): int64 if all values are integers, else text, or the type in `columns`.
    """

    columns: _OwnColumns | None = _own_columns()


class ArrowSource(FileSource):
    """Arrow IPC files (Feather version 2), with or without compression. A shard of n elements is a dict of columns.

    Columns, their types, nulls and folders `key=value` are as in `parquet`. Needs pipedist[arrow].
    """

    columns: _OwnColumns | None = _own_columns()


class Hdf5Source(FileSource):
    """Datasets in HDF5 files, divided along the first axis. A shard of n elements is array[n, ...].

    With several datasets of one length it is a dict of them, by their paths. Needs pipedist[hdf5].
    """

    dataset: _Names = Field(
        description="The path of the dataset in each file, or a list of paths.", examples=["images"]
    )


class ZarrSource(Section):
    """A zarr array, divided along the first axis. A shard of n elements is array[n, ...].

    For a group it is a dict of its arrays, which must have one length, or of those in `arrays`. A chunk that the store
    does not have is its fill value, as zarr defines. Needs pipedist[zarr].
    """

    path: PathText = Field(
        description="The folder of the array or group, relative to the spec's folder, or a URL.",
        examples=["climate.zarr"],
    )
    arrays: _Names | None = Field(
        default=None,
        description="The arrays of a group to read. Default: all of them.",
        examples=[["temperature", "time"]],
    )


class ImagesSource(FileSource):
    """Image files, decoded with Pillow; each file is an element. Needs pipedist[images].

    A shard of n elements is `{image, path, label}`: uint8[n, height, width, channels] with `size`, and an object array
    of uint8[height, width, channels] without it, because images may differ; `L` has no axis of channels. `path` is
    text. `label`, if it is asked for, is text too.
    """

    size: (
        Annotated[
            list[Annotated[int, Field(ge=1, le=65_536)]],
            Field(min_length=2, max_length=2),
            Expected("a list of height and width, in pixels"),
        ]
        | None
    ) = Field(
        default=None,
        description="The height and width to which every image is resized (bilinear), in pixels. Default: its own.",
        examples=[[224, 224]],
    )
    mode: Literal["L", "RGB", "RGBA"] = Field(
        default="RGB", description="The color mode to which every image is converted.", examples=["L"]
    )
    label: Literal["folder"] | None = Field(
        default=None,
        description="`folder`: the name of the folder of each file is its label.",
        examples=["folder"],
    )


class TarSource(FileSource):
    """Tar archives in WebDataset's naming: files with one name up to the first dot are one element.

    A shard of n elements is a dict: `key`, the common name, and a column for each ending. By default these are object
    arrays of bytes. A part that an element lacks is a missing value. Archives are read by offset, so they can be
    shuffled; `.tar.gz` and `.tgz` are unpacked first.
    """

    columns: (
        Annotated[
            dict[str, Literal[ColumnType, "bytes", "json"]], ExpectedShape(_COLUMNS_EXPECTED, filled_mapping)
        ]
        | None
    ) = Field(
        default=None,
        description="The parts to read, by ending, and their types. Default: all parts, as `bytes`.",
        examples=[{"jpg": "bytes", "cls": "int64", "json": "json"}],
    )
    unpacked_bytes_max: _UnpackedBytes | None = _unpacked()


def _is_ordered(query: str) -> bool:
    """Return whether a query has an ORDER BY of its own, not only one inside brackets, quotes or comments."""
    text = re.sub(r"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"|--[^\n]*|/\*.*?\*/", " ", query, flags=re.DOTALL)
    while (inner := re.sub(r"\([^()]*\)", " ", text)) != text:
        text = inner
    return re.search(r"\border\s+by\b", text, re.IGNORECASE) is not None


class SqlSource(Section):
    """Rows of a query to SQLite, or to DuckDB with pipedist[duckdb]. A shard of n elements is a dict of columns.

    Rows are read by ranges, with LIMIT and OFFSET, in every worker; the database must not change. A column of SQLite is
    int64, float64, text or bytes, as its values in all rows are; NULL is NaN, "" or empty bytes, and makes integers
    float64. DuckDB's columns are as in `parquet`.
    """

    url: Annotated[
        str,
        satisfies(lambda url: bool(re.fullmatch(r"(sqlite|duckdb):///[^\0]+", url))),
        WithJsonSchema({"type": "string", "minLength": 1}),
        Expected("sqlite:///PATH or duckdb:///PATH"),
    ] = Field(
        description="The database file; a path after three slashes is relative to the spec's folder.",
        examples=["sqlite:///flights.db"],
    )
    query: Annotated[
        str, satisfies(_is_ordered), Expected("a query with an ORDER BY, which numbers its rows")
    ] = Field(
        description="The query. Its ORDER BY must leave no ties, so that every worker sees the same order.",
        examples=["SELECT carrier, dep_delay FROM flights ORDER BY id"],
    )


class HuggingfaceSource(Section):
    """A dataset of Hugging Face. A shard of n elements is a dict of columns, as in `parquet`.

    An image or audio file is a dict of its `bytes` and `path`. Needs pipedist[huggingface].
    """

    path: PathText = Field(
        description="A folder that `save_to_disk` wrote, relative to the spec's folder, or the name of a dataset of "
        "the hub, which is downloaded to its cache on every host.",
        examples=["reviews"],
    )
    name: Annotated[str, Expected("a text")] | None = Field(
        default=None, description="The configuration of a dataset of the hub.", examples=["default"]
    )
    split: Annotated[str, Expected("the name of a split")] | None = Field(
        default=None,
        description="The split to read; required if there are several.",
        examples=["train"],
    )
    columns: _Names | None = Field(
        default=None, description="The columns to read. Default: all of them.", examples=[["text", "label"]]
    )


class JsonlSource(FileSource):
    """Files with one JSON object per line. A shard of n elements is a list of n objects.

    With `columns`, it is a dict of columns, array[n], of the keys of the objects themselves, not of nested
    objects. A key that is absent or null is a missing value; a column whose key no object has is an error.
    """

    columns: Annotated[dict[str, ColumnType], ExpectedShape(_COLUMNS_EXPECTED, mapping)] | None = _columns(
        default=None
    )
    unpacked_bytes_max: _UnpackedBytes | None = _unpacked()


class TextSource(FileSource):
    """Text files; each line is an element. A shard of n elements is a list of n texts."""

    unpacked_bytes_max: _UnpackedBytes | None = _unpacked()


class FilesSource(FileSource):
    """Whole files; each file is an element. A shard of n elements is `{path, bytes}`: texts, and an object
    array of bytes."""


class FunctionSource(Section):
    """A function that returns a tree of arrays, divided along the first axis, or an iterable of elements."""

    call: Function = Field(
        description="The function that makes the data; it is called once.", examples=["digits:load"]
    )
    with_: Arguments = Field(
        default_factory=dict,
        alias="with",
        description="The keyword arguments of the function: any tree of values.",
        examples=[{"seed": 1}],
    )


class ClassSource(Section):
    """A class that reads elements by their numbers, in each worker: of your own, or of another package.

    `__len__()` returns the number of elements, and `read(ids)` a tree of arrays [n, ...] of those with the numbers
    `ids`, int64[n]. Optional: `element_spec`, a tree of `pipedist.ArraySpec` of one element; `fingerprint()`, a text
    that changes with the data; `close()`. A class that a package registers in the group `pipedist.sources` of its entry
    points has a key of its own, whose keys are the arguments: `dicom: {path: scans}`.
    """

    class_: Function = Field(
        alias="class",
        description="The class; an object of it is made in each process that reads.",
        examples=["readers:Scans"],
    )
    with_: Arguments = Field(
        default_factory=dict,
        alias="with",
        description="The keyword arguments of the class: any tree of values.",
        examples=[{"folder": "${spec.dir}/scans"}],
    )


class ArraysSource(Section):
    """A tree of arrays in memory, divided along the first axis; only in a spec given as a dict."""

    arrays: Any


def _source(model: type[Section], *examples: object) -> Any:
    """Return a source key. Its default stands for an absent key; null is not a source."""
    return Field(default=None, description=summary(model), examples=list(examples))


class DatasetSpec(Section):
    """A dataset: exactly one source, and how it is divided into steps."""

    range: Annotated[
        RangeSource,
        ExpectedShape(
            "an integer, or a mapping with `stop` and optionally `start` and `step`",
            lambda value: {"stop": value} if type(value) is int else mapping(value),
            RangeSource | int,
        ),
    ] = _source(RangeSource, 10)
    npy: NpySource = _source(NpySource, {"path": "images.npy"})
    npz: NpzSource = _source(NpzSource, {"path": "digits.npz"})
    csv: CsvSource = _source(
        CsvSource, {"path": "flights*.csv", "columns": {"carrier": "str", "dep_delay": "float32"}}
    )
    parquet: ParquetSource = _source(ParquetSource, {"path": "trips.parquet"})
    arrow: ArrowSource = _source(ArrowSource, {"path": "trips/*.arrow"})
    jsonl: JsonlSource = _source(JsonlSource, {"path": "events.jsonl"})
    text: TextSource = _source(TextSource, {"path": "logs/**/*.log"})
    files: FilesSource = _source(FilesSource, {"path": "pages/*.html"})
    images: ImagesSource = _source(
        ImagesSource, {"path": "photos/*/*.jpg", "size": [224, 224], "label": "folder"}
    )
    tar: TarSource = _source(TarSource, {"path": "shards/*.tar", "columns": {"jpg": "bytes", "cls": "int64"}})
    hdf5: Hdf5Source = _source(Hdf5Source, {"path": "runs/*.h5", "dataset": "events"})
    zarr: ZarrSource = _source(ZarrSource, {"path": "climate.zarr"})
    sql: SqlSource = _source(
        SqlSource, {"url": "sqlite:///flights.db", "query": "SELECT * FROM flights ORDER BY id"}
    )
    huggingface: HuggingfaceSource = _source(HuggingfaceSource, {"path": "reviews", "split": "train"})
    function: FunctionSource = _source(FunctionSource, {"call": "digits:load", "with": {"seed": 1}})
    source: ClassSource = _source(ClassSource, {"class": "readers:Scans", "with": {"folder": "scans"}})
    arrays: Annotated[ArraysSource, ExpectedShape("a tree of arrays", lambda value: {"arrays": value})] = (
        _source(ArraysSource)
    )
    batch: Annotated[
        int, Field(ge=1, le=BATCH_ELEMENTS_MAX), Expected("a positive whole number of elements")
    ] = Field(
        description="The GLOBAL batch size, in elements: a step has this many elements, divided among the "
        "replicas.",
        examples=[4096],
    )
    drop_remainder: bool = Field(
        default=False,
        description="Whether the last step of an epoch is skipped if it has fewer than `batch` elements.",
        examples=[True],
    )
    epochs: Annotated[int, Field(ge=1, le=EPOCHS_MAX), Expected("a positive whole number of epochs")] = Field(
        default=1,
        description="How often the batched dataset is read; a step never crosses an epoch.",
        examples=[3],
    )
    shuffle: bool = Field(
        default=False,
        description="Whether each epoch has its own order of the elements, derived from (seed, dataset, epoch). "
        "An error for sources without random access.",
        examples=[True],
    )

    @property
    def kind(self) -> str:
        """The key of the source, such as "csv"."""
        return next(name for name in SOURCES if name in self.model_fields_set)

    @property
    def config(self) -> dict[str, Any]:
        """The source's keys and values, as plain dicts, lists and scalars; keys without a value are absent."""
        section: Section = getattr(self, self.kind)
        fields = type(section).model_fields
        values = {field.alias or name: getattr(section, name) for name, field in fields.items()}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
            if value is not None or self.kind == "arrays"
        }


SOURCES: Final[Mapping[str, type[Section]]] = {
    name: kind
    for name, field in DatasetSpec.model_fields.items()
    if isinstance(kind := field.annotation, type) and issubclass(kind, Section)
}
DATASET_KEYS: Final = tuple(name for name in DatasetSpec.model_fields if name not in SOURCES)
"""The keys of a dataset that are not sources."""
