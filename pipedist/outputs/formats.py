"""Which value fits which format, as far as that is known before a run.

| ending | `per: run` | `per: step`, `per: epoch` |
|---|---|---|
| .json | any tree | a list of them |
| .npy | one array | stacked along a new axis 0 |
| .npz | leaf paths joined with "/", a bare array is "data" | each leaf stacked |
| .csv, .parquet, .jsonl | a row per index of axis 0 | a row for each value |

Rows have a column per leaf path ("value" if bare).
"""

from __future__ import annotations

from pathlib import PurePath
from typing import Literal

SUFFIXES = (".csv", ".json", ".jsonl", ".npy", ".npz", ".parquet")
"""The endings that an output may have."""

_TABLES = frozenset({".csv", ".parquet"})
"""Formats whose cells hold one number or text each."""

Verb = Literal["reduce", "gather", "update"]
Per = Literal["run", "step", "epoch"]


def check_output(path: str, verb: Verb, per: Per, op_or_axis: str | int | None = None) -> str | None:
    """Say what is wrong with an output, as far as that is known before the run.

    Args:
        path: where the output goes, relative to the run's folder, as written in the spec.
        verb: of the stage whose value it is.
        per: how often the stage has a value.
        op_or_axis: a gather's axis; a reduce's op; None otherwise.

    Returns:
        The problem, one line without a full stop, or None.
    """
    if problem := path_problem(path):
        return problem
    suffix = PurePath(path).suffix
    if suffix not in SUFFIXES:
        return f"an output ends in one of {', '.join(SUFFIXES)}, not in {suffix or 'nothing'!r}"
    if suffix == ".parquet" and not _installed("pyarrow"):
        return ".parquet needs pyarrow: pip install 'pipedist[parquet]'"
    if suffix in _TABLES and verb == "gather":
        if per != "run":
            return (
                f"{suffix} holds one row for each {per}, and a gather has many rows a {per}: "
                "write .jsonl, or .npz, or gather per: run"
            )
        if isinstance(op_or_axis, int) and op_or_axis > 0:
            return (
                f"{suffix} holds one-dimensional columns, and a gather along axis {op_or_axis} has "
                f"{op_or_axis + 1} dimensions or more: write .npz"
            )
    return None


def path_problem(path: str) -> str | None:
    """Say why a path can't be that of a file below an output folder, or return None."""
    name = PurePath(path)
    if not name.parts or "\0" in path or path.endswith("/"):
        return f"an output is the path of a file, not {path!r}"
    if name.is_absolute() or ".." in name.parts:
        return f"an output stays below the run's folder: {path!r} does not (--output DIR chooses the folder)"
    if name.parts[0] == ".pipedist":
        return "the folder .pipedist belongs to pipedist; choose another name"
    return None


def _installed(module: str) -> bool:
    # importing pyarrow takes a tenth of a second; finding it takes none
    from importlib.util import find_spec

    return find_spec(module) is not None
