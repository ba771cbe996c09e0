"""Render the results of a run for people: a table, the ledger, the timings.

Values are shown as `outputs.summary` describes.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipedist.core.names import plural
from pipedist.core.types import Tree
from pipedist.journal.history import DurableProgress
from pipedist.outputs.summary import records, shown, summarize, summarize_file
from pipedist.runs.progress import duration
from pipedist.runs.timings import Timings, brief

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.table import Table

# if standard output is no terminal: paths are never wrapped
PLAIN_WIDTH = 1_000_000
PLAIN_VALUE_WIDTH = 60  # of the column of values
NAMES_MAX = 4  # stages of a pass that are all named

_REASONS = {
    "error": "after an error",
    "timeout": "after a timeout",
    "death": "after a worker died",
    "slow": "of slow calls",
}


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

    plain = not (_is_terminal() or "COLUMNS" in os.environ)
    page = _Page()
    console = Console(
        file=page, force_terminal=_is_terminal(), highlight=False, width=PLAIN_WIDTH if plain else None
    )
    if listed := list(rows):
        console.print(*_values(listed, plain=plain), sep="\n")
    else:
        console.print(Text("The spec has no reduce, gather or update, so the run has no results."))
    console.print()
    kinds = ", ".join(f"{ledger[kind]:,} {kind}" for kind in ("committed", "quarantined", "lost"))
    console.print(Text(f"{plural(ledger['elements'], 'element')}: {kinds}"))
    for name, counts in resumed.items():
        console.print(
            Text(f"stage {name}: {DurableProgress(**counts)} taken from the journal, not executed again")
        )
    for stage, counts in retries.items():
        reasons = ", ".join(f"{count:,} {_REASONS[reason]}" for reason, count in counts.items())
        console.print(Text(f"stage {stage}: {plural(sum(counts.values()), 'retry')} ({reasons})"))
    if isinstance(timings, Timings) and timings.stages:
        console.print(_stages_table(timings), "", sep="\n")
    if isinstance(timings, Timings) and timings.limit:
        console.print(Text(timings.limit))
    if timings:
        total_s = timings["total"]
        phases = {name: seconds for name, seconds in timings.items() if name != "total"}
        outside_s = max(0.0, total_s - sum(phases.values()))  # imports, the start of workers, large outputs
        times = {**phases, "start and end": outside_s, "total": total_s} if phases else {"total": total_s}
        console.print(Text(", ".join(f"{name} {duration(seconds)}" for name, seconds in times.items())))
    # Padding of the columns is removed: output may go to a file.
    return "\n".join(line.rstrip(" ") for line in page.getvalue().split("\n"))


def _values(rows: Sequence[Row], *, plain: bool) -> list[RenderableType]:
    """Return the table of values, and below it a table for each value that consists of records."""
    from rich.text import Text

    values = table()
    for title in ("stage", "verb"):
        values.add_column(title, overflow="fold")
    values.add_column("value", overflow="fold", max_width=PLAIN_VALUE_WIDTH if plain else None)
    any_file = any(row.file for row in rows)
    if any_file:
        values.add_column("file", overflow="fold", no_wrap=plain)
    below: list[RenderableType] = []
    for row in rows:
        streamed = isinstance(row.value, Path)
        text = summarize_file(row.value) if streamed else summarize(row.value)
        found = None if streamed else records(row.value)
        if found is not None:
            text = f"{found.count:,} records, below"
            below += [Text(), table([row.name, *found.names], found.rows)]
        cells = [Text(row.name), Text(row.verb), Text(text)]
        if any_file:
            cells.append(Text("" if row.file is None else shown(row.file)))
        values.add_row(*cells)
    return [values, *below]


class _Page(io.StringIO):
    """Buffer for the rendered text, so that rendering does not fail on a full disk."""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return (sys.stdout.encoding if sys.stdout is not None else None) or "utf-8"


def _is_terminal() -> bool:
    return sys.stdout is not None and sys.stdout.isatty()


def table(heads: Sequence[str] = (), rows: Iterable[Sequence[str]] = ()) -> Table:
    """Return a table of texts, none of which is cut: a cut number misleads, and a cut key can't be replayed."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for number, head in enumerate(heads):
        made.add_column(Text(head), justify="right" if number else "left", overflow="fold")
    for row in rows:
        made.add_row(*map(Text, row))
    return made


class StagesTable:
    """A table of stages, with only the columns that have room: a number broken into several lines can't be read."""

    _GAP = 3  # between two columns
    _TEXT_WIDTH = 12  # to which names of stages and calls may be folded
    _OPTIONAL = ("longest call", "median", "elements/s", "busy")  # skipped in this order

    def __init__(self, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        self._columns = {head: [row[at] for row in rows] for at, head in enumerate(heads)}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = dict(self._columns)
        for head in self._OPTIONAL:
            widths = (self._width(head, cells) for head, cells in columns.items())
            if sum(widths) + self._GAP * (len(columns) - 1) <= options.max_width:
                break
            columns.pop(head, None)
        made = table(list(columns), zip(*columns.values(), strict=True))
        for head, column in zip(columns, made.columns, strict=True):
            column.no_wrap = not self._folds(head)
        yield made

    @staticmethod
    def _folds(head: str) -> bool:
        return head in ("stages", "longest call")

    def _width(self, head: str, cells: Sequence[str]) -> int:
        width = max(map(len, (head, *cells)))
        return min(width, self._TEXT_WIDTH) if self._folds(head) else width


def _stages_table(timings: Timings) -> StagesTable:
    rows = []
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
        rows.append((name, *numbers, *times, longest))
    return StagesTable(("stages", "calls", "elements/s", "busy", "median", "longest call"), rows)
