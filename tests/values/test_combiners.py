from __future__ import annotations

from functools import reduce
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipedist import combiners
from pipedist.combiners import (
    ByKey,
    by_key,
    by_key_counter,
    by_key_max,
    by_key_min,
    by_key_moments,
    by_key_sum,
    counter,
    moments,
    top_k,
)

KEYS = st.sampled_from(["a", "b", "c"])
CHUNKS = st.lists(st.lists(st.tuples(KEYS, st.integers(-(2**62), 2**62)), max_size=6), min_size=1, max_size=5)


@given(CHUNKS)
def test_counter_counts_as_if_of_all_values_together(chunks: Any) -> None:
    whole = [key for chunk in chunks for key, _ in chunk]
    result = reduce(counter, [counter.of([key for key, _ in chunk]) for chunk in chunks])
    assert result == {key: whole.count(key) for key in set(whole)}
    assert list(result) == sorted(result)


@given(CHUNKS)
def test_by_key_is_the_same_as_of_all_rows_together(chunks: Any) -> None:
    whole = [row for chunk in chunks for row in chunk]
    for combine, fold in ((by_key_sum, sum), (by_key_min, min), (by_key_max, max)):
        parts = [
            combine.of([key for key, _ in chunk], np.array([n for _, n in chunk], np.int64))
            for chunk in chunks
        ]
        result = reduce(combine, parts)
        assert result == {key: fold(n for k, n in whole if k == key) for key in {k for k, _ in whole}}
        assert list(result) == sorted(result)


NUMBERS = st.floats(-1e6, 1e6)


@given(st.lists(st.lists(NUMBERS, max_size=8), min_size=1, max_size=6))
def test_moments_are_those_of_all_rows_together(chunks: list[list[float]]) -> None:
    whole = np.array([x for chunk in chunks for x in chunk])
    result = reduce(moments, [moments.of(chunk) for chunk in chunks])
    assert result["count"] == len(whole)
    if len(whole):
        np.testing.assert_allclose(result["mean"], whole.mean(), rtol=1e-9, atol=1e-6)
        np.testing.assert_allclose(moments.variance(result), whole.var(), rtol=1e-6, atol=1e-4)
        assert (result["min"], result["max"]) == (whole.min(), whole.max())
    else:
        assert np.isnan(moments.mean(result))
        assert np.isnan(moments.std(result))


def test_moments_do_not_cancel() -> None:
    x = np.random.default_rng(1).normal(1e9, 1.0, 3000)
    result = reduce(moments, [moments.of(part) for part in np.array_split(x, 50)])
    shifted = x - 1e9  # exact, and of a size where NumPy's own two passes are accurate
    np.testing.assert_allclose(moments.variance(result, ddof=1), shifted.var(ddof=1), rtol=1e-6)
    np.testing.assert_allclose(moments.std(result), shifted.std(), rtol=1e-6)


def test_moments_of_columns_and_missing_values() -> None:
    rows = np.array([[1.0, np.nan], [3.0, 5.0]])
    skipped = moments(moments.of(rows, skip_missing=True), moments.of(np.empty((0, 2)), skip_missing=True))
    assert skipped["count"].tolist() == [2, 1]
    assert skipped["missing"].tolist() == [0, 1]
    assert skipped["mean"].tolist() == [2, 5]
    assert skipped["min"].tolist() == [1, 5]
    propagated = moments.of(rows)
    assert np.isnan(propagated["mean"]).tolist() == [False, True]
    assert np.isnan(propagated["max"]).tolist() == [False, True]
    assert np.isnan(moments.variance(skipped, ddof=1)).tolist() == [False, True]


@given(st.lists(st.lists(st.integers(0, 5), max_size=5), min_size=1, max_size=5), st.integers(1, 6))
def test_top_k_keeps_the_first_of_equal_values(chunks: list[list[int]], k: int) -> None:
    places = iter(range(1000))
    parts = [top_k.of(chunk, k, {"place": np.array([next(places) for _ in chunk], int)}) for chunk in chunks]
    whole = [x for chunk in chunks for x in chunk]
    expected = sorted(range(len(whole)), key=lambda i: (-whole[i], i))[:k]
    for result in (reduce(top_k, parts), reduce(lambda b, a: top_k(a, b), reversed(parts))):
        assert result["rows"]["place"].tolist() == expected
        assert [int(x) for x in result["values"]] == [whole[i] for i in expected]


def test_top_k_leaves_nans_out() -> None:
    assert top_k.of([np.nan, 1.0, np.inf, -np.inf], 3)["values"].tolist() == [np.inf, 1.0, -np.inf]
    smallest = np.array([0, 2**64 - 1], np.uint64)
    assert top_k.of(smallest, 1)["values"].tolist() == [2**64 - 1]


