"""The document of a spec with the places of its values, and the problems found in it.

In YAML text (`pipedist.spec.yaml_text`) every key and value has a line and a column. In a dict (the embedded
API) it has only a path, such as "stages.late.reduce". Problems are collected, and raised together in the
order of their places.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

from msgspec import Struct, field

from pipedist.core.names import nearest, printable
from pipedist.errors import Problem, SpecError

Path = tuple[str | int, ...]  # the keys and list indices that lead from the document's root to a value

EXCERPT_CHARACTERS_MAX = 100

TEXT_CHARACTERS_MAX = 800  # the limit of a message, which may quote a long text of the spec

PROBLEMS_MAX = 100


class Place(Struct, frozen=True):
    """A 1-based line and column (code points)."""

    line: int
    column: int


class Document(Struct):
    """A spec as nested plain values, before any check.

    A dict has no name ("") and no lines, and its keys and values have no places. `moved` maps canonical paths
    to those in the document, for values written elsewhere (the short form `dataset`, misspelled keys).
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
        """Return a problem at a value, or at the nearest written value around it.

        Args:
            path: canonical; `("datasets", "dataset", ...)` also if the document has `dataset:`.
            message: the fact, one line, no final full stop.
            allowed: names, of which the nearest to `given` is suggested.
            given: the text that was written instead; default: the text at `path`, or the key itself.
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
        where = f"{self.name}:{place.line}:{place.column}"
        return Problem(message, where, *self._excerpt(place), expected, suggestion)

    def order(self, path: Path, *, at_key: bool = False, fragment: str = "") -> tuple[int, ...]:
        """Return a key that sorts places in the order of the document."""
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

    def written(self, path: Path) -> Path:
        """Return the path in the document of a value with a canonical path."""
        for known, written in reversed(self.moved.items()):  # the last moves are the innermost
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
            # a window around the column, so that the caret stays below its character
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
    """Return a printable text; the middle of a very long one is cut."""
    if len(text) > TEXT_CHARACTERS_MAX:
        text = f"{text[: TEXT_CHARACTERS_MAX // 2]} ... {text[-TEXT_CHARACTERS_MAX // 2 :]}"
    return printable(text)


class Problems:
    """Collects the problems of one document and raises them together, in the order of their places.

    At `PROBLEMS_MAX` problems it raises those that it has, so that a file full of mistakes costs as little
    time as a file with a few.
    """

    def __init__(self, document: Document) -> None:
        self.document = document
        self._found: dict[Problem, tuple[tuple[int, ...], int]] = {}
        self._broken: set[Path] = set()

    def add(
        self,
        path: Path,
        message: str,
        expected: str = "",
        *,
        allowed: Iterable[str] = (),
        given: str = "",
        at_key: bool = False,
        fragment: str = "",
    ) -> None:
        """Add a problem at `path`; arguments as in `Document.problem`.

        A problem at or below a value that is known to be broken is ignored: it would repeat the problem of
        that value in other words.
        """
        if self.is_broken(path):
            return
        problem = self.document.problem(
            path, message, expected=expected, allowed=allowed, given=given, at_key=at_key, fragment=fragment
        )
        self._keep(problem, self.document.order(path, at_key=at_key, fragment=fragment))

    def add_outside(
        self, where: str, message: str, *, expected: str = "", allowed: Iterable[str] = (), given: str = ""
    ) -> None:
        """Add a problem outside the document, such as one of a `--set`; these come first."""
        suggestion = nearest(given, allowed)
        self._keep(Problem(printable(message), printable(where), expected=expected, nearest=suggestion), ())

    def break_at(self, path: Path) -> None:
        """Record that the value at `path` has its problem: later ones at or below it are ignored."""
        self._broken.add(self.document.written(path))

    def is_broken(self, path: Path) -> bool:
        """Return whether the value at `path`, or one that holds it, is known to be broken."""
        path = self.document.written(path)
        return any(path[:length] in self._broken for length in range(len(path) + 1))

    def fail(self, path: Path, message: str, expected: str) -> NoReturn:
        """Add a problem after which nothing else can be checked, and raise all."""
        self.add(path, message, expected)
        raise SpecError(self._sorted())

    def raise_all(self) -> None:
        """Raise the problems found so far, if there are any, as a SpecError."""
        if self._found:
            raise SpecError(self._sorted())

    def _keep(self, problem: Problem, order: tuple[int, ...]) -> None:
        self._found.setdefault(problem, (order, len(self._found)))
        if len(self._found) >= PROBLEMS_MAX:
            last = Problem(
                f"these are the first {PROBLEMS_MAX} problems; there may be more",
                problem.where,
                expected="a spec without the problems above",
            )
            raise SpecError([*self._sorted(), last])

    def _sorted(self) -> list[Problem]:
        return sorted(self._found, key=self._found.__getitem__)
