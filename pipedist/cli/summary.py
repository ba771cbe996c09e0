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
    """Return what is in a file: of arrays by dtype and shape, else its size."""
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
    return f"{path.stat().st_size:,} bytes"


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