def test_integers_beyond_int64_are_exact() -> None:
    large, small = 2**63 + 5, 3
    components = [by_key_max.of(["k"], np.array([each], np.uint64)) for each in (large, small)]
    assert by_key_max(*components) == {"k": large}
    assert by_key_min(*components) == {"k": small}
    assert counter.of([large, small, large]) == {small: 1, large: 2}
    assert by_key_sum.of([large, small, large], [1, 2, 4]) == {small: 2, large: 5}


@pytest.mark.parametrize("unit", ["D", "us", "ns"])
def test_dates_by_key_stay_dates(unit: str) -> None:
    days = np.array(["2024-02-29", "2023-01-01"], f"M8[{unit}]")
    early = by_key_min(by_key_min.of(["k"], days[:1]), by_key_min.of(["k"], days[1:]))
    assert early == {"k": days[1]}
    assert early["k"].dtype == days.dtype


def test_groups_of_other_components() -> None:
    assert by_key_counter(by_key_counter.of([1, 2], ["x", "y"]), by_key_counter.of([1], ["x"])) == {
        1: {"x": 2},
        2: {"y": 1},
    }
    parts = [by_key_moments.of(["a", "b", "a"], [1.0, 2.0, np.nan], skip_missing=True)] * 2
    assert by_key_moments(*parts)["a"]["missing"] == 2
    largest = ByKey("largest", top_k)
    result = largest(largest.of(["a"], [1.0], k=1), largest.of(["a"], [3.0], k=1))
    assert result["a"]["values"].tolist() == [3.0]
    assert by_key is by_key_sum


def test_sums_of_arrays_by_key_do_not_wrap() -> None:
    part = by_key.of(["a"], np.array([[2**62, 1]]))
    with pytest.raises(OverflowError):
        by_key(part, part)
    assert by_key.of(["a", "a"], np.array([2**62, 2**62])) == {"a": 2**63}
    assert by_key.of(["a", "a"], np.array([[60000.0], [60000.0]], np.float16))["a"].tolist() == [120000.0]


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: counter.of([1.5]), TypeError, "keys must be text, integers or dates"),
        (lambda: counter.of([1, 2**63, 0.5]), TypeError, "keys must be text, integers or dates"),
        (lambda: counter.of(["7", 7]), TypeError, "some keys are text, and others are not, as 7"),
        (lambda: by_key_sum.of([1.5, "a"], [1, 2]), TypeError, "some keys are text, and others are not"),
        (lambda: counter(3, {}), TypeError, "counter combines dicts"),
        (lambda: moments.of(1.0), ValueError, "got a scalar"),
        (lambda: moments.of(["x"]), TypeError, "real numbers"),
        (lambda: moments({}, {}), TypeError, "what moments.of"),
        (lambda: moments(moments.of([1.0]), moments.of(np.ones((1, 2)))), ValueError, "shapes"),
        (lambda: top_k.of([1], 0), ValueError, "k >= 1"),
        (lambda: top_k.of([1], 1, {"n": np.arange(2)}), ValueError, "rows 'n'"),
        (lambda: top_k(top_k.of([1], 1), top_k.of([1], 2)), ValueError, "one k"),
        (lambda: top_k({}, {}), TypeError, "what top_k.of"),
        (lambda: by_key.of(["a"], [1, 2]), ValueError, "do not match values"),
        (lambda: by_key_sum.of(["a"], {"n": [1]}), TypeError, "got a dict: np.column_stack"),
        (lambda: by_key_sum.of(["a"], ["x"]), TypeError, "must be numbers or dates, got text"),
        (lambda: by_key_max.of(["a"], np.array(["x"])), TypeError, "must be numbers or dates, got text"),
    ],
)
def test_misuse_is_an_error(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()


def test_the_documented_names_are_there() -> None:
    for name in ("by_key", "counter", "moments", "top_k", "by_key_sum", "by_key_moments", "by_key_max"):
        assert callable(getattr(combiners, name))


def test_keys_are_texts_of_any_length() -> None:
    keys = np.array(["a\0", "a", "x" * 100_000, *["b"] * 99, "a"], object)
    assert counter.of(keys) == counter.of(list(keys)) == {"a": 2, "a\0": 1, "b": 99, "x" * 100_000: 1}
    assert by_key_sum.of(keys, np.ones(len(keys), int)) == counter.of(keys)
    with pytest.raises(TypeError, match="keys must be text, integers or dates, got object"):
        counter.of(np.array(["a", None], object))
