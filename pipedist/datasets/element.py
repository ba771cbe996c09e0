"""The elements of a `Dataset`, trees of NumPy arrays, and their specs.

As in tf.data, a list is one array: `[1, 2, 3]` is stacked to int64[3]. Structure is expressed by
tuples, namedtuples, dicts and dataclasses.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from pipedist.core import ragged, trees
from pipedist.core.misuse_hints import conversion_hint, is_masked
from pipedist.core.types import Tree

Shape = tuple[int | None, ...]  # None is a dimension that differs between elements


class ArraySpec:
    """The dtype and static shape of one leaf of an element (tf.TensorSpec).

    A leaf of trees, therefore not a dataclass.

    Args:
        dtype: any NumPy dtype; text and bytes have no width here (`str`, `bytes`). It comes first, where
            tf.TensorSpec has the shape.
        shape: one entry per dimension, None if it differs between elements.

    Raises:
        TypeError: the dtype is none, or a shape.
        ValueError: a dimension is neither None nor an int of at least 0.

    Example:
        dataset = pipedist.Dataset.range(10).batch(4)
        dataset.element_spec  # an ArraySpec: dtype int64, shape (None,)
    """

    __slots__ = ("dtype", "shape")

    dtype: np.dtype[Any]
    shape: Shape

    def __init__(self, dtype: DTypeLike, shape: Sequence[int | None] = ()) -> None:
        if isinstance(dtype, (tuple, list)) and all(size is None or isinstance(size, int) for size in dtype):
            raise TypeError(
                f"ArraySpec takes the dtype first, then the shape, but got the shape {dtype!r} first: write "
                f"pipedist.ArraySpec(dtype, {dtype!r})"
            )
        found = np.dtype(dtype)
        object.__setattr__(self, "dtype", np.dtype(found.kind) if found.kind in "US" else found)
        for size in shape:
            if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 0):
                raise ValueError(
                    f"shape {tuple(shape)!r}: a dimension must be an int >= 0 or None, got {size!r}"
                )
        object.__setattr__(self, "shape", tuple(shape))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"ArraySpec is immutable: can't set {name!r}")

    def __reduce__(self) -> tuple[Any, ...]:
        return ArraySpec, (self.dtype, self.shape)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ArraySpec):
            return NotImplemented
        return self.dtype == other.dtype and self.shape == other.shape

    def __hash__(self) -> int:
        return hash((self.dtype, self.shape))

    def __repr__(self) -> str:
        name = {"U": "str", "S": "bytes"}.get(self.dtype.kind, str(self.dtype))
        return f"ArraySpec({name}[{', '.join(map(str, self.shape))}])"

    def with_shape(self, shape: Sequence[int | None]) -> ArraySpec:
        """Return the spec of the same dtype with another shape."""
        return ArraySpec(self.dtype, shape)

    def merge(self, other: ArraySpec) -> ArraySpec:
        """Return the narrowest spec that covers both; dimensions which differ become None.

        Raises:
            ValueError: dtypes or ranks differ.
        """
        if self.dtype != other.dtype or len(self.shape) != len(other.shape):
            raise ValueError(f"{self} and {other} have no common spec: dtype and rank must agree")
        return self.with_shape([a if a == b else None for a, b in zip(self.shape, other.shape, strict=True)])


def as_element(value: Any) -> Tree:
    """Turn what user code gave into an element of NumPy leaves; raise TypeError or ValueError if that is impossible."""
    if isinstance(value, np.ndarray | np.generic):
        return _checked(value)
    if value is None:
        return None
    if isinstance(value, dict):
        return {key: as_element(item) for key, item in value.items()}
    if isinstance(value, tuple):
        items = [as_element(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        result = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(result, field.name, as_element(getattr(value, field.name)))
        return result
    if isinstance(value, str | bytes):  # an array would drop zeros at the end
        return np.str_(value) if isinstance(value, str) else np.bytes_(value)
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise ValueError(
            f"a list is stacked to one array, but its items have different shapes ({error}); "
            "write structure as a tuple or a dict"
        ) from error
    return _checked(array)[()]


def kept(leaf: Any) -> Any:
    """Return a leaf that stays unchanged: a copy of a writeable array.

    The user's code may reuse the memory for the next element before this one is stacked or sent.
    """
    return leaf.copy() if isinstance(leaf, np.ndarray) and leaf.flags.writeable else leaf


def read_only(element: Tree) -> Tree:
    """Return an element with read-only views of its arrays, safe to share."""
    return trees.tree_map(lambda leaf: _frozen(leaf) if isinstance(leaf, np.ndarray) else leaf, element)


def _frozen(array: NDArray[Any]) -> NDArray[Any]:
    view = array.view()
    view.flags.writeable = False
    return view


def _checked(value: Any) -> Any:
    if type(value) is not np.ndarray and is_masked(value):
        raise TypeError(
            f"an element has a masked array as a leaf; expected a plain array: {conversion_hint(value)}"
        )
    if isinstance(value, np.ndarray) and value.dtype.kind == "O":
        try:
            ragged.split(value)
        except ragged.UnlikeCells as error:
            raise TypeError(f"an element has a leaf of {error}") from None
    elif value.dtype.kind == "O" or value.dtype.type is np.void:
        raise TypeError(
            f"an element has a leaf of dtype {value.dtype}; expected numbers, bool, str, bytes or "
            "dates (write structure as tuples and dicts)"
        )
    return value


def spec_of(element: Tree) -> Tree:
    return trees.tree_map(lambda leaf: ArraySpec(leaf.dtype, leaf.shape), element)


def misfit(spec: Tree, arrays: Tree) -> str:
    """Return how elements, stacked in arrays [n, ...], differ from a tree of ArraySpecs; "" if they fit it."""
    specs, declared = trees.flatten(spec)
    leaves, treedef = trees.flatten(arrays)
    if treedef != declared:
        return f"{trees.describe(treedef)}, and `element_spec` is {trees.describe(declared)}"
    for path, array, wanted in zip(trees.paths(arrays), leaves, specs, strict=True):
        shape = array.shape[1:]
        sizes = zip(shape, wanted.shape, strict=False)
        fits = len(shape) == len(wanted.shape) and all(size in (there, None) for there, size in sizes)
        if not fits or not ragged.fit(array.dtype, wanted.dtype):
            named = f"{path!r} of " if path else ""
            return f"{named}{ArraySpec(array.dtype, shape)}, and `element_spec` declares {wanted}"
    return ""


_SHOWN_MAX = 12  # leaves of an element that are named


def described(spec: Tree) -> str:
    """Return a tree of ArraySpecs in one line: "{image: uint8[32, 32, 3], label: str}"."""
    leaves, _ = trees.flatten(spec)
    texts = [str(leaf).removeprefix("ArraySpec(").removesuffix(")").removesuffix("[]") for leaf in leaves]
    paths = trees.paths(spec)
    if paths == [""]:
        return texts[0]
    named = [f"{path}: {text}" for path, text in zip(paths, texts, strict=True)]
    more = [f"and {len(named) - _SHOWN_MAX} more"] if len(named) > _SHOWN_MAX else []
    return "{" + ", ".join(named[:_SHOWN_MAX] + more) + "}"


def merge_specs(first: Tree, second: Tree) -> Tree:
    """Return the narrowest spec that covers both trees of specs, else raise ValueError."""
    a, treedef = trees.flatten(first)
    b, other = trees.flatten(second)
    if treedef != other:
        raise ValueError(
            f"elements have different structures: {trees.describe(treedef)} and {trees.describe(other)}"
        )
    return trees.unflatten(treedef, [x.merge(y) for x, y in zip(a, b, strict=True)])


def zeros(spec: Tree) -> Tree:
    """Return an element of zeros (False, "") of a spec; unknown dimensions are 1."""
    return trees.tree_map(
        lambda leaf: np.zeros([1 if size is None else size for size in leaf.shape], leaf.dtype)[()], spec
    )


def stack(elements: Sequence[Tree]) -> Tree:
    """Stack elements of one structure and shape (else ValueError) along a new first axis, leaf by leaf."""
    columns, treedef = _columns(elements)
    stacked = []
    for index, column in enumerate(columns):
        shapes = {np.shape(leaf) for leaf in column}
        if len(shapes) > 1:
            name = trees.treedef_paths(treedef)[index]
            raise ValueError(
                f"can't batch elements of different shapes {sorted(shapes)}{_at(name)}: use padded_batch"
            )
        stacked.append(ragged.stack(column))
    return trees.unflatten(treedef, stacked)


def stack_padded(elements: Sequence[Tree]) -> Tree:
    """Stack elements of one structure and rank; each leaf is padded at the end to the largest shape."""
    columns, treedef = _columns(elements)
    stacked = []
    for index, column in enumerate(columns):
        if len({np.ndim(leaf) for leaf in column}) > 1:
            name = trees.treedef_paths(treedef)[index]
            raise ValueError(f"can't pad elements of different ranks{_at(name)}")
        if len(set(map(np.shape, column))) == 1:
            stacked.append(ragged.stack(column))
            continue
        shape = [max(sizes) for sizes in zip(*(np.shape(leaf) for leaf in column), strict=True)]
        block = np.zeros((len(column), *shape), np.result_type(*[np.asarray(leaf).dtype for leaf in column]))
        if block.dtype.kind == "O":  # zeros are no texts
            cell = next((cell for leaf in column for cell in leaf.flat if cell is not None), None)
            block[...] = type(cell)() if isinstance(cell, str | bytes) else None
        for row, leaf in enumerate(column):
            place = tuple(slice(size) for size in np.shape(leaf))
            block[row, ...][place] = leaf  # `...`: a view also of a scalar
        stacked.append(block)
    return trees.unflatten(treedef, stacked)


def _columns(elements: Sequence[Tree]) -> tuple[list[list[Any]], trees.Treedef]:
    if not elements:
        raise ValueError("nothing to batch")
    flattened = list(map(trees.flatten, elements))
    first = flattened[0][1]
    for _, treedef in flattened:
        if treedef != first:
            raise ValueError(
                "can't batch elements of different structures: "
                f"{trees.describe(first)} and {trees.describe(treedef)}"
            )
    columns = [list(column) for column in zip(*(leaves for leaves, _ in flattened), strict=True)]
    for index, column in enumerate(columns):
        wanted, *others = dict.fromkeys(np.asarray(leaf).dtype for leaf in column)
        # NumPy would make floats or text of integers, in some batches only.
        for other in others:
            if not ragged.fit(other, wanted):
                name = trees.treedef_paths(first)[index]
                raise ValueError(
                    f"can't batch elements of dtypes {wanted} and {other}{_at(name)}: convert them to one dtype"
                )
    return columns, first


def common_rows(element: Tree) -> int:
    """Return the length of the leading axis that all leaves share, else raise ValueError."""
    leaves, treedef = trees.flatten(element)
    if not leaves:
        raise ValueError("an element without arrays has no rows")
    names = trees.treedef_paths(treedef)
    sizes = []
    for name, leaf in zip(names, leaves, strict=True):
        if np.ndim(leaf) == 0:
            raise ValueError(f"a scalar has no rows{_at(name)}: expected arrays with a leading axis")
        sizes.append(len(leaf))
    if len(set(sizes)) > 1:
        found = ", ".join(f"{name or 'value'}: {size}" for name, size in zip(names, sizes, strict=True))
        raise ValueError(f"leaves have different numbers of rows ({found}); expected one length for all")
    return sizes[0]


def split(element: Tree, parts: int) -> list[Tree]:
    """Divide an element's rows into `parts` chunks of ceil(rows / parts), the last shorter or empty.

    Each leaf is divided by its own length (tf.distribute's rebatching of a zip). Chunks are read-only views.
    """
    leaves, treedef = trees.flatten(element)
    columns = []
    for index, leaf in enumerate(leaves):
        if np.ndim(leaf) == 0:
            name = trees.treedef_paths(treedef)[index]
            raise ValueError(
                f"can't divide a scalar among replicas{_at(name)}: "
                "batch the dataset last, with .batch(global_batch_size)"
            )
        view = _frozen(np.ascontiguousarray(leaf))
        size = -(-len(view) // parts)
        columns.append([view[part * size : (part + 1) * size] for part in range(parts)])
    return [trees.unflatten(treedef, [column[part] for column in columns]) for part in range(parts)]


def _at(path: str) -> str:
    return f" (leaf {path!r})" if path else ""
