"""Trees of arrays to frames and back, without copies of large arrays.

A payload is a list of frames. The first, its HEADER, is msgpack: the tree itself. msgpack's C code
writes the types that it knows (None, bool, int, float, str, bytes, list, dict); the encoder translates
the others:

- A tuple, namedtuple, dataclass, slice or range is a list that begins with a MARK (an
  extension type of one byte). A mark anywhere else is malformed.
- An int beyond 64 bits, a complex, a NumPy scalar and a small array are extension types that
  hold their bytes.
- A list of similar items (the results of a range of calls) is written as columns, so that one array
  stands for the arrays at one place of all items: `pipedist.protocol.columns`.
- An object array is a list too: a mark, kind, shape, and the parts of its cells (`pipedist.core.ragged`).
- An array of more than `INLINE_BYTES_MAX` is an extension type that names a frame and an
  offset. From `FRAME_BYTES_MIN` on it has a frame of its own, which IS the array's memory;
  those between are copied together into shared frames, because a frame costs more than a copy.

Received frames are checked before use: the header is parsed once without creating objects (so a list
that claims a billion elements must have them), then decoded; then every dtype, shape, offset and class
is checked against the frames. Nothing is unpickled.

Messages of a training loop often have the same header, because only the contents of their arrays change. The
layout of such a header is kept (`_Layout`): a later message with it is not parsed again, only its frames are checked.

All bits of values are kept: NaN payloads, -0.0, lone surrogates. Arrays become little-endian and
C-contiguous. `bytearray` and `memoryview` come back as `bytes`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgpack
import numpy as np

from pipedist.core import ragged, trees
from pipedist.core.types import Tree
from pipedist.errors import RemoteProtocolError
from pipedist.protocol.columns import SlotValues, fits, items_of, nodes_of, stacked_values_of
from pipedist.protocol.encoder import FLOAT, UnsendableError, encode, float_start
from pipedist.protocol.layout import (
    ARRAY_ALIGNMENT_BYTES,
    BIG_INT,
    COLUMNS,
    COMPLEX,
    IN_FRAME,
    INLINE,
    MARK,
    MARKS,
    NUMPY_BYTES,
    NUMPY_SCALAR,
    NUMPY_STR,
    OBJECTS,
    PAIR,
    PLACE,
    RANGE,
    RECORD,
    SLICE,
    TUPLE,
    Frame,
    UnsuitableTree,
    build_instance,
    check_nodes,
    find_class,
    parse_array,
)
from pipedist.protocol.limits import INT_BYTES_MAX, LIMITS, MessageLimits

__all__ = ["Frame", "UnsendableError", "decode", "encode"]

_UNCHECKED_BYTES_MAX: Final = 512  # not parsed in advance up to this size: false lengths take <= 2 MiB
_MARK_START: Final = msgpack.packb(TUPLE)[:2]  # of every mark: without it, no list is a tuple or record


def decode(
    frames: Sequence[bytes | bytearray | memoryview],
    *,
    may_import: bool = False,
    limits: MessageLimits = LIMITS,
    stacked: bool = False,
) -> Tree:
    """Return the tree that `encode` turned into frames; arrays are read-only, aligned, C-contiguous views.

    With `may_import`, the modules of dataclasses and namedtuples are imported: only for frames of a trusted peer.
    Otherwise they must have been imported in this process. With `stacked`, dicts of one slot with similar arrays
    are returned as SlotValues of one array. Raise RemoteProtocolError if `encode` would not have written
    these frames, or a class is unknown in this process.
    """
    first = frames[0] if frames else b""
    key = bytes(first) if 0 < memoryview(first).nbytes <= _UNCHECKED_BYTES_MAX else b""
    known: _Layout | bool | None = True
    if len(frames) > 1:
        known = _layouts.get(key) if key else True
        if type(known) is _Layout and (tree := known.tree(frames, limits)) is not None:
            return tree
    elif key and len(key) <= limits.header_bytes_max and (tree := _small_tree(key)) is not None:
        return tree
    try:
        decoder = _Decoder(frames, may_import, limits, stacked)
        tree = decoder.tree()
        if known is None or known is False:
            _learn(key, decoder.arrays, tree, frames=len(frames) - 1, is_first=known is None)
        return tree
    except _FAULTS as error:
        reason = str(error) or type(error).__name__
        raise RemoteProtocolError(f"malformed payload: {reason}") from error


_FAULTS: Final = (
    UnsuitableTree,
    ValueError,
    TypeError,
    OverflowError,
    RecursionError,
    MemoryError,
    msgpack.exceptions.UnpackException,
)


def _small_tree(header: bytes) -> Tree | None:
    """Return the tree of a short header, without frames; None: the decoder handles it, or raises its error."""
    slot = _float_slots.get(header[: -FLOAT.size])
    if slot is not None:
        return [{slot: FLOAT.unpack_from(header, len(header) - FLOAT.size)[0]}]
    if header[0] == COLUMNS or _MARK_START in header:
        return None
    try:
        tree = msgpack.unpackb(
            header, ext_hook=_extension, strict_map_key=False, unicode_errors="surrogatepass"
        )
        check_nodes(tree)
        _learn_float(header, tree)
    except _FAULTS:
        return None
    return tree


_FLOAT_SLOTS_MAX: Final = 64
_float_slots: dict[bytes, str] = {}
"""The slot of results that are one float, such as a loss, by what comes before the float's bytes."""


