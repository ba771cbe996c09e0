"""Which value fits which format, as far as that is known before a run.

| ending | `per: run` | `per: step`, `per: epoch` |
|---|---|---|
| .json | any tree | a list of them |
| .npy | one array | stacked along a new axis 0 |
| .npz | leaf paths joined with "/", a bare array is "data" | each leaf stacked |
| .csv, .parquet, .jsonl | a row per index of axis 0 | a row for each value |

Rows have a column per leaf path ("value" if bare). What was combined by key (`pipedist.combiners.by_key` and
its kin) is a row per key instead, with `per: run`: see `pipedist.tables`.
"""

from __future__ import annotations

from pathlib import PurePath

SUFFIXES = (".csv", ".json", ".jsonl", ".npy", ".npz", ".parquet")
"""The endings that an output may have."""


def missing_package(path: str) -> str | None:
    """Say which package the format of an output needs and is not installed; None where all is there."""
    if path.endswith(".parquet") and not _installed("pyarrow"):
        return ".parquet needs pyarrow: pip install 'pipedist[parquet]'"
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
