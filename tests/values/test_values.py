from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pipedist import values
from pipedist.core import ragged
from pipedist.values import Mirrored, PerReplica


def test_a_per_replica_value_is_a_container_and_not_a_number() -> None:
    value = PerReplica([1, "two", None])
    assert len(value) == 3
    assert value[1] == "two"
    assert list(value) == [1, "two", None]
    assert value.components == (1, "two", None)
    assert repr(value) == "PerReplica:{\n  0: 1,\n  1: 'two',\n  2: None\n}"
    with pytest.raises(TypeError):
        bool(value)
    with pytest.raises(TypeError):
        value + 1  # type: ignore[operator]
    with pytest.raises(TypeError):
        np.ones(3) + value
    with pytest.raises(TypeError, match="local_results"):
        np.asarray(value)
    with pytest.raises(ValueError):
        PerReplica([])
    assert isinstance(Mirrored([1, 1]), PerReplica)


def test_per_replica_has_one_at_every_leaf_also_with_one_replica() -> None:
    tree = values.per_replica([{"a": 1, "b": None}, {"b": None, "a": 1}])
    assert tree["b"] is None
    assert tree["a"].components == (1, 1)
    assert values.per_replica(["s"]).components == ("s",)
    assert values.per_replica([None, None]) is None
    assert values.per_replica([[]]) == []
    with pytest.raises(ValueError, match=r"replica 0 has \*, replica 1 has None"):
        values.per_replica([1, None])


def test_replicas_without_a_call_have_none() -> None:
    assert values.per_replica([{"a": 1}], replicas=3)["a"].components == (1, None, None)


def test_select_takes_the_replicas_component_wherever_one_stands() -> None:
    tree = {"x": [PerReplica([1, 2]), 3], "y": (PerReplica([{"z": 4}, {"z": 5}]),)}
    assert values.select(tree, 1) == {"x": [2, 3], "y": ({"z": 5},)}
    with pytest.raises(ValueError, match="of 2 components has none for replica 2"):
        values.select(tree, 2)


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        (PerReplica(["a", "b"]), ("a", "b")),
        (3, (3,)),
        (None, (None,)),
        ([], ([], [])),
        ([1, 2], ([1, 2], [1, 2])),
        ({"a": PerReplica([1, 2]), "b": None}, ({"a": 1, "b": None}, {"a": 2, "b": None})),
    ],
)
def test_local_results(tree: Any, expected: Any) -> None:
    assert values.local_results(tree, 2) == expected


def test_a_value_of_another_strategy_is_refused() -> None:
    for call in (
        lambda tree: values.local_results(tree, 3),
        lambda tree: values.reduce("sum", tree, None, 3),
        lambda tree: values.gather(tree, 0, 3),
    ):
        with pytest.raises(ValueError, match="2 components, but there are 3 replicas"):
            call([PerReplica([1, 2])])


def test_reduce_leaf_by_leaf() -> None:
    tree = {"a": PerReplica([np.arange(4), np.arange(4, 8)]), "b": [PerReplica([1.0, 2.0])], "c": None}
    result = values.reduce("SUM", tree, None, 2)
    assert result["a"].tolist() == [4, 6, 8, 10]
    assert result["b"] == [3.0]
    assert result["c"] is None
    rows = [PerReplica([np.arange(4), np.arange(4, 6)])] * 2
    assert values.reduce("mean", rows, 0, 2) == [2.5, 2.5]
    assert values.reduce("sum", PerReplica([{"k": 1}, {"k": 2}]), None, 2) == {"k": 3}


def test_mean_over_replicas_counts_empty_components_and_not_missing_ones() -> None:
    empty = np.empty(0)
    assert values.reduce("mean", PerReplica([empty, empty]), None, 2).shape == (0,)
    assert np.isnan(values.reduce("mean", PerReplica([empty, empty]), 0, 2))
    assert values.reduce("mean", PerReplica([np.ones(2), None]), None, 2).tolist() == [1, 1]
    assert values.reduce("sum", PerReplica([None, None]), None, 2) is None


def test_what_returned_nothing_is_not_reduced() -> None:
    with pytest.raises(ValueError, match="is a `return` missing"):
        values.reduce("sum", None, None, 2)


def test_masks_are_not_dropped_by_a_gather() -> None:
    part = np.ma.masked_array([1, 2], [False, True])
    with pytest.raises(TypeError, match=r"gather of the value: .* masked"):
        values.gather(values.PerReplica([part, part]), 0, 2)


@pytest.mark.parametrize("plain", [3, 0, np.zeros(2), True, "text", None, [1.0, 2.0], {"a": 1.0}])
@pytest.mark.parametrize(("op", "axis"), [("sum", None), ("sum", 0), ("mean", 0), ("max", None)])
def test_a_plain_value_has_no_reduction(plain: Any, op: str, axis: int | None) -> None:
    with pytest.raises(ValueError, match="plain"):
        values.reduce(op, plain, axis, 2)
    assert values.reduce("mean", plain, None, 2) is plain or values.reduce("mean", plain, None, 2) == plain


