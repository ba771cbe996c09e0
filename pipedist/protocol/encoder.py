"""The encoder of trees into frames; see `pipedist.protocol.codec`."""

from __future__ import annotations

import dataclasses
import inspect
import struct
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

import msgpack
import numpy as np

from pipedist.core import ragged
from pipedist.core.misuse_hints import conversion_hint
from pipedist.core.types import Tree, is_record
from pipedist.errors import PipedistError
from pipedist.protocol.columns import ITEMS_MIN, SlotValues, Unlike, columns_of, fits, nodes_of
from pipedist.protocol.layout import (
    BIG_INT,
    COLUMNS,
    COMPLEX,
    DICTS,
    FOREIGN,
    FRAME_BYTES_MIN,
    IN_FRAME,
    INLINE,
    INLINE_BYTES_MAX,
    KEYS,
    NUMPY_BYTES,
    NUMPY_SCALAR,
    NUMPY_STR,
    OBJECTS,
    PAIR,
    PLACE,
    RANGE,
    RECORD,
    SHARED_ALIGNMENT_BYTES,
    SHARED_FRAME_BYTES_MAX,
    SLICE,
    TUPLE,
    ClassNotFound,
    Frame,
    TreeTooLarge,
    UnsuitableTree,
    UnsupportedArray,
    check_nodes,
    children_of,
    class_signature,
    describe_array,
    is_namedtuple,
)
from pipedist.protocol.limits import DEPTH_MAX, INT_BYTES_MAX, KIB, LIMITS

_COLUMNS_START: Final = bytes([COLUMNS])
_PLAIN: Final = frozenset({float, bool, type(None)})
_ADVICE: Final = "send arrays, numbers, str, bytes, None, or dict, list, tuple, dataclass of them"


class UnsendableError(PipedistError, TypeError):
    """A value in a tree can't be serialized.

    The text names its type and its path.
    """


def encode(tree: Tree | SlotValues[list[Any]]) -> list[Frame]:
    """Turn a tree into frames for `decode`: a header and the bytes of its larger arrays.

    A tree is a nested dict (keys str or int), list, tuple, namedtuple or dataclass; leaves are arrays (bool, numbers,
    complex, str, bytes, datetime64, timedelta64, bfloat16; objects as `pipedist.core.ragged` defines them), NumPy
    scalars, int, float, complex, bool, str, bytes, slice, range, None. Frames of 64 KiB and more are views of the
    arrays' own memory: it must not change before they are sent. Raise UnsendableError, with the path, for other
    values, a tree deeper than DEPTH_MAX, or a frame that exceeds the limits.
    """
    if type(tree) is SlotValues:
        found = _encode_columns(tree) if len(tree) >= ITEMS_MIN else None
        return encode(list(tree)) if found is None else found
    if type(tree) is list and len(tree) == 1 and type(item := tree[0]) is dict and len(item) == 1:
        [(key, value)] = item.items()
        # a result that is one number: the common case, cheaper
        if type(key) is str and type(value) in _PLAIN:
            if type(value) is float and len(key) <= _SLOT_CHARS_MAX:
                return [float_start(key) + FLOAT.pack(value)]
            return [msgpack.Packer(strict_types=True, unicode_errors="surrogatepass").pack(tree)]
    if type(tree) is list and len(tree) >= ITEMS_MIN:
        frames = _encode_columns(tree)
        if frames is not None:
            return frames
    encoder = _Encoder()
    try:
        check_nodes(tree)
        header = encoder.pack(tree)
        frames = encoder.finish(header)
    except (UnsuitableTree, ValueError, OverflowError, RecursionError) as error:
        raise _unsendable(tree, error) from None
    if len(header) > LIMITS.header_bytes_max:
        raise UnsendableError(
            f"a tree of {len(header)} bytes without its arrays, the limit is {LIMITS.header_bytes_max}; "
            "send arrays instead of lists of Python objects, or smaller steps"
        )
    if len(frames) > LIMITS.frames_max - 1:
        raise UnsendableError(
            f"a tree with {len(frames) - 1} large arrays, the limit is {LIMITS.frames_max - 2}; "
            "send fewer, or smaller steps"
        )
    return frames


FLOAT: Final = struct.Struct(">d")  # as msgpack writes it
_SLOT_CHARS_MAX: Final = 64


