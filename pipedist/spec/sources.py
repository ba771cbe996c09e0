"""Datasets: where the elements come from, and how they are cut into steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pipedist.spec.keys import WITH, Arguments, ColumnType, Function, Paths, TypedColumn
from pipedist.spec.kinds import INT64, Anything, Checked, Flag, Integer, MappingOf, Nullable, Wrong
from pipedist.spec.section import Key, Section, key

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


def _step(value: object) -> object:
    if not INT64.fits(value) or value == 0:
        raise Wrong
    return value


class RangeSource(Section):
    """The integers from `start` to below `stop`. A shard of n elements is int64[n]."""

    start: int = key(INT64, Key("The first integer.", "an integer of at most 64 bits", "start: 0"), default=0)
    stop: int = key(
        INT64,
        Key("Where the integers end; it is not among them.", "an integer of at most 64 bits", "stop: 10"),
    )
    step: int = key(
        Checked(_step, INT64.schema()),
        Key("The distance of two integers; negative counts down.", "an integer other than 0", "step: 2"),
        default=1,
    )


class NpySource(Section):
    """`.npy` files, cut along the first axis. A shard of n elements is array[n, ...]."""

    path: tuple[str, ...] = key(Paths, _PATH)


class NpzSource(Section):
    """`.npz` files, arrays of one length. A shard of n elements is a dict of array[n, ...]."""

    path: tuple[str, ...] = key(Paths, _PATH)


class CsvSource(Section):
    """CSV files with a header row, whose fields are separated by commas (by nothing else) and quoted with
    `"`; `.gz` and one-member `.zip` are read. A missing value (empty, NA, NaN) is NaN in a float column,
    "" in a str column, and an error with file:row:column in others. The first row of each file is read
    before anything runs, unless a stage sets elements aside: `plan` finds a column of another type than
    declared. A shard of n elements is a dict of columns, array[n].
    """

    path: tuple[str, ...] = key(Paths, _PATH)
    columns: dict[str, str] = key(MappingOf(ColumnType, items_min=1), _COLUMNS)


class ParquetSource(Section):
    """Parquet files. A shard of n elements is a dict of columns, array[n]. A null is NaN in floats, "" in
    `str`, NaT in dates, and an error in others; a time with a zone is read in UTC.
    """

    path: tuple[str, ...] = key(Paths, _PATH)
    columns: dict[str, str] | None = key(
        Nullable(MappingOf(TypedColumn)),
        Key(
            "The columns to read, and their types; `own` is the type that a column has in the file, which "
            "dates have, too. Default: all columns, each as its own.",
            expected="a mapping of column names to types",
            example="columns: {carrier: str, dep_delay: float32, day: own}",
        ),
        default=None,
    )


class JsonlSource(Section):
    """Files of one JSON object a line. A shard of n elements is a list of n objects; with `columns`, a dict
    of columns, array[n]: the keys of the objects themselves, not of what is nested in them. A key that is
    absent or null is a missing value; a column whose key no object has is an error.
    """

    path: tuple[str, ...] = key(Paths, _PATH)
    columns: dict[str, str] | None = key(Nullable(MappingOf(ColumnType)), _COLUMNS, default=None)


class TextSource(Section):
    """Text files, one line an element. A shard of n elements is a list of n texts."""

    path: tuple[str, ...] = key(Paths, _PATH)


class FilesSource(Section):
    """Whole files, one file an element. A shard of n elements is `{path: list[str], bytes: list[bytes]}`."""

    path: tuple[str, ...] = key(Paths, _PATH)


class FunctionSource(Section):
    """A function's tree of arrays, cut along the first axis, or its iterable of elements, stacked."""

    call: str | Callable[..., Any] = key(
        Function,
        Key(
            "The function that makes the data; it is called once.",
            '"package.module:name", of Python identifiers',
            "call: digits:load",
        ),
    )
    with_: dict[str, Any] = key(Arguments, WITH, default={})


class ArraysSource(Section):
    """A tree of arrays in memory, cut along the first axis; only in a spec given as a dict."""

    arrays: Any = key(Anything(), None)


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

    batch: int = key(
        Integer(1, BATCH_ELEMENTS_MAX),
        Key(
            "The GLOBAL batch size, in elements: a step is this many elements, divided among the replicas.",
            "a positive whole number of elements",
            "batch: 4096",
        ),
    )
    drop_remainder: bool = key(
        Flag(),
        Key(
            "Whether a last step of an epoch with fewer than `batch` elements is left out.",
            "true or false",
            "drop_remainder: true",
        ),
        default=False,
    )
    epochs: int = key(
        Integer(1, EPOCHS_MAX),
        Key(
            "How often the batched dataset is read; a step never crosses an epoch.",
            "a positive whole number of epochs",
            "epochs: 3",
        ),
        default=1,
    )
    shuffle: bool = key(
        Flag(),
        Key(
            "Whether each epoch has the elements in an order of its own, from (seed, dataset, epoch). "
            "Refused for sources without random access.",
            "true or false",
            "shuffle: true",
        ),
        default=False,
    )


class DatasetSpec(DatasetKeys):
    """A dataset: exactly one source, and how it is cut into steps.

    `kind` is the source's key ("csv"); `source` holds what stands below it.
    """

    kind: str
    source: Source

    @property
    def config(self) -> dict[str, Any]:
        """The source's keys and values, as plain dicts, lists and scalars; keys without a value left out."""
        values = {name: getattr(self.source, field.attribute) for name, field in self.source.fields.items()}
        return {
            name: list(value) if name == "path" else value
            for name, value in values.items()
            if value is not None or name == "arrays"
        }
