"""The formats of outputs, by the ending of the path.

| ending | `per: run` | `per: step`, `per: epoch` |
|---|---|---|
| .json | any tree | a list of them |
| .npy | one array | stacked along a new axis 0 |
| .npz | leaf paths joined with "/", a bare array is "data" | each leaf stacked |
| .csv, .parquet, .jsonl | a row per index of axis 0 | a row for each value |

Rows have a column per leaf path ("value" if bare). With `per: run`, a result by key (`by_key` and the
like of `pipedist.combiners`) has a row per key instead, see `pipedist.outputs.tables`. Each format is imported
when it is used: a run that writes one .json needs neither zipfile nor pyarrow.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy.typing as npt

from pipedist.core.types import Tree
from pipedist.errors import OutputError
from pipedist.outputs.sink import JsonSink, Mode, Sink

SUFFIXES = (".csv", ".json", ".jsonl", ".npy", ".npz", ".parquet")


def missing_package(path: str) -> str | None:
    """Return the package that the format of an output lacks, with the command to install it, or None."""
    from importlib.util import find_spec  # importing pyarrow itself takes a tenth of a second

    if path.endswith(".parquet") and find_spec("pyarrow") is None:
        return ".parquet needs pyarrow: pip install 'pipedist[parquet]'"
    return None


def open_sink(
    path: Path,
    *,
    shape: Literal["run", "per"],
    gather: bool,
    axis: int = 0,
    label: str = "",
    table: Callable[[Tree], dict[str, npt.NDArray[Any]]] | None = None,
) -> Sink:
    """Open a file for the values of one stage.

    Args:
        path: where the file will be; its folder exists. Its ending chooses the format.
        shape: "run": one value; "per": one value for each step or epoch, each a call of `append`.
        gather: with shape "run": `append` receives the pieces of the value, step by step, instead of
            the value.
        axis: the axis along which the pieces are concatenated. Axis 0 is written directly to the file,
            another one through a temporary file beside it.
        label: the file as errors name it: "outputs.rows (rows.npy)"; "": its path.
        table: with shape "run": returns the columns of the value, arrays [rows, ...] by name, for a format
            with rows; None: the columns are the value's leaves.
    """
    mode: Mode = "each" if shape == "per" else "pieces" if gather else "one"
    suffix, label = path.suffix, label or str(path)
    if suffix == ".json":
        return JsonSink(path, mode, axis, label)
    if suffix in (".npy", ".npz"):
        from pipedist.outputs.array_files import NpySink, NpzSink

        return (NpySink if suffix == ".npy" else NpzSink)(path, mode, axis, label)
    if suffix in (".csv", ".jsonl", ".parquet"):
        from pipedist.outputs.row_files import CsvSink, JsonLinesSink, ParquetSink

        rows: dict[str, Callable[..., Sink]] = {
            ".csv": CsvSink,
            ".jsonl": JsonLinesSink,
            ".parquet": ParquetSink,
        }
        return rows[suffix](path, mode, axis, label, table)
    raise OutputError(f"{label}: an output must end in one of {', '.join(SUFFIXES)}")
