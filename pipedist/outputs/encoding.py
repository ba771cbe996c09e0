"""Encodes trees as JSON; equal values give equal bytes.

Arrays are nested lists; floats have the shortest decimal text that gives the same number in
their own dtype (`float32(0.1)` is `0.1`); NaN and the infinities are the strings "NaN",
"Infinity", "-Infinity"; bytes are base64; complex numbers are `[real, imaginary]`; dates and
durations are NumPy's text for them (ISO 8601; "5 days"). Dataclasses and namedtuples are
objects, tuples lists, integer keys strings. A table by key whose keys are dates or tuples is a list of
objects, one for each row. `longdouble` is rounded to float64, as
readers of JSON do.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import sys
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeGuard

import numpy as np
import numpy.typing as npt

from pipedist.core.types import Tree
from pipedist.errors import OutputError

if TYPE_CHECKING:
    from pipedist.reduction.keyed.table import KeyedTable


Json = Any  # a value for `json.dumps`: dict with str keys, list, str, int, finite float, bool, None

_PLAIN = frozenset({str, int, bool, type(None)})


def to_json(tree: Tree, path: tuple[str, ...] = ()) -> Json:
    """Return a tree, which is at `path` in a larger one, as plain JSON values.

    Raises:
        OutputError: a leaf has no JSON form, or two keys of one dict have the same text; the
            text names the path.
    """
    if tree is None or isinstance(tree, bool):
        return tree
    if isinstance(tree, str):
        return str.__str__(tree)  # the text of an enum member, not its name
    if isinstance(tree, float) and not isinstance(tree, np.generic):
        return _float(tree)
    if isinstance(tree, int):
        return int(tree)
    if isinstance(tree, np.ndarray | np.generic):
        return array_to_json(np.asarray(tree), path)
    if isinstance(tree, bytes | bytearray | memoryview):
        return _base64(bytes(tree))
    if isinstance(tree, complex):
        return [_float(tree.real), _float(tree.imag)]
    if type(tree) is dict and _is_plain(tree.values()):
        if (kinds := set(map(type, tree))) == {str}:
            return dict(tree)
        if kinds == {int}:
            return dict(zip(map(str, tree), tree.values(), strict=True))
    if type(tree) is list and _is_plain(tree):
        return list(tree)
    inner = node(tree)
    if inner is None:
        raise OutputError(f"{_at(path)}: a value of type {type(tree).__qualname__} has no JSON form")
    if inner[0] == "object":
        return {name: to_json(value, (*path, name)) for name, value in key_texts(inner[1], path)}
    return [to_json(value, (*path, str(index))) for index, value in enumerate(inner[1])]


def _is_plain(values: Collection[Tree]) -> bool:
    """Return whether all values are JSON already, without a loop: there may be millions."""
    kinds = set(map(type, values))
    return kinds <= _PLAIN or (kinds == {float} and all(map(math.isfinite, values)))


def dumps(tree: Tree, *, sort_keys: bool = True) -> str:
    """Return a tree as JSON text on one line, without a line end."""
    return text(to_json(tree), sort_keys=sort_keys)


def text(value: Json, *, sort_keys: bool = True) -> str:
    """Return plain JSON values as text on one line, without a line end."""
    line = json.dumps(value, ensure_ascii=False, allow_nan=False, sort_keys=sort_keys)
    try:
        line.encode()
    except UnicodeEncodeError:  # half of a surrogate pair has no UTF-8, but the JSON \ud800
        line = json.dumps(value, allow_nan=False, sort_keys=sort_keys)
    return line


def is_keyed_table(value: object) -> TypeGuard[KeyedTable]:
    """Return whether a value is a table by key; few runs have one, and need the modules of such tables."""
    module = sys.modules.get("pipedist.reduction.keyed.table")
    return module is not None and isinstance(value, module.KeyedTable)


def node(tree: Tree) -> tuple[Literal["object"], list[tuple[Any, Tree]]] | tuple[Literal["list"], Any] | None:
    """Return a container's JSON type and its children; None for a leaf and for None."""
    if is_keyed_table(tree) and not tree.has_plain_keys:
        return "list", tree.records()
    if isinstance(tree, Mapping):
        return "object", list(tree.items())
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return "object", list(zip(tree._fields, tree, strict=True))
    if isinstance(tree, list | tuple | deque):
        return "list", tree
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return "object", [(field.name, getattr(tree, field.name)) for field in dataclasses.fields(tree)]
    return None


def key_texts(items: list[tuple[Any, Tree]], path: tuple[str, ...]) -> Iterator[tuple[str, Tree]]:
    """Yield the children of an object with their keys as text."""
    seen = set()
    for key, value in items:
        if not isinstance(key, str | int | np.integer) or isinstance(key, bool):
            raise OutputError(f"{_at(path)}: a dict key must be str or int for JSON, not {key!r}")
        name = str(key)
        if name in seen:
            raise OutputError(f"{_at(path)}: two dict keys have the same text in JSON: {name!r}")
        seen.add(name)
        yield name, value


def array_to_json(array: npt.NDArray[Any], path: tuple[str, ...] = ()) -> Json:
    """Return an array as nested lists (a 0-d array as a number)."""
    kind = array.dtype.kind
    if kind in "iubU":
        return array.tolist()  # it is JSON already
    if kind == "f" or (kind == "V" and array.dtype.names is None and "float" in array.dtype.name):
        if kind == "V":  # bfloat16 and the like, which NumPy can't print: exact in float32
            array = array.astype(np.float32)
        shortest = array if array.dtype == np.float64 else _via_shortest_text(array)
        if np.isfinite(shortest).all():
            return shortest.tolist()
        return _convert(shortest.tolist(), _float)
    if kind == "c":
        return array_to_json(np.stack([array.real, array.imag], axis=-1), path)
    if kind == "S":
        return _convert(array.tolist(), _base64)
    if kind in "Mm":
        texts = np.array([str(value) for value in array.reshape(-1)], dtype="U")
        return texts.reshape(array.shape).tolist()
    if kind == "O":
        return _convert(array.tolist(), lambda cell: to_json(cell, path))
    raise OutputError(f"{_at(path)}: an array of dtype {array.dtype} has no JSON form")


def _via_shortest_text(array: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return float64 numbers whose shortest text is the shortest text of the array's own dtype."""
    numbers = [float(str(value)) for value in array.reshape(-1)]
    return np.array(numbers, dtype=np.float64).reshape(array.shape)


def _convert(nested: Any, fn: Any) -> Any:
    if isinstance(nested, list):
        return [_convert(item, fn) for item in nested]
    return fn(nested)


def _float(value: float) -> float | str:
    if value != value:
        return "NaN"
    if value in (float("inf"), float("-inf")):
        return "Infinity" if value > 0 else "-Infinity"
    return float(value)


def _base64(value: bytes) -> str:
    return base64.b64encode(value).decode("ascii")


def _at(path: tuple[str, ...]) -> str:
    return f"at {'/'.join(path)!r}" if path else "the value"