def test_with_one_replica_a_plain_value_is_its_component() -> None:
    assert values.reduce("sum", np.arange(3), 0, 1) == 3
    mean = values.reduce("mean", np.arange(3), None, 1)
    assert mean.dtype == np.float64


def test_gather() -> None:
    tree = {"a": PerReplica([np.arange(4), np.arange(4, 6)]), "b": 3}
    result = values.gather(tree, 0, 2)
    assert result["a"].tolist() == [0, 1, 2, 3, 4, 5]
    assert result["b"] == 3
    matrix = PerReplica([np.ones((2, 1)), np.zeros((2, 2))])
    for axis in (1, -1):
        assert values.gather(matrix, axis, 2).tolist() == [[1, 0, 0], [1, 0, 0]]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (["ab"], ["c", "longer"]),
        ([True], [False]),
        ([1j], [2j]),
        ([b"x"], [b"yz"]),
        (np.array(["2020-01-01"], "M8[D]"), np.array(["2020-01-02"], "M8[D]")),
    ],
)
def test_gather_takes_every_dtype(first: Any, second: Any) -> None:
    result = values.gather(PerReplica([np.array(first), np.array(second)]), 0, 2)
    assert result.tolist() == [*np.array(first).tolist(), *np.array(second).tolist()]


def test_gather_keeps_shape_and_dtype_of_empty_components_and_skips_missing_ones() -> None:
    empty = np.empty((0, 2), np.int32)
    assert values.gather(PerReplica([empty, empty]), 0, 2).shape == (0, 2)
    assert values.gather(PerReplica([np.ones(2), None]), 0, 2).tolist() == [1, 1]
    assert values.gather(PerReplica([None, None]), 0, 2) is None


def test_errors_name_the_leaf_of_the_tree() -> None:
    with pytest.raises(TypeError, match="leaf 'k/1': sum of the value: expected numbers"):
        values.reduce("sum", {"k": [PerReplica([1, 2]), PerReplica(["a", "b"])]}, None, 2)
    with pytest.raises(OverflowError, match=r"leaf 'k': sum of leaf 'x': .*does not fit uint8"):
        values.reduce("sum", {"k": PerReplica([{"x": np.uint8(200)}] * 2)}, None, 2)


@pytest.mark.parametrize(
    ("components", "axis", "error", "text"),
    [
        ([1.0, 2.0], 0, ValueError, "leaf 'k': gather of the value: replica 0 has a scalar"),
        ([np.ones(2), np.float64(1)], 0, ValueError, "replica 1 has a scalar"),
        ([np.ones((4, 2)), np.ones((2, 2))], 1, ValueError, r"shape \(4, 2\), replica 1 \(2, 2\)"),
        ([np.ones(2), np.ones((2, 2))], 0, ValueError, "only the size along axis 0"),
        ([np.ones(2), np.ones(2)], 1, ValueError, "out of range"),
        ([np.ones(2), np.ones(2)], -2, ValueError, "out of range"),
        ([np.ones(2), np.ones(2, np.float32)], 0, TypeError, "dtype"),
        ([np.ones(2), np.ones(2)], True, TypeError, "axis"),
        ([np.ones(2), np.ones(2)], None, TypeError, "axis"),
        ([np.ones(2), np.ones(2)], [0], TypeError, "axis"),
    ],
)
def test_gather_refuses(components: Any, axis: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        values.gather({"k": PerReplica(components)}, axis, 2)


def test_gather_concatenates_texts_bytes_and_records() -> None:
    texts = [np.array(["a"]), np.array(["b\0", None], object), np.array(["ccc"])]
    found = values.gather(PerReplica(texts), 0, 3)
    assert (found.dtype, found.tolist()) == (np.dtype(object), ["a", "b\0", None, "ccc"])
    records: list[Any] = [[{"a": 1, "b": [2]}], [], None, [{"c": {}}]]
    assert values.gather(PerReplica(records), 0, 4) == [{"a": 1, "b": [2]}, {"c": {}}]
    layers = [[{"w": np.ones(2)}], [{"w": np.zeros(1)}]]
    assert values.gather(PerReplica(layers), 0, 2)[0]["w"].tolist() == [1, 1, 0]
    with pytest.raises(ValueError, match="records have no axis 1"):
        values.gather(PerReplica(records), 1, 4)
    with pytest.raises(TypeError, match="dtype"):
        values.gather(PerReplica([np.array([b"a"], object), np.ones(1)]), 0, 2)


def test_an_object_array_without_axes_keeps_its_shape() -> None:
    for cell in ({"a": 1}, [1, [2]]):
        array = np.empty((), object)
        array[()] = cell
        assert ragged.owned(array).shape == ()
        assert ragged.owned(array).item() == cell
