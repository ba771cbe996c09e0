"""Isolation of values between user functions, and on their way out of the process.

`as_readonly` protects a value that a function is about to receive: arrays are C-contiguous and read-only, containers
belong to the function. `take_ownership` protects a result that waits to be sent: nothing that user code still holds
can change it. Without it, a function that returns one reused buffer would give results that depend on how calls are
bundled. It converts arrays of other libraries to NumPy (`pipedist.core.dlpack`). Frames become trees of columns in
both (`pipedist.datasets.frames`): a stage that reads the value of another one gets what the driver would get.
"""

from __future__ import annotations

import datetime
import sys

import numpy as np

from pipedist.core import dlpack, ragged, trees
from pipedist.core.types import Tree
from pipedist.protocol.encoder import UnsendableError
from pipedist.protocol.limits import ELEMENTS_MAX

COPIED_BYTES = 512  # copying an array of this size takes less time than to decide whether it must be copied

_NUMBERS = frozenset({int, float, bool})
_IMMUTABLE = frozenset({int, float, str, bool, bytes, complex, type(None)})
_NATIVE = frozenset({np.ndarray, *_IMMUTABLE})
_CONVERTED = (dict, datetime.date, datetime.timedelta)


def as_readonly(value: Tree) -> Tree:
    """Return `value` in new containers, with read-only C-contiguous arrays."""
    if type(value) in _IMMUTABLE:
        return value
    return trees.tree_map(_read_only, value)


def without_frames(value: Tree) -> Tree:
    """Return a tree with the columns of each frame in its place; raise UnsendableError if a frame has none.

    A `Counter` becomes a dict, and Python's dates and durations become NumPy's.
    """
    if type(value) in _NATIVE:
        return value
    leaves, treedef = trees.flatten(value)
    if not any(map(_is_converted, map(type, leaves))):
        return value
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, dict):
            leaves[index] = without_frames(dict(leaf))
        elif isinstance(leaf, datetime.date | datetime.timedelta):
            leaves[index] = _of_numpy(leaf, treedef, index)
        elif _is_converted(type(leaf)):
            from pipedist.datasets.frames import FrameError, columns_of  # rarely needed

            try:
                leaves[index] = columns_of(leaf)
            except FrameError as error:
                raise UnsendableError(f"can't send {error}, {dlpack.place_of(treedef, index)}") from error
    return trees.unflatten(treedef, leaves)


def _of_numpy(leaf: datetime.date | datetime.timedelta, treedef: trees.Treedef, index: int) -> np.generic:
    """Return a date or duration of Python as one of NumPy."""
    if isinstance(leaf, datetime.timedelta):
        return np.timedelta64(leaf)
    if getattr(leaf, "tzinfo", None) is not None:
        place = dlpack.place_of(treedef, index)
        raise UnsendableError(
            f"can't send a datetime with a time zone, {place}; "
            "t.astimezone(datetime.UTC).replace(tzinfo=None) is the same time in UTC, without one"
        )
    return np.datetime64(leaf)


def _is_converted(cls: type) -> bool:
    """Return whether `without_frames` converts the instances of a leaf's class."""
    return cls not in _NATIVE and (issubclass(cls, _CONVERTED) or is_frame(cls))


def is_frame(cls: type) -> bool:
    """Return whether the instances of a class are frames, tables or columns of another library."""
    if hasattr(cls, "__arrow_c_stream__") or hasattr(cls, "__arrow_c_array__"):
        return True
    return cls.__module__.partition(".")[0] == "pandas" and hasattr(cls, "iloc")  # a Series of pandas 2


