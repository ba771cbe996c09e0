"""Shared by encoder and decoder: extension types, trees, arrays, classes.

An array's dtype and shape are a PREFIX, little-endian: length of the prefix in units of 16 bytes (u8),
length of the dtype's text (u8), the text (`<f8`, `<U3`, `<M8[ns]`, `bfloat16`), number of dimensions
(u8), the dimensions (u64 each), zeros up to a multiple of 16. So the data after it is aligned.

A namedtuple or dataclass class is a text, `module:qualname(field,field)`. A class that a peer names is
looked up in the dictionaries of the modules that are already imported (no `__getattr__` runs), and
instances are created without calling `__init__`: received bytes can't choose the code that runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import math
import re
import struct
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from itertools import chain
from typing import Any, Final, TypeAlias

import msgpack
import numpy as np

from pipedist.core.types import Tree, is_record
from pipedist.protocol.limits import DEPTH_MAX, ELEMENTS_MAX, KIB, MIB

Frame: TypeAlias = bytes | memoryview

INLINE_BYTES_MAX: Final = 512
FRAME_BYTES_MIN: Final = 64 * KIB
SHARED_FRAME_BYTES_MAX: Final = 1 * MIB
SHARED_ALIGNMENT_BYTES: Final = 64

MARK, BIG_INT, COMPLEX, INLINE, IN_FRAME, NUMPY_SCALAR, NUMPY_STR, NUMPY_BYTES = range(1, 9)
TUPLE, RECORD, SLICE, RANGE, OBJECTS = MARKS = [msgpack.ExtType(MARK, bytes([kind])) for kind in range(5)]
PLACE: Final = struct.Struct("<IQ")  # frame, offset in bytes
PAIR: Final = struct.Struct("<dd")
_SCALARS: Final = frozenset({bool, int, float, complex, str, bytes, type(None)})
_SMALL_NODES: Final = 48  # less than DEPTH_MAX, so a tree of this size can't be too deep
_LEAVES: Final = _SCALARS | {np.ndarray, slice, range, bytearray, memoryview}
KEYS: Final = frozenset({str, int})
DICTS: Final = frozenset({dict, defaultdict, OrderedDict})  # they are sent as dicts
COLUMNS: Final = 0xC1  # first byte of a header that holds columns; msgpack never uses it
FOREIGN: Final = frozenset({msgpack.ExtType, msgpack.Timestamp})  # a misplaced mark, or a timestamp


# -- trees ------------------------------------------------------------------------------------------


class UnsuitableTree(Exception):
    """A tree can't be sent; the text names the value, but not its place."""


class TreeTooLarge(UnsuitableTree):
    """A tree has more than ELEMENTS_MAX elements."""


def children_of(node: Any) -> Iterable[Any]:
    cls = type(node)
    if cls is list or cls is tuple:
        return node  # type: ignore[no-any-return]
    if cls in DICTS:
        return node.values()  # type: ignore[no-any-return]
    if is_namedtuple(cls):
        return node  # type: ignore[no-any-return]
    if is_record(cls):
        return [getattr(node, field.name, None) for field in dataclasses.fields(cls)]
    return ()


def _is_small(tree: Tree) -> bool:
    """Return whether a tree has only few nodes, of plain types and of classes that were sent or received before.

    For the few nodes of one step's message, this is several times as fast as a scan by levels.
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
            below = node.values()
        elif cls is list or cls is tuple:
            below = node
        elif (signature := _class_signatures.get(cls)) is not None:
            below = node if issubclass(cls, tuple) else [getattr(node, name, None) for name in signature[1]]
        else:
            return False
        left -= len(below)
        if left < 0:
            return False
        pending += below
    return True


def check_nodes(tree: Tree) -> None:
    """Check depth, number of elements and dict keys, level by level; raise UnsuitableTree.

    Sets of types keep the scan at C speed: it costs about 20 ns per element. A shared node counts as often as
    it would be written.
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
            raise UnsuitableTree("a value of the msgpack library, or a misplaced mark")
        dicts = [node for node in level if type(node) in DICTS] if types & DICTS else []
        if not KEYS.issuperset(set(map(type, chain.from_iterable(dicts)))):
            raise UnsuitableTree("a dict whose keys are not all str or int")
        children = list(chain.from_iterable(map(children_of, level)))
        count += len(children)
        if count > ELEMENTS_MAX:
            raise TreeTooLarge(f"a tree of more than {ELEMENTS_MAX} elements")
        below = {cls for cls in set(map(type, children)) - _LEAVES if not issubclass(cls, np.generic)}
        level = [child for child in children if type(child) in below] if below else []
    raise UnsuitableTree(f"a nest of more than {DEPTH_MAX} levels")


# -- arrays -----------------------------------------------------------------------------------------

ARRAY_ALIGNMENT_BYTES: Final = 16

_DTYPE_TEXT: Final = re.compile(
    r"""[<|] (?: b1 | [iu][1248] | f(?:2|4|8|12|16) | c(?:8|16|24|32) | [US][1-9]\d{0,8}
        | [mM]8 (?: \[ (?:[1-9]\d{0,8})? (?:Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as) \] )? )""",
    re.VERBOSE,
)
_ARRAY_CACHE_ENTRIES_MAX: Final = 4096
_DIMENSIONS_MAX: Final = 64

