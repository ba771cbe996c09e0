"""How much state an object has: for tests that it does not grow."""

from __future__ import annotations

import gc
from collections.abc import Sized

_CONTAINERS = (dict, list, set, frozenset, tuple)


def entries(*roots: object) -> int:
    """Return the entries of all containers that pipedist's objects among these and their parts have."""
    seen: set[int] = set()
    todo: list[object] = list(roots)
    count = 0
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(item, type):
            continue
        seen.add(id(item))
        if isinstance(item, Sized) and not isinstance(item, str | bytes):
            count += len(item)
        if isinstance(item, _CONTAINERS) or type(item).__module__.partition(".")[0] in (
            "pipedist",
            "collections",
        ):
            todo += gc.get_referents(item)
    return count
