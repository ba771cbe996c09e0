"""pyarrow's columns -> typed NumPy columns."""

from __future__ import annotations

from typing import Any

import numpy as np

from pipedist.datasets.sources.columns import CellError, Column, array_of_texts

OWN_TYPE = "own"
"""Stands for a column's type where the spec names none: that of the file."""


def plain_type(arrow: Any, own: Any) -> Any:
    """Return the type of a column's values: for a dictionary that of its entries."""
    return own.value_type if arrow.types.is_dictionary(own) else own


def readable(arrow: Any, own: Any, kind: str) -> bool:
    """Tell whether a column of a file can be read as a type.

    Args:
        arrow: the pyarrow module.
        own: the column's type in the file.
        kind: a column type, or `OWN_TYPE`.
    """
    types, own = arrow.types, plain_type(arrow, own)
    text = _is_text(types, own)
    integer, floating = types.is_integer(own), types.is_floating(own)
    if kind == OWN_TYPE:
        time = types.is_timestamp(own) or types.is_date(own) or types.is_duration(own)
        return bool(text or integer or floating or types.is_boolean(own) or time)
    if kind == "str":
        return bool(text or types.is_null(own))
    if kind == "bool":
        return bool(types.is_boolean(own))
    return bool(integer or ((floating or types.is_null(own)) and kind.startswith("float")))


def _is_text(types: Any, own: Any) -> bool:
    # by its name: the oldest pyarrow that we take has no views
    return bool(types.is_string(own) or types.is_large_string(own) or str(own) == "string_view")


def numpy_column(arrow: Any, column: Any, kind: str) -> Column:
    """Return a column's values as an array; nulls are csv's missing values.

    Args:
        arrow: the pyarrow module.
        column: ChunkedArray[n] of a type that is `readable` as `kind`.
        kind: a column type, or `OWN_TYPE`.

    Returns:
        array[n]: a null is NaN in floats, "" in text and NaT in dates.

    Raises:
        CellError: a value is null that may not be, or does not fit its type.
    """
    types = arrow.types
    if types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if types.is_null(column.type):  # the writer saw no value, and so no type
        column = column.cast(arrow.string() if kind == "str" else arrow.float64())
    own = column.type
    if _is_text(types, own):
        return array_of_texts(["" if text is None else text for text in _texts(column)])
    counted = types.is_boolean(own) or (types.is_integer(own) and not kind.startswith("float"))
    if counted and column.null_count:
        row = int(np.flatnonzero(column.is_null().to_numpy())[0])
        named = str(own) if kind == OWN_TYPE else kind
        raise CellError(row, f"a value of type {named} is missing; float columns read one as NaN")
    values: Column = column.to_numpy()
    return values if kind == OWN_TYPE else _fitted(values, np.dtype(kind))


def _texts(column: Any) -> list[str | None]:
    try:
        texts: list[str | None] = column.to_pylist()
    except UnicodeDecodeError:  # Arrow's writers need not look
        for row, text in enumerate(column):
            try:
                text.as_py()
            except UnicodeDecodeError as error:
                raise CellError(row, f"{error.object!r} is not UTF-8 text") from error
        raise
    return texts


def _fitted(values: Column, dtype: np.dtype[Any]) -> Column:
    if values.dtype == dtype:
        return values
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            result: Column = values.astype(dtype)
        wrong = np.isinf(result) & ~np.isinf(values)
    else:
        limits = np.iinfo(dtype)
        result = values.astype(dtype)
        wrong = (values < limits.min) | (values > limits.max)
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise CellError(row, f"{values[row]} does not fit {dtype}")
    return result
