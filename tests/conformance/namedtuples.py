"""Namedtuple classes of the cases, made on demand and found again in every process by their name.

A case says `{"namedtuple": "Pair", "fields": {"x": ..., "y": ...}}`, and the same name comes with other
fields elsewhere. The class of that one is `Pair__x__y` in this module, in the worker too.
"""

from __future__ import annotations

from collections import namedtuple
from functools import cache


@cache
def namedtuple_class(name: str, fields: tuple[str, ...]) -> type:
    """Return the class of a namedtuple; one class for one name and fields in a process."""
    cls = namedtuple(name, fields)  # type: ignore[misc]
    cls.__module__ = __name__
    cls.__qualname__ = "__".join((name, *fields))
    return cls


def __getattr__(qualname: str) -> type:
    name, *fields = qualname.split("__")
    if not name or not all(field.isidentifier() for field in (name, *fields)):
        raise AttributeError(f"module {__name__!r} has no attribute {qualname!r}")
    return namedtuple_class(name, tuple(fields))
