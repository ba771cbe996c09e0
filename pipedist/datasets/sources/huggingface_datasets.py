"""Source `huggingface`: a dataset of Hugging Face's `datasets`, saved to disk or of the hub.

Rows are read as Arrow columns, so that nulls, text and lists are those of `parquet`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from pipedist.core.names import nearest
from pipedist.core.types import Tree
from pipedist.datasets.element import ArraySpec
from pipedist.datasets.sources.arrow_columns import OWN_TYPE, numpy_column, readable
from pipedist.datasets.sources.base import (
    Config,
    ElementReader,
    ReaderSource,
    SourceError,
    imported,
    index_of,
    rows_of,
    sealed,
)
from pipedist.datasets.sources.columns import CellError, Column, no_such_column


class HuggingfaceReader(ElementReader):
    """Reads rows of a dataset."""

    def __init__(self, config: Config) -> None:
        self._arrow = imported("pyarrow", "huggingface", "huggingface")
        imported("pyarrow.compute", "huggingface", "huggingface")
        self._label: str = config["label"]
        self._columns: list[str] = config["columns"]
        loaded = _load(config)
        self._fingerprint = str(
            loaded._fingerprint
        )  # `datasets` reuses cached results that have an equal one
        self._dataset = loaded.select_columns(self._columns).with_format("arrow")
        if "fingerprint" in config and self.fingerprint() != config["fingerprint"]:
            raise SourceError(
                f"{self._label}: the data has changed since the run began: start again", key="path"
            )

    @property
    def element_spec(self) -> Tree:  # type: ignore[override]
        empty = self.read(range(0))
        return {name: ArraySpec(column.dtype, column.shape[1:]) for name, column in empty.items()}

    def fingerprint(self) -> str:
        return self._fingerprint

    def __len__(self) -> int:
        return int(self._dataset.num_rows)

    def read(self, location: Tree) -> dict[str, Column]:
        """Return {column: array[n]} of the rows with the ids `location`."""
        rows = rows_of(location, len(self))
        try:
            table = self._dataset[index_of(rows)]
        except (self._arrow.ArrowException, OSError) as error:
            first = rows[0] if len(rows) else 0
            raise SourceError(
                f"{self._label}: rows from {first} on can't be read: {error}", key="path"
            ) from error
        shard = {}
        for name in self._columns:
            column = table.column(name)
            if isinstance(column.type, self._arrow.ExtensionType):
                column = self._arrow.chunked_array(
                    [each.storage for each in column.chunks], column.type.storage_type
                )
            try:
                shard[name] = sealed(numpy_column(self._arrow, column, OWN_TYPE))
            except CellError as error:
                raise SourceError(
                    f"{self._label}: row {np.asarray(rows)[error.row]}: column {name!r}: {error.message}",
                    key="columns",
                    name=name,
                ) from error
        return shard


def _load(config: Config) -> Any:
    """Return the dataset of a config."""
    datasets = imported("datasets", "huggingface", "huggingface")
    datasets.disable_progress_bars()
    path, split = config["path"], config.get("split")
    try:
        if config["saved"]:
            found = datasets.load_from_disk(path)
        else:
            found = datasets.load_dataset(path, config.get("name"), split=split)
    except Exception as error:  # builders and the hub raise anything
        raise SourceError(
            f"{config['label']}: can't be loaded: {type(error).__name__}: {error}", key="path"
        ) from error
    if not isinstance(found, datasets.DatasetDict):
        return found
    splits = list(found)
    if split is None and len(splits) > 1:
        raise SourceError(
            f"{config['label']} has the splits {', '.join(splits)}",
            key="path",
            expected=f"`split: {splits[0]}`",
        )
    if split is not None and split not in found:
        raise SourceError(
            f"{config['label']} has no split {split!r}",
            key="split",
            nearest=nearest(split, splits),
            expected="one of " + ", ".join(splits),
        )
    return found[split or splits[0]]


def open_huggingface(config: Config, folder: Path) -> ReaderSource:
    """Open a dataset: `path` is a folder or a name of the hub; optional `name`, `split`, `columns`."""
    path: str = config["path"]
    local = os.path.abspath(os.path.join(folder, path))
    saved = os.path.isdir(local)
    settings: Config = {
        "kind": "huggingface",
        "path": local if saved else path,
        "label": path,
        "saved": saved,
        **{key: config[key] for key in ("name", "split") if key in config},
    }
    dataset = _load(settings)
    arrow = imported("pyarrow", "huggingface", "huggingface")
    types = {field.name: field.type for field in dataset.features.arrow_schema}
    for name in config.get("columns", ()):
        if name not in types:
            raise no_such_column(name, list(types), path)
    settings["columns"] = list(config.get("columns", types))
    for name in settings["columns"]:
        own = getattr(types[name], "storage_type", types[name])
        if not readable(arrow, own, OWN_TYPE):
            raise SourceError(
                f"{path}: column {name!r} is {own}, which can't be read: name the columns to be read",
                key="columns",
                name=name,
            )
    reader = HuggingfaceReader(settings)
    settings["fingerprint"] = reader.fingerprint()
    return ReaderSource(len(reader), settings, reader)
