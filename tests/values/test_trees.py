from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field

import pytest

from pipedist.core import trees
from pipedist.values import PerReplica

Pair = namedtuple("Pair", "x y")


@dataclass(frozen=True, slots=True)
class Stats:
    total: object
    parts: object = None


@dataclass
class Picky:
    number: int
    double: int = field(init=False)

    def __post_init__(self) -> None:
        if not isinstance(self.number, int):
            raise TypeError("only ints")
        self.double = 2 * self.number


def test_every_container_is_taken_apart_and_put_together() -> None:
    tree = {"b": Stats(1, {"z": Stats(2)}), "a": [Pair(3, 4), None, (5,)], 7: OrderedDict(q=6)}
    leaves, treedef = trees.flatten(tree)
    assert sorted(leaves) == [1, 2, 3, 4, 5, 6]
    assert trees.unflatten(treedef, leaves) == tree


def test_leaves_come_in_sorted_order_of_keys_and_dicts_keep_their_own_order() -> None:
    leaves, treedef = trees.flatten({"b": 1, "a": 2})
    assert leaves == [2, 1]
    assert list(trees.unflatten(treedef, leaves)) == ["b", "a"]
    assert trees.structure({"a": 0, "b": 0}) == treedef


def test_paths_name_keys_positions_and_fields() -> None:
    tree = {"b": Stats(1, [2]), "a": [Pair(3, 4), None]}
    assert trees.paths(tree) == ["a/0/x", "a/0/y", "b/total", "b/parts/0"]
    assert trees.paths(5) == [""]
    assert trees.paths(None) == []


def test_a_dataclass_is_put_together_without_its_post_init() -> None:
    mapped = trees.tree_map(str, Picky(4))
    assert (mapped.number, mapped.double) == ("4", "8")


def test_a_class_is_not_an_instance_and_per_replica_is_a_leaf() -> None:
    value = PerReplica([1, 2])
    assert trees.flatten([Stats, value])[0] == [Stats, value]


def test_tree_map_takes_trees_of_one_structure() -> None:
    assert trees.tree_map(lambda a, b: (a, b), {"k": [1]}, {"k": [Stats(2)]}) == {"k": [(1, Stats(2))]}
    with pytest.raises(ValueError):
        trees.tree_map(lambda a, b: a, {"k": 1}, {"l": 1})


def test_different_structures_are_shown() -> None:
    with pytest.raises(ValueError, match=r"replica 0 has \{'a': \*\}, replica 2 has \[\*\]"):
        trees.same_structure([{"a": 1}, {"a": 2}, [3]])
    with pytest.raises(ValueError, match="no components"):
        trees.same_structure([])


def test_a_tree_that_contains_itself_is_refused() -> None:
    tree: list[object] = []
    tree.append(tree)
    with pytest.raises(RecursionError):
        trees.flatten(tree)
