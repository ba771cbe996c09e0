"""Results of elements with different numbers of rows: `ragged: lists` and `ragged: rows`.

A result is an array, a list of numbers or texts, a list of records, or a dict of these and of single values.

| `ragged` | the batch of n elements with k rows in all |
|---|---|
| lists | object arrays [n], whose cells are the arrays; single values as ever; a list of records is one cell |
| rows | arrays [k], and `element`, int64[k]: the number of the element of each row; single values are repeated |

A bare array has the name "value" among rows. Records stay records, with `element` as their first key. An element may
have no rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipedist.core import ragged, trees
from pipedist.core.types import Tree

ELEMENT = "element"  # the column of the numbers of elements


def as_arrays(result: Tree) -> Tree:
    """Return a result with arrays in place of lists of values; lists of records stay."""
    if isinstance(result, dict):
        return {name: as_arrays(value) for name, value in result.items()}
    if isinstance(result, list) and not ragged.are_records(result):
        if all(isinstance(item, str) for item in result) and result:
            return ragged.of_texts(result)
        if any(isinstance(item, list) or (isinstance(item, np.ndarray) and item.ndim) for item in result):
            return ragged.objects([np.asarray(item) for item in result])
        return np.asarray(result)
    return result


def kind_of(result: Tree) -> tuple[Any, ...]:
    """Return a key of results that can be in one batch, with rows of any number; see `fit`."""
    if ragged.are_records(result):
        return ("records",)
    if isinstance(result, np.ndarray) and ragged.is_blank(result):
        return ("blank",)
    leaves, structure = trees.flatten(with_cells(result))
    return "dict" if isinstance(result, dict) else "other", structure, *map(_kind_of_leaf, leaves)


def fit(kind: tuple[Any, ...], usual: tuple[Any, ...]) -> bool:
    """Return whether results of two kinds can be in one batch; a leaf without rows fits all."""
    if kind == usual:
        return True
    if "blank" in (kind[0], usual[0]):
        return "dict" not in (kind[0], usual[0])
    return kind[:2] == usual[:2] and all(
        a == b or "blank" in (a, b) for a, b in zip(kind[2:], usual[2:], strict=True)
    )


def lists_of(results: Sequence[Tree]) -> Tree:
    """Return results as a batch of lists."""
    if any(map(ragged.are_records, results)):
        return ragged.objects([_records(result) for result in results])
    flat = [trees.flatten(with_cells(result)) for result in results]
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return trees.unflatten(flat[0][1], [_cells(column) for column in columns])


def rows_of(results: Sequence[Tree], ids: Sequence[int]) -> Tree:
    """Return the rows of all results, with the numbers of their elements."""
    if any(ragged.are_records(result) for result in results):
        if any("element" in record for result in results for record in _records(result)):
            raise ValueError(
                f"a record has the key {ELEMENT!r}, which `ragged: rows` adds: name it otherwise"
            )
        return [
            {ELEMENT: id_, **record}
            for id_, result in zip(ids, results, strict=True)
            for record in _records(result)
        ]
    named = [result if isinstance(result, dict) else {"value": result} for result in results]
    if any(ELEMENT in result for result in named):
        raise ValueError(f"a result has the key {ELEMENT!r}, which `ragged: rows` adds: name it otherwise")
    flat = [trees.flatten(result) for result in named]
    counts = [_rows(leaves, id_) for (leaves, _), id_ in zip(flat, ids, strict=True)]
    parts = [
        [leaf if np.ndim(leaf) else np.repeat(np.asarray(leaf)[None], count) for leaf in leaves]
        for (leaves, _), count in zip(flat, counts, strict=True)
    ]
    columns = [_together(column) for column in zip(*parts, strict=True)]
    tree = trees.unflatten(flat[0][1], columns)
    return {ELEMENT: np.repeat(np.asarray(ids, np.int64), counts), **tree}


def _records(result: Tree) -> list[dict[str, Any]]:
    if ragged.are_records(result):
        records: list[dict[str, Any]] = result
        return records
    if np.size(result):
        raise ValueError("the results of some elements are lists of records, and others are not")
    return []


def _rows(leaves: Sequence[Any], id_: int) -> int:
    counts = {len(leaf) for leaf in leaves if np.ndim(leaf)}
    if len(counts) != 1:
        found = f"arrays of {', '.join(map(str, sorted(counts)))} rows" if counts else "no array"
        raise ValueError(
            f"`ragged: rows` needs arrays of one length: the result of element {id_} has {found}"
        )
    return counts.pop()


def _together(column: Sequence[NDArray[Any]]) -> NDArray[Any]:
    full = [part for part in column if not ragged.is_blank(part)]
    return ragged.concatenate(full) if full else column[0]


def with_cells(result: Tree) -> Tree:
    """Return a result with each list of records as one leaf."""
    if isinstance(result, dict):
        return {name: with_cells(value) for name, value in result.items()}
    return _cell(result) if ragged.are_records(result) else result


def _cell(value: Any) -> NDArray[Any]:
    cell = np.empty((), object)
    cell[()] = value
    return cell


def _cells(column: Sequence[Any]) -> NDArray[Any]:
    if not any(np.ndim(leaf) or is_cell(leaf) for leaf in column):
        return ragged.stack(column)
    return ragged.objects([leaf[()] if is_cell(leaf) else np.asarray(leaf) for leaf in column])


def is_cell(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray) and leaf.dtype.kind == "O" and not leaf.ndim


def _kind_of_leaf(leaf: Any) -> object:
    array = np.asarray(leaf)
    if ragged.is_blank(array):
        return "blank"
    dtype = "O" if array.dtype.kind in "UOT" else array.dtype.str.partition("S")[1] or array.dtype.str
    return dtype, array.ndim, array.shape[1:] if array.ndim else ()
