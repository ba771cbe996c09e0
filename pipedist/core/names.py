"""Words of messages: plurals, lists, the name that a mistyped one means, and what a terminal can show."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

GIVEN_CHARACTERS_MAX = 200  # a longer text is no mistyped name, and comparing it takes long


def nearest(given: str, allowed: Iterable[str]) -> str:
    """Return the allowed name that is nearest to `given`, or "" if none is near.

    Case is ignored; in "module:name" the part after the colon may match alone.
    """
    names = {name.lower(): name for name in allowed}
    if not names or len(given) > GIVEN_CHARACTERS_MAX:
        return ""
    from difflib import get_close_matches  # imported for wrong names only

    for candidate in (given, given.rpartition(":")[2]):
        # difflib does not find swapped letters in short words such as "of"
        swapped = [name for name in names if sorted(name) == sorted(candidate.lower())]
        if swapped:
            return names[swapped[0]]
        close = get_close_matches(candidate.lower(), names, n=1, cutoff=0.6)
        if candidate and close:
            return names[close[0]]
    return ""


def did_you_mean(given: str, allowed: Iterable[str]) -> str:
    """Return "; did you mean 'name'?" with the nearest name, or "" if none is near."""
    near = nearest(given, allowed)
    return f"; did you mean {near!r}?" if near else ""


def plural(count: int, noun: str) -> str:
    """Return "1 step", "2 retries", "1,000 replicas"."""
    if count == 1:
        return f"1 {noun}"
    ends_in_y = noun.endswith("y") and noun[-2] not in "aeiou"
    return f"{count:,} {noun[:-1]}ies" if ends_in_y else f"{count:,} {noun}s"


def few(items: Sequence[object], count: int) -> str:
    """Return the first items of a list: "1, 2", or "1, 2, ..." if there are more."""
    return ", ".join(map(str, items[:count])) + ", ..." * (len(items) > count)


def excerpt(text: str, characters_max: int) -> str:
    """Return a text; if it is longer, its beginning and "..."."""
    return text if len(text) <= characters_max else f"{text[: characters_max - 3]}..."


def printable(text: str) -> str:
    """Return a text without the characters that control a terminal."""
    return "".join(each if each.isprintable() else "\ufffd" for each in text)


LISTED_MAX = 12  # lines


def listed(lines: Iterable[str]) -> str:
    """Return at most LISTED_MAX lines, indented, and the number of the others."""
    shown = list(lines)
    rest = [f"... and {len(shown) - LISTED_MAX} more"] if len(shown) > LISTED_MAX else []
    return "".join(f"\n    {line}" for line in shown[:LISTED_MAX] + rest)
