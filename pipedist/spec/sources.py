"""Datasets: where the elements come from, and how they are cut into steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from pipedist.spec.keys import ColumnType, Function, Key, Paths, Section, WithTree, wrong

BATCH_ELEMENTS_MAX = 2**40
EPOCHS_MAX = 2**31 - 1

_PATH = Key(
    "The files that hold the data: a glob (`**` goes into subfolders) or a list of them, relative to the "
    "spec's folder. Matches are expanded once and sorted; several files are one dataset in that order; no "
    "match is an error.",
    expected="a glob or a list of globs",
    example='path: "data/*.csv"',
)
_COLUMNS = Key(
    "The columns to read, and their types. In text formats a missing value (empty, `NA`, `NaN`) is NaN in "
    "floats, an empty text in `str`, and an error with file, row and column in other types.",
    expected="a mapping of column names to types",
    example="columns: {carrier: str, dep_delay: float32}",
)


def _not_zero(value: object) -> object:
    if type(value) is int and value == 0:
        raise wrong("")
    return value


class RangeSource(Section):
    """The integers from `start` to below `stop`. A shard of n elements is int64[n]."""

    start: Annotated[
        int,
        Key("The first integer.", "an integer of at most 64 bits", "start: 0"),
        Field(ge=-(2**63), lt=2**63),
    ] = 0
    stop: Annotated[
        int,
        Key("Where the integers end; it is not among them.", "an integer of at most 64 bits", "stop: 10"),
        Field(ge=-(2**63), lt=2**63),
    ]
    step: Annotated[
        int,
        Key("The distance of two integers; negative counts down.", "an integer other than 0", "step: 2"),
        BeforeValidator(_not_zero),
        Field(ge=-(2**63), lt=2**63),
    ] = 1


class NpySource(Section):
    """`.npy` files, cut along the first axis. A shard of n elements is array[n, ...]."""

    path: Annotated[Paths, _PATH]


class NpzSource(Section):
    """`.npz` files, arrays of one length. A shard of n elements is a dict of array[n, ...]."""

    path: Annotated[Paths, _PATH]


class CsvSource(Section):
    """CSV files with a header row, whose fields are separated by commas (by nothing else) and quoted with
    `"`; `.gz` and one-member `.zip` are read. A missing value (empty, NA, NaN) is NaN in a float column,
    "" in a str column, and an error with file:row:column in others. A shard of n elements is a dict of
    columns, array[n].
    """

    path: Annotated[Paths, _PATH]
    columns: Annotated[dict[str, ColumnType], _COLUMNS, Field(min_length=1)]


class ParquetSource(Section):
    """Parquet files. A shard of n elements is a dict of columns, array[n]."""

    path: Annotated[Paths, _PATH]
    columns: Annotated[dict[str, ColumnType] | None, _COLUMNS] = None


class JsonlSource(Section):
    """Files of one JSON object a line. A shard of n elements is a list of n objects; with `columns`, a dict
    of columns, array[n].
    """

    path: Annotated[Paths, _PATH]
    columns: Annotated[dict[str, ColumnType] | None, _COLUMNS] = None


class TextSource(Section):
    """Text files, one line an element. A shard of n elements is a list of n texts."""

    path: Annotated[Paths, _PATH]


class FilesSource(Section):
    """Whole files, one file an element. A shard of n elements is `{path: list[str], bytes: list[bytes]}`."""

    path: Annotated[Paths, _PATH]


class FunctionSource(Section):
    """A function's tree of arrays, cut along the first axis, or its iterable of elements, stacked."""

    call: Annotated[
        Function,
        Key(
            "The function that makes the data; it is called once.",
            '"package.module:name", of Python identifiers',
            "call: digits:load",
        ),
    ]
    with_: WithTree = Field({}, alias="with")


class ArraysSource(Section):
    """A tree of arrays in memory, cut along the first axis; only in a spec given as a dict."""

    arrays: Any


Source = (
    RangeSource
    | NpySource
    | NpzSource
    | CsvSource
    | ParquetSource
    | JsonlSource
    | TextSource
    | FilesSource
    | FunctionSource
    | ArraysSource
)
SOURCES: Mapping[str, type[Section]] = {
    "range": RangeSource,
    "npy": NpySource,
    "npz": NpzSource,
    "csv": CsvSource,
    "parquet": ParquetSource,
    "jsonl": JsonlSource,
    "text": TextSource,
    "files": FilesSource,
    "function": FunctionSource,
    "arrays": ArraysSource,
}
SOURCE_EXAMPLES = {
    "range": "range: 10",
    "npy": "npy: {path: images.npy}",
    "npz": "npz: {path: digits.npz}",
    "csv": 'csv: {path: "flights*.csv", columns: {carrier: str, dep_delay: float32}}',
    "parquet": "parquet: {path: trips.parquet}",
    "jsonl": "jsonl: {path: events.jsonl}",
    "text": 'text: {path: "logs/**/*.log"}',
    "files": 'files: {path: "pages/*.html"}',
    "function": "function: {call: digits:load, with: {seed: 1}}",
    "arrays": "",
}


class DatasetKeys(Section):
    """The keys of a dataset beside its source."""

    batch: Annotated[
        int,
        Key(
            "The GLOBAL batch size, in elements: a step is this many elements, divided among the replicas.",
            "a positive number of elements",
            "batch: 4096",
        ),
        Field(ge=1, le=BATCH_ELEMENTS_MAX),
    ]
    drop_remainder: Annotated[
        bool,
        Key(
            "Whether a last step of an epoch with fewer than `batch` elements is left out.",
            "true or false",
            "drop_remainder: true",
        ),
    ] = False
    epochs: Annotated[
        int,
        Key(
            "How often the batched dataset is read; a step never crosses an epoch.",
            "a positive number of epochs",
            "epochs: 3",
        ),
        Field(ge=1, le=EPOCHS_MAX),
    ] = 1
    shuffle: Annotated[
        bool,
        Key(
            "Whether each epoch has the elements in an order of its own, from (seed, dataset, epoch). "
            "Refused for sources without random access.",
            "true or false",
            "shuffle: true",
        ),
    ] = False


class DatasetSpec(DatasetKeys):
    """A dataset: exactly one source, and how it is cut into steps.

    `kind` is the source's key ("csv"); `source` holds what stands below it.
    """

    kind: str
    source: Source

    @property
    def config(self) -> dict[str, Any]:
        """The source's keys and values, as plain dicts, lists and scalars; keys without a value left out."""
        values = {
            field.alias or name: getattr(self.source, name)
            for name, field in type(self.source).model_fields.items()
        }
        return {
            key: list(value) if key == "path" else value
            for key, value in values.items()
            if value is not None or key == "arrays"
        }
