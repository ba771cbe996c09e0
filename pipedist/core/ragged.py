"""Object arrays: texts, bytes, lists and records of any length.

NumPy's `<U` and `S` give every value the width of the longest, and drop zeros at its end. An OBJECT ARRAY (dtype
object) refers to its values instead, so it takes the bytes that there are.
All of its cells, apart from None, a null, are of one kind:

| kind | cells | sent as |
|---|---|---|
| TEXTS | str | lengths (int64; -1: None), and their UTF-8 in one array of bytes |
| BYTES | bytes | lengths, and one array of bytes |
| LISTS | arrays [k, ...] of one dtype | lengths, and their concatenation |
| NESTED | lists, dicts, or arrays that differ | a list of them |

`<U` stays `<U`, unless it `is_wasteful`; then it becomes an object array of str.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Sequence
from dataclasses import is_dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pipedist.core import trees

Array = npt.NDArray[Any]

TEXTS, BYTES, LISTS, NESTED = range(4)

_WIDE_BYTES_MIN: Final = 1 << 20
_WASTE_MAX: Final = 4
_OBJECT_BYTES: Final = 64  # the size of an empty str or bytes
_FLAT: Final = frozenset({str, bytes, type(None), np.str_, np.bytes_})


class UnlikeCells(ValueError):
    """The cells of an object array are not of one kind that can be sent."""


def is_wasteful(texts: int, width: int, chars: int) -> bool:
    """Return whether texts of `chars` characters in all need much more memory as `<U` than as str."""
    wide_bytes = 4 * texts * width
    return wide_bytes > _WIDE_BYTES_MIN and wide_bytes > _WASTE_MAX * (4 * chars + _OBJECT_BYTES * texts)


def objects(cells: Collection[Any]) -> Array:
    """Return an object array [n] of cells, which may be arrays themselves."""
    return np.fromiter(cells, object, len(cells))


def of_texts(texts: Sequence[str]) -> Array:
    """Return texts as `<U`; as an object array if `<U` is wasteful or would drop a zero at an end."""
    width = max(map(len, texts), default=0)
    if any(text[-1:] == "\0" for text in texts) or is_wasteful(len(texts), width, sum(map(len, texts))):
        return objects(texts)
    return np.array(texts, np.str_)


def narrowed(array: Array) -> Array:
    """Return an array, as an object array if it is `<U` and wasteful."""
    return array.astype(object) if array.dtype.kind == "U" and _are_wasteful([array]) else array


def is_blank(array: Array) -> bool:
    """Return whether an array is `np.array([])`, which has neither the dtype nor the shape of rows."""
    return array.shape == (0,) and array.dtype == np.float64


def fit(a: np.dtype[Any], b: np.dtype[Any]) -> bool:
    """Return whether arrays of two dtypes can be concatenated: equal ones, or texts."""
    kinds = {a.kind, b.kind}
    return a == b or kinds <= {"U", "O", "T"} or kinds <= {"S", "O"}


def concatenate(parts: Sequence[Array], axis: int = 0) -> Array:
    """Concatenate arrays whose dtypes fit; the kind of array does not depend on their grouping."""
    kinds = {part.dtype.kind for part in parts}
    if kinds & {"O", "T"} or (kinds == {"U"} and _are_wasteful(parts)):
        parts = [part.astype(object, copy=False) for part in parts]
    return np.concatenate(parts, axis=axis)


def stack(cells: Sequence[Any]) -> Array:
    """Stack arrays or scalars along a new first axis; texts and bytes keep zeros at their ends."""
    types = set(map(type, cells))
    if types and types <= {str, np.str_}:
        return of_texts(list(map(str.__str__, cells)))  # `str(...)` of a np.str_ drops zeros at the end
    if types and types <= {bytes, np.bytes_}:
        return objects(list(map(bytes, cells)))
    return concatenate([np.asarray(cell)[None] for cell in cells])


def _are_wasteful(parts: Sequence[Array]) -> bool:
    texts, width = sum(part.size for part in parts), max(part.itemsize // 4 for part in parts)
    if not is_wasteful(texts, width, 0):
        return False
    return is_wasteful(texts, width, sum(int(np.char.str_len(part).sum()) for part in parts))


def are_records(value: Any) -> bool:
    """Return whether a value is a list of records: dicts with str keys; not a tree of arrays in lists and dicts."""
    if type(value) is not list or not value or set(map(type, value)) != {dict}:
        return False
    if any(type(key) is not str for record in value for key in record):
        return False
    leaves, _ = trees.flatten(value[0])
    return not leaves or any(not np.ndim(leaf) for leaf in leaves)


def record_problem(value: Any) -> str:
    """Return why a list with dicts, dataclasses or namedtuples is no list of records, "" if that is not the fault."""
    if type(value) is not list or are_records(value):
        return ""
    if not any(isinstance(item, dict) or hasattr(item, "_fields") or is_dataclass(item) for item in value):
        return ""
    for index, item in enumerate(value):
        if type(item) is not dict:
            return f"element {index} of the list is a {type(item).__qualname__}, and a record is a dict"
        keys = [key for key in item if type(key) is not str]
        if keys:
            return f"element {index} of the list has the key {keys[0]!r}, and the keys of a record are text"
    return ""


def owned(array: Array) -> Array:
    """Return a copy in C order that shares no changeable cell."""
    if array.dtype.kind == "O" and not _FLAT.issuperset(map(type, array.flat)):
        return np.asarray(copy.deepcopy(array), order="C")
    return np.array(array, order="C", copy=True)


def frozen(array: Array) -> Array:
    """Return a read-only array of the same values; a function may change neither it nor cells of another reader."""
    if array.dtype.kind == "O" and not _FLAT.issuperset(map(type, array.flat)):
        array = objects([_frozen(cell) for cell in array.flat]).reshape(array.shape)
    view = array.view()
    view.flags.writeable = False
    return view


def _frozen(cell: Any) -> Any:
    return frozen(cell) if type(cell) is np.ndarray else copy.deepcopy(cell)


def size_bytes(array: Array) -> int:
    """Return the size of an array, with that of its cells."""
    if array.dtype.kind != "O":
        return array.nbytes
    return array.nbytes + sum(
        len(cell) if isinstance(cell, str | bytes) else getattr(cell, "nbytes", _OBJECT_BYTES)
        for cell in array.flat
    )


def split(array: Array) -> list[Any]:
    """Return kind and parts of an object array, for `join`, else raise UnlikeCells."""
    cells = array.ravel().tolist()
    found = [cell for cell in cells if cell is not None]
    types = set(map(type, found))
    if all(issubclass(cls, str) for cls in types):
        encoded = [None if cell is None else cell.encode("utf-8", "surrogatepass") for cell in cells]
        return [TEXTS, _lengths(encoded), np.frombuffer(b"".join(filter(None, encoded)), np.uint8)]
    if all(issubclass(cls, bytes) for cls in types):
        return [BYTES, _lengths(cells), np.frombuffer(b"".join(found), np.uint8)]
    if types == {np.ndarray} and all(cell.ndim for cell in found):
        full = [cell for cell in found if len(cell)] or found[:1]
        first = full[0]
        if all(fit(cell.dtype, first.dtype) and cell.shape[1:] == first.shape[1:] for cell in full):
            return [LISTS, _lengths(cells), concatenate(full)]
    if types <= {list, dict, np.ndarray}:
        return [NESTED, cells]
    names = " and ".join(sorted({cls.__qualname__ for cls in types}))
    raise UnlikeCells(
        f"dtype object whose cells are {names}; its cells are all str, all bytes, or lists, arrays and "
        "dicts, and None: convert it, as with x.astype(float) or x.astype(str)"
    )


def join(kind: int, shape: Sequence[int], *parts: Any) -> Array:
    """Return the read-only object array that `split` took apart.

    Raises:
        ValueError: `split` would not have returned these parts.
    """
    if kind == NESTED and len(parts) == 1 and type(parts[0]) is list:
        cells = parts[0]
        if not {list, dict, np.ndarray, type(None)}.issuperset(map(type, cells)):
            raise ValueError("nested cells that are neither lists nor dicts nor arrays")
    elif kind in (TEXTS, BYTES, LISTS) and len(parts) == 2:
        cells = _cut(kind, *parts)
    else:
        raise ValueError("a malformed object array")
    if not all(type(size) is int and size >= 0 for size in shape) or math.prod(shape) != len(cells):
        raise ValueError(f"an object array of {len(cells)} cells and shape {list(shape)}")
    array = objects(cells).reshape(shape)
    array.flags.writeable = False
    return array


def _lengths(cells: Sequence[Any]) -> Array:
    return np.fromiter((-1 if cell is None else len(cell) for cell in cells), np.int64, len(cells))


def _cut(kind: int, lengths: Any, data: Any) -> list[Any]:
    if type(lengths) is not np.ndarray or lengths.dtype != np.int64 or lengths.ndim != 1:
        raise ValueError("lengths that are not int64[n]")
    if type(data) is not np.ndarray or not data.ndim:
        raise ValueError("cells that are not an array")
    if kind != LISTS and (data.dtype != np.uint8 or data.ndim != 1):
        raise ValueError("cells that are not bytes")
    if lengths.size and not -1 <= int(lengths.min()) <= int(lengths.max()) <= len(data):
        raise ValueError("a cell outside of its data")
    ends = np.cumsum(np.maximum(lengths, 0))
    if (int(ends[-1]) if lengths.size else 0) != len(data):
        raise ValueError(f"cells of {int(ends[-1]) if lengths.size else 0} bytes or rows, not {len(data)}")
    ranges = zip((ends - np.maximum(lengths, 0)).tolist(), ends.tolist(), lengths.tolist(), strict=True)
    if kind == LISTS:
        return [None if length < 0 else data[a:b] for a, b, length in ranges]
    view = data.data
    if kind == BYTES:
        return [None if length < 0 else bytes(view[a:b]) for a, b, length in ranges]
    return [None if length < 0 else str(view[a:b], "utf-8", "surrogatepass") for a, b, length in ranges]
