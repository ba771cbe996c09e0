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

All bits of values are kept: NaN payloads, -0.0, lone surrogates. Arrays become little-endian and
C-contiguous. `bytearray` and `memoryview` come back as `bytes`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import msgpack
import numpy as np

from pipedist.core import ragged
from pipedist.core.types import Tree
from pipedist.errors import RemoteProtocolError
from pipedist.protocol.columns import fits, items_of, nodes_of
from pipedist.protocol.encoder import UnsendableError, encode
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
) -> Tree:
    """Return the tree that `encode` turned into frames; arrays are read-only, aligned, C-contiguous views.

    With `may_import`, the modules of dataclasses and namedtuples are imported: only for frames of a trusted peer.
    Otherwise they must have been imported in this process. Raise RemoteProtocolError if `encode` would not have written
    these frames, or a class is unknown in this process.
    """
    try:
        return _Decoder(frames, may_import, limits).tree()
    except (
        UnsuitableTree,
        ValueError,
        TypeError,
        OverflowError,
        RecursionError,
        MemoryError,
        msgpack.exceptions.UnpackException,
    ) as error:
        reason = str(error) or type(error).__name__
        raise RemoteProtocolError(f"malformed payload: {reason}") from error


class _Decoder:
    """The decoder of one payload; its methods raise ValueError for input that `encode` does not write."""

    __slots__ = ("_classes", "_frames", "_header", "_may_import", "_unused")

    def __init__(
        self, frames: Sequence[bytes | bytearray | memoryview], may_import: bool, limits: MessageLimits
    ) -> None:
        if not frames:
            raise ValueError("no frames")
        if len(frames) > limits.frames_max:
            raise ValueError(f"{len(frames)} frames, the limit is {limits.frames_max}")
        views = [memoryview(frame) for frame in frames]
        self._header = views[0].cast("B") if views[0].format != "B" else views[0]
        self._frames = [view.toreadonly().cast("B") for view in views[1:]]
        if self._header.nbytes > limits.header_bytes_max:
            raise ValueError(f"a header of {self._header.nbytes} bytes, limit {limits.header_bytes_max}")
        self._unused = set(range(len(self._frames)))
        self._may_import = may_import
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

    def _items(self, columns: Tree) -> list[Any]:
        if type(columns) is not list or len(columns) != 2 or type(columns[0]) is not int or columns[0] < 0:
            raise ValueError("malformed columns")
        count, column = columns
        nodes = nodes_of(column)
        if not fits(nodes, count, self._header.nbytes + sum(frame.nbytes for frame in self._frames)):
            raise ValueError(f"columns of {count} items of {nodes} nodes, too many for its size")
        return items_of(column, count)

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
        if code == INLINE:
            (dtype, shape, size_bytes), at = parse_array(data)
            if len(data) != at + size_bytes:
                raise ValueError(f"an array {dtype}{list(shape)} of {len(data) - at} bytes")
            array: np.ndarray[Any, Any] = np.ndarray(shape, dtype, data, at)
            return _checked(array) if dtype.kind in "bU" else array
        if code == IN_FRAME:
            return self._array_in_frame(data)
        if code == MARK:
            if len(data) != 1 or data[0] >= len(MARKS):
                raise ValueError("an unknown mark")
            return msgpack.ExtType(MARK, data)
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
        array: np.ndarray[Any, Any] = np.ndarray(shape, dtype, frame, offset)
        if not array.flags.aligned:
            array = array.copy()
            array.flags.writeable = False
        return _checked(array)


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
