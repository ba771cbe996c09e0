"""What a table says about a value: small ones exactly, large ones by dtype and shape."""

from __future__ import annotations

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


def records(value: Tree) -> tuple[list[str], list[list[str]]] | None:
    """Return a dict (or list) of records as a table.

    A record is an object of single values; all have the same names.

    Returns:
        The header, whose first column is the key, and at most `RECORDS_MAX` rows (a last one
        "..." where there are more); None where the value is something else.
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
        names = names or sorted(cells) if isinstance(record, dict) else names or list(cells)
        if set(cells) != set(names) or any(np.ndim(c) or encoding.node(c) for c in cells.values()):
            return None
        if len(rows) < RECORDS_MAX:
            rows.append([str(key), *(summarize(cells[name]) for name in names)])
    if not names:
        return None
    if len(pairs) > RECORDS_MAX:
        rows.append([f"... {len(pairs) - RECORDS_MAX:,} more", *([""] * len(names))])
    return ["", *names], rows


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
