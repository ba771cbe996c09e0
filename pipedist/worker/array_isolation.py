"""What happens to a value between user functions, and on its way out of the process.

`guard` protects a value that a function is about to receive: arrays are C-contiguous and
read-only, containers are the function's own. `own` protects a result that waits to be sent:
nothing that user code still holds can change it any more. Without it, a function that returns
one reused buffer would give results that depend on how calls are bundled. Arrays of other libraries
become NumPy's there (`pipedist.core.dlpack`).
"""

from __future__ import annotations

import sys

import numpy as np

from pipedist.core import dlpack, trees
from pipedist.core.types import Tree
from pipedist.protocol.encoder import UnsendableError

_COPIED_BYTES = 512
"""To copy so small an array takes less time than to find out whether it must be."""

_IMMUTABLE = (int, float, str, bool, bytes, complex, type(None))


def guard(value: Tree) -> Tree:
    """Return `value` for a function to read: own containers, read-only C-contiguous arrays."""
    if type(value) in _IMMUTABLE:
        return value
    return trees.tree_map(_read_only, value)


def own(box: list[Tree]) -> tuple[Tree, int]:
    """Return a value that nobody else can change, and its size in bytes.

    An array of some size is copied only if somebody else holds it, or memory that it is a view of.

    Args:
        box: a list that holds the value, and is emptied: so that the caller's reference does
            not count as somebody else's.

    Returns:
        The same tree in own containers, and the approximate number of bytes that it takes.

    Raises:
        UnsendableError: another library's array that NumPy can't have; the text has its path.
    """
    value = box.pop()
    kind = type(value)
    if kind in _IMMUTABLE:
        return value, _size(value)
    if kind is np.ndarray and value.nbytes <= _COPIED_BYTES:
        return np.array(value, order="C", copy=True), value.nbytes
    bare = kind is np.ndarray
    leaves, treedef = ([value], None) if bare else trees.flatten(value)  # the common case, cheaper
    del value
    size = 0
    for index in range(len(leaves)):
        kind = type(leaves[index])
        is_shared = kind is np.ndarray and not _is_exclusive(leaves, index)
        if is_shared or issubclass(kind, np.memmap):  # a file's memory is whoever's has the file
            leaves[index] = np.array(leaves[index], order="C", copy=True)
        elif kind in (bytearray, memoryview):
            leaves[index] = bytes(leaves[index])
        elif dlpack.is_foreign(kind):
            leaves[index] = _taken(leaves[index], treedef, index)
        size += _size(leaves[index])
    return leaves[0] if treedef is None else trees.unflatten(treedef, leaves), size


def _taken(leaf: trees.Leaf, treedef: trees.Treedef | None, index: int) -> trees.Leaf:
    try:
        return np.array(dlpack.to_numpy(leaf), order="C", copy=True)
    except dlpack.ForeignArrayError as error:
        raise UnsendableError(f"can't send {error}, {dlpack.place_of(treedef, index)}") from error


def _read_only(leaf: trees.Leaf) -> trees.Leaf:
    if type(leaf) is not np.ndarray and not isinstance(leaf, np.memmap):
        return leaf
    if leaf.flags.c_contiguous and not leaf.flags.writeable:
        return leaf
    view = np.asarray(leaf, order="C").view()
    view.flags.writeable = False
    return view


def _references(leaves: list[trees.Leaf], index: int) -> int:
    return sys.getrefcount(leaves[index])


def _base_references(leaves: list[trees.Leaf], index: int) -> int:
    return sys.getrefcount(leaves[index].base)


def _is_exclusive(leaves: list[trees.Leaf], index: int) -> bool:
    """Whether the list holds the only way to the array's memory, in C order."""
    if _references(leaves, index) > _ALONE or not leaves[index].flags.c_contiguous:
        return False
    if leaves[index].base is None:
        return bool(leaves[index].flags.owndata)
    return (
        type(leaves[index].base) is np.ndarray
        and bool(leaves[index].base.flags.owndata)
        and _base_references(leaves, index) <= _BASE_ALONE
    )


def _size(leaf: trees.Leaf) -> int:
    if isinstance(leaf, (np.ndarray, np.generic)):
        return int(leaf.nbytes)
    if isinstance(leaf, (str, bytes)):
        return len(leaf) + 16
    return 16


# How many references an object has that only a list holds depends on the interpreter's version
# (what a call itself adds to the count), so it is measured on the very code that asks.
_ALONE = _references([np.empty(1)], 0)
_BASE_ALONE = _base_references([np.empty(2).reshape(1, 2)], 0)