def _learn_float(header: bytes, tree: Tree) -> None:
    if type(tree) is not list or len(tree) != 1 or type(tree[0]) is not dict or len(tree[0]) != 1:
        return
    [(slot, value)] = tree[0].items()
    if type(slot) is not str or type(value) is not float or len(_float_slots) >= _FLOAT_SLOTS_MAX:
        return
    if header[: -FLOAT.size] == float_start(slot):
        _float_slots[header[: -FLOAT.size]] = slot


class _Decoder:
    """The decoder of one payload; its methods raise ValueError for input that `encode` does not write."""

    __slots__ = ("_classes", "_frames", "_header", "_may_import", "_stacked", "_unused", "arrays")

    def __init__(
        self,
        frames: Sequence[bytes | bytearray | memoryview],
        may_import: bool,
        limits: MessageLimits,
        stacked: bool,
    ) -> None:
        if not frames:
            raise ValueError("no frames")
        if len(frames) > limits.frames_max:
            raise ValueError(f"{len(frames)} frames, the limit is {limits.frames_max}")
        views = [memoryview(frame) for frame in frames]
        self._header = views[0].cast("B") if views[0].format != "B" else views[0]
        self._frames = [view.toreadonly().cast("B") for view in views[1:]] if len(views) > 1 else []
        self.arrays: list[tuple[Any, _Place]] = []  # those in frames, and where they are
        if self._header.nbytes > limits.header_bytes_max:
            raise ValueError(f"a header of {self._header.nbytes} bytes, limit {limits.header_bytes_max}")
        self._unused = set(range(len(self._frames)))
        self._may_import = may_import
        self._stacked = stacked
        self._classes: dict[str, tuple[type, tuple[str, ...]]] = {}

    def tree(self) -> Tree:
        header = self._header
        if header.nbytes and header[0] == COLUMNS:
            return self._items(self._unpacked(header[1:]))
        return self._unpacked(header)

    def _unpacked(self, header: memoryview) -> Tree:
        if header.nbytes <= _UNCHECKED_BYTES_MAX:
            packed: bytes | memoryview = bytes(header)
            has_marks = _MARK_START in packed
        else:
            _check_syntax(header)
            packed, has_marks = header, True
        tree = msgpack.unpackb(
            packed,
            ext_hook=self._extension,
            list_hook=self._list if has_marks else None,
            strict_map_key=False,
            unicode_errors="surrogatepass",
        )
        if self._unused:
            raise ValueError(f"frame {min(self._unused)} belongs to no array")
        check_nodes(tree)
        return tree

    def _items(self, columns: Tree) -> list[Any] | SlotValues[np.ndarray[Any, Any]]:
        if type(columns) is not list or len(columns) != 2 or type(columns[0]) is not int or columns[0] < 0:
            raise ValueError("malformed columns")
        count, column = columns
        nodes = nodes_of(column)
        if not fits(nodes, count, self._header.nbytes + sum(frame.nbytes for frame in self._frames)):
            raise ValueError(f"columns of {count} items of {nodes} nodes, too many for its size")
        found = stacked_values_of(column, count) if self._stacked else None
        return items_of(column, count) if found is None else found

    def _list(self, items: list[Any]) -> Any:
        if not items or type(items[0]) is not msgpack.ExtType:
            return items
        mark = items[0]
        if mark == TUPLE:
            return tuple(items[1:])
        if mark == RECORD:
            return self._record(items)
        parts = items[1:]
        if mark == OBJECTS and len(parts) > 2 and type(parts[0]) is int and type(parts[1]) is list:
            if parts[0] == ragged.NESTED:
                check_nodes(parts)
            return ragged.join(*parts)
        if len(parts) != 3:
            raise ValueError(f"a slice or range of {len(parts)} parts")
        types = set(map(type, parts))
        if mark == SLICE and types <= {int, type(None)}:
            return slice(*parts)
        if mark == RANGE and types == {int}:
            return range(*parts)
        raise ValueError("a slice or range whose parts are not ints")

    def _record(self, items: list[Any]) -> Any:
        text = items[1] if len(items) > 1 else None
        if type(text) is not str:
            raise ValueError("a record without the name of its class")
        found = self._classes.get(text)
        if found is None:
            found = self._classes[text] = find_class(text, may_import=self._may_import)
        return build_instance(*found, items[2:])

    def _extension(self, code: int, data: bytes) -> Any:
        return self._array_in_frame(data) if code == IN_FRAME else _extension(code, data)

    def _array_in_frame(self, data: bytes) -> np.ndarray[Any, Any]:
        (dtype, shape, size_bytes), at = parse_array(data)
        if len(data) != at + PLACE.size:
            raise ValueError("an array whose place is malformed")
        number, offset = PLACE.unpack_from(data, at)
        if number >= len(self._frames):
            raise ValueError(f"an array in frame {number} of {len(self._frames)}")
        frame = self._frames[number]
        if offset + size_bytes > frame.nbytes or offset % ARRAY_ALIGNMENT_BYTES:
            raise ValueError(
                f"an array {dtype}{list(shape)} at byte {offset} of a frame of {frame.nbytes} bytes"
            )
        self._unused.discard(number)
        place = _Place(dtype, shape, number, offset, offset + size_bytes)
        array = place.array(frame)
        self.arrays.append((array, place))
        return array


