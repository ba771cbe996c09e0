"""What both ends of the codec must agree on: extension types, thresholds, the shape of a tree."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterable
from itertools import chain
from typing import Any, Final, TypeAlias

import msgpack
import numpy as np

from pipedist.program import Tree
from pipedist.transport import classes
from pipedist.transport.config import DEPTH_MAX, ELEMENTS_MAX, KIB, MIB

Frame: TypeAlias = bytes | memoryview

INLINE_BYTES_MAX: Final = 512
FRAME_BYTES_MIN: Final = 64 * KIB
SHARED_FRAME_BYTES_MAX: Final = 1 * MIB
SHARED_ALIGNMENT_BYTES: Final = 64

MARK, BIG_INT, COMPLEX, INLINE, IN_FRAME, NUMPY_SCALAR, NUMPY_STR, NUMPY_BYTES = range(1, 9)
TUPLE, RECORD, SLICE, RANGE = (msgpack.ExtType(MARK, bytes([kind])) for kind in range(4))
PLACE: Final = struct.Struct("<IQ")  # frame, offset in bytes
PAIR: Final = struct.Struct("<dd")
_SCALARS: Final = frozenset({bool, int, float, complex, str, bytes, type(None)})
_SMALL_NODES: Final = 48  # fewer than DEPTH_MAX: these can't be nested too deeply
_LEAVES: Final = _SCALARS | {np.ndarray, slice, range, bytearray, memoryview}
KEYS: Final = frozenset({str, int})
COLUMNS: Final = 0xC1
"""First byte of a header that holds columns (`pipedist.transport.columns`); msgpack never uses it."""

FOREIGN: Final = frozenset({msgpack.ExtType, msgpack.Timestamp})
"""Types that msgpack encodes by itself; when read, a mark out of place, or a timestamp."""


class UnsuitableTree(Exception):
    """A tree can't be encoded; the text names the value, but not its place."""


class TreeTooLarge(UnsuitableTree):
    """A tree has more elements than anybody would want to walk."""


def children_of(node: Any) -> Iterable[Any]:
    """Return the values directly below a node; nothing for a leaf."""
    cls = type(node)
    if cls is list or cls is tuple:
        return node  # type: ignore[no-any-return]
    if cls is dict:
        return node.values()  # type: ignore[no-any-return]
    if classes.is_namedtuple(cls):
        return node  # type: ignore[no-any-return]
    if dataclasses.is_dataclass(cls):
        return [getattr(node, field.name, None) for field in dataclasses.fields(cls)]
    return ()


def _is_small(tree: Tree) -> bool:
    """Tell of a tree of few nodes, all of them containers and leaves of plain types, that it is right.

    For the few nodes of one step's message, this is several times as fast as going level by level.
    """
    left = _SMALL_NODES
    pending = [tree]
    while pending:
        node = pending.pop()
        cls = type(node)
        if cls in _LEAVES:
            continue
        if cls is dict:
            for key in node:
                if type(key) not in KEYS:
                    return False
            left -= len(node)
            if left < 0:
                return False
            pending += node.values()
        elif cls is list or cls is tuple:
            left -= len(node)
            if left < 0:
                return False
            pending += node
        else:
            return False
    return True


def check_nodes(tree: Tree) -> None:
    """Check depth, number of elements and dict keys, level by level.

    Sets of types keep the scan at C speed: it costs about 20 ns an element.

    Raises:
        UnsuitableTree: it is too deep or too large (also where a shared node would be written
            again and again), or a dict has other keys than str and int.
    """
    if type(tree) in _LEAVES or _is_small(tree):
        return
    level = [tree]
    count = 0
    for _ in range(DEPTH_MAX + 1):
        if not level:
            return
        types = set(map(type, level))
        if types & FOREIGN:
            raise UnsuitableTree("a value of the msgpack library, or a mark out of place")
        dicts = [node for node in level if type(node) is dict] if dict in types else []
        if not KEYS.issuperset(set(map(type, chain.from_iterable(dicts)))):
            raise UnsuitableTree("a dict whose keys are not all str or int")
        children = list(chain.from_iterable(map(children_of, level)))
        count += len(children)
        if count > ELEMENTS_MAX:
            raise TreeTooLarge(f"a tree of more than {ELEMENTS_MAX} elements")
        below = {cls for cls in set(map(type, children)) - _LEAVES if not issubclass(cls, np.generic)}
        level = [child for child in children if type(child) in below] if below else []
    raise UnsuitableTree(f"a nest of more than {DEPTH_MAX} levels")
