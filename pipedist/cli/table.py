"""The results of a run for people: a table, the ledger, the timings."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipedist.cli.progress import duration
from pipedist.cli.summary import Records, records, summarize, summarize_file
from pipedist.program import Tree

if TYPE_CHECKING:
    from rich.console import RenderableType

PLAIN_WIDTH = 1_000_000
"""Where standard output is no terminal a line is as long as it must be: paths stay whole."""
PLAIN_VALUE_WIDTH = 60
"""There, characters of the column of values, which are texts of several words."""


@dataclass(frozen=True, slots=True)
class Row:
    """One finished value.

    Args:
        name: of the stage.
        verb: what the stage does: "reduce sum", "gather 0".
        value: its value; the file's path where it was streamed into the file.
        file: where it was written, or None.
    """

    name: str
    verb: str
    value: Tree
    file: Path | None = None


def render(rows: Iterable[Row], ledger: Mapping[str, int], timings: Mapping[str, float]) -> str:
    """Return the results as text for standard output, as wide and colourful as that is."""
    # rich takes 60 ms to import: only when there is something to draw
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for title in ("stage", "verb"):
        table.add_column(title, overflow="fold")
    plain = not _has_width()
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
    console.print(Text(ledger_line(ledger)))
    if timings:
        console.print(Text(timings_line(timings)))
    # columns are padded to the table's width: nobody wants the blanks in a file
    return "\n".join(line.rstrip(" ") for line in page.getvalue().split("\n"))


class _Page(io.StringIO):
    """What is drawn, before any of it is written: drawing must not fail with a full disk."""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The letters that standard output can show."""
        return (sys.stdout.encoding if sys.stdout is not None else None) or "utf-8"


def _is_terminal() -> bool:
    return sys.stdout is not None and sys.stdout.isatty()


def _records_table(name: str, found: Records) -> RenderableType:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    inner = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for index, title in enumerate([name, *found.names]):
        inner.add_column(Text(title), overflow="fold", justify="left" if index == 0 else "right")
    for row in found.rows:
        inner.add_row(*map(Text, row))
    return inner


def _has_width() -> bool:
    """Whether standard output, or the user, says how wide it is."""
    return _is_terminal() or "COLUMNS" in os.environ


def ledger_line(ledger: Mapping[str, int]) -> str:
    """Return the ledger as a line: every element is accounted for."""
    kinds = ", ".join(f"{ledger[kind]:,} {kind}" for kind in ("committed", "quarantined", "lost"))
    count = ledger["elements"]
    return f"{count:,} element{'s' * (count != 1)}: {kinds}"


def timings_line(timings: Mapping[str, float]) -> str:
    """Return the timings as a line."""
    return ", ".join(f"{name.removesuffix('_s')} {duration(seconds)}" for name, seconds in timings.items())


def shown(path: Path) -> str:
    """Return a path as a person would type it: relative where it is below the current directory."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
