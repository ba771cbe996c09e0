"""Results of combine functions by key as tables, with one row per key.

| combine function | columns |
|---|---|
| `by_key_sum` and the other tables by key of `pipedist.combiners` | those of the table |
| `ByKey(name, combine)` | `key`, and one for each leaf path of a component |
| `top_k` | `value`, and one for each leaf path of the rows (`row` if bare), the largest value first |
| `ByKey(name, top_k)` | `key`, and these: one row for each value of each key |

Rows are ordered by key, then by value. Keys are text (`<U`) or integers (int64; uint64 if they exceed its range).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from pipedist.combiners import ByKey, Moments, TopK, sorted_keys
from pipedist.core import ragged, trees
from pipedist.core.types import Tree
from pipedist.outputs.spool import Array, Columns
from pipedist.reduction.keyed.combiners import KeyedCombiner

Table = Callable[[Tree], Columns]
"""Return the table of a value.

Raises TypeError if the combine function cannot return such a value, ValueError if it fits no table.
"""

_EXACT_MAX = 2**53  # integers up to this are exact in float64


def table_of(combine: object) -> Table | None:
    """Return the conversion to a table, None if the result stays a tree, or is a table by key already."""
    if isinstance(combine, TopK):
        return _largest
    if isinstance(combine, ByKey):
        return _largest_by_key if isinstance(combine.combine, TopK) else _components
    return None


def misfit(combine: object, suffix: str, per: str) -> str | None:
    """Return why a file can't hold the results of a stock combine function; None if it may.

    Args:
        suffix: the ending of the file.
        per: the scope of a value: "run", "epoch" or "step".
    """
    if not isinstance(combine, KeyedCombiner | Moments | TopK | ByKey):
        return None
    names = {TopK: "top_k", Moments: "moments"}
    name = combine.name if isinstance(combine, ByKey | KeyedCombiner) else names[type(combine)]
    if suffix == ".npy":
        return f"a `.npy` file holds one array, but the value of {name} has several: write .npz or .json"
    if per == "run" or isinstance(combine, Moments) or suffix in (".json", ".jsonl"):
        return None
    if isinstance(combine, TopK):
        if suffix in (".npz", ".zarr", ".h5"):
            return None
        return f"a row for each {per} can't hold the k values of {name}: write .jsonl or .json"
    return f"the keys of {name} differ from {per} to {per}, but a `{suffix}` file has the same ones: write .jsonl"


def _largest(value: Tree) -> Columns:
    component = _mapping(value)
    rows = component["rows"]
    columns = {"value": np.asarray(component["values"])}
    if rows is not None:
        leaves, structure = trees.flatten(rows)
        for path, leaf in zip(trees.treedef_paths(structure), leaves, strict=True):
            name = path or "row"
            if name in columns:
                raise ValueError(f"two columns have the name {name!r}: write .json")
            columns[name] = np.asarray(leaf)
    return columns


def _largest_by_key(value: Tree) -> Columns:
    by_key = _mapping(value)
    found = sorted_keys(by_key)
    tables = [_largest(by_key[key]) for key in found]
    columns: Columns = {}
    if len({tuple(table) for table in tables}) > 1:
        raise ValueError("the rows of some keys have other columns than those of others: write .json")
    for name in tables[0] if tables else ():
        if name == "key":
            raise ValueError("two columns have the name 'key': write .json")
        columns[name] = ragged.concatenate([table[name] for table in tables])
    keys = [key for key, table in zip(found, tables, strict=True) for _ in table["value"]]
    return {"key": _keys(keys), **columns}


def _components(value: Tree) -> Columns:
    by_key = _mapping(value)
    keys = sorted_keys(by_key)
    columns = {"key": _keys(keys)}
    taken = [trees.flatten(by_key[key]) for key in keys]
    structure = taken[0][1] if taken else None
    for key, (_, other) in zip(keys, taken, strict=True):
        if other != structure:
            raise ValueError(
                f"keys {keys[0]!r} and {key!r} have components of different structures, which do not fit one "
                "table: write .json"
            )
    for place, path in enumerate(trees.treedef_paths(structure) if structure is not None else ()):
        name = path or "value"
        if name in columns:
            raise ValueError(f"two columns have the name {name!r}: write .json")
        columns[name] = _column(name, [np.asarray(leaves[place]) for leaves, _ in taken])
    return columns


def _mapping(value: Tree) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"expected a dict by key, got {type(value).__name__}")
    return value


def _keys(keys: Sequence[Any]) -> Array:
    if all(isinstance(key, str) for key in keys):
        return ragged.of_texts(keys)
    if any(isinstance(key, str) for key in keys):
        raise ValueError("some keys are text and some integers, but a column has one type: write .json")
    if not all(isinstance(key, int | np.integer) for key in keys):
        raise TypeError("keys must be text or integers: write .json")
    return _integers("key", [np.asarray(key) for key in keys])


def _column(name: str, cells: Sequence[Array]) -> Array:
    """Return one leaf of all components: array [rows, ...]."""
    if not cells:
        return np.empty(0, np.int64)
    shapes = sorted({cell.shape for cell in cells})
    if len(shapes) > 1:
        raise ValueError(f"column {name!r} has values of shapes {shapes[0]} and {shapes[1]}: write .json")
    kinds = {cell.dtype.kind for cell in cells}
    # Python integers have any size, and NumPy converts mixed signed and unsigned integers to floats
    if "O" in kinds or (kinds <= set("iu") and len({cell.dtype for cell in cells}) > 1):
        return _integers(name, cells)
    if len(kinds) > 1:
        whole = [cell for cell in cells if cell.dtype.kind in "iu"]
        if not kinds <= set("iuf") or any(
            abs(int(each)) > _EXACT_MAX for cell in whole for each in cell.flat
        ):
            found = " and ".join(sorted({str(cell.dtype) for cell in cells}))
            raise ValueError(f"column {name!r} has values of dtypes {found}: write .json")
    return np.stack(cells)


def _integers(name: str, cells: Sequence[Array]) -> Array:
    exact = np.stack([cell.astype(object) for cell in cells])
    for dtype in (np.int64, np.uint64):
        limits = np.iinfo(dtype)
        if all(isinstance(each, int) and limits.min <= each <= limits.max for each in exact.flat):
            return exact.astype(dtype)
    raise ValueError(f"column {name!r} has values that fit neither int64 nor uint64: write .json")
