"""Render the results of a run for people: a table, the ledger, the timings.

Small values are shown exactly, large ones by dtype and shape. The work for a value is bounded, except for one pass
over the keys, and one over the types of the values, of a large container.
"""

from __future__ import annotations

import heapq
import io
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipedist.cli.progress import duration
from pipedist.core.types import Tree
from pipedist.journal.history import DurableProgress
from pipedist.outputs import encoding
from pipedist.runs.timings import Timings, brief

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

# if standard output is no terminal: paths are never wrapped
PLAIN_WIDTH = 1_000_000
PLAIN_VALUE_WIDTH = 60  # of the column of values
INLINE_SIZE_MAX = 16  # elements of an array that is shown in full
INLINE_CHARACTERS_MAX = 120  # of the text of a tree that is shown in full
LEAVES_MAX = 12  # leaves of a large tree that are listed
ENTRIES_MAX = INLINE_SIZE_MAX + 1  # entries of one container that are visited; more than are shown
COUNTED_MAX = 1_000  # nodes that are visited to count the leaves that are not listed
CELL_DIGITS = 7  # significant digits of a float in a table of records
SCANNED_BYTES_MAX = 4 * 2**20  # size of a text file whose rows are counted
RECORDS_MAX = 20  # rows of a table of records that are shown
FIELDS_MAX = 32  # columns of a table of records
NAMES_MAX = 4  # stages of a pass that are all named

_REASONS = {"error": "raised", "timeout": "timed out", "death": "whose worker died", "slow": "slow"}

_SCALARS = frozenset({int, float, complex, bool, str, bytes, type(None), np.ndarray})


@dataclass(frozen=True, slots=True)
class Row:
    """One finished value, or the path of the file into which it was streamed, with the name and verb of its stage."""

    name: str
    verb: str
    value: Tree
    file: Path | None = None


def render(
    rows: Iterable[Row],
    ledger: Mapping[str, int],
    timings: Mapping[str, float],
    retries: Mapping[str, Mapping[str, int]] = {},
    resumed: Mapping[str, Mapping[str, int]] = {},
) -> str:
    """Return the results as text for standard output, with its width and colours."""
    from rich.console import Console
    from rich.text import Text

    table = _table()
    for title in ("stage", "verb"):
        table.add_column(title, overflow="fold")
    plain = not (_is_terminal() or "COLUMNS" in os.environ)
    table.add_column("value", overflow="fold", max_width=PLAIN_VALUE_WIDTH if plain else None)
    listed = list(rows)
    any_file = any(row.file for row in listed)
    if any_file:
        table.add_column("file", overflow="fold", no_wrap=plain)
    below: list[RenderableType] = []
    for row in listed:
        streamed = isinstance(row.value, Path)
        text = summarize_file(row.value) if streamed else summarize(row.value)
        found = None if streamed else records(row.value)
        if found is not None:
            text = f"{found.count:,} records, below"
            below += [Text(), _records_table(row.name, found)]
        cells = [Text(row.name), Text(row.verb), Text(text)]
        if any_file:
            cells.append(Text("" if row.file is None else shown(row.file)))
        table.add_row(*cells)
    page = _Page()
    console = Console(
        file=page, force_terminal=_is_terminal(), highlight=False, width=PLAIN_WIDTH if plain else None
    )
    console.print(table, *below, sep="\n")
    console.print()
    kinds = ", ".join(f"{ledger[kind]:,} {kind}" for kind in ("committed", "quarantined", "lost"))
    console.print(Text(f"{_counted(ledger['elements'], 'element')}: {kinds}"))
    for name, counts in resumed.items():
        console.print(
            Text(f"stage {name}: {DurableProgress(**counts)} taken from the journal, not executed again")
        )
    for stage, counts in retries.items():
        reasons = ", ".join(f"{count:,} {_REASONS[reason]}" for reason, count in counts.items())
        attempts = _counted(sum(counts.values()), "attempt")
        console.print(Text(f"stage {stage}: {attempts} did not count ({reasons})"))
    if isinstance(timings, Timings) and timings.stages:
        console.print(_stages_table(timings), "", sep="\n")
    if isinstance(timings, Timings) and timings.limit:
        console.print(Text(timings.limit))
    if timings:
        times = (f"{name.removesuffix('_s')} {duration(seconds)}" for name, seconds in timings.items())
        console.print(Text(", ".join(times)))
    # Padding of the columns is removed: output may go to a file.
    return "\n".join(line.rstrip(" ") for line in page.getvalue().split("\n"))


class _Page(io.StringIO):
    """Buffer for the rendered text, so that rendering does not fail on a full disk."""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return (sys.stdout.encoding if sys.stdout is not None else None) or "utf-8"


def _is_terminal() -> bool:
    return sys.stdout is not None and sys.stdout.isatty()


def _table() -> Table:
    from rich import box
    from rich.table import Table

    return Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)


def _records_table(name: str, found: Records) -> Table:
    from rich.text import Text

    inner = _table()
    for index, title in enumerate([name, *found.names]):
        inner.add_column(Text(title), overflow="fold", justify="left" if index == 0 else "right")
    for row in found.rows:
        inner.add_row(*map(Text, row))
    return inner


def _stages_table(timings: Timings) -> Table:
    from rich.text import Text

    table = _table()
    table.add_column("stages", overflow="fold")
    for title in ("calls", "elements/s", "busy", "median", "longest call"):
        table.add_column(title, justify="right", overflow="fold")  # a key that is cut can't be replayed
    for stage in timings.stages:
        names = stage.name.split(" -> ")
        name = (
            stage.name
            if len(names) <= NAMES_MAX
            else f"{names[0]} -> ... -> {names[-1]}, {len(names)} stages"
        )
        longest = f"{stage.slowest} {brief(stage.max_s)}".strip() if stage.calls else ""
        numbers = (f"{stage.calls:,}", f"{stage.elements_per_s:,.0f}" if stage.elements else "")
        times = (brief(stage.busy_s), brief(stage.p50_s))
        table.add_row(*map(Text, (name, *numbers, *times, longest)))
    return table


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
    size = path.stat().st_size
    if path.suffix == ".parquet":
        import pyarrow.parquet

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
    from pipedist.datasets.sources.row_files import csv_of_long_fields  # quoted cells may contain line feeds

    csv = csv_of_long_fields(SCANNED_BYTES_MAX)
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
    """A dict or list of records, as cells: at most `RECORDS_MAX` rows, and one that counts the others."""

    count: int
    names: list[str]
    rows: list[list[str]]


def records(value: Tree) -> Records | None:
    """Return a dict or list of at least two records; None for other values.

    A record is an object of at most `FIELDS_MAX` single values; all that are shown have the same names. Floats are
    rounded to `CELL_DIGITS` digits: the exact values are in the file, or in `--json`.
    """
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
