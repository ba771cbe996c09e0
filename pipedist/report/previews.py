"""Previews of outputs: the first rows of a table, a chart of numbers, the curves of a training."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROWS_MAX = 10
COLUMNS_MAX = 40
CELL_CHARS_MAX = 80
BINS = 40
SAMPLES_MAX = 100_000  # numbers that a histogram counts
POINTS_MAX = 1_000  # of a curve
CURVES_MAX = 24  # of a stage
READ_BYTES_MAX = 64 * 2**20  # a longer text file is previewed, but not read for curves

Json = dict[str, Any]


def preview(path: Path) -> Json | None:
    """Return the first rows or the distribution of an output, None if there is no preview."""
    readers = {
        ".csv": _csv,
        ".jsonl": _jsonl,
        ".parquet": _parquet,
        ".npy": _npy,
        ".npz": _npz,
        ".json": _text,
    }
    reader = None if path.is_dir() else readers.get(path.suffix)
    try:
        return None if reader is None else reader(path)
    except (OSError, ValueError, ImportError) as error:
        return {"kind": "text", "text": f"no preview: {error}"}


def _cell(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= CELL_CHARS_MAX else text[:CELL_CHARS_MAX] + "..."


def _table(names: list[str], rows: list[list[Any]], count: int | None) -> Json:
    cells = [[_cell(each) for each in row[:COLUMNS_MAX]] for row in rows]
    return {
        "kind": "table",
        "names": names[:COLUMNS_MAX],
        "rows": cells,
        "count": count,
        "columns": len(names),
    }


def _csv(path: Path) -> Json:
    import csv

    with path.open(encoding="utf-8", newline="", errors="replace") as file:
        rows = list(islice(csv.reader(file), ROWS_MAX + 1))
    return _table(rows[0] if rows else [], [list(row) for row in rows[1:]], None)


def _jsonl(path: Path) -> Json:
    with path.open(encoding="utf-8") as file:
        values = [json.loads(line) for line in islice(file, ROWS_MAX)]
    if values and all(isinstance(value, dict) for value in values):
        names = list(dict.fromkeys(name for value in values for name in value))
        return _table(names, [[value.get(name) for name in names] for value in values], None)
    return _table(["value"], [[value] for value in values], None)


def _parquet(path: Path) -> Json:
    import pyarrow.parquet as pq

    file = pq.ParquetFile(path)
    names = list(file.schema_arrow.names)
    batch = next(file.iter_batches(ROWS_MAX, columns=names[:COLUMNS_MAX]), None)
    rows = [] if batch is None else [list(row.values()) for row in batch.to_pylist()]
    return _table(names, rows, file.metadata.num_rows)


def _npy(path: Path) -> Json:
    return _array(np.load(path, mmap_mode="r", allow_pickle=False))


def _npz(path: Path) -> Json:
    with np.load(path, allow_pickle=False) as archive:
        names = list(archive.files)
        members = [{"name": name, **_array(archive[name])} for name in names[:COLUMNS_MAX]]
    return {"kind": "members", "members": members, "count": len(names)}


def _text(path: Path) -> Json:
    with path.open(encoding="utf-8", errors="replace") as file:
        text = file.read(2001)
    return {"kind": "text", "text": text if len(text) <= 2000 else text[:2000] + "..."}


def _array(array: NDArray[Any]) -> Json:
    """Return dtype, shape, first values, and for numbers a histogram."""
    head: Json = {
        "kind": "array",
        "dtype": str(array.dtype),
        "shape": list(array.shape),
        "first": [
            _cell(each) for each in np.ravel(array[:ROWS_MAX] if array.ndim else array)[:ROWS_MAX].tolist()
        ],
    }
    if array.dtype.kind not in "iuf" or array.size < BINS:
        return head
    flat = np.ravel(array)[:: max(1, array.size // SAMPLES_MAX)].astype(np.float64)
    finite = flat[np.isfinite(flat)]
    if len(finite) < BINS or finite.min() == finite.max():
        return head
    counts, edges = np.histogram(finite, bins=BINS)
    histogram = {"counts": counts.tolist(), "low": float(edges[0]), "high": float(edges[-1])}
    return {**head, "histogram": histogram, "is_sampled": len(flat) < array.size}


# -- curves ------------------------------------------------------------------------------


def curves(
    path: Path, pers: Mapping[str, str], document: Mapping[str, Any], outputs: Mapping[str, str]
) -> list[Json]:
    """Return the values of reductions per step or epoch that are numbers, as curves.

    Args:
        path: the output folder.
        pers: by stage, how often it has a value: run, epoch or step.
        document: the run's results document.
        outputs: the file of each stage that has one.
    """
    found = []
    results = document.get("results", {})
    for stage, per in pers.items():
        if per == "run" or stage not in results:
            continue
        try:
            named = list(islice(_series(path, results[stage], outputs.get(stage)), CURVES_MAX))
        except (OSError, ValueError, ImportError):
            continue  # the preview of the output reports the problem
        lines = [
            {"name": name, "values": [float(x) if np.isfinite(x) else None for x in y], "every": every}
            for name, (y, every) in ((name, _thinned(values)) for name, values in named)
        ]
        if lines:
            found.append({"stage": stage, "per": per, "lines": lines})
    return found


def _thinned(values: NDArray[np.float64]) -> tuple[NDArray[np.float64], int]:
    every = -(-len(values) // POINTS_MAX)
    return values[::every], every


def _series(path: Path, value: Any, output: str | None) -> Iterator[tuple[str, NDArray[np.float64]]]:
    """Yield name and values of each series of numbers of a stage's value."""
    if isinstance(value, list):
        yield from _of_list(value)
    elif output is not None or (isinstance(value, Mapping) and "file" in value):
        yield from _of_file(path / output if output is not None else Path(value["file"]))


def _of_list(values: list[Any]) -> Iterator[tuple[str, NDArray[np.float64]]]:
    if values and all(isinstance(each, dict) for each in values):
        for name in values[0]:
            yield from ((name, y) for _, y in _of_list([each.get(name) for each in values]))
    elif len(values) > 1 and all(isinstance(each, int | float) for each in values):
        yield "", np.array(values, np.float64)


def _of_file(path: Path) -> Iterator[tuple[str, NDArray[np.float64]]]:
    if path.suffix in (".npy", ".npz"):
        loaded = np.load(path, mmap_mode="r" if path.suffix == ".npy" else None, allow_pickle=False)
        arrays = {"": loaded} if path.suffix == ".npy" else loaded
        for name in arrays:
            if arrays[name].ndim == 1 and arrays[name].dtype.kind in "iufb" and len(arrays[name]) > 1:
                yield name, np.asarray(arrays[name], np.float64)
    elif path.suffix == ".csv" and path.stat().st_size <= READ_BYTES_MAX:
        import csv

        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.reader(file))
        for place, name in enumerate(rows[0] if rows else []):
            column = _numbers([row[place] for row in rows[1:]])
            if column is not None and name not in ("step", "epoch"):
                yield name, column
    elif path.suffix == ".jsonl" and path.stat().st_size <= READ_BYTES_MAX:
        with path.open(encoding="utf-8") as file:
            yield from _of_list([json.loads(line) for line in file])


def _numbers(cells: list[str]) -> NDArray[np.float64] | None:
    try:
        return np.array([float(cell) for cell in cells]) if len(cells) > 1 else None
    except ValueError:
        return None
