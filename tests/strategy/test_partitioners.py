"""Partitioners: what they promise of every shard, and what they refuse."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pipedist
from pipedist.strategy.partitioners import Partitioner, shard_sizes

SHAPES = st.lists(st.integers(0, 40), min_size=1, max_size=3)
DTYPES = st.sampled_from(["float16", "float32", "float64", "int8", "bool", "complex128", "str", "S5"])
SIZES = st.integers(1, 400)
COUNTS = st.integers(1, 50)


def element_bytes(dtype: str) -> int:
    return np.dtype(dtype).itemsize or 16


@st.composite
def cuts(draw: st.DrawFn) -> tuple[list[int], str, int]:
    shape = draw(SHAPES)
    return shape, draw(DTYPES), draw(st.integers(-len(shape), len(shape) - 1))


def bytes_of_shards(shape: list[int], dtype: str, axis: int, shards: int) -> list[int]:
    rest = math.prod(length for i, length in enumerate(shape) if i != axis % len(shape))
    return [rows * rest * element_bytes(dtype) for rows in shard_sizes(shape[axis], shards)]


def shards_along(partitioner: Partitioner, shape: list[int], dtype: str, axis: int) -> int:
    partitions = partitioner(shape, dtype, axis)
    assert len(partitions) == len(shape)
    assert all(n == 1 for i, n in enumerate(partitions) if i != axis % len(shape))
    shards = partitions[axis]
    assert 1 <= shards <= max(1, shape[axis])
    return shards


@given(cuts(), COUNTS)
def test_fixed_shards_are_limited_by_the_number_of_rows(cut: tuple[list[int], str, int], n: int) -> None:
    shape, _, axis = cut
    assert shards_along(pipedist.FixedShardsPartitioner(n), *cut) == max(1, min(n, shape[axis]))


@given(cuts(), SIZES, COUNTS)
def test_min_size_keeps_its_minimum_and_could_not_cut_more(
    cut: tuple[list[int], str, int], least: int, n: int
) -> None:
    shards = shards_along(pipedist.MinSizePartitioner(least, n), *cut)
    assert shards <= n
    if shards > 1:
        assert min(bytes_of_shards(*cut, shards)) >= least
    if shards < min(n, cut[0][cut[2]]):
        assert min(bytes_of_shards(*cut, shards + 1)) < least


@given(cuts(), SIZES, st.none() | COUNTS)
def test_max_size_keeps_its_maximum_and_could_not_cut_less(
    cut: tuple[list[int], str, int], most: int, n: int | None
) -> None:
    shards = shards_along(pipedist.MaxSizePartitioner(most, n), *cut)
    rows = cut[0][cut[2]]
    if shards < min(n or rows, rows):
        assert max(bytes_of_shards(*cut, shards)) <= most
    if shards > 1:
        assert max(bytes_of_shards(*cut, shards - 1)) > most


@given(st.integers(0, 1000), COUNTS)
def test_the_longer_shards_come_first(rows: int, shards: int) -> None:
    sizes = shard_sizes(rows, shards)
    assert (sum(sizes), len(sizes)) == (rows, shards)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


def test_the_documented_examples() -> None:
    assert shard_sizes(10, 3) == [4, 3, 3]
    assert pipedist.MinSizePartitioner(16, 4)([10], np.float32) == [
        2
    ]  # tf.distribute: 3, of 16, 12, 12 bytes
    assert pipedist.MaxSizePartitioner(16)((10, 4), "float32") == [10, 1]
    assert pipedist.MaxSizePartitioner(16, bytes_per_string=1)([20], str) == [2]
    assert pipedist.MinSizePartitioner()([10**6], "float64") == [1]
    assert pipedist.FixedShardsPartitioner(2)([3, 8], "int64", axis=-1) == [1, 2]


@pytest.mark.parametrize("cls", ["FixedShardsPartitioner", "MinSizePartitioner", "MaxSizePartitioner"])
@pytest.mark.parametrize(
    ("value", "error"),
    [(0, ValueError), (-1, ValueError), (2.0, TypeError), (True, TypeError), ("2", TypeError)],
)
def test_numbers_that_make_no_sense_are_refused_by_name(cls: str, value: Any, error: type[Exception]) -> None:
    made = getattr(pipedist, cls)
    for name in made.__dataclass_fields__:
        given = {"max_shard_bytes": 1} if cls.startswith("Max") else {}
        with pytest.raises(error, match=f"{name} is {value!r}"):
            made(**given | {name: value})


@pytest.mark.parametrize(
    ("shape", "dtype", "axis", "error", "text"),
    [
        ((), "float32", 0, ValueError, "scalar"),
        ((3, -1), "float32", 0, ValueError, "length of shape is -1"),
        ((3, 2.0), "float32", 0, TypeError, "length of shape is 2.0"),
        ((3,), "float32", 1, ValueError, "axis is 1"),
        ((3,), "float32", -2, ValueError, "axis is -2"),
        ((3,), "float32", None, TypeError, "`axis` must be an int, got None"),
        ("33", "float32", 0, TypeError, "`shape` must be a tuple or list of ints, got '33'"),
        (3, "float32", 0, TypeError, "`shape` must be a tuple or list of ints, got 3"),
        ((3,), object, 0, TypeError, "Python objects"),
        ((3,), "no dtype", 0, TypeError, "no dtype"),
    ],
)
def test_invalid_shapes_and_dtypes_are_rejected(
    shape: Any, dtype: Any, axis: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        pipedist.MaxSizePartitioner(8)(shape, dtype, axis)
