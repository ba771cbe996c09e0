"""The sources of datasets.

`open_source`, in the driver, finds and counts the elements; `open_reader`, in any process that sees
the same files, reads them. The module of a kind is imported when the kind is used.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipedist.datasets.sources import paths
from pipedist.datasets.sources.base import Config, ElementReader, Ids, Reader, Source, SourceError
from pipedist.errors import PipedistError

__all__ = ["Config", "Ids", "Reader", "Source", "SourceError", "is_visible", "open_reader", "open_source"]

# By kind, its key in a spec: the module, the function that opens a source, and the reader's class.
_KINDS = {
    "range": ("memory", "open_range", "RangeReader"),
    "arrays": ("memory", "open_arrays", ""),
    "npy": ("numpy_files", "open_npy", "NumpyReader"),
    "npz": ("numpy_files", "open_npz", "NumpyReader"),
    "csv": ("csv_files", "open_csv", "CsvReader"),
    "parquet": ("arrow_files", "open_parquet", "ParquetReader"),
    "arrow": ("arrow_files", "open_arrow", "ArrowReader"),
    "hdf5": ("array_stores", "open_hdf5", "Hdf5Reader"),
    "zarr": ("array_stores", "open_zarr", "ZarrReader"),
    "images": ("image_files", "open_images", "ImagesReader"),
    "tar": ("tar_files", "open_tar", "TarReader"),
    "sql": ("sql_queries", "open_sql", "SqlReader"),
    "huggingface": ("huggingface_datasets", "open_huggingface", "HuggingfaceReader"),
    "jsonl": ("text_files", "open_jsonl", "JsonlReader"),
    "text": ("text_files", "open_text", "TextReader"),
    "files": ("text_files", "open_files", "RawFilesReader"),
    "function": ("memory", "open_function", ""),
    "source": ("reader_classes", "open_class", "ClassReader"),
}


def open_source(kind: str, config: Mapping[str, Any], *, folder: Path) -> Source:
    """Open a source: find its files, count its elements, and compare its settings with the data.

    Args:
        config: the settings, each valid as the spec's models require; `call` is a callable, `class` a FunctionRef.
        folder: the folder that a relative `path` starts from.

    Raises:
        SourceError: the settings don't fit the data, or the data can't be read.
    """
    source: Source = _part(kind, 1)(dict(config), folder)
    path = config.get("path", ())
    if source.portable and any(map(paths.is_private, [path] if isinstance(path, str) else path)):
        source.portable, source.why_not_portable = False, "memory:// URLs can be read in this process only"
    return source


def open_reader(config: Config, code: Sequence[str] = ()) -> Reader:
    """Open a reader of a source's `config`, in any process on the host where the source was opened.

    `code`: the folders of the spec's modules here, if they are not those of the driver.
    """
    if config["kind"] == "source":
        config = {**config, "code": list(code) or config["code"]}
    reader: Reader = _part(config["kind"], 2)(config)
    return reader


def is_visible(config: Config, code: Sequence[str]) -> bool:
    """Return whether this process sees the data of a portable source: its files unchanged, or its fingerprint."""
    if "fingerprint" not in config:
        return paths.is_visible(config)
    if not config["fingerprint"]:
        return False
    try:
        reader = open_reader(config, code)
        try:
            return isinstance(reader, ElementReader) and reader.fingerprint() == config["fingerprint"]
        finally:
            reader.close()
    except (PipedistError, OSError):
        return False


def _part(kind: str, part: int) -> Any:
    parts = _KINDS[kind]
    return getattr(importlib.import_module(f"pipedist.datasets.sources.{parts[0]}"), parts[part])
