"""HTML for notebooks: tables of short text, without colours, scripts or styles of a page.

All text is escaped, and everything is bounded: it may be the user's data.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final

import numpy as np

ROWS_MAX: Final = 20
TEXT_CHARS_MAX: Final = 400  # of one cell
ARRAY_SIZE_MAX: Final = 16  # elements of an array that is shown in full
INTEGER_BITS_MAX: Final = 1_024
DEPTH_MAX: Final = 8  # of a tree whose leaves are listed

_CELL = "text-align:left;vertical-align:top;white-space:pre-wrap"
_SHORT: Final = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 100


def shortened(text: str) -> str:
    return text if len(text) <= TEXT_CHARS_MAX else text[:TEXT_CHARS_MAX] + "..."


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], more: int = 0) -> str:
    """Return a table of text, and how many `more` rows there are."""
    lines = [_row("th", heads), *(_row("td", row) for row in rows[:ROWS_MAX])]
    more += max(0, len(rows) - ROWS_MAX)
    if more:
        lines.append(_row("td", [f"... {more:,} more", *([""] * (len(heads) - 1))]))
    return f"<table>{''.join(lines)}</table>"


def paragraph(text: str) -> str:
    from html import escape  # its table of names takes long to load

    return f"<p>{escape(shortened(text))}</p>"


def _row(kind: str, cells: Sequence[str]) -> str:
    from html import escape

    inner = "".join(f'<{kind} style="{_CELL}">{escape(shortened(cell))}</{kind}>' for cell in cells)
    return f"<tr>{inner}</tr>"


def leaves(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield path and value of the first leaves of a tree of dicts, lists and tuples."""
    yield from islice(_walk(value, ()), ROWS_MAX)


def _walk(value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping | list | tuple) and value and len(path) < DEPTH_MAX:
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, child in islice(pairs, ROWS_MAX):
            yield from _walk(child, (*path, shortened(str(key))))
    else:
        yield "/".join(path), value


def brief(value: Any) -> str:
    """Return one leaf as text: exactly if it is small, else its type and shape."""
    if isinstance(value, np.ndarray) and (value.size > ARRAY_SIZE_MAX or value.dtype.kind in "OV"):
        return f"{value.dtype}[{', '.join(map(str, value.shape))}]"
    if (
        isinstance(value, int) and value.bit_length() > INTEGER_BITS_MAX
    ):  # Python refuses to print most of these
        return f"an integer of {value.bit_length():,} bits"
    return shortened(str(value) if isinstance(value, np.ndarray | np.generic) else _SHORT.repr(value))
