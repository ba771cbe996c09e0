"""Results as DataFrames: a value, or the file into which it was written.

| value | rows |
|---|---|
| arrays of one length, or a dict of them | one per index of axis 0; a column per leaf path, "value" if bare |
| numbers and texts, or a dict of them | one |
| a list of records | one per record |
| values per step or epoch | one per value, if its leaves are numbers or arrays of one shape |
| a result by key, a counter | one per key, as in `pipedist.outputs.tables` |

Dtypes and further axes are as `pipedist.datasets.frames` describes.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pipedist.core import ragged, trees
from pipedist.core.types import Tree
from pipedist.datasets.frames import FrameError, form_of, missing_package
from pipedist.errors import UsageError
from pipedist.reduction.keyed.table import KeyedTable

Library = Literal["pandas", "polars", "arrow"]


def frame_of(
    value: Tree,
    library: Library,
    *,
    per: str = "run",
    table: Callable[[Tree], Mapping[str, Any]] | None = None,
) -> Any:
    """Return a value, or the content of its file, as a DataFrame (arrow: a Table).

    Args:
        value: the value; a path: its file.
        per: the scope of a value: with "step" and "epoch", `value` is a list with one for each.
        table: returns the columns of a result by key.

    Raises:
        UsageError: the library is missing, or the value is no table.
    """
    if library not in ("pandas", "polars", "arrow"):
        raise UsageError(f"there is no library {library!r} of frames: use pandas, polars or arrow")
    if install := missing_package(library):
        raise UsageError(f"a frame of {library} needs packages that are not installed: {install}")
    try:
        if isinstance(value, Path):
            found = _read(value, library)
            if found is not None:
                return found
            value = _loaded(value)
            per = "run"
        if ragged.are_records(value):
            return _of_records(value, library)
        if isinstance(value, KeyedTable):
            return form_of(value.columns(), library)
        if table is not None:
            return form_of(dict(table(value)), library)
        return form_of(_rows_of(value, one_per_value=per != "run"), library)
    except (FrameError, ValueError, TypeError, OverflowError) as error:
        raise UsageError(f"the value is no table: {error}") from error


def _rows_of(value: Tree, *, one_per_value: bool) -> Tree:
    """Return a tree of columns."""
    if one_per_value and isinstance(value, list):
        if any(each is None for each in value):
            raise ValueError("a step or epoch without calls has no value")
        flat = [trees.flatten(each) for each in value]
        paths = trees.treedef_paths(flat[0][1]) if flat else []
        if any(structure != flat[0][1] for _, structure in flat):
            raise ValueError("its values have different structures")
        columns = zip(*(leaves for leaves, _ in flat), strict=True)
        return {path or "value": ragged.stack(cells) for path, cells in zip(paths, columns, strict=True)}
    leaves, structure = trees.flatten(value)
    if isinstance(value, list) and not any(np.ndim(leaf) for leaf in leaves) and len(leaves) == len(value):
        return {"value": ragged.stack(leaves)}  # a list of numbers or texts
    if any(np.ndim(leaf) for leaf in leaves):
        return value
    paths = trees.treedef_paths(structure)
    return {path or "value": ragged.stack([leaf]) for path, leaf in zip(paths, leaves, strict=True)}


def _of_records(records: list[dict[str, Any]], library: Library) -> Any:
    if library == "pandas":
        return importlib.import_module("pandas").DataFrame.from_records(records)
    if library == "polars":
        return importlib.import_module("polars").from_dicts(records)
    return importlib.import_module("pyarrow").Table.from_pylist(records)


def _read(path: Path, library: Library) -> Any:
    """Return a file that the library reads itself, or None."""
    if path.suffix not in (".parquet", ".csv"):
        return None
    kind = path.suffix[1:]
    if library == "arrow":
        module, name = f"pyarrow.{kind}", "read_table" if kind == "parquet" else "read_csv"
    else:
        module, name = library, f"read_{kind}"
    return getattr(importlib.import_module(module), name)(path)


def _loaded(path: Path) -> Tree:
    if path.suffix == ".npy":
        return np.load(path, allow_pickle=False)
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as file:
            return {"value" if name == "data" else name: file[name] for name in file.files}
    if path.suffix == ".jsonl":
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return lines if ragged.are_records(lines) else {"value": np.array(lines)}
    if path.suffix == ".json":
        value = json.loads(path.read_text(encoding="utf-8"))
        return _arrays_in(value)
    raise ValueError(f"{path} is a file that is read with the library of its format")


def _arrays_in(value: Any) -> Tree:
    """Return a tree of JSON with lists of numbers and texts as arrays."""
    if isinstance(value, dict):
        return {name: _arrays_in(each) for name, each in value.items()}
    if isinstance(value, list) and not ragged.are_records(value):
        return np.array(value)
    return value
