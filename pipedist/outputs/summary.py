"""Summarize the values of a run as text, and records as a table.

Small values are shown exactly, large ones by dtype and shape. The work for a value is bounded, except for one pass
over the keys, and one over the types of the values, of a large container.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipedist.core.names import plural
from pipedist.core.types import Tree
from pipedist.outputs import encoding

if TYPE_CHECKING:
    from pipedist.reduction.keyed.table import KeyedTable


INLINE_SIZE_MAX = 16  # elements of an array that is shown in full
INLINE_CHARACTERS_MAX = 120  # of the text of a tree that is shown in full
LEAVES_MAX = 12  # leaves of a large tree that are listed
ENTRIES_MAX = INLINE_SIZE_MAX + 1  # entries of one container that are visited; more than are shown
COUNTED_MAX = 1_000  # nodes that are visited to count the leaves that are not listed
CELL_DIGITS = 7  # significant digits of a float in a table of records
SCANNED_BYTES_MAX = 4 * 2**20  # size of a text file whose rows are counted
LARGEST_MAX = 10  # counts of a table of counts that are shown, the largest
RECORDS_MAX = 20  # rows of a table of records that are shown
FIELDS_MAX = 32  # columns of a table of records

_SCALARS = frozenset({int, float, complex, bool, str, bytes, type(None), np.ndarray})


def shown(path: Path) -> str:
    """Return a path relative to the current directory if it is below that."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def summarize(value: Tree) -> str:
    """Return a value as text of one or a few lines."""
    if isinstance(value, np.ndarray):
        return _array(value)
    if isinstance(value, bytes):
        return f"{len(value):,} bytes"
    if encoding.is_keyed_table(value):
        numbers = _inline_numbers(value)
        if numbers:
            return numbers
        if numbers is not None or len(value) > INLINE_SIZE_MAX:
            return plural(len(value), "key")
    if encoding.node(value) is None:
        return _scalar(encoding.to_json(value))
    leaves = [leaf for _, leaf in islice(_leaves(value), INLINE_SIZE_MAX + 1)]
    if len(leaves) <= INLINE_SIZE_MAX and all(np.size(leaf) <= INLINE_SIZE_MAX for leaf in leaves):
        text = encoding.dumps(value, sort_keys=False)
        if len(text) <= INLINE_CHARACTERS_MAX:
            return text
    lines = [f"{name}: {summarize(leaf)}" for name, leaf in islice(_leaves(value), LEAVES_MAX)]
    return _lines(lines, _count(value, [COUNTED_MAX]))


def _leaves(value: Tree, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Tree]]:
    """Yield path and value of the first leaves, in order of their keys; None and empty containers count."""
    found = list(_entries(value))
    if not found:
        yield "/".join(path), value
    for name, child in found:
        yield from _leaves(child, (*path, str(name)))


def _entries(value: Tree) -> Iterable[tuple[Any, Tree]]:
    """Return the first `ENTRIES_MAX` children of a container by key, in one pass over its keys at most."""
    if not isinstance(value, Mapping):
        inner = encoding.node(value)
        if inner is None:
            return ()
        return islice(inner[1] if inner[0] == "object" else enumerate(inner[1]), ENTRIES_MAX)
    try:
        keys = heapq.nsmallest(ENTRIES_MAX, value)
    except TypeError:  # integers and text
        keys = heapq.nsmallest(ENTRIES_MAX, value, key=lambda key: (isinstance(key, str), key))
    return [(key, value[key]) for key in keys]


def _count(value: Tree, room: list[int]) -> int | None:
    """Return the number of leaves; None if that takes more than `room[0]` visits, which are subtracted."""
    room[0] -= 1
    if isinstance(value, Mapping):
        children: Collection[Tree] = value.values()
    elif (inner := encoding.node(value)) is None:
        return 1
    else:
        children = [child for _, child in inner[1]] if inner[0] == "object" else inner[1]
    if _SCALARS.issuperset(map(type, children)):
        return max(1, len(children))
    total = 0
    for child in children:
        count = _count(child, room) if room[0] > 0 else None
        if count is None:
            return None
        total += count
    return total


def _lines(lines: list[str], count: int | None) -> str:
    """Return the first of `count` lines as one text; None: too many to count."""
    if count is None:
        return "\n".join([*lines, "... more"])
    more = [f"... {count - LEAVES_MAX:,} more"] if count > LEAVES_MAX else []
    return "\n".join(lines + more)


def summarize_file(path: Path) -> str:
    """Return dtype and shape, number of rows, or size of a file, without reading large files."""
    if path.suffix in (".npy", ".npz"):
        from pipedist.outputs.array_files import members

        found = [(name, f"{dtype}[{', '.join(map(str, shape))}]") for name, (dtype, shape) in members(path)]
        if path.suffix == ".npy":
            return found[0][1]
        return _lines([f"{name}: {text}" for name, text in found[:LEAVES_MAX]], len(found))
    if path.is_dir():
        sizes = [each.stat().st_size for each in path.rglob("*") if each.is_file()]
        return f"{plural(len(sizes), 'file')}, {sum(sizes):,} bytes"
    size = path.stat().st_size
    if path.suffix == ".parquet":
        import pyarrow.parquet

        return plural(pyarrow.parquet.read_metadata(path).num_rows, "row")
    if size <= SCANNED_BYTES_MAX:
        if path.suffix in (".csv", ".jsonl"):
            return plural(_rows(path), "row")
        if path.suffix == ".json":
            return _json(path)
    return f"{size:,} bytes"