def _extension(code: int, data: bytes) -> Any:
    """Return the value of an extension type other than an array in a frame."""
    if code == INLINE:
        (dtype, shape, size_bytes), at = parse_array(data)
        if len(data) != at + size_bytes:
            raise ValueError(f"an array {dtype}{list(shape)} of {len(data) - at} bytes")
        array: np.ndarray[Any, Any] = np.ndarray(shape, dtype, data, at)
        return _checked(array) if dtype.kind in "bU" else array
    if code == MARK:
        if len(data) != 1 or data[0] >= len(MARKS):
            raise ValueError("an unknown mark")
        return MARKS[data[0]]
    if code == NUMPY_SCALAR:
        (dtype, shape, size_bytes), at = parse_array(data)
        if shape or len(data) != at + size_bytes or dtype.kind in "US":
            raise ValueError("a malformed NumPy scalar")
        scalar: np.ndarray[Any, Any] = np.ndarray((), dtype, data, at)
        return (_checked(scalar) if dtype.kind == "b" else scalar)[()]
    if code == BIG_INT:
        if not 9 <= len(data) <= INT_BYTES_MAX:
            raise ValueError(f"an int of {len(data)} bytes")
        return int.from_bytes(data, "little", signed=True)
    if code == COMPLEX:
        if len(data) != PAIR.size:
            raise ValueError(f"a complex of {len(data)} bytes")
        return complex(*PAIR.unpack(data))
    if code == NUMPY_STR:
        return np.str_(data.decode("utf-8", "surrogatepass"))
    if code == NUMPY_BYTES:
        return np.bytes_(data)
    raise ValueError(f"unknown extension type {code}")