@lru_cache(maxsize=64)
def float_start(slot: str) -> bytes:
    """Return what comes before the float's bytes in the header of a result that is one float."""
    packer = msgpack.Packer(strict_types=True, unicode_errors="surrogatepass")
    start: bytes = packer.pack([{slot: 0.0}])[: -FLOAT.size]
    return start


_FORMS_MAX: Final = 64
_headers: dict[tuple[Any, ...], bytes] = {}  # of arguments, by form
_RAW_KINDS: Final = frozenset("biufc")  # of dtypes whose memory is sent as it is, in native order


def encode_arguments(values: list[Tree]) -> list[Frame]:
    """Return `encode([None, None, values, None])`, for the shard or (args, kwargs) of each call, or lists of them.

    In a loop only the contents of arrays change from step to step: a header is made once for each form, which is
    the dtypes and shapes of shards and positional arguments that are arrays: all in one shared frame, or each in its
    own.
    """
    form: list[Any] = []
    parts: list[Any] = []
    large: list[Frame] = []
    shared_bytes = 0
    for value in _calls_of(values, form):
        if type(value) is np.ndarray:
            arrays: tuple[Any, ...] = (value,)
            form.append(np.ndarray)
        elif type(value) is tuple and len(value) == 2 and type(value[0]) is tuple:
            arrays, kwargs = value
            if type(kwargs) is not dict or kwargs:
                return encode([None, None, values, None])
        else:
            return encode([None, None, values, None])
        for array in arrays:
            if (
                type(array) is not np.ndarray
                or array.dtype.kind not in _RAW_KINDS
                or not array.dtype.isnative
                or not array.flags.c_contiguous
                or (size_bytes := array.nbytes) <= INLINE_BYTES_MAX
            ):
                return encode([None, None, values, None])
            form.append((array.dtype, array.shape))
            if size_bytes >= FRAME_BYTES_MIN:
                large.append(array.reshape(-1).view(np.uint8).data.toreadonly())
            else:
                shared_bytes += size_bytes
                parts.append(array.data)
                if padding := -size_bytes % SHARED_ALIGNMENT_BYTES:
                    shared_bytes += padding
                    parts.append(b"\0" * padding)
        form.append(None)
    key = tuple(form)
    header = _headers.get(key)
    if header is not None:
        if large:
            return [header, *large]
        # The only array is sent from its own memory.
        return [header, parts[0].cast("B").toreadonly() if len(parts) == 1 else b"".join(parts)]
    frames = encode([None, None, values, None])
    is_uniform = not shared_bytes if large else 0 < shared_bytes <= SHARED_FRAME_BYTES_MAX
    if is_uniform and sys.byteorder == "little":
        if len(_headers) >= _FORMS_MAX:
            _headers.clear()
        _headers[key] = bytes(frames[0])
    return frames


def _calls_of(values: list[Tree], form: list[Any]) -> list[Tree]:
    """Return the calls of values that are lists of them, whose lengths are added to the form."""
    if not values or type(values[0]) is not list:
        return values
    calls: list[Tree] = []
    for value in values:
        if type(value) is not list:
            return [None]  # no call: rejected
        form.append(len(value))
        calls += value
    return calls


def _encode_columns(items: list[Any] | SlotValues[list[Any]]) -> list[Frame] | None:
    """Return the frames of a list of similar items as columns; None: it is not sent as columns."""
    encoder = _Encoder()
    try:
        column = columns_of(items)
        check_nodes(column)
        header = _COLUMNS_START + encoder.pack([len(items), column])
        frames = encoder.finish(header)
    except (Unlike, UnsuitableTree, ValueError, OverflowError, RecursionError):
        return None  # `encode` raises the error when it encodes the list as it is
    size_bytes = sum(frame.nbytes if type(frame) is memoryview else len(frame) for frame in frames)
    is_within = len(header) <= LIMITS.header_bytes_max and len(frames) < LIMITS.frames_max
    return frames if is_within and fits(nodes_of(column), len(items), size_bytes) else None