def take_ownership(box: list[Tree], objects_max: int = ELEMENTS_MAX) -> tuple[Tree, int]:
    """Empty a list that holds a value; return it unchangeable by other code, and its size in bytes.

    A larger array is copied only if there is another reference to it, or to the memory that it is a view of; the
    caller's own reference would count, hence the list. Raise UnsendableError, with the path, for more than
    `objects_max` leaves and containers, or an array that NumPy cannot convert.
    """
    value = box.pop()
    kind = type(value)
    if kind is np.ndarray and (bytes_ := value.nbytes) <= COPIED_BYTES and value.dtype.kind != "O":
        return value.copy(), bytes_  # in C order
    if kind in _IMMUTABLE:
        return value, len(value) + 16 if kind is str or kind is bytes else 16
    bare = kind is np.ndarray
    leaves, treedef = ([value], None) if bare else trees.flatten(value)  # the common case, cheaper
    del value
    if treedef is not None:
        check_objects(treedef, objects_max)
    kinds = set(map(type, leaves))
    if not _NATIVE.issuperset(kinds) and any(map(_is_converted, kinds)):
        box = [without_frames(leaves[0] if treedef is None else trees.unflatten(treedef, leaves))]
        del leaves
        return take_ownership(box, objects_max)
    if treedef is not None and _NUMBERS.issuperset(kinds):
        return trees.unflatten(treedef, leaves), 16 * len(leaves)
    size = 0
    for index in range(len(leaves)):
        kind = type(leaves[index])
        is_shared = kind is np.ndarray and not _is_exclusive(leaves, index)
        if is_shared or issubclass(kind, np.memmap):  # other processes may change a file's memory
            leaves[index] = ragged.owned(leaves[index])
        elif kind in (bytearray, memoryview):
            leaves[index] = bytes(leaves[index])
        elif dlpack.is_foreign(kind):
            leaves[index] = _to_numpy(leaves[index], treedef, index)
        size += _size(leaves[index])
    return leaves[0] if treedef is None else trees.unflatten(treedef, leaves), size


def check_objects(treedef: trees.Treedef, objects_max: int) -> None:
    """Raise UnsendableError if a value has more leaves and containers than `objects_max`."""
    if treedef.num_nodes > objects_max:
        raise UnsendableError(
            f"it has {treedef.num_nodes:,} numbers, strings and containers, the limit is {objects_max:,}; "
            "return an array, such as np.array(values), or a dict of arrays"
        )


def _to_numpy(leaf: trees.Leaf, treedef: trees.Treedef | None, index: int) -> trees.Leaf:
    try:
        return np.array(dlpack.to_numpy(leaf), order="C", copy=True)
    except dlpack.ForeignArrayError as error:
        raise UnsendableError(f"can't send {error}, {dlpack.place_of(treedef, index)}") from error


def _read_only(leaf: trees.Leaf) -> trees.Leaf:
    if type(leaf) is not np.ndarray and not isinstance(leaf, np.memmap):
        return as_readonly(without_frames(leaf)) if _is_converted(type(leaf)) else leaf
    if leaf.flags.c_contiguous and not leaf.flags.writeable and leaf.dtype.kind != "O":
        return leaf
    return ragged.frozen(np.asarray(leaf, order="C"))


def _references(leaves: list[trees.Leaf], index: int) -> int:
    return sys.getrefcount(leaves[index])


def _base_references(leaves: list[trees.Leaf], index: int) -> int:
    return sys.getrefcount(leaves[index].base)


def _is_exclusive(leaves: list[trees.Leaf], index: int) -> bool:
    """Return whether the list has the only reference to memory in C order."""
    if _references(leaves, index) > _ALONE or not leaves[index].flags.c_contiguous:
        return False
    if leaves[index].dtype.kind == "O":  # other code may hold its cells
        return False
    if leaves[index].base is None:
        return bool(leaves[index].flags.owndata)
    return (
        type(leaves[index].base) is np.ndarray
        and bool(leaves[index].base.flags.owndata)
        and _base_references(leaves, index) <= _BASE_ALONE
    )


def _size(leaf: trees.Leaf) -> int:
    if isinstance(leaf, np.ndarray):
        return ragged.size_bytes(leaf)
    if isinstance(leaf, np.generic):
        return int(leaf.nbytes)
    if isinstance(leaf, (str, bytes)):
        return len(leaf) + 16
    return 16


# The reference count of an object that only a list holds depends on the version of the interpreter (a call
# itself may add to the count), so it is measured with the same code that checks it.
_ALONE = _references([np.empty(1)], 0)
_BASE_ALONE = _base_references([np.empty(2).reshape(1, 2)], 0)
