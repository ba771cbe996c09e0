"""Datasets: where the elements come from, and how they are divided into steps."""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from pipedist.spec.fields import (
    BATCH_ELEMENTS_MAX,
    Arguments,
    ColumnType,
    Expected,
    ExpectedShape,
    Function,
    Int64,
    Paths,
    Section,
    filled_mapping,
    mapping,
    satisfies,
    summary,
)

EPOCHS_MAX = 2**31 - 1
UNPACKED_BYTES_MAX = 2**40

_COLUMNS_EXPECTED = "a mapping of column names to types"


def _columns(**options: Any) -> Any:
    return Field(
        **options,
        description="The columns to read, and their types. In text formats a missing value (empty, `NA`, "
        "`NaN`) is NaN in floats, an empty text in `str`, and an error with file, row and column in other types.",
        examples=[{"carrier": "str", "dep_delay": "float32"}],
    )


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
    """CSV files with a header row; fields are separated by commas only, and quoted with `"`.

    `.gz` and one-member `.zip` files are read too. A missing value (empty, NA, NaN) is NaN in a float column,
    "" in a str column, and an error with file:row:column in other columns. The first row of each file is read
    before anything runs, unless a stage quarantines elements: `plan` finds a column whose type is not the
    declared one. A shard of n elements is a dict of columns, array[n].
    """

    columns: Annotated[dict[str, ColumnType], ExpectedShape(_COLUMNS_EXPECTED, filled_mapping)] = _columns(
        min_length=1
    )
    unpacked_bytes_max: _UnpackedBytes | None = _unpacked()


class ParquetSource(FileSource):
    """Parquet files. A shard of n elements is a dict of columns, array[n].

    Lists of a fixed size are array[n, size]; binary, other lists, and structs are object arrays (see Text, bytes,
    lists and records). A null is NaN in floats, "" in `str`, NaT in dates, an empty list, None for a struct, and an
    error in other types; a time with a zone is read in UTC.
    """

    columns: (
        Annotated[dict[str, Literal[ColumnType, "own"]], ExpectedShape(_COLUMNS_EXPECTED, mapping)] | None
    ) = Field(
        default=None,
        description="The columns to read, and their types; `own` is the column's type in the file, which may "
        "also be a date, binary, a list or a struct. Default: all columns, each with its own type.",
        examples=[{"carrier": "str", "dep_delay": "float32", "day": "own"}],
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
    """Whole files; each file is an element. A shard of n elements is `{path: list[str], bytes: list[bytes]}`."""


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


SOURCES: Final[Mapping[str, type[Section]]] = {
    "range": RangeSource,
    "npy": NpySource,
    "npz": NpzSource,
    "csv": CsvSource,
    "parquet": ParquetSource,
    "jsonl": JsonlSource,
    "text": TextSource,
    "files": FilesSource,
    "function": FunctionSource,
    "source": ClassSource,
    "arrays": ArraysSource,
}


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
    jsonl: JsonlSource = _source(JsonlSource, {"path": "events.jsonl"})
    text: TextSource = _source(TextSource, {"path": "logs/**/*.log"})
    files: FilesSource = _source(FilesSource, {"path": "pages/*.html"})
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
            name: list(value) if name == "path" else value
            for name, value in values.items()
            if value is not None or name == "arrays"
        }


DATASET_KEYS: Final = tuple(name for name in DatasetSpec.model_fields if name not in SOURCES)
"""The keys of a dataset that are not sources."""