class _Encoder:
    """Collects the frames of one payload while msgpack writes its header."""

    __slots__ = ("_frames", "_shared", "_shared_bytes", "_shared_number")

    def __init__(self) -> None:
        self._frames: list[Frame] = []
        self._shared: list[Frame] = []
        self._shared_bytes = 0
        self._shared_number = 0

    def pack(self, tree: Tree) -> bytes:
        # Not an attribute: it refers to this object, and a cycle would keep the arrays alive.
        packer = msgpack.Packer(
            default=self._translate, strict_types=True, unicode_errors="surrogatepass", buf_size=4 * KIB
        )
        header: bytes = packer.pack(tree)
        return header

    def finish(self, header: bytes) -> list[Frame]:
        self._close_shared()
        return [header, *self._frames]

    def _translate(self, value: Any) -> Any:
        """Translate a value that msgpack does not know into one that it does."""
        cls = type(value)
        if cls is np.ndarray:
            return self._array(value)
        if cls is tuple:
            return [TUPLE, *value]
        if issubclass(cls, np.generic):
            return _numpy_scalar(value)
        translate = _TRANSLATE.get(cls)
        if translate is not None:
            return translate(value)
        if issubclass(cls, np.memmap):
            return self._array(value.view(np.ndarray))
        if is_namedtuple(cls):
            return [RECORD, _signature(cls)[0], *value]
        if is_record(cls):
            text, fields = _signature(cls)
            try:
                return [RECORD, text, *[getattr(value, name) for name in fields]]
            except AttributeError as error:
                raise UnsuitableTree(f"a {cls.__qualname__} whose field is missing: {error}") from None
        raise UnsuitableTree(_type_name(cls))

    def _array(self, array: np.ndarray[Any, Any]) -> msgpack.ExtType | list[Any]:
        if array.dtype.kind == "U":
            array = ragged.narrowed(array)
        if array.dtype.kind in "OT":
            return _objects(array.astype(object, copy=False))
        try:
            prefix, size_bytes, convert = describe_array(array.dtype, array.shape)
        except UnsupportedArray as error:
            raise UnsuitableTree(f"an array of {error}") from None
        if convert is not None:
            array = array.astype(convert)
        if size_bytes <= INLINE_BYTES_MAX:
            return _extension(INLINE, prefix + array.tobytes())
        if size_bytes > LIMITS.frame_bytes_max:
            raise UnsuitableTree(f"an array of {size_bytes} bytes, the limit is {LIMITS.frame_bytes_max}")
        if not array.flags.c_contiguous:
            array = array.copy(order="C")
        if array.ndim != 1:
            array = array.reshape(-1)
        view = array.view(np.uint8).data.toreadonly()
        if size_bytes >= FRAME_BYTES_MIN:
            place = PLACE.pack(len(self._frames), 0)
            self._frames.append(view)
        else:
            place = PLACE.pack(*self._share(view, size_bytes))
        return _extension(IN_FRAME, prefix + place)

    def _share(self, view: memoryview, size_bytes: int) -> tuple[int, int]:
        if self._shared_bytes + size_bytes > SHARED_FRAME_BYTES_MAX:
            self._close_shared()
        if not self._shared:
            self._shared_number = len(self._frames)
            self._frames.append(b"")  # keeps the number until the frame is full
        offset = self._shared_bytes
        padding = -size_bytes % SHARED_ALIGNMENT_BYTES
        self._shared += [view, b"\0" * padding]
        self._shared_bytes += size_bytes + padding
        return self._shared_number, offset

    def _close_shared(self) -> None:
        if self._shared:
            self._frames[self._shared_number] = b"".join(self._shared)
            self._shared = []
            self._shared_bytes = 0


def _extension(code: int, data: bytes) -> msgpack.ExtType:
    """Return an extension type, without the checks of its class: they cost more than the rest of an array."""
    return tuple.__new__(msgpack.ExtType, (code, data))


def _objects(array: np.ndarray[Any, Any]) -> list[Any]:
    try:
        kind, *parts = ragged.split(array)
    except ragged.UnlikeCells as error:
        raise UnsuitableTree(f"an array of {error}") from None
    if kind == ragged.NESTED:
        check_nodes(parts)
    return [OBJECTS, kind, list(array.shape), *parts]


def _big_int(value: int) -> msgpack.ExtType:
    size_bytes = value.bit_length() // 8 + 1
    if size_bytes > INT_BYTES_MAX:
        raise UnsuitableTree(f"an int of {size_bytes} bytes, the limit is {INT_BYTES_MAX}")
    return msgpack.ExtType(BIG_INT, value.to_bytes(size_bytes, "little", signed=True))


