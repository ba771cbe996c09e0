"""Per-replica values: one component per replica, and their reduction to one value.

Names and rules are tf.distribute's (`PerReplica`, `Mirrored`, `Strategy.reduce`, `Strategy.gather`,
`local_results`); docstrings note where pipedist is stricter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple, NoReturn

import numpy as np

from pipedist.core import html, ragged, trees
from pipedist.core.misuse_hints import conversion_hint, is_masked
from pipedist.core.types import Tree
from pipedist.reduction import tree as reduction_tree
from pipedist.reduction.partials import SUMS, axis_of, finish_leaf, resolve_axes, sum_in_tree
from pipedist.reduction.tree import FoldTree, Reduction, fold_all
from pipedist.reduction.tree import ReduceOp as ReduceOp

_FLOAT: Final = frozenset({float})

_BARE: Final = frozenset({int, float, bool, str, np.ndarray, np.float64, np.float32, np.int64})
"""Frequent types of components that are leaves: their structure needs no lookup."""


class PerReplica:
    """One component per replica, in order of replica id (tf: PerReplica).

    It is a container, not a number: it supports length, index and iteration only. Get its components
    with `local_results`, or combine them with `reduce` or `gather`. In a tree it is a leaf; its
    components may be trees. A component is None if the replica made no call.

    Args:
        components: the value of replica 0, 1, ...; at least one.

    Raises:
        ValueError: there are no components.

    Example:
        values = pipedist.PerReplica([np.zeros(2), np.ones(2)])
        values[1], len(values)
    """

    __slots__ = ("_components",)

    def __init__(self, components: Iterable[Tree]) -> None:
        self._components = tuple(components)
        if not self._components:
            raise ValueError(f"{type(self).__name__} needs at least one component")

    @property
    def components(self) -> tuple[Tree, ...]:
        """The value of replica 0, 1, ..."""
        return self._components

    def __len__(self) -> int:
        return len(self._components)

    def __getitem__(self, replica: int) -> Tree:
        return self._components[replica]

    def __iter__(self) -> Iterator[Tree]:
        return iter(self._components)

    def __bool__(self) -> NoReturn:
        raise TypeError(f"the truth value of a {type(self).__name__} is ambiguous: test its components")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} is not an array: use local_results, reduce or gather")

    def __repr__(self) -> str:
        lines = (f"  {replica}: {component!r}" for replica, component in enumerate(self._components))
        return f"{type(self).__name__}:{{\n" + ",\n".join(lines) + "\n}"

    def _repr_html_(self) -> str:
        """Return a table for notebooks: a column per replica, a row per leaf."""
        shown = self._components[: html.ROWS_MAX]
        columns = [dict(html.leaves(component)) for component in shown]
        paths = list(dict.fromkeys(path for column in columns for path in column))
        heads = [type(self).__name__, *(f"replica {number}" for number in range(len(shown)))]
        rows = [
            [path, *(html.brief(column[path]) if path in column else "" for column in columns)]
            for path in paths
        ]
        missing = len(self) - len(shown)
        return html.table(heads, rows) + (html.paragraph(f"... {missing:,} more replicas") if missing else "")


class Mirrored(PerReplica):
    """A PerReplica whose components are equal; its creator ensures that.

    Example:
        rates = pipedist.Mirrored([0.1, 0.1])
        await strategy.run(step, args=(batch, rates))
    """

    __slots__ = ()


def per_replica(components: Sequence[Tree], replicas: int | None = None) -> Tree:
    """Return ONE tree with the components' structure and PerReplica leaves.

    A leaf is always PerReplica, also with one replica; None stays None. (tf.distribute returns a leaf
    unchanged if it is the same object in all replicas.)

    Args:
        components: the tree of replica 0, 1, ..., of one structure; at least one.
        replicas: total number of replicas, if the last ones made no call; their components are None.

    Raises:
        ValueError: the components differ in structure (the text shows both), or there are none.
    """
    missing = (None,) * (0 if replicas is None else replicas - len(components))
    if components and _BARE.issuperset(map(type, components)):
        return PerReplica((*components, *missing))
    columns, treedef = trees.same_structure(components)
    return trees.unflatten(
        treedef, [PerReplica((*leaves, *missing)) for leaves in zip(*columns, strict=True)]
    )


def select(tree: Tree, replica: int) -> Tree:
    """Return the tree with each PerReplica replaced by one replica's component.

    Args:
        tree: any tree.
        replica: replica id, 0-based.

    Raises:
        ValueError: a PerReplica in the tree has no such component.
    """

    def component(leaf: Any) -> Any:
        if not isinstance(leaf, PerReplica):
            return leaf
        if not 0 <= replica < len(leaf):
            raise ValueError(
                f"a {type(leaf).__name__} of {len(leaf)} components has none for replica {replica}: "
                "it comes from a strategy with another number of replicas"
            )
        return leaf[replica]

    return trees.tree_map(component, tree)


def local_results(tree: Tree, replicas: int) -> tuple[Tree, ...]:
    """Return the value of each replica, as a tuple in order of replica id.

    As in tf.distribute, a plain value gives `(value,)`, and a container one copy per replica with that
    replica's components.

    Args:
        tree: a PerReplica, a tree with PerReplica leaves, or anything else.
        replicas: number of replicas.

    Raises:
        ValueError: a PerReplica has another number of components.
    """
    leaves, treedef = trees.flatten(tree)
    for leaf in leaves:
        check_length(leaf, replicas)
    if tree is None or (treedef.is_leaf() and not isinstance(tree, PerReplica)):
        return (tree,)
    return tuple(select(tree, replica) for replica in range(replicas))


def reduce(op: ReduceOp | str, tree: Tree, axis: int | Sequence[int] | None, replicas: int) -> Tree:
    """Reduce per-replica values to one value, leaf by leaf (tf.distribute.Strategy.reduce).

    The fold is that of a reduction over a dataset (`pipedist.reduction.tree`): in the order of replica
    ids, in a fixed tree. With axis None components are folded element by element, and must have one
    shape; MEAN then divides by the number of components, EMPTY ONES INCLUDED (an array of no rows
    counts). With an axis their rows are folded too, and MEAN divides by the true number of rows.
    No rows give 0 (SUM), 1 (PROD), NaN (MEAN), None (MIN, MAX). A component that is None
    contributes nothing.

    With one replica a plain leaf is the component of replica 0. With more, it was not computed on each
    replica, so only MEAN with axis None is defined: the value itself.

    Args:
        op: an operator or its name (case-insensitive).
        tree: a PerReplica, or a tree with PerReplica leaves; numeric arrays and numbers.
        axis: None, an int, or a list or tuple of ints; negative ones count from the end.
        replicas: number of replicas.

    Returns:
        The tree with an array in place of each leaf, or a NumPy scalar if no axis remains.

    Raises:
        ValueError: an unknown operator; a plain leaf; shapes that differ; an axis out of range.
        TypeError: a leaf is not numeric (bool, str), dtypes differ, or an axis is not an int.
        OverflowError: an integer result does not fit its dtype.
    """
    reduction = Reduction.of(op, axis)
    if replicas > 1 and tree is None:
        return _reduce_plain(reduction, tree)
    if type(tree) is PerReplica:
        return _reduce_leaf(reduction, tree, replicas)
    return _leaf_by_leaf(lambda leaf: _reduce_leaf(reduction, leaf, replicas), tree)


class Partial(NamedTuple):
    """A component that was reduced to its partial."""

    partial: reduction_tree.Partial


def reduce_components(reduction: Reduction, components: Sequence[Tree | Partial]) -> Tree:
    """Return `reduce` of the components of all replicas, some of which are partials; with its bits and its errors."""
    bare = [each.partial[0] if type(each) is Partial else each for each in components]
    columns, treedef = trees.same_structure(bare)
    if not treedef.num_leaves:
        return reduce(reduction.op, bare[0], reduction.axis, len(components))

    def fold(place: int) -> Tree:
        partials = (
            [0, [component.partial[1][place]]]
            if type(component) is Partial
            else reduction.partial(column[place])
            for component, column in zip(components, columns, strict=True)
        )
        return reduction.finish(fold_all(reduction.combine, partials))

    return _leaf_by_leaf(fold, trees.unflatten(treedef, range(treedef.num_leaves)))


def gather(tree: Tree, axis: int, replicas: int) -> Tree:
    """Concatenate per-replica arrays in order of replica id, leaf by leaf (Strategy.gather).

    Args:
        tree: a PerReplica, or a tree with PerReplica leaves: arrays of any dtype, of one rank, whose
            sizes may differ along `axis` only. A plain leaf is returned as it is, and a component
            that is None contributes nothing.
        axis: the axis of concatenation; a negative one counts from the end.
        replicas: number of replicas.

    Raises:
        ValueError: a component is a scalar, sizes differ along another axis, or the axis is out of range.
        TypeError: dtypes differ, a component is not an array, or the axis is not an int.
    """
    number = axis_of(axis)

    def gathered(leaf: Any) -> Any:
        check_length(leaf, replicas)
        return concatenate(leaf.components, number) if isinstance(leaf, PerReplica) else leaf

    return _leaf_by_leaf(gathered, tree)


def _leaf_by_leaf(fn: Callable[[Any], Any], tree: Tree) -> Tree:
    """Return the tree of `fn(leaf)`; errors begin with the path of the leaf, unless it is the whole tree."""
    if type(tree) is PerReplica:  # a leaf, whose errors have no path
        return fn(tree)
    leaves, treedef = trees.flatten(tree)
    results = []
    for leaf in leaves:
        try:
            results.append(fn(leaf))
        except (TypeError, ValueError, OverflowError) as error:
            path = trees.treedef_paths(treedef)[len(results)]
            if not path:
                raise
            raise type(error)(f"leaf {path!r}: {error}") from None
    return trees.unflatten(treedef, results)


def check_length(leaf: Any, replicas: int) -> None:
    if isinstance(leaf, PerReplica) and len(leaf) != replicas:
        raise ValueError(
            f"a {type(leaf).__name__} of {len(leaf)} components, but there are {replicas} replicas: "
            "it comes from a strategy with another number of replicas"
        )


def _reduce_leaf(reduction: Reduction, leaf: Any, replicas: int) -> Tree:
    if isinstance(leaf, PerReplica):
        if len(leaf.components) != replicas:
            check_length(leaf, replicas)
        return _fold(reduction, leaf.components)
    return _fold(reduction, (leaf,)) if replicas == 1 else _reduce_plain(reduction, leaf)


def _fold(reduction: Reduction, components: Sequence[Tree]) -> Tree:
    if reduction.axis is None and reduction.op in SUMS and _FLOAT.issuperset(map(type, components)):
        return finish_leaf(reduction.op, ["f8", len(components), sum_in_tree(components)])
    fold: FoldTree[reduction_tree.Partial] = FoldTree(reduction.combine)
    for replica, component in enumerate(components):
        if component is not None:
            fold.push(replica, reduction.partial(component))
    return reduction.finish(fold.result())


def _reduce_plain(reduction: Reduction, leaf: Any) -> Any:
    if reduction.op is ReduceOp.MEAN and reduction.axis is None:
        return leaf
    if leaf is None:
        raise ValueError(
            "a plain None is not a per-replica value: if `run` returned it, is a `return` missing?"
        )
    raise ValueError(
        f"a plain {type(leaf).__name__} is not a per-replica value: {reduction.op.value} of it is "
        "ambiguous with more than one replica. Reduce what `run` returned"
    )


def concatenate(components: Sequence[Tree], axis: int, names: Sequence[str] = ()) -> Tree:
    """Concatenate trees of arrays leaf by leaf; see `gather`.

    Args:
        components: trees of one structure; one that is None contributes nothing.
        axis: the axis of concatenation; lists of records are concatenated along axis 0.
        names: what to call the components in errors; default: "replica 0", "replica 1", ...

    Raises:
        ValueError, TypeError: as `gather`; with the path of the leaf in the attribute `leaf` if one does not fit.
    """
    numbered = [number for number, component in enumerate(components) if component is not None]
    present = [components[number] for number in numbered]
    if not present:
        return None
    if any(map(ragged.are_records, present)) and all(
        part == [] or ragged.are_records(part) for part in present
    ):
        if axis:
            raise ValueError(f"records have no axis {axis} to gather along: use axis 0")
        return [record for part in present for record in part]
    names = [names[number] if names else f"replica {number}" for number in numbered]
    columns, treedef = trees.same_structure(present, names)
    gathered = []
    for index, parts in enumerate(zip(*columns, strict=True)):
        try:
            gathered.append(_concatenate_leaf([_plain_array(part) for part in parts], axis, names))
        except (TypeError, ValueError) as error:
            path = trees.treedef_paths(treedef)[index]
            place = f"leaf {path!r}" if path else "the value"
            located: Any = type(error)(f"gather of {place}: {error}")
            located.leaf = path
            raise located from None
    return trees.unflatten(treedef, gathered)


def _plain_array(part: Any) -> np.ndarray[Any, Any]:
    if is_masked(part):
        raise TypeError(f"expected plain arrays, got a masked one; {conversion_hint(part)}")
    return np.asarray(part)


def is_blank(value: Tree, axis: int = 0) -> bool:
    """Return whether no leaf has rows, and one is `np.array([])`, as a function returns that found none in a shard.

    That leaf has neither the dtype nor the shape of rows, so it fits all others, and adds nothing to them.
    """
    leaves = [value] if type(value) is np.ndarray else trees.flatten(value)[0]
    blank = [type(leaf) is np.ndarray and ragged.is_blank(leaf) for leaf in leaves]
    return any(blank) and all(
        is_bare or (type(leaf) is np.ndarray and -leaf.ndim <= axis < leaf.ndim and not leaf.shape[axis])
        for leaf, is_bare in zip(leaves, blank, strict=True)
    )


def _concatenate_leaf(parts: Sequence[np.ndarray[Any, Any]], axis: int, names: Sequence[str]) -> Any:
    found = [(part, name) for part, name in zip(parts, names, strict=True) if not ragged.is_blank(part)]
    if 0 < len(found) < len(parts):
        parts, names = zip(*found, strict=True)
    first = parts[0]
    for name, part in zip(names, parts, strict=True):
        if part.ndim == 0:
            raise ValueError(
                f"{name} has a scalar, which has no axis to gather along; return an array of "
                "shape (1,), or reduce"
            )
        if not ragged.fit(part.dtype, first.dtype):
            raise TypeError(
                f"{names[0]} has dtype {first.dtype}, {name} {part.dtype}; return one dtype in every call, as "
                "with x.astype(np.float64)"
            )
        (along,) = resolve_axes((axis,), part.shape)
        differs = (
            part.shape[:along] != first.shape[:along] or part.shape[along + 1 :] != first.shape[along + 1 :]
        )
        if differs or part.ndim != first.ndim:
            raise ValueError(
                f"{names[0]} has shape {first.shape}, {name} {part.shape}; only the size along "
                f"axis {axis} may differ"
            )
    return ragged.concatenate(parts, axis)
