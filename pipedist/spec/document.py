"""A spec as a tree of plain values, each with the place it was written at.

Both doors give the same thing: YAML text (`pipedist.spec.yaml_text`) has a line and a column
for every key and value, a dict (the embedded API) has only paths, "stages.late.reduce".
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct

from pipedist.errors import Problem
from pipedist.spec.problems import nearest
from pipedist.spec.scalars import printable

Path = tuple[str | int, ...]
"""The way from the document's root to a value: keys, and indices of lists."""

EXCERPT_CHARACTERS_MAX = 100

TEXT_CHARACTERS_MAX = 800
"""Of what is said of a problem: it may quote what somebody wrote."""


class Place(Struct, frozen=True):
    """A 1-based line and column (code points)."""

    line: int
    column: int


@dataclass(slots=True)
class Document:
    """A spec before anything is known about its meaning.

    Args:
        name: the file's path as typed, "" for a dict.
        value: nested dicts, lists and scalars.
        lines: the text's lines, empty for a dict.
        keys, values: places of keys and of values by path; empty for a dict.
        moved: value paths that stand elsewhere in the document (the short form `dataset`).
    """

    name: str
    value: object
    lines: tuple[str, ...] = ()
    keys: dict[Path, Place] = field(default_factory=dict)
    values: dict[Path, Place] = field(default_factory=dict)
    moved: dict[Path, Path] = field(default_factory=dict)

    def problem(
        self,
        path: Path,
        message: str,
        *,
        expected: str = "",
        allowed: Iterable[str] = (),
        given: str = "",
        at_key: bool = False,
        fragment: str = "",
    ) -> Problem:
        """Return a problem with its place, or the place of the nearest value around it.

        Args:
            path: what the problem is about.
            message: what is wrong, one line, no final full stop.
            expected: what would have been right.
            allowed: the names that would have been right; the nearest to `given` is suggested.
            given: what was written instead; default: the text at `path`, or the key itself.
            at_key: the place is that of the key, not that of its value.
            fragment: a part of the value at which the caret points, if it is on the same line.
        """
        path = self.written(path)
        message, expected = _bounded(message), _bounded(expected)
        if not given:
            value = self._lookup(path)
            given = value if isinstance(value, str) and not at_key else str(path[-1] if path else "")
        suggestion = nearest(given, allowed)
        if not self.lines:
            return Problem(message, printable(self._dotted(path)), expected=expected, nearest=suggestion)
        place = self._place(path, at_key, fragment)
        excerpt, column = self._excerpt(place)
        where = f"{self.name}:{place.line}:{place.column}"
        return Problem(message, where, excerpt, column, expected, suggestion)

    def order(self, path: Path, *, at_key: bool = False, fragment: str = "") -> tuple[int, ...]:
        """Return what sorts places in the order of the document."""
        path = self.written(path)
        if self.lines:
            place = self._place(path, at_key, fragment)
            return (place.line, place.column)
        order = []
        value: Any = self.value
        for part in path:
            if not holds(value, part):
                break
            order.append(list(value).index(part) if isinstance(value, dict) else int(part))
            value = value[part]
        return tuple(order)

    def move(self, path: Path, written: Path) -> None:
        """Say that the value known as `path` stands at `written` in the document."""
        self.moved[path] = written

    def written(self, path: Path) -> Path:
        """Return where the value known as `path` stands in the document."""
        # The last moves are the innermost.
        for known, written in reversed(self.moved.items()):
            if path[: len(known)] == known:
                path = written + path[len(known) :]
        return path

    def _lookup(self, path: Path) -> Any:
        value: Any = self.value
        for part in path:
            if not holds(value, part):
                return None
            value = value[part]
        return value

    def _place(self, path: Path, at_key: bool, fragment: str) -> Place:
        if at_key and path in self.keys:
            return self.keys[path]
        while path not in self.values and path not in self.keys and path:
            path = path[:-1]
        place = self.values.get(path) or self.keys.get(path) or Place(1, 1)
        if fragment:
            found = self.lines[place.line - 1].find(fragment, place.column - 1)
            if found >= 0:
                return Place(place.line, found + 1)
        return place

    def _excerpt(self, place: Place) -> tuple[str, int]:
        line = self.lines[place.line - 1] if place.line <= len(self.lines) else ""
        column = place.column
        if len(line) > EXCERPT_CHARACTERS_MAX:
            # The caret must stay under what it points at: a window around it.
            start = max(0, min(column - 1 - EXCERPT_CHARACTERS_MAX // 2, len(line) - EXCERPT_CHARACTERS_MAX))
            line, column = line[start : start + EXCERPT_CHARACTERS_MAX], column - start
        line = printable(line.replace("\t", " ")).rstrip()
        return (line, column) if line else ("", 0)

    @staticmethod
    def _dotted(path: Path) -> str:
        text = ""
        for part in path:
            text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
        return text or "spec"


def holds(value: object, part: str | int) -> bool:
    """Return whether `part` leads from `value` to a value in it."""
    if isinstance(value, dict):
        return part in value
    return isinstance(value, list | tuple) and isinstance(part, int) and part < len(value)


def _bounded(text: str) -> str:
    """Return a text for people: printable, and without the middle of what somebody wrote at great length."""
    if len(text) > TEXT_CHARACTERS_MAX:
        text = f"{text[: TEXT_CHARACTERS_MAX // 2]} ... {text[-TEXT_CHARACTERS_MAX // 2 :]}"
    return printable(text)