def _slice(value: slice) -> list[Any]:
    parts = [value.start, value.stop, value.step]
    if not {int, type(None)}.issuperset(map(type, parts)):
        raise UnsuitableTree("a slice whose parts are not int or None")
    return [SLICE, *parts]


_TRANSLATE: Final[dict[type, Callable[[Any], Any]]] = {
    defaultdict: dict,
    OrderedDict: dict,
    int: _big_int,
    complex: lambda value: msgpack.ExtType(COMPLEX, PAIR.pack(value.real, value.imag)),
    slice: _slice,
    range: lambda value: [RANGE, value.start, value.stop, value.step],
}


_plain_scalars: dict[type, bytes] = {}  # prefixes of the scalar types whose dtype is fixed and native


def _numpy_scalar(value: np.generic) -> msgpack.ExtType:
    prefix = _plain_scalars.get(type(value))
    if prefix is not None:
        return msgpack.ExtType(NUMPY_SCALAR, prefix + value.tobytes())
    if isinstance(value, np.str_):
        return msgpack.ExtType(NUMPY_STR, value.encode("utf-8", "surrogatepass"))
    if isinstance(value, np.bytes_):
        return msgpack.ExtType(NUMPY_BYTES, bytes(value))
    try:
        prefix, _, convert = describe_array(value.dtype, ())
    except UnsupportedArray as error:
        raise UnsuitableTree(f"a NumPy scalar of {error}") from None
    if convert is None and value.dtype.kind in "biufc":
        _plain_scalars[type(value)] = prefix
    data = value.tobytes() if convert is None else np.asarray(value).astype(convert).tobytes()
    return msgpack.ExtType(NUMPY_SCALAR, prefix + data)


def _signature(cls: type) -> tuple[str, tuple[str, ...]]:
    try:
        return class_signature(cls)
    except ClassNotFound as error:
        raise UnsuitableTree(f"an instance of {error}") from None


def _type_name(cls: type) -> str:
    name = cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
    return f"{'an' if name[:1] in 'aeiouAEIOU' else 'a'} {name}"


def _unsendable(tree: Tree, error: Exception) -> UnsendableError:
    """Return the error for the first value that can't be sent, with its path, computed only here."""
    if isinstance(error, TreeTooLarge):
        return UnsendableError(f"can't send {error}; send arrays instead of lists of Python objects")
    pending: list[tuple[tuple[str, ...], Any]] = [((), tree)]
    while pending:
        path, node = pending.pop()
        if len(path) > DEPTH_MAX:
            place = "/".join(path[:8]) + "/..."
            return UnsendableError(
                f"can't send a nest of more than {DEPTH_MAX} levels, at {place}; "
                "flatten it, or break the cycle"
            )
        cls = type(node)
        where = f"at {'/'.join(path)}" if path else "as the whole value"
        if cls in DICTS:
            for key in node:
                if type(key) not in KEYS:
                    plain = "str" if isinstance(key, str) else "int" if isinstance(key, np.integer) else ""
                    return UnsendableError(
                        f"can't send a dict with the key {key!r} of type {type(key).__qualname__}, {where}; "
                        "keys are str or int" + (f": use {plain}(key)" if plain else "")
                    )
        names = _child_names(node)
        try:
            if cls in FOREIGN:
                raise UnsuitableTree(_type_name(cls))
            if names is None:
                _Encoder().pack(node)
            elif cls not in (*DICTS, list, tuple):
                _signature(cls)
        except (UnsuitableTree, ValueError, OverflowError) as reason:
            hint = "" if isinstance(node, np.generic) or cls is np.ndarray else conversion_hint(node)
            advice = "`await` it first" if inspect.isawaitable(node) else hint or _ADVICE
            return UnsendableError(f"can't send {reason}, {where}; {advice}")
        if names is not None:
            pending += reversed(
                [((*path, name), child) for name, child in zip(names, children_of(node), strict=True)]
            )
    return UnsendableError(f"can't send this tree: {error}; {_ADVICE}")


def _child_names(node: Any) -> list[str] | None:
    cls = type(node)
    if cls in DICTS:
        return list(map(str, node))
    if cls is list or cls is tuple:
        return list(map(str, range(len(node))))
    if is_namedtuple(cls):
        return list(cls._fields)
    if is_record(cls):
        return [field.name for field in dataclasses.fields(cls)]
    return None
