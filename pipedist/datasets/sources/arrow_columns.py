"""Arrow columns as NumPy arrays, and back.

| Arrow | NumPy | a null is |
|---|---|---|
| integers, booleans | the same dtype | an error, which names its row |
| floats | the same dtype | NaN |
| dates, timestamps, durations | datetime64, timedelta64 | NaT |
| text; dictionaries of text | `<U`, or an object array of str, as `ragged.of_texts` | "" |
| binary | an object array of bytes | b"" |
| lists of a fixed size | an array with a further axis | as for its items |
| other lists | an object array of arrays | an empty list |
| structs | an object array of dicts | None |

In the other direction a further axis is a fixed-size list, and the cells of an object array decide its type. Columns
of numbers and dates without nulls share their memory in both directions, booleans and text do not. pyarrow is an
extra, and an argument here. Its own conversions of numbers import pandas where it is installed, which takes a quarter
of a second in each process, so numbers are views of the buffers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pipedist.core import ragged
from pipedist.datasets.sources.columns import CellError, Column, MissingCellError, dtype_of

OWN_TYPE = "own"  # in place of a column's type: the type in the file


def plain_type(arrow: Any, own: Any) -> Any:
    """Return the type of a column's values; for a dictionary, of its entries."""
    return own.value_type if arrow.types.is_dictionary(own) else own


def readable(arrow: Any, own: Any, kind: str) -> bool:
    """Return whether a column of type `own` in a file can be read as `kind`."""
    types, own = arrow.types, plain_type(arrow, own)
    text = _is_text(types, own)
    integer, floating = types.is_integer(own), types.is_floating(own)
    if kind == OWN_TYPE:
        time = types.is_timestamp(own) or types.is_date(own) or types.is_duration(own)
        return bool(
            text
            or time
            or _is_plain(types, own)
            or (_is_list(types, own) and _is_item(arrow, own.value_type))
            or _is_nested(types, own)
        )
    if kind == "str":
        return bool(text or types.is_null(own))
    if kind == "bool":
        return bool(types.is_boolean(own))
    if kind in ("date", "timestamp"):
        return bool(types.is_date(own) or types.is_timestamp(own))
    return bool(integer or ((floating or types.is_null(own)) and kind.startswith("float")))


def _is_plain(types: Any, own: Any) -> bool:
    number = types.is_integer(own) or types.is_floating(own) or types.is_boolean(own)
    return bool(number or _is_text(types, own) or _is_binary(types, own))


def _is_binary(types: Any, own: Any) -> bool:
    fixed = types.is_fixed_size_binary(own) or str(own) == "binary_view"
    return bool(types.is_binary(own) or types.is_large_binary(own) or fixed)


def _is_list(types: Any, own: Any) -> bool:
    return bool(types.is_list(own) or types.is_large_list(own) or types.is_fixed_size_list(own))


def _is_item(arrow: Any, own: Any) -> bool:
    """Return whether lists of a type are arrays."""
    return not arrow.types.is_struct(own) and readable(arrow, own, OWN_TYPE)


def _is_nested(types: Any, own: Any) -> bool:
    """Return whether values of a type are dicts and lists of plain values."""
    if types.is_struct(own):
        return all(_is_nested(types, field.type) or _is_plain(types, field.type) for field in own)
    if _is_list(types, own):
        return _is_nested(types, own.value_type) or _is_plain(types, own.value_type)
    return False


def _is_text(types: Any, own: Any) -> bool:
    # by name: the oldest supported pyarrow has no views
    return bool(types.is_string(own) or types.is_large_string(own) or str(own) == "string_view")


def numpy_column(arrow: Any, column: Any, kind: str) -> Column:
    """Return a `readable` ChunkedArray as an array, or raise CellError.

    A null is NaN in floats, "" in text, b"" in binary, NaT in dates, an empty list in lists, None in structs.
    """
    types = arrow.types
    if types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if types.is_null(column.type):  # a column without any value
        column = column.cast(arrow.string() if kind == "str" else arrow.float64())
    own = column.type
    if _is_text(types, own):
        return ragged.of_texts(["" if text is None else text for text in _texts(column)])
    if _is_binary(types, own):
        return ragged.objects([b"" if data is None else data for data in column.to_pylist()])
    if _is_list(types, own):
        if not _is_item(arrow, own.value_type):
            return ragged.objects(column.to_pylist())
        return _lists(arrow, column)
    if types.is_struct(own):
        return ragged.objects(column.to_pylist())
    counted = types.is_boolean(own) or (types.is_integer(own) and not kind.startswith("float"))
    if counted and column.null_count:
        row = int(np.flatnonzero(numbers_of(arrow, column.is_null()))[0])
        raise MissingCellError(row, own if kind == OWN_TYPE else kind)
    values = numbers_of(arrow, column)
    return values if kind == OWN_TYPE else _fitted(values, dtype_of(kind))


