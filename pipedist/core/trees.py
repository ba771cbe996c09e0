"""Trees: nested containers whose leaves are values.

Nodes are dict (with OrderedDict, defaultdict), list, tuple, namedtuple, deque, dataclass and None;
everything else is a leaf, including `PerReplica`. Two dicts with the same keys have the same structure:
leaves are visited in sorted order of keys, so the order of a fold over leaves never depends on insertion
order; `unflatten` restores each dict's insertion order. None has no leaves and stays None.

Dataclasses become nodes on first use, in a registry private to pipedist: user classes need no
declaration, and other users of optree in the process are unaffected. They are rebuilt without `__init__`
and `__post_init__`, because those might reject replaced leaves (a `PerReplica`, a partial sum).
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

import optree

from pipedist.core.types import Tree, is_record

Leaf = Any  # an array, number, str, bytes, PerReplica: any value that is not a node

Treedef = optree.PyTreeSpec  # the structure of a tree without its leaves; comparable with ==, hashable

T = TypeVar("T")

EXCERPT_CHARS_MAX = 500  # longest excerpt of a structure in an error

_NAMESPACE = "pipedist"
_NONE: Treedef = optree.tree_flatten(cast("Tree", None), namespace=_NAMESPACE)[1]
_registering = threading.Lock()
_registered: set[type] = set()


def flatten(tree: Tree) -> tuple[list[Leaf], Treedef]:
    """Split a tree, or a bare leaf, into its leaves and its structure.

    A tree that is deeper than 1,000 nodes, or contains itself, is a RecursionError.
    """
    if tree is None:  # what many steps of a training return
        return [], _NONE
    while True:
        leaves, treedef = optree.tree_flatten(tree, namespace=_NAMESPACE)
        unknown = [cls for cls in set(map(type, leaves)) if is_record(cls)]
        if not unknown:
            return leaves, treedef
        for cls in unknown:
            _register(cls)


def unflatten(treedef: Treedef, leaves: Iterable[Leaf]) -> Tree:
    """Build a tree from a structure and as many leaves (else ValueError), in the order of `flatten`."""
    tree: Tree = treedef.unflatten(leaves)
    return tree


def tree_map(fn: Callable[..., Leaf], tree: Tree, *rest: Tree) -> Tree:
    """Return the tree of `fn(leaf, *leaves_of_rest)`, called in the order of `flatten`.

    The trees of `rest` extend the structure of `tree` (else ValueError): where it has a leaf they may have a
    subtree, which is passed to `fn`.
    """
    leaves, treedef = flatten(tree)
    columns = [leaves]
    for other in rest:
        flatten(other)  # registers dataclasses that only this tree contains
        columns.append(treedef.flatten_up_to(other))
    return unflatten(treedef, map(fn, *columns))


def replace(tree: Tree, kind: type[T], fn: Callable[[T], Tree]) -> Tree:
    """Return the tree with each node of exactly the class `kind`, not traversed, replaced by `fn(node)`."""
    flatten(tree)  # registers its dataclasses
    return optree.tree_map(
        lambda leaf: fn(leaf) if type(leaf) is kind else leaf,
        tree,
        is_leaf=lambda node: type(node) is kind,
        namespace=_NAMESPACE,
    )


def structure(tree: Tree) -> Treedef:
    return flatten(tree)[1]


def paths(tree: Tree) -> list[str]:
    """Return the path of each leaf, in the order of `flatten`.

    Keys, positions and field names are joined with "/": `{"a": [1, {"b": 2}]}` gives "a/0" and
    "a/1/b"; a bare leaf has the path "".
    """
    return treedef_paths(structure(tree))


def treedef_paths(treedef: Treedef) -> list[str]:
    return ["/".join(_step(entry) for entry in accessor) for accessor in treedef.accessors()]


def describe(treedef: Treedef) -> str:
    """Return a structure as text for an error: `{'a': *, 'b': [*, None]}`, with * for a leaf."""
    text = str(treedef).removeprefix("PyTreeSpec(").removesuffix(")")
    return text.removesuffix(f", namespace={_NAMESPACE!r}")


def excerpt(treedef: Treedef) -> str:
    """Return the beginning of a structure as text."""
    text = describe(treedef)
    return text if len(text) <= EXCERPT_CHARS_MAX else text[:EXCERPT_CHARS_MAX] + "..."


def same_structure(trees: Sequence[Tree], names: Sequence[str] = ()) -> tuple[list[list[Leaf]], Treedef]:
    """Split at least one tree of ONE structure (else ValueError) into each one's leaves and the structure.

    `names` are those of the trees in the error; default: "replica 0", "replica 1", ...
    """
    if not trees:
        raise ValueError("no components: at least one replica is needed")
    flattened = list(map(flatten, trees))
    first = flattened[0][1]
    for index, (_, treedef) in enumerate(flattened):
        if treedef != first:
            one, other = (names[0], names[index]) if names else ("replica 0", f"replica {index}")
            raise ValueError(
                f"the components have different structures: {one} has {excerpt(first)}, "
                f"{other} has {excerpt(treedef)}; a replica function must return the same "
                "structure on every replica"
            )
    return [leaves for leaves, _ in flattened], first


def _step(entry: optree.PyTreeEntry) -> str:
    return entry.field if isinstance(entry, optree.NamedTupleEntry) else str(entry.entry)


def _register(cls: type) -> None:
    names = tuple(field.name for field in dataclasses.fields(cls))

    def to_children(instance: Any) -> tuple[tuple[Any, ...], None, tuple[str, ...]]:
        return tuple(getattr(instance, name) for name in names), None, names

    def from_children(_: object, children: Iterable[Any]) -> Any:
        instance: Any = object.__new__(cls)
        for name, child in zip(names, children, strict=True):
            object.__setattr__(instance, name, child)
        return instance

    with _registering:
        if cls in _registered:
            return
        optree.register_pytree_node(cls, to_children, from_children, namespace=_NAMESPACE)
        _registered.add(cls)