def _rows(path: Path) -> int:
    if path.suffix == ".jsonl":
        return path.read_bytes().count(b"\n")
    from pipedist.datasets.sources.row_files import csv_of_long_fields  # quoted cells may contain line feeds

    csv = csv_of_long_fields(SCANNED_BYTES_MAX)
    with path.open(encoding="utf-8", newline="", errors="surrogatepass") as file:
        return max(0, sum(1 for _ in csv.reader(file)) - 1)  # without the header


def _json(path: Path) -> str:
    import json

    with path.open("rb") as file:
        value = json.load(file)
    if isinstance(value, list) and len(value) > INLINE_SIZE_MAX:
        return plural(len(value), "value")
    text = summarize(value)
    return text if len(text) <= INLINE_CHARACTERS_MAX else f"{path.stat().st_size:,} bytes"


@dataclass(frozen=True, slots=True)
class Records:
    """A dict or list of records, as cells: at most `RECORDS_MAX` rows, and one that counts the others."""

    count: int
    names: list[str]
    rows: list[list[str]]


def records(value: Tree) -> Records | None:
    """Return a dict or list of at least two records; None for other values.

    A record is an object of at most `FIELDS_MAX` single values; all that are shown have the same names. Floats are
    rounded to `CELL_DIGITS` digits: the exact values are in the file, or in `--json`.
    """
    if encoding.is_keyed_table(value):
        return _records_by_key(value)
    outer = ("object", value.items()) if isinstance(value, Mapping) else encoding.node(value)
    if outer is None or len(outer[1]) < 2:
        return None
    count = len(outer[1])
    pairs = outer[1] if outer[0] == "object" else enumerate(outer[1])
    names: list[str] | None = None
    rows: list[list[str]] = []
    for key, record in islice(pairs, RECORDS_MAX):
        if isinstance(record, Mapping) and len(record) > FIELDS_MAX:
            return None
        inner = encoding.node(record)
        if inner is None or inner[0] != "object":
            return None
        cells = {str(name): cell for name, cell in inner[1]}
        names = names or list(cells)
        if set(cells) != set(names) or any(np.ndim(c) or encoding.node(c) for c in cells.values()):
            return None
        rows.append([str(key), *(_cell(cells[name]) for name in names)])
    if not names:
        return None
    if count > RECORDS_MAX:
        rows.append([f"... {count - RECORDS_MAX:,} more", *([""] * len(names))])
    return Records(count, names, rows)


def _records_by_key(table: KeyedTable) -> Records | None:
    """Return the first rows of a table by key, or the largest counts of a counter that is not shown in full."""
    if len(table) < 2 or _inline_numbers(table):
        return None
    if table.kind == "counter":
        largest = table.largest(LARGEST_MAX)
        rows = [[_key(key), f"{count:,}"] for key, count in largest]
        total, names = len(table), ["count"]
    else:
        total = table.height
        head = table.columns(0, min(total, RECORDS_MAX))
        keys, names = list(head)[: len(table.names)], list(head)[len(table.names) :]
        if any(head[name].ndim > 1 for name in names):
            return None
        cells = zip(*(head[name].tolist() for name in (*keys, *names)), strict=True)
        rows = [[_key(row[: len(keys)]), *map(_cell, row[len(keys) :])] for row in cells]
    if total > len(rows):
        more = "smaller ones" if table.kind == "counter" else "more"
        rows.append([f"... {total - len(rows):,} {more}", *([""] * len(names))])
    return Records(total, names, rows)


def _inline_numbers(table: KeyedTable) -> str | None:
    """Return a table of one number by key as one line, the largest counts first.

    "" if it is too long for that; None for other tables.
    """
    from pipedist.reduction.keyed.table import NUMBERS  # loaded already

    if table.kind not in NUMBERS:
        return None
    if len(table) > INLINE_SIZE_MAX:
        return ""
    entries = table.largest(len(table)) if table.kind == "counter" else table.items()
    text = encoding.dumps({_key(key): value for key, value in entries}, sort_keys=False)
    return text if len(text) <= INLINE_CHARACTERS_MAX else ""


def _key(key: Any) -> str:
    return ", ".join(map(str, key)) if isinstance(key, tuple) else str(key)


def _cell(value: Tree) -> str:
    plain = encoding.to_json(value)
    if isinstance(plain, float):
        return f"{plain:,.{CELL_DIGITS}g}"
    return f"{plain:,}" if isinstance(plain, int) and not isinstance(plain, bool) else summarize(value)


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