def numbers_of(arrow: Any, column: Any) -> Column:
    """Return an Array or ChunkedArray of numbers, booleans or dates; with nulls integers become float64."""
    if arrow.types.is_boolean(column.type):
        return numbers_of(arrow, column.cast(arrow.uint8())).view(np.bool_)
    parts = column.chunks if isinstance(column, arrow.ChunkedArray) else [column]
    chunks = [_chunk(arrow, part) for part in parts if len(part)]
    if not chunks:
        return np.empty(0, _dtype_of_type(arrow.types, column.type))
    return chunks[0] if len(chunks) == 1 else np.concatenate(chunks)


def _chunk(arrow: Any, chunk: Any) -> Column:
    dtype = _dtype_of_type(arrow.types, chunk.type)
    stored = np.dtype(np.int32) if arrow.types.is_date32(chunk.type) else dtype
    values: Column = np.frombuffer(
        chunk.buffers()[1], stored, count=len(chunk), offset=chunk.offset * stored.itemsize
    )
    values.flags.writeable = False  # other readers share the buffer
    if stored != dtype:
        values = values.astype(np.int64).view(dtype)
    if not chunk.null_count:
        return values
    values = values.astype(np.float64 if dtype.kind in "iu" else dtype)
    values[numbers_of(arrow, chunk.is_null())] = np.nan if values.dtype.kind == "f" else "NaT"
    return values


def _dtype_of_type(types: Any, own: Any) -> np.dtype[Any]:
    if types.is_timestamp(own) or types.is_duration(own):
        return np.dtype(f"{'M8' if types.is_timestamp(own) else 'm8'}[{own.unit}]")
    if types.is_date(own):
        return np.dtype("M8[D]" if types.is_date32(own) else "M8[ms]")
    return np.dtype({"halffloat": "f2", "float": "f4", "double": "f8"}.get(str(own), str(own)))


def _lists(arrow: Any, column: Any) -> Column:
    """Return lists: of a fixed size as array[n, size], others as an object array of arrays."""
    import pyarrow.compute  # the sources import only what tables of numbers need

    size = column.type.list_size if arrow.types.is_fixed_size_list(column.type) else None
    counted = pyarrow.compute.list_value_length(column).fill_null(size or 0)
    lengths = numbers_of(arrow, counted).astype(np.int64)
    if size is not None and column.null_count:  # `flatten` drops the values of a null
        null = arrow.scalar([None] * size, column.type)
        column = column.fill_null(null)
    items = pyarrow.compute.list_flatten(column)
    ends = np.cumsum(lengths, dtype=np.int64)
    try:
        values = numpy_column(arrow, items, OWN_TYPE)
    except CellError as error:
        error.row = int(np.searchsorted(ends, error.row, side="right"))  # of the list that the item is in
        raise
    if size is not None:
        return values.reshape(len(column), size, *values.shape[1:])
    starts = ends - lengths
    return ragged.objects([values[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)])


def _texts(column: Any) -> list[str | None]:
    try:
        texts: list[str | None] = column.to_pylist()
    except UnicodeDecodeError:  # Arrow's writers need not check
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
    if dtype.kind == "M":  # a date of a timestamp is its day
        result: Column = values.astype(dtype)
        wrong = (result.astype(values.dtype) != values) & ~np.isnat(values)
    elif dtype.kind == "f":
        with np.errstate(over="ignore"):
            result = values.astype(dtype)
        wrong = np.isinf(result) & ~np.isinf(values)
    else:
        limits = np.iinfo(dtype)
        result = values.astype(dtype)
        wrong = (values < limits.min) | (values > limits.max)
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise CellError(row, f"{values[row]} does not fit {dtype}")
    return result


def arrow_column(arrow: Any, array: Column) -> Any:
    """Return an array as an Arrow Array; raise ArrowException, ValueError, TypeError or OverflowError if none fits."""
    if 0 in array.shape[1:]:
        raise ValueError(f"lists of shape {array.shape[1:]} have no values")
    values: Any = array.reshape(-1)
    if array.dtype.kind in "iuf" and array.dtype.isnative:
        kind = arrow.from_numpy_dtype(array.dtype)
        column = arrow.Array.from_buffers(
            kind, len(values), [None, arrow.py_buffer(np.ascontiguousarray(values))]
        )
        return _fixed_size(arrow, column, array.shape[1:])
    if array.dtype.kind in "US":
        values = values.tolist()
    elif array.dtype.kind == "O":
        values = list(map(_plain_cell, values))
    kinds = {"U": arrow.string(), "S": arrow.binary()}
    return _fixed_size(arrow, arrow.array(values, type=kinds.get(array.dtype.kind)), array.shape[1:])


def _fixed_size(arrow: Any, column: Any, sizes: tuple[int, ...]) -> Any:
    for size in reversed(sizes):
        column = arrow.FixedSizeListArray.from_arrays(column, size)
    return column


def _plain_cell(cell: Any) -> Any:
    """Return a cell of an object array in the form in which pyarrow reads it."""
    if not isinstance(cell, np.ndarray | np.datetime64):
        return cell
    # pyarrow can't read NumPy's dates in an array of objects
    return cell.tolist() if cell.ndim > 1 or cell.dtype.kind == "O" or cell.dtype.str[1:] == "M8[D]" else cell
