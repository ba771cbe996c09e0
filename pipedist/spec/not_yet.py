"""What the language has and this version of pipedist does not execute, in one table.

It is read by `load` (each use is a problem, at its place) and by the language reference (a note
at each key). Whoever teaches the engine one of these takes its row away.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pipedist.records import record
from pipedist.spec.document import Path
from pipedist.spec.model import LAUNCHERS, ClusterSpec
from pipedist.spec.problems import Problems
from pipedist.spec.section import Section
from pipedist.version import __version__

LAUNCHERS_EXECUTED = ("local", "connect", "ray", "dask")
"""What can start workers today."""


@record
class NotYet:
    """A key, or some of its values, that this version does not execute.

    Args:
        section: whose key it is.
        key: the key, as it is written.
        what: the key or its values, for people.
        instead: what a spec can say today.
        applies: whether a value of the key is one of those.
    """

    section: type[Section]
    key: str
    what: str
    instead: str
    applies: Callable[[object], bool]


_LATER = [name for name in LAUNCHERS if name not in LAUNCHERS_EXECUTED]

NOT_YET = (
    NotYet(
        ClusterSpec,
        "launcher",
        "the launchers " + ", ".join(f"`{name}`" for name in _LATER),
        "`launcher: local`, `connect`, `ray` or `dask`",
        lambda value: value in _LATER,
    ),
)


def sentence(what: str) -> str:
    """Return the message of a problem: which version does not execute what."""
    return f"not yet: pipedist {__version__} does not execute {what}"


def not_yet_of(section: type[Section], key: str) -> NotYet | None:
    """Return the row of a key, None for one that is executed."""
    return next((row for row in NOT_YET if row.section is section and row.key == key), None)


def note_not_yet(problems: Problems, sections: Mapping[Path, Section | None]) -> None:
    """Note every use of what this version does not execute.

    Args:
        problems: where they are noted.
        sections: the sections of the spec by path; None where one has mistakes of its own.
    """
    for path, section in sections.items():
        for row in NOT_YET:
            if isinstance(section, row.section) and row.applies(getattr(section, row.key)):
                value = getattr(section, row.key)
                what = f"the launcher `{value}`" if row.key == "launcher" else row.what
                problems.add_not_yet((*path, row.key), sentence(what), expected=row.instead)
