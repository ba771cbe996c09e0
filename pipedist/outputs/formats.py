"""The formats of outputs, by the ending of the path, and the sinks that write them.

| ending | `per: run` | `per: step`, `per: epoch` |
|---|---|---|
| .json | any tree | a list of them |
| .npy | one array | stacked along a new axis 0 |
| .npz, .zarr, .h5 | leaf paths joined with "/", a bare array is "data" | each leaf stacked |
| .csv, .jsonl, .parquet, .arrow, .sqlite, .duckdb | a row per index of axis 0 | a row for each value |
| .parquet/ | the same, in the files of a folder | the same |
| a name with `{column}` | a file per index of axis 0 | a file for each value |

Rows have a column per leaf path ("value" if bare). With `per: run`, a result by key (`by_key` and the
like of `pipedist.combiners`) has a row per key instead, see `pipedist.outputs.tables`. Each format is imported
when it is used: a run that writes one .json needs neither zipfile nor pyarrow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Literal

import numpy.typing as npt

from pipedist.core.types import Tree
from pipedist.errors import OutputError
from pipedist.outputs.sink import JsonSink, Mode, Sink, Target

_SINKS: Final[Mapping[str, tuple[str, str, tuple[str, ...]]]] = {
    "csv": ("row_files", "CsvSink", ()),
    "jsonl": ("row_files", "JsonLinesSink", ()),
    "npy": ("array_files", "NpySink", ()),
    "npz": ("array_files", "NpzSink", ()),
    "parquet": ("arrow_files", "ParquetSink", ("pyarrow",)),
    "parquet_parts": ("arrow_files", "ParquetPartsSink", ("pyarrow",)),
    "arrow": ("arrow_files", "ArrowSink", ("pyarrow",)),
    "zarr": ("array_stores", "ZarrSink", ("zarr",)),
    "h5": ("array_stores", "Hdf5Sink", ("h5py",)),
    "sqlite": ("databases", "SqliteSink", ()),
    "duckdb": ("databases", "DuckdbSink", ("duckdb", "pyarrow")),
    "files": ("element_files", "FilesSink", ()),
    "sink": ("class_sink", "ClassSink", ()),
}
"""Module, class and packages of each kind of sink, except the one of .json."""

SUFFIXES: Final = tuple(
    sorted([".json", *(f".{kind}" for kind in _SINKS if kind not in ("parquet_parts", "files", "sink"))])
)

_EXTRAS: Final = {"h5": "hdf5", "parquet_parts": "parquet"}


def missing_package(kind: str) -> str | None:
    """Return the package that a kind of output lacks, with the command to install it, or None."""
    from importlib.util import find_spec  # importing pyarrow itself takes a tenth of a second

    packages = _SINKS[kind][2] if kind in _SINKS else ()
    if missing := [package for package in packages if find_spec(package) is None]:
        extra = _EXTRAS.get(kind, kind)
        return f".{kind.partition('_')[0]} needs {missing[0]}: pip install 'pipedist[{extra}]'"
    return None


def open_sink(
    path: Path,
    *,
    shape: Literal["run", "per"],
    gather: bool,
    axis: int = 0,
    label: str = "",
    table: Callable[[Tree], dict[str, npt.NDArray[Any]]] | None = None,
    kind: str = "",
    name: str = "value",
    run: str = "",
    options: Mapping[str, Any] = {},
) -> Sink:
    """Open a file for the values of one stage.

    Args:
        path: where the file will be; its folder exists.
        shape: "run": one value; "per": one value for each step or epoch, each a call of `append`.
        gather: with shape "run": `append` receives the pieces of the value, step by step, instead of
            the value.
        axis: the axis along which the pieces are concatenated. Axis 0 is written directly to the file,
            another one through a temporary file beside it.
        label: the file as errors name it: "outputs.rows (rows.npy)"; "": its path.
        table: with shape "run": returns the columns of the value, arrays [rows, ...] by name, for a format
            with rows; None: the columns are the value's leaves.
        kind: the kind of sink; "": that of the ending of the path.
        name: the stage, for a format whose files have named tables.
        run: the id of the run.
        options: the keys of the output beside its path.
    """
    mode: Mode = "each" if shape == "per" else "pieces" if gather else "one"
    target = Target(path, mode, axis, label or str(path), name, run, table, options)
    kind = kind or path.suffix.removeprefix(".")
    if kind == "json":
        return JsonSink(target)
    if kind not in _SINKS:
        raise OutputError(f"{target.label}: an output must end in one of {', '.join(SUFFIXES)}")
    module, cls, _ = _SINKS[kind]
    sink: Sink = getattr(import_module(f"pipedist.outputs.{module}"), cls)(target)
    return sink
