"""The data of a `map` as the source of a dataset, with a default batch size that depends on the data alone.

A list of numbers, texts or bytes is an array; other Python objects are pickled one by one, for functions that get them
back (`pipedist.worker.mapped`). Frames are columns, and files are what the source of their ending reads.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from pipedist.core import ragged
from pipedist.core.functions import pickled_value
from pipedist.errors import UsageError

if TYPE_CHECKING:
    from pipedist.core.types import Form

CALLS: Final = 128  # calls of data of known length: some for each worker of a large cluster
BATCH: Final = 64  # elements of a batch of an iterator
ROWS: Final = 1024  # elements of a batch of files

ENDINGS: Final = {
    ".csv": "csv",
    ".parquet": "parquet",
    ".jsonl": "jsonl",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".npy": "npy",
    ".npz": "npz",
    ".txt": "text",
    ".text": "text",
    ".log": "text",
}
"""The sources of files, by ending."""


@dataclass(frozen=True, slots=True)
class MapData:
    """Data as the source of a dataset.

    Args:
        batch: the default batch size.
        form: the library of a frame, as `as` names it.
        is_list: whether elements and results are Python objects.
        is_pickled: whether the elements of a list are pickled.
    """

    source: dict[str, Any]
    batch: int
    form: Form | None = None
    is_list: bool = False
    is_pickled: bool = False
    is_iterator: bool = False


def data_of(data: Any, columns: Mapping[str, str] | str | None) -> MapData:
    """Return data of a program as the source of a dataset; `columns` are those of a path."""
    if isinstance(data, str | os.PathLike):
        return _files(os.fspath(data), columns)
    if columns is not None:
        raise TypeError("`columns` are for a path of .csv, .parquet or .jsonl files")
    if isinstance(data, Mapping):
        tree = {name: np.asarray(each) for name, each in data.items()}
        return MapData({"arrays": tree}, _batch(max((len(x) for x in tree.values() if x.ndim), default=0)))
    if (library := _library(data)) is not None:
        from pipedist.datasets.frames import columns_of

        found = columns_of(data)
        if isinstance(found, dict):
            rows = len(next(iter(found.values()), ()))
            return MapData({"arrays": found}, _batch(rows), form=library)
        return MapData({"arrays": found}, _batch(len(found)))
    if hasattr(data, "__array__"):
        array = np.asarray(data)
        return MapData({"arrays": array}, _batch(len(array) if array.ndim else 0))
    if isinstance(data, set | frozenset):
        raise TypeError("a set has no order: pass sorted(data)")
    if not isinstance(data, Iterable):
        kind = "an async iterable" if hasattr(data, "__aiter__") else type(data).__qualname__
        raise TypeError(f"map() needs an array, a frame, an iterable or a path, got {kind}")
    if not hasattr(data, "__len__"):
        return MapData(
            {"function": {"call": _Pickled(data)}}, BATCH, is_list=True, is_pickled=True, is_iterator=True
        )
    return _list(list(data))


def _batch(count: int) -> int:
    return max(1, -(-count // CALLS))


def _list(items: list[Any]) -> MapData:
    kinds = {type(item) for item in items}
    array: Any = None
    if kinds == {str}:
        array = ragged.of_texts(items)
    elif kinds == {bytes}:
        array = ragged.objects(items)
    elif kinds in ({bool}, {float}, {int}):
        with suppress(OverflowError):
            array = np.array(items, {bool: np.bool_, float: np.float64, int: np.int64}[kinds.pop()])
    is_pickled = array is None
    if array is None:
        array = ragged.objects([_pickled(item, at) for at, item in enumerate(items)])
    return MapData({"arrays": array}, _batch(len(items)), is_list=True, is_pickled=is_pickled)


def _pickled(item: Any, at: int) -> bytes:
    try:
        return pickled_value(item)
    except Exception as error:  # of the item's own methods
        kind = type(item).__qualname__
        raise TypeError(
            f"element {at}, a {kind}, can't be sent to workers: {type(error).__name__}: {error}. Pass what it is made "
            "of, such as a path, and make it in the function"
        ) from error


class _Pickled:
    """The pickled elements of an iterable, as the function of a dataset."""

    def __init__(self, data: Iterable[Any]) -> None:
        self._data = data
        self.__qualname__ = type(data).__qualname__

    def __call__(self) -> Iterable[bytes]:
        return (_pickled(item, at) for at, item in enumerate(self._data))


def _library(data: Any) -> Form | None:
    """Return the library of a frame, as `as` names it; None for other data."""
    names = {base.__module__.partition(".")[0] for base in type(data).__mro__}
    if "pandas" in names and hasattr(data, "columns"):
        return "pandas"
    if "polars" in names:
        return "polars"
    return "arrow" if hasattr(data, "__arrow_c_stream__") and not hasattr(data, "__array__") else None


def _files(path: str, columns: Mapping[str, str] | str | None) -> MapData:
    name = Path(path).name
    for packed in (".gz", ".zip"):
        name = name.removesuffix(packed)
    kind = ENDINGS.get(Path(name).suffix)
    if kind is None:
        raise UsageError(
            f"{path!r} is read by its ending, which is none of {', '.join(ENDINGS)}. Map a list of paths, "
            "with a function that opens them; or pass a list of texts to map these"
        )
    source: dict[str, Any] = {"path": path}
    if columns is None and kind == "csv":
        columns = "infer"
    if columns is not None:
        source["columns"] = columns if isinstance(columns, str) else dict(columns)
    return MapData({kind: source}, ROWS)
