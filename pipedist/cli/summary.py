"""What a table says about a value: small ones exactly, large ones by dtype and shape."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy_format

from pipedist import trees
from pipedist.outputs import encoding
from pipedist.program import Tree

INLINE_SIZE_MAX = 16
"""Elements of an array that is shown in full."""
INLINE_CHARACTERS_MAX = 120
"""Length of a tree that is shown in full."""
LEAVES_MAX = 12
"""Leaves of a large tree that are described one by one."""
CELL_DIGITS = 7
"""Significant digits of a float in a table of records."""
SCANNED_BYTES_MAX = 4 * 2**20
"""A file of text up to this size is read for its number of rows."""
RECORDS_MAX = 20
"""Rows of a table of records."""


def summarize(value: Tree) -> str:
    """Return a value as text of one or a few lines."""
    if isinstance(value, np.ndarray):
        return _array(value)
    if isinstance(value, bytes):
        return f"{len(value):,} bytes"
    if encoding.node(value) is None:
        return _scalar(encoding.to_json(value))
    if _small(value):
        text = encoding.dumps(value, sort_keys=False)
        if len(text) <= INLINE_CHARACTERS_MAX:
            return text
    leaves, structure = trees.flatten(value)
    names = trees.treedef_paths(structure)
    lines = [
        f"{name}: {summarize(leaf)}"
        for name, leaf in zip(names[:LEAVES_MAX], leaves[:LEAVES_MAX], strict=True)
    ]
    if len(leaves) > LEAVES_MAX:
        lines.append(f"... {len(leaves) - LEAVES_MAX:,} more")
    return "\n".join(lines)


def summarize_file(path: Path) -> str:
    """Return what is in a file, as far as that takes no time: dtype and shape, records, else its size."""
    if path.suffix == ".npy":
        with path.open("rb") as file:
            return _header(file)
    if path.suffix == ".npz":
        import zipfile  # only where there is one

        lines = []
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            for name in names[:LEAVES_MAX]:
                with archive.open(name) as member:
                    lines.append(f"{name.removesuffix('.npy')}: {_header(member)}")
        if len(names) > LEAVES_MAX:
            lines.append(f"... {len(names) - LEAVES_MAX:,} more")
        return "\n".join(lines)
    size = path.stat().st_size
    if path.suffix == ".parquet":
        import pyarrow.parquet  # it wrote the file

        return _counted(pyarrow.parquet.read_metadata(path).num_rows, "row")
    if size <= SCANNED_BYTES_MAX:
        if path.suffix in (".csv", ".jsonl"):
            return _counted(_rows(path), "row")
        if path.suffix == ".json":
            return _json(path)
    return f"{size:,} bytes"


def _rows(path: Path) -> int:
    if path.suffix == ".jsonl":
        return path.read_bytes().count(b"\n")
    import csv  # a quoted cell may hold line feeds

    csv.field_size_limit(SCANNED_BYTES_MAX)
    with path.open(encoding="utf-8", newline="", errors="surrogatepass") as file:
        return max(0, sum(1 for _ in csv.reader(file)) - 1)  # without the header


def _json(path: Path) -> str:
    import json

    with path.open("rb") as file:
        value = json.load(file)
    if isinstance(value, list) and len(value) > INLINE_SIZE_MAX:
        return _counted(len(value), "value")
    text = summarize(value)
    return text if len(text) <= INLINE_CHARACTERS_MAX else f"{path.stat().st_size:,} bytes"


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"


@dataclass(frozen=True, slots=True)
class Records:
    """A dict or list of records, as cells.

    Args:
        count: how many there are.
        names: of the columns, after the key's.
        rows: the key and the cells; at most `RECORDS_MAX`, and a last one that counts the others.
    """

    count: int
    names: list[str]
    rows: list[list[str]]


def records(value: Tree) -> Records | None:
    """Return a dict (or list) of at least two records, None where the value is something else.

    A record is an object of single values; all have the same names. Floats are rounded to
    `CELL_DIGITS` digits: the exact values are in the file, or in `--json`.
    """
    outer = encoding.node(value)
    if outer is None or len(outer[1]) < 2:
        return None
    pairs = outer[1] if outer[0] == "object" else list(enumerate(outer[1]))
    names: list[str] | None = None
    rows: list[list[str]] = []
    for key, record in pairs:
        inner = encoding.node(record)
        if inner is None or inner[0] != "object":
            return None
        cells = {str(name): cell for name, cell in inner[1]}
        names = names or list(cells)
        if set(cells) != set(names) or any(np.ndim(c) or encoding.node(c) for c in cells.values()):
            return None
        if len(rows) < RECORDS_MAX:
            rows.append([str(key), *(_cell(cells[name]) for name in names)])
    if not names:
        return None
    if len(pairs) > RECORDS_MAX:
        rows.append([f"... {len(pairs) - RECORDS_MAX:,} more", *([""] * len(names))])
    return Records(len(pairs), names, rows)


def _cell(value: Tree) -> str:
    plain = encoding.to_json(value)
    if isinstance(plain, float):
        return f"{plain:,.{CELL_DIGITS}g}"
    return f"{plain:,}" if isinstance(plain, int) and not isinstance(plain, bool) else summarize(value)


def _header(file: IO[bytes]) -> str:
    npy_format.read_magic(file)  # ours are of version 1.0
    shape, _, dtype = npy_format.read_array_header_1_0(file)
    return f"{dtype}[{', '.join(map(str, shape))}]"


def _array(array: np.ndarray[Any, np.dtype[Any]]) -> str:
    if array.ndim == 0:
        return _scalar(encoding.to_json(array))
    if array.size <= INLINE_SIZE_MAX and array.dtype.kind not in "SV":
        text = encoding.dumps(array)
        if len(text) <= INLINE_CHARACTERS_MAX:
            return text
    return f"{array.dtype}[{', '.join(map(str, array.shape))}]"


def _scalar(value: encoding.Json) -> str:
    if not isinstance(value, str):
        return encoding.text(value)
    return value if len(value) <= INLINE_CHARACTERS_MAX else value[:INLINE_CHARACTERS_MAX] + "..."


def _small(value: Tree) -> bool:
    leaves = trees.flatten(value)[0]
    return len(leaves) <= INLINE_SIZE_MAX and all(np.size(leaf) <= INLINE_SIZE_MAX for leaf in leaves)
