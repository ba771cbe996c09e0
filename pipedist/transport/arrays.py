"""How one array's dtype and shape are written on the wire: a short, checked, cached prefix.

Layout, little-endian: length of the prefix in units of 16 bytes (u8), length of the dtype's
text (u8), the text (`<f8`, `<U3`, `<M8[ns]`, `bfloat16`), number of dimensions (u8), the
dimensions (u64 each), zeros up to a multiple of 16. So whatever follows it is aligned.
"""

from __future__ import annotations

import importlib
import math
import re
import struct
import sys
from typing import Any, Final

import numpy as np

ALIGNMENT_BYTES: Final = 16

_DTYPE_TEXT: Final = re.compile(
    r"""[<|] (?: b1 | [iu][1248] | f(?:2|4|8|12|16) | c(?:8|16|24|32) | [US][1-9]\d{0,8}
        | [mM]8 (?: \[ (?:[1-9]\d{0,8})? (?:Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as) \] )? )""",
    re.VERBOSE,
)
_CACHE_ENTRIES_MAX: Final = 4096
_DIMENSIONS_MAX: Final = 64

Description = tuple["np.dtype[Any]", tuple[int, ...], int]
"""dtype, shape and size in bytes of an array."""


class Indescribable(ValueError):
    """A dtype has no form on the wire, or a prefix is malformed."""


_prefixes: dict[tuple[np.dtype[Any], tuple[int, ...]], tuple[bytes, int, np.dtype[Any] | None]] = {}
_descriptions: dict[bytes, Description] = {}


def describe(dtype: np.dtype[Any], shape: tuple[int, ...]) -> tuple[bytes, int, np.dtype[Any] | None]:
    """Write the prefix of an array.

    Returns:
        The prefix, the array's size in bytes, and the dtype to convert it to first (the same
        one in little-endian order), or None where it already is that.

    Raises:
        Indescribable: a dtype that does not travel: objects, records, a foreign one.
    """
    entry = _prefixes.get((dtype, shape))
    if entry is None:
        text, convert = _dtype_text(dtype)
        size_bytes = math.prod(shape) * dtype.itemsize
        body = struct.pack(f"<B{len(text)}sB{len(shape)}Q", len(text), text, len(shape), *shape)
        units = -(-(1 + len(body)) // ALIGNMENT_BYTES)
        prefix = (bytes([units]) + body).ljust(units * ALIGNMENT_BYTES, b"\0")
        entry = prefix, size_bytes, convert
        if len(_prefixes) >= _CACHE_ENTRIES_MAX:
            _prefixes.clear()
        _prefixes[dtype, shape] = entry
    return entry


def parse(data: bytes) -> tuple[Description, int]:
    """Read the prefix at the beginning of `data`.

    Returns:
        The description, and the length of the prefix, bytes.

    Raises:
        Indescribable: anything that `describe` would not have written.
    """
    if not data:
        raise Indescribable("an array without a description")
    length = data[0] * ALIGNMENT_BYTES
    prefix = data[:length]
    description = _descriptions.get(prefix)
    if description is None:
        description = _parse(prefix, length)
        if len(_descriptions) >= _CACHE_ENTRIES_MAX:
            _descriptions.clear()
        _descriptions[prefix] = description
    return description, length


def _dtype_text(dtype: np.dtype[Any]) -> tuple[bytes, np.dtype[Any] | None]:
    if dtype.names is not None:
        raise Indescribable("a structured dtype; send a dict with one array a field")
    if _is_bfloat16(dtype):
        return b"bfloat16", None
    if dtype.itemsize == 0:
        raise Indescribable(f"dtype {dtype.str!r}, whose elements have no bytes")
    if dtype.kind == "T":  # of which NumPy has no other byte order to ask for
        raise Indescribable(f"dtype {dtype}; make it one of fixed width: numpy.array(texts.tolist())")
    little = dtype.newbyteorder("<")
    text = little.str
    if dtype.kind not in "biufcUSmM" or not _DTYPE_TEXT.fullmatch(text):
        raise Indescribable(f"dtype {dtype}")
    native = sys.byteorder == "little"
    return text.encode("ascii"), None if dtype.isnative == native or dtype.str[0] == "|" else little


def _is_bfloat16(dtype: np.dtype[Any]) -> bool:
    return dtype.name == "bfloat16" and dtype.type.__module__ == "ml_dtypes"


def _parse(prefix: bytes, length: int) -> Description:
    if len(prefix) != length or length < ALIGNMENT_BYTES:
        raise Indescribable("an array's description is cut off")
    text_length = prefix[1]
    at = 2 + text_length
    if at >= length:
        raise Indescribable("an array's description is cut off")
    dtype = _dtype(prefix[2:at])
    dimensions = prefix[at]
    end = at + 1 + 8 * dimensions
    if dimensions > _DIMENSIONS_MAX or -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES != length:
        raise Indescribable("an array's description has the wrong length")
    if any(prefix[end:]):
        raise Indescribable("an array's description has bytes after its end")
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
            raise Indescribable(
                "a bfloat16 array, and ml_dtypes is not installed here; install it"
            ) from error
    name = text.decode("ascii", "replace")
    if not _DTYPE_TEXT.fullmatch(name):
        raise Indescribable(f"unknown dtype {name!r}")
    try:
        dtype = np.dtype(name)
    except (TypeError, ValueError) as error:
        raise Indescribable(f"unknown dtype {name!r}") from error
    if dtype.newbyteorder("<").str != name:
        raise Indescribable(f"dtype {name!r} is not written the way numpy does")
    return dtype