ArrayDescription = tuple["np.dtype[Any]", tuple[int, ...], int]  # dtype, shape and size in bytes of an array


class UnsupportedArray(ValueError):
    """An array's dtype can't be sent, or a prefix is malformed."""


_array_prefixes: dict[tuple[np.dtype[Any], tuple[int, ...]], tuple[bytes, int, np.dtype[Any] | None]] = {}
_array_descriptions: dict[bytes, ArrayDescription] = {}


def describe_array(dtype: np.dtype[Any], shape: tuple[int, ...]) -> tuple[bytes, int, np.dtype[Any] | None]:
    """Return the prefix of an array, and its size in bytes.

    The third value is the dtype to convert it to first (the same one in little-endian order), or None. Raises
    UnsupportedArray for objects, records, and foreign dtypes.
    """
    entry = _array_prefixes.get((dtype, shape))
    if entry is None:
        text, convert = _dtype_text(dtype)
        size_bytes = math.prod(shape) * dtype.itemsize
        body = struct.pack(f"<B{len(text)}sB{len(shape)}Q", len(text), text, len(shape), *shape)
        units = -(-(1 + len(body)) // ARRAY_ALIGNMENT_BYTES)
        prefix = (bytes([units]) + body).ljust(units * ARRAY_ALIGNMENT_BYTES, b"\0")
        entry = prefix, size_bytes, convert
        if len(_array_prefixes) >= _ARRAY_CACHE_ENTRIES_MAX:
            _array_prefixes.clear()
        _array_prefixes[dtype, shape] = entry
    return entry


def parse_array(data: bytes) -> tuple[ArrayDescription, int]:
    """Return the description at the beginning of `data`, and the bytes of that prefix.

    Raises UnsupportedArray if `describe_array` would not have written it.
    """
    if not data:
        raise UnsupportedArray("an array without a description")
    length = data[0] * ARRAY_ALIGNMENT_BYTES
    prefix = data[:length]
    description = _array_descriptions.get(prefix)
    if description is None:
        description = _parsed(prefix, length)
        if len(_array_descriptions) >= _ARRAY_CACHE_ENTRIES_MAX:
            _array_descriptions.clear()
        _array_descriptions[prefix] = description
    return description, length


def _dtype_text(dtype: np.dtype[Any]) -> tuple[bytes, np.dtype[Any] | None]:
    if dtype.names is not None:
        raise UnsupportedArray("a structured dtype; send a dict with one array per field")
    if _is_bfloat16(dtype):
        return b"bfloat16", None
    if dtype.itemsize == 0:
        raise UnsupportedArray(f"dtype {dtype.str!r}, whose elements have no bytes")
    if dtype.kind not in "biufcUSmM":
        raise UnsupportedArray(f"dtype {dtype}")
    little = dtype.newbyteorder("<")
    text = little.str
    if not _DTYPE_TEXT.fullmatch(text):
        raise UnsupportedArray(f"dtype {dtype}")
    native = sys.byteorder == "little"
    return text.encode("ascii"), None if dtype.isnative == native or dtype.str[0] == "|" else little


def _is_bfloat16(dtype: np.dtype[Any]) -> bool:
    return dtype.name == "bfloat16" and dtype.type.__module__ == "ml_dtypes"


def _parsed(prefix: bytes, length: int) -> ArrayDescription:
    if len(prefix) != length or length < ARRAY_ALIGNMENT_BYTES:
        raise UnsupportedArray("an array's description is cut off")
    text_length = prefix[1]
    at = 2 + text_length
    if at >= length:
        raise UnsupportedArray("an array's description is cut off")
    dtype = _dtype(prefix[2:at])
    dimensions = prefix[at]
    end = at + 1 + 8 * dimensions
    if dimensions > _DIMENSIONS_MAX or -(-end // ARRAY_ALIGNMENT_BYTES) * ARRAY_ALIGNMENT_BYTES != length:
        raise UnsupportedArray("an array's description has the wrong length")
    if any(prefix[end:]):
        raise UnsupportedArray("an array's description has bytes after its end")
    shape = struct.unpack_from(f"<{dimensions}Q", prefix, at + 1)
    size_bytes = math.prod(shape) * dtype.itemsize
    return dtype, shape, size_bytes


def _dtype(text: bytes) -> np.dtype[Any]:
    if text == b"bfloat16":
        try:
            # A fixed, known library: a peer can't choose what is imported here.
            bfloat16: np.dtype[Any] = np.dtype(importlib.import_module("ml_dtypes").bfloat16)
            return bfloat16
        except ImportError as error:
            raise UnsupportedArray(
                "a bfloat16 array, and ml_dtypes is not installed here; install it"
            ) from error
    name = text.decode("ascii", "replace")
    if not _DTYPE_TEXT.fullmatch(name):
        raise UnsupportedArray(f"unknown dtype {name!r}")
    try:
        dtype = np.dtype(name)
    except (TypeError, ValueError) as error:
        raise UnsupportedArray(f"unknown dtype {name!r}") from error
    if dtype.newbyteorder("<").str != name:
        raise UnsupportedArray(f"dtype {name!r} is not in NumPy's form")
    return dtype


# -- classes ----------------------------------------------------------------------------------------

_CLASS_SIGNATURE: Final = re.compile(r"([\w.]{1,400}):([\w.]{1,400})\((\w[\w,]{0,20000})?\)")
_CLASS_CACHE_ENTRIES_MAX: Final = 1024


class ClassNotFound(ValueError):
    """A class has no usable name, or a name has no suitable class."""


_class_signatures: dict[type, tuple[str, tuple[str, ...]]] = {}
_found_classes: dict[str, tuple[str, str, type, tuple[str, ...]]] = {}
"""Received names of classes, with the module's name, the class's, the class, and its fields."""


def is_namedtuple(cls: type) -> bool:
    fields = getattr(cls, "_fields", None)
    return issubclass(cls, tuple) and isinstance(fields, tuple) and all(type(f) is str for f in fields)


def class_signature(cls: type) -> tuple[str, tuple[str, ...]]:
    """Return a namedtuple or dataclass class as text, and the names of its fields.

    Raises ClassNotFound for a class that is defined inside a function: other processes can't find it.
    """
    entry = _class_signatures.get(cls)
    if entry is None:
        fields = _field_names(cls)
        text = f"{cls.__module__}:{cls.__qualname__}({','.join(fields)})"
        if not _CLASS_SIGNATURE.fullmatch(text):
            raise ClassNotFound(
                f"class {cls.__module__}.{cls.__qualname__}, which other processes can't find by name; "
                "define it at the top level of a module"
            )
        if len(_class_signatures) >= _CLASS_CACHE_ENTRIES_MAX:
            _class_signatures.clear()
        entry = _class_signatures[cls] = text, fields
    return entry


def find_class(text: str, *, may_import: bool) -> tuple[type, tuple[str, ...]]:
    """Find the class that `class_signature` wrote, and the names of its fields, or raise ClassNotFound.

    `may_import`: import its module if needed; only for frames from a trusted peer.
    """
    known = _found_classes.get(text)
    if known is not None:
        module_name, qualname, cls, fields = known
        module = sys.modules.get(module_name)
        if module is not None and vars(module).get(qualname) is cls:  # it was not defined again
            return cls, fields
    match = _CLASS_SIGNATURE.fullmatch(text)
    if match is None:
        raise ClassNotFound(f"malformed class name {text[:200]!r}")
    module_name, qualname, field_text = match.groups()
    module = sys.modules.get(module_name)
    if module is None and may_import:
        try:
            module = importlib.import_module(module_name)
        except ImportError as error:
            raise ClassNotFound(f"class {module_name}.{qualname}: {error}") from error
        except (Exception, SystemExit) as error:  # a user's module may raise anything
            raise ClassNotFound(
                f"class {module_name}.{qualname}: importing {module_name} failed: "
                f"{type(error).__name__}: {error}"
            ) from error
    if module is None:
        raise ClassNotFound(f"class {module_name}.{qualname}: module {module_name} is not imported here")
    found: Any = module
    for name in qualname.split("."):
        found = vars(found).get(name) if hasattr(found, "__dict__") else None
    if not isinstance(found, type) or not (is_namedtuple(found) or dataclasses.is_dataclass(found)):
        raise ClassNotFound(f"{module_name}.{qualname} is neither a namedtuple nor a dataclass here")
    fields = _field_names(found)
    if field_text != (",".join(fields) or None):
        raise ClassNotFound(
            f"class {module_name}.{qualname} has the fields ({', '.join(fields)}) here "
            f"and ({(field_text or '').replace(',', ', ')}) at the sender; use one version of the code"
        )
    with contextlib.suppress(ClassNotFound):  # its own name is not suitable: it is found again each time
        class_signature(found)
        if len(_found_classes) >= _CLASS_CACHE_ENTRIES_MAX:
            _found_classes.clear()
        _found_classes[text] = module_name, qualname, found, fields
    return found, fields


def build_instance(cls: type, fields: tuple[str, ...], values: list[Any]) -> Any:
    """Return an instance of a class, without calling `__init__`, or raise ClassNotFound."""
    if len(values) != len(fields):
        raise ClassNotFound(
            f"class {cls.__qualname__} has {len(fields)} fields, but {len(values)} were received"
        )
    if is_namedtuple(cls):
        return tuple.__new__(cls, values)
    try:
        instance: Any = object.__new__(cls)
        for name, value in zip(fields, values, strict=True):
            object.__setattr__(instance, name, value)
    except (TypeError, AttributeError) as error:
        raise ClassNotFound(f"class {cls.__qualname__} can't be rebuilt: {error}") from error
    return instance


def _field_names(cls: type) -> tuple[str, ...]:
    if is_namedtuple(cls):
        return tuple(cls._fields)  # type: ignore[attr-defined]
    return tuple(field.name for field in dataclasses.fields(cls))
