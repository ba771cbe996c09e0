from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipedist.datasets.sources import SourceError, open_source
from tests.datasets.sources.reading import assert_sealed, read_elsewhere

HERE = Path()


@given(
    st.integers(-(2**62), 2**62), st.integers(0, 30), st.sampled_from([-7, -1, 1, 3, 10**12]), st.randoms()
)
def test_a_range_is_pythons(start: int, count: int, step: int, random: Any) -> None:
    numbers = range(start, start + count * step, step)
    source = open_source("range", {"start": start, "stop": numbers.stop, "step": step}, folder=HERE)
    assert source.length == count
    assert read_elsewhere(source, range(count)).tolist() == list(numbers)
    order = list(range(count))
    random.shuffle(order)
    shard = read_elsewhere(source, np.array(order, np.int64))
    assert shard.dtype == np.int64
    assert shard.tolist() == [numbers[i] for i in order]


def test_ids_of_a_later_epoch_are_the_same_elements() -> None:
    source = open_source("range", {"stop": 10}, folder=HERE)
    assert read_elsewhere(source, range(23, 27)).tolist() == [3, 4, 5, 6]
    assert read_elsewhere(source, np.array([29, 20])).tolist() == [9, 0]
    assert read_elsewhere(source, range(8, 12)).tolist() == [8, 9, 0, 1]
    assert read_elsewhere(source, range(7, 7)).tolist() == []
    with pytest.raises(IndexError):
        source.read(np.array([-1]))
    with pytest.raises(IndexError):
        source.read(range(-2, 0))


def test_a_huge_range_costs_nothing() -> None:
    source = open_source("range", {"stop": 2**62}, folder=HERE)
    assert source.length == 2**62
    assert source.read(range(2**61, 2**61 + 2)).tolist() == [2**61, 2**61 + 1]


def test_a_range_whose_length_is_no_int64_is_refused() -> None:
    with pytest.raises(SourceError, match="more elements than int64") as caught:
        open_source("range", {"start": -(2**63), "stop": 2**63 - 1}, folder=HERE)
    assert caught.value.key == "stop"


def test_an_empty_range_has_no_elements() -> None:
    source = open_source("range", {"stop": 0}, folder=HERE)
    assert source.length == 0
    assert source.read(range(0)).dtype == np.int64
    with pytest.raises(IndexError, match="no elements"):
        source.read(range(1))


def test_arrays_are_sliced_without_a_copy() -> None:
    x, y = np.arange(12.0).reshape(6, 2), np.arange(6)
    source = open_source("arrays", {"arrays": {"x": x, "more": [y]}}, folder=HERE)
    assert (source.length, source.portable, source.by_id) == (6, False, True)
    shard = source.read(source.locate(range(8, 10)))
    assert_sealed(shard)
    assert shard["x"].tolist() == [[4, 5], [6, 7]]
    assert np.shares_memory(shard["x"], x)
    assert shard["more"][0].tolist() == [2, 3]
    assert x.flags.writeable
    shuffled = source.read(np.array([5, 0]))
    assert_sealed(shuffled)
    assert shuffled["more"][0].tolist() == [5, 0]
    assert source.read(range(0))["x"].shape == (0, 2)
    assert [block["more"][0].tolist() for block in source.blocks(4)] == [[0, 1, 2, 3], [4, 5]]


def test_arrays_in_any_layout_become_plain() -> None:
    awkward = np.asfortranarray(np.arange(12, dtype=">i4").reshape(4, 3))
    source = open_source("arrays", {"arrays": awkward}, folder=HERE)
    shard = source.read(range(1, 3))
    assert_sealed(shard)
    assert shard.tolist() == [[3, 4, 5], [6, 7, 8]]


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        ({}, "no array"),
        ({"x": 3}, "arrays/x: a int, not an array"),
        ([1, 2], "arrays/0"),
        (np.float64(3), "no leading dimension"),
        ({"a": np.zeros(3), "b": np.zeros(4)}, "arrays/a has 3 rows, arrays/b has 4"),
        ({"a": np.array([None, 1])}, "dtype object whose cells are int"),
        (np.zeros(2, [("a", "i4")]), "can't be read"),
        ({"a": np.ma.masked_array([1, 2], [False, True])}, "arrays/a: a masked array can't be read"),
    ],
)
def test_values_other_than_trees_of_arrays_are_rejected(tree: Any, text: str) -> None:
    with pytest.raises(SourceError, match=text) as caught:
        open_source("arrays", {"arrays": tree}, folder=HERE)
    assert caught.value.key == "arrays"


def test_object_arrays_of_text_are_a_source_like_any_other() -> None:
    texts = ["y" * 100_000, *["x"] * 99, "ends\0", None]
    source = open_source("arrays", {"arrays": {"s": np.array(texts, object)}}, folder=HERE)
    assert source.read(range(102))["s"].tolist() == texts
    source.close()
    wide = open_source("arrays", {"arrays": {"s": np.array(texts[:100])}}, folder=HERE)
    assert wide.read(range(100))["s"].dtype == object
    wide.close()
