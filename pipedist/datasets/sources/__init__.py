"""The sources of datasets.

`open_source`, in the driver, finds and counts the elements; `open_reader`, in any process that sees
the same files, reads them. The module of a kind is imported when the kind is used.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipedist.datasets.sources.base import Config, Ids, Reader, Source, SourceError
from pipedist.datasets.sources.paths import is_private

__all__ = ["KINDS", "Config", "Ids", "Reader", "Source", "SourceError", "open_reader", "open_source"]

# The kinds of sources, by their keys in a spec.
KINDS = ("range", "arrays", "npy", "npz", "csv", "parquet", "jsonl", "text", "files", "function")


def open_source(kind: str, config: Mapping[str, Any], *, folder: Path, code: Sequence[str] = ()) -> Source:
    """Open a source: find its files, count its elements, and check its settings.

    Args:
        config: the source's settings, as in the spec: `path`, `columns`, `start`, `call`, ...
        folder: the folder that a relative `path` starts from.
        code: additional folders with the modules of a `function`.

    Raises:
        SourceError: the settings don't fit the data, or the data can't be read.
    """
    source = _open(kind, dict(config), folder, code)
    path = config.get("path", ())
    if source.portable and any(map(is_private, [path] if isinstance(path, str) else path)):
        source.portable, source.why_not_portable = False, "memory:// URLs can be read in this process only"
    return source


def _open(kind: str, settings: Config, folder: Path, code: Sequence[str]) -> Source:
    match kind:
        case "range":
            from pipedist.datasets.sources.memory import open_range

            return open_range(settings)
        case "arrays":
            from pipedist.datasets.sources.memory import open_arrays

            return open_arrays(settings)
        case "npy":
            from pipedist.datasets.sources.numpy_files import open_npy

            return open_npy(settings, folder)
        case "npz":
            from pipedist.datasets.sources.numpy_files import open_npz

            return open_npz(settings, folder)
        case "csv":
            from pipedist.datasets.sources.csv_files import open_csv

            return open_csv(settings, folder)
        case "parquet":
            from pipedist.datasets.sources.parquet_files import open_parquet

            return open_parquet(settings, folder)
        case "jsonl":
            from pipedist.datasets.sources.text_files import open_jsonl

            return open_jsonl(settings, folder)
        case "text":
            from pipedist.datasets.sources.text_files import open_text

            return open_text(settings, folder)
        case "files":
            from pipedist.datasets.sources.text_files import open_files

            return open_files(settings, folder)
        case "function":
            from pipedist.datasets.sources.memory import open_function

            return open_function(settings, code)
    raise _unknown(kind)


def open_reader(config: Config) -> Reader:
    """Open a reader of a source's `config`, in any process on the host where the source was opened."""
    match config["kind"]:
        case "range":
            from pipedist.datasets.sources.memory import RangeReader

            return RangeReader(config)
        case "npy" | "npz":
            from pipedist.datasets.sources.numpy_files import NumpyReader

            return NumpyReader(config)
        case "csv":
            from pipedist.datasets.sources.csv_files import CsvReader

            return CsvReader(config)
        case "parquet":
            from pipedist.datasets.sources.parquet_files import ParquetReader

            return ParquetReader(config)
        case "jsonl":
            from pipedist.datasets.sources.text_files import JsonlReader

            return JsonlReader(config)
        case "text":
            from pipedist.datasets.sources.text_files import TextReader

            return TextReader(config)
        case "files":
            from pipedist.datasets.sources.text_files import RawFilesReader

            return RawFilesReader()
    raise _unknown(config["kind"])


def _unknown(kind: object) -> SourceError:
    near = difflib.get_close_matches(str(kind), KINDS, 1)
    return SourceError(
        f"unknown kind of source {kind!r}", nearest=near[0] if near else "", expected=", ".join(KINDS)
    )
