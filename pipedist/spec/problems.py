"""The mistakes found in one spec, gathered until all of them can be told at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pipedist.errors import Problem, SpecError
from pipedist.spec.scalars import printable

if TYPE_CHECKING:
    from pipedist.spec.document import Document, Path


PROBLEMS_MAX = 100
GIVEN_CHARACTERS_MAX = 200


class Problems:
    """Gathers the problems of one document and raises them together, in order of place.

    At `PROBLEMS_MAX` problems it raises what it has: a file of nothing but mistakes is refused as
    fast as one with a few.

    Args:
        document: where the places come from.
    """

    def __init__(self, document: Document) -> None:
        self._document = document
        self._found: dict[Problem, tuple[tuple[int, ...], int]] = {}
        self._broken: set[Path] = set()

    def add(
        self,
        path: Path,
        message: str,
        *,
        expected: str = "",
        allowed: Iterable[str] = (),
        given: str = "",
        at_key: bool = False,
        fragment: str = "",
    ) -> None:
        """Note a problem at `path`; arguments as in `Document.problem`.

        A problem at or below a value that is known to be broken is not noted: it would only
        repeat, in other words, what has been said of that value.
        """
        if self.is_broken(path):
            return
        problem = self._document.problem(
            path,
            message,
            expected=expected,
            allowed=allowed,
            given=given,
            at_key=at_key,
            fragment=fragment,
        )
        self._note(problem, self._document.order(path, at_key=at_key, fragment=fragment))

    def add_outside(
        self, where: str, message: str, *, expected: str = "", allowed: Iterable[str] = (), given: str = ""
    ) -> None:
        """Note a problem of something outside the document, such as a `--set`; they are told first."""
        self._note(
            Problem(printable(message), printable(where), expected=expected, nearest=nearest(given, allowed)),
            (),
        )

    def break_at(self, path: Path) -> None:
        """Say that the value at `path` has had its problem: later ones at or below it are dropped."""
        self._broken.add(self._document.written(path))

    def is_broken(self, path: Path) -> bool:
        """Return whether the value at `path`, or one that holds it, is known to be broken."""
        path = self._document.written(path)
        return any(path[:length] in self._broken for length in range(len(path) + 1))

    def move(self, path: Path, written: Path) -> None:
        """Say that the value known as `path` stands at `written` in the document."""
        self._document.move(path, written)

    def raise_all(self) -> None:
        """Raise what has been noted.

        Raises:
            SpecError: there is at least one problem; it lists all of them in order of place.
        """
        if self._found:
            raise SpecError(self._sorted())

    def _note(self, problem: Problem, order: tuple[int, ...]) -> None:
        self._found.setdefault(problem, (order, len(self._found)))
        if len(self._found) >= PROBLEMS_MAX:
            last = Problem(
                f"there may be more: these are the first {PROBLEMS_MAX} problems",
                problem.where,
                expected="fewer mistakes",
            )
            raise SpecError([*self._sorted(), last])

    def _sorted(self) -> list[Problem]:
        return sorted(self._found, key=self._found.__getitem__)


def nearest(given: str, allowed: Iterable[str]) -> str:
    """Return the allowed name that `given` most probably means, "" if none is near.

    Case does not count; of "module:name" the part behind the colon may match alone.
    """
    names = {name.lower(): name for name in allowed}
    if not names or len(given) > GIVEN_CHARACTERS_MAX:
        return ""
    from difflib import get_close_matches  # only wrong specs pay for its import

    for candidate in (given, given.rpartition(":")[2]):
        # Swapped letters are the commonest slip, and difflib finds none of it in words like "of".
        swapped = [name for name in names if sorted(name) == sorted(candidate.lower())]
        if swapped:
            return names[swapped[0]]
        close = get_close_matches(candidate.lower(), names, n=1, cutoff=0.6)
        if candidate and close:
            return names[close[0]]
    return ""


def listing(names: Iterable[str]) -> str:
    """Return "a, b or c" for a sentence.

    >>> listing(["a", "b", "c"])
    'a, b or c'
    """
    *head, last = [name or "''" for name in names]
    return f"{', '.join(head)} or {last}" if head else last
