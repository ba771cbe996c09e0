"""Frames of pandas, Polars and Arrow as trees of columns, and shards in the form of another library.

`columns_of` makes what the engine knows of a frame that a function returned: a dict of arrays by column, in the
order of the frame, or one array of a series. An object that has Arrow's PyCapsule interface (`__arrow_c_stream__`) is a
frame. Types and nulls follow `pipedist.datasets.sources.arrow_columns`. Columns of pandas with a NumPy dtype, and
those of text, need no pyarrow. Of pandas' index, the levels that have a name are columns, before the others.

`form_of` makes a frame or tensors of a shard:

| form | the shard becomes | memory |
|---|---|---|
| pandas | a DataFrame | that of the shard, read-only, for numbers and dates |
| polars, arrow | a DataFrame, a Table, which can't be changed | that of the shard for numbers and dates |
| torch | the same tree with tensors; text stays NumPy | a copy: a tensor can be changed, and a shard must not |
| jax | the same tree with JAX arrays; text stays NumPy | as JAX decides; 64-bit numbers need jax_enable_x64 |

A bare array is the column "value" of a frame, nested keys are joined with "/", and an array with further axes is a
column of fixed-size lists (in pandas: of arrays).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, Final

import numpy as np

from pipedist.core import ragged, trees
from pipedist.core.types import Form, Tree
from pipedist.datasets.sources.arrow_columns import OWN_TYPE, arrow_column, numpy_column, readable
from pipedist.datasets.sources.columns import CellError, Column, MissingCellError

_PACKAGES: Final = {
    "pandas": ("pandas",),
    "polars": ("polars", "pyarrow"),
    "arrow": ("pyarrow",),
    "torch": ("torch",),
    "jax": ("jax",),
}


class FrameError(TypeError):
    """A frame that is no tree of columns, or a shard that is no frame; the text names the column."""


def missing_package(form: Form) -> str:
    """Return the command that installs what a form needs; "" if it is there."""
    if all(find_spec(package) is not None for package in _PACKAGES[form]):
        return ""
    return "pip install torch" if form == "torch" else f"pip install 'pipedist[{form}]'"


# -- frames as columns --------------------------------------------------------------------------------


def columns_of(frame: Any) -> dict[str, Column] | Column:
    """Return the columns of a frame by name, array[rows] each; those of a series as one array.

    Columns share the frame's memory where they can.

    Raises:
        FrameError: a column has a null where its dtype has none, or a type that no array has; two columns have the
            same name, or one has none; or pyarrow is missing.

    Example:
        >>> import pandas
        >>> columns_of(pandas.DataFrame({"n": [1, 2]}))
        {'n': array([1, 2])}
    """
    pandas = sys.modules.get("pandas")
    if pandas is not None and isinstance(frame, pandas.Series):
        return _of_series(pandas, frame, frame.name)
    if pandas is not None and isinstance(frame, pandas.DataFrame):
        levels = [name for name in frame.index.names if name is not None]
        parts = [frame.index.get_level_values(name).to_series() for name in levels]
        parts += [frame.iloc[:, place] for place in range(frame.shape[1])]
        _check_names([*levels, *frame.columns], frame)
        return {part.name: _of_series(pandas, part, part.name) for part in parts}
    arrow = _pyarrow(frame)
    try:
        if isinstance(frame, arrow.Array):
            return _of_arrow(arrow, arrow.chunked_array([frame]), "value")
        table = frame
        if not isinstance(frame, arrow.Table):
            stream = arrow.chunked_array(frame)  # once: a reader can't be read a second time
            if not arrow.types.is_struct(stream.type):
                return _of_arrow(arrow, stream, "value")
            table = arrow.Table.from_struct_array(stream)
    except (arrow.ArrowException, ValueError, TypeError, AttributeError) as error:
        raise FrameError(f"{_kind(frame)} can't be read through Arrow: {error}") from error
    _check_names(table.column_names, frame)
    return {name: _of_arrow(arrow, table.column(name), name) for name in table.column_names}


def _of_series(pandas: Any, series: Any, name: object) -> Column:
    dtype = series.dtype
    if isinstance(dtype, np.dtype) and dtype.kind != "O":
        values: Column = series.to_numpy()
        return values
    if isinstance(dtype, np.dtype | pandas.StringDtype):
        cells = series.to_numpy(object)
        missing = series.isna().to_numpy()
        if all(isinstance(cell, str) for cell in cells[~missing]):
            return ragged.of_texts(["" if gap else cell for cell, gap in zip(cells, missing, strict=True)])
        if all(isinstance(cell, np.ndarray) and cell.ndim for cell in cells) and len(cells):
            return ragged.objects(cells)
    arrow = _pyarrow(series)
    try:
        array = arrow.Array.from_pandas(series)
    except (arrow.ArrowException, ValueError, TypeError) as error:
        raise FrameError(f"column {name!r} of dtype {dtype} has no Arrow type: {error}") from error
    chunked = array if isinstance(array, arrow.ChunkedArray) else arrow.chunked_array([array])
    return _of_arrow(arrow, chunked, name)


def _of_arrow(arrow: Any, column: Any, name: object) -> Column:
    if not (readable(arrow, column.type, OWN_TYPE) or arrow.types.is_null(column.type)):
        raise FrameError(
            f"column {name!r} is {column.type}, which no array has: convert it to a number or text"
        )
    try:
        return numpy_column(arrow, column, OWN_TYPE)
    except CellError as error:
        is_missing = isinstance(error, MissingCellError)
        fix = "Fill it, or cast the column to a float" if is_missing else "Convert the column"
        raise FrameError(f"column {name!r}, row {error.row}: {error.fact}. {fix}") from error


def _check_names(names: list[Any], frame: Any) -> None:
    for place, name in enumerate(names):
        if not isinstance(name, str):
            raise FrameError(
                f"column {place} of {_kind(frame)} has the name {name!r}, and names must be text"
            )
        if name in names[:place]:
            raise FrameError(f"{_kind(frame)} has two columns named {name!r}")


def _pyarrow(frame: Any) -> Any:
    try:
        import pyarrow
        import pyarrow.compute
    except ImportError:
        raise FrameError(f"{_kind(frame)} needs pyarrow: pip install 'pipedist[arrow]'") from None
    return pyarrow


def _kind(frame: Any) -> str:
    cls = type(frame)
    return f"a {cls.__module__.partition('.')[0]} {cls.__qualname__}"


# -- shards in the form of another library ------------------------------------------------------------


def form_of(shard: Tree, form: Form) -> Any:
    """Return a shard as a frame, or with its arrays as tensors; the table above has the rules.

    Args:
        shard: a tree of arrays; for a frame, all of one length.

    Raises:
        FrameError: the arrays are no columns of one length, or the library has no type for one.
    """
    if form == "torch":
        import torch

        return trees.tree_map(lambda leaf: torch.from_numpy(leaf.copy()) if _is_tensor(leaf) else leaf, shard)
    if form == "jax":
        import jax.numpy

        return trees.tree_map(lambda leaf: jax.numpy.asarray(leaf) if _is_tensor(leaf) else leaf, shard)
    columns: dict[str, Column] = {}
    for path, leaf in _leaves(shard, ()):
        name = "/".join(path) or "value"
        if not isinstance(leaf, np.ndarray) or not leaf.ndim:
            raise FrameError(f"a frame has columns, and {name!r} of the input is a {type(leaf).__qualname__}")
        columns[name] = leaf
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise FrameError(f"the columns of a frame have one length, and those of the input have {lengths}")
    if form == "pandas":
        import pandas

        cells = {name: list(column) if column.ndim > 1 else column for name, column in columns.items()}
        return pandas.DataFrame(cells, copy=False)
    import pyarrow

    arrays = {}
    for name, column in columns.items():
        try:
            arrays[name] = arrow_column(pyarrow, column)
        except (pyarrow.ArrowException, ValueError, TypeError, OverflowError) as error:
            raise FrameError(f"column {name!r} of dtype {column.dtype} has no Arrow type: {error}") from error
    table = pyarrow.table(arrays)
    if form == "arrow":
        return table
    import polars

    return polars.from_arrow(table)


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc"


def _leaves(tree: Tree, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield path and value of the leaves, dicts in their own order."""
    if isinstance(tree, dict):
        for name, child in tree.items():
            yield from _leaves(child, (*path, str(name)))
        return
    leaves, structure = trees.flatten(tree)
    for below, leaf in zip(trees.treedef_paths(structure), leaves, strict=True):
        yield (*path, below) if below else path, leaf
