from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pipedist.errors import OutputError
from pipedist.outputs.encoding import dumps, to_json


class Point(NamedTuple):
    x: int
    y: float


@dataclass
class Moments:
    count: int
    mean: np.ndarray


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        (np.float32(0.1), 0.1),
        (np.array([0.1, 0.2], np.float32), [0.1, 0.2]),
        (np.array([[0.1]], np.float16), [[0.1]]),
        (np.array(0.1), 0.1),
        (float("nan"), "NaN"),
        (np.array([np.nan, np.inf, -np.inf, 1.5]), ["NaN", "Infinity", "-Infinity", 1.5]),
        (np.float32("inf"), "Infinity"),
        (np.array([np.longdouble("-1e400"), 0.5]), ["-Infinity", 0.5]),
        (b"\x00\xff", base64.b64encode(b"\x00\xff").decode()),
        (np.array([b"ab"]), ["YWI="]),
        (np.array(["a", "bc"]), ["a", "bc"]),
        (np.array([True, False]), [True, False]),
        (np.bool_(True), True),
        (np.uint64(2**64 - 1), 2**64 - 1),
        (2**70, 2**70),
        (1 + 2j, [1.0, 2.0]),
        (np.array([1 + 2j], np.complex64), [[1.0, 2.0]]),
        (np.array(["2020-01-02", "NaT"], "M8[D]"), ["2020-01-02", "NaT"]),
        (np.array([5], "m8[D]"), ["5 days"]),
        (np.zeros((0, 3)), []),
        (np.zeros((2, 0), np.float32), [[], []]),
        ((1, [2, None]), [1, [2, None]]),
        ({1: "a", np.int64(2): "b"}, {"1": "a", "2": "b"}),
        (Point(1, 2.0), {"x": 1, "y": 2.0}),
        (Moments(2, np.array([1, 2])), {"count": 2, "mean": [1, 2]}),
        (None, None),
    ],
)
def test_each_kind_of_value_has_its_json(tree: object, expected: object) -> None:
    assert to_json(tree) == expected
    assert json.loads(dumps(tree)) == expected


def test_floats_print_the_shortest_text_of_their_dtype() -> None:
    assert dumps(np.array([0.1, 1 / 3], np.float32)) == "[0.1, 0.33333334]"
    assert dumps(np.float16(1 / 3)) == "0.3333"
    assert dumps(0.1) == "0.1"


@given(hnp.arrays(st.sampled_from([np.float16, np.float32, np.float64]), hnp.array_shapes(max_side=4)))
def test_floats_come_back_exactly(array: np.ndarray) -> None:
    special = {"NaN": np.nan, "Infinity": np.inf, "-Infinity": -np.inf}
    flat = [special.get(x, x) for x in json.loads(dumps(array.reshape(-1)))]
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(np.array(flat, np.float64).astype(array.dtype), array.reshape(-1))


def test_keys_are_sorted_by_default() -> None:
    assert dumps({"b": 1, "a": 2}) == '{"a": 2, "b": 1}'
    assert dumps({"b": 1, "a": 2}, sort_keys=False) == '{"b": 1, "a": 2}'


def test_half_a_surrogate_pair_is_escaped() -> None:
    assert dumps("\ud800") == '"\\ud800"'
    assert dumps("é") == '"é"'


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"a": [object()]}, ["'a/0'", "object"]),
        ({"a": {1, 2}}, ["'a'", "set"]),
        ({1: 1, "1": 2}, ["'1'", "same text"]),
        ({(1, 2): 1}, ["(1, 2)"]),
        (np.array([object()]), ["type object"]),
        (np.array([], "V4"), ["dtype |V4"]),
    ],
)
def test_a_leaf_without_json_is_reported_with_its_path(tree: object, words: list[str]) -> None:
    with pytest.raises(OutputError) as caught:
        to_json(tree)
    for word in words:
        assert word in str(caught.value)