class _Place(NamedTuple):
    """An array in a frame."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    frame: int  # its number, the first one after the header is 0
    offset: int
    end: int

    def array(self, frame: memoryview) -> np.ndarray[Any, Any]:
        """Return the array, or raise ValueError if a value is not one of its dtype."""
        array: np.ndarray[Any, Any] = np.ndarray(self.shape, self.dtype, frame, self.offset)
        if not array.flags.aligned:
            array = array.copy()
            array.flags.writeable = False
        return _checked(array)


class _Layout(NamedTuple):
    """The content of a header with only plain containers and leaves, and arrays in frames."""

    treedef: trees.Treedef
    leaves: tuple[Any, ...]  # a `_Place` for each array
    frames: int  # without the header

    def tree(self, frames: Sequence[bytes | bytearray | memoryview], limits: MessageLimits) -> Tree | None:
        """Return the tree of frames that fit, else None: the decoder raises its error."""
        if len(frames) - 1 != self.frames or len(frames) > limits.frames_max:
            return None
        views = [memoryview(frame).toreadonly().cast("B") for frame in frames[1:]]
        leaves: list[Any] = []
        for leaf in self.leaves:
            if type(leaf) is _Place:
                view = views[leaf.frame]
                if leaf.end > view.nbytes:
                    return None
                try:
                    leaf = leaf.array(view)
                except ValueError:
                    return None
            leaves.append(leaf)
        return trees.unflatten(self.treedef, leaves)


_LAYOUTS_MAX: Final = 64
_layouts: dict[bytes, _Layout | bool] = {}  # by header; False: it was seen once, True: it has no layout
_PLAIN: Final = frozenset({bool, int, float, complex, str, bytes})  # immutable: trees may share such a leaf


def _learn(
    header: bytes, arrays: list[tuple[Any, _Place]], tree: Tree, *, frames: int, is_first: bool
) -> None:
    """Keep the layout of a header that is seen for the second time."""
    if is_first:
        if len(_layouts) >= _LAYOUTS_MAX:
            _layouts.clear()
        _layouts[header] = False
        return
    places = {id(array): place for array, place in arrays}
    leaves, treedef = trees.flatten(tree)
    found = [places.get(id(leaf), leaf) for leaf in leaves]
    is_plain = _has_plain_nodes(tree) and all(type(leaf) is _Place or type(leaf) in _PLAIN for leaf in found)
    _layouts[header] = _Layout(treedef, tuple(found), frames) if is_plain else True


def _has_plain_nodes(tree: Tree) -> bool:
    if type(tree) is dict:
        return all(map(_has_plain_nodes, tree.values()))
    if type(tree) in (list, tuple):
        return all(map(_has_plain_nodes, tree))
    return tree is None or type(tree) in _PLAIN or type(tree) is np.ndarray


def _check_syntax(header: memoryview) -> None:
    """Parse without creating objects, to check every length in the header."""
    unpacker = msgpack.Unpacker(None, max_buffer_size=max(header.nbytes, 1))
    unpacker.feed(header)
    try:
        unpacker.skip()
    except msgpack.OutOfData:
        raise ValueError("the header is cut off") from None


def _checked(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Reject bytes that are not a value of their dtype; NumPy does not."""
    kind = array.dtype.kind
    if kind == "b" and array.size and array.view(np.uint8).max() > 1:
        raise ValueError("a bool array with a byte that is neither 0 nor 1")
    if kind == "U" and array.size and math.prod(array.shape):
        points = np.ndarray((array.nbytes // 4,), np.dtype("<u4"), array)
        if points.max() > 0x10FFFF:
            raise ValueError("a str array with a code point beyond U+10FFFF")
    return array
