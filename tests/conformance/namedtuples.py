"""The namedtuple classes of the cases, in a module that every process can import.

A case says `{"namedtuple": "Pair", "fields": {"x": ..., "y": ...}}`, and the same name comes with other
fields elsewhere. Values travel with their class by name, as a user's do, so the classes that the
cases at hand need are written to a module of their own in a temporary folder on the import path;
the class above is `conformance_namedtuples.Pair__x__y`, and its `__name__` is "Pair".
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from collections import namedtuple
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

MODULE = "conformance_namedtuples"

Shape = tuple[str, tuple[str, ...]]
"""A class's name and its fields."""


@cache
def namedtuple_class(name: str, fields: tuple[str, ...]) -> type:
    """Return the class of a namedtuple; one class for one name and fields in a process."""
    try:
        return getattr(importlib.import_module(MODULE), _qualname(name, fields))
    except (ImportError, AttributeError):
        return make(name, fields)


def make(name: str, fields: tuple[str, ...]) -> type:
    """Return a new class, which says that it stands in the module."""
    cls = namedtuple(name, fields)  # type: ignore[misc]
    cls.__module__ = MODULE
    cls.__qualname__ = _qualname(name, fields)
    return cls


def shapes(part: Any) -> set[Shape]:
    """Return the namedtuples in a VALUE or an expression."""
    found: set[Shape] = set()
    match part:
        case {"namedtuple": str(name), "fields": dict(fields)} | ["namedtuple", str(name), dict(fields)]:
            found.add((name, tuple(fields)))
    children = part.values() if isinstance(part, Mapping) else part if isinstance(part, list) else ()
    for child in children:
        found |= shapes(child)
    return found


@contextmanager
def importable(classes: Iterable[Shape]) -> Iterator[None]:
    """Make the module, for as long as the context lasts; workers started in it find it too."""
    lines = [f"from {__name__} import make"]
    lines += [f"{_qualname(*shape)} = make{shape!r}" for shape in sorted(set(classes))]
    with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
        (Path(folder) / f"{MODULE}.py").write_text("\n".join(lines) + "\n")
        sys.path.append(folder)
        importlib.invalidate_caches()
        sys.modules.pop(MODULE, None)
        namedtuple_class.cache_clear()
        try:
            importlib.import_module(MODULE)
            yield
        finally:
            sys.path.remove(folder)
            sys.modules.pop(MODULE, None)
            namedtuple_class.cache_clear()


def _qualname(name: str, fields: tuple[str, ...]) -> str:
    return "__".join((name, *fields))
