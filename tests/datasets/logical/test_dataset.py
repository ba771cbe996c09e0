"""`Dataset`: each transformation against what plain Python says."""

from __future__ import annotations

import itertools
from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pipedist.datasets.element import ArraySpec
from pipedist.datasets.logical import Dataset
from pipedist.strategy.strategies import DEFAULT

Pair = namedtuple("Pair", ["a", "b"])


@dataclass(frozen=True)
class Row:
    x: Any
    y: Any


def numbers(dataset: Dataset) -> list[Any]:
    return [element.tolist() for element in dataset]


def test_range_is_int64_and_iterates_again() -> None:
    dataset = Dataset.range(2, 9, 3)
    assert numbers(dataset) == numbers(dataset) == [2, 5, 8]
    assert all(type(element) is np.int64 for element in dataset)
    assert (dataset.cardinality(), dataset.element_spec) == (3, ArraySpec(np.int64))


def test_slices_keep_structure_and_dtype_and_are_read_only() -> None:
    arrays = (np.arange(6, dtype=np.float16).reshape(3, 2), {"b": np.array(["x", "yy", "z"]), "a": [1, 2, 3]})
    first, second, third = Dataset.from_tensor_slices(arrays)
    assert first[0].tolist() == [0, 1]
    assert first[0].dtype == np.float16
    assert (second[1]["b"], third[1]["a"]) == ("yy", 3)
    with pytest.raises(ValueError, match="read-only"):
        first[0][0] = 5
    spec = Dataset.from_tensor_slices(arrays).element_spec
    assert spec == (ArraySpec(np.float16, [2]), {"b": ArraySpec(str), "a": ArraySpec(np.int64)})


@pytest.mark.parametrize(
    ("tensors", "error", "match"),
    [
        (np.float32(1), ValueError, "scalar has no rows"),
        ((np.arange(3), np.arange(2)), ValueError, "0: 3, 1: 2"),
        ({"a": object()}, TypeError, "dtype object"),
        ({"a": np.ma.masked_array([1, 2], [False, True])}, TypeError, "a masked array"),
        ([[1, 2], [3]], ValueError, "different shapes"),
        ((), ValueError, "no rows"),
    ],
)
def test_bad_slices_are_refused_at_once(tensors: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        Dataset.from_tensor_slices(tensors)


@pytest.mark.parametrize(
    "make", [lambda a: Pair(a, a + 1), lambda a: Row(a, a + 1), lambda a: {"k": (a, None)}]
)
def test_structures_survive_batching_and_unbatching(make: Any) -> None:
    dataset = Dataset.range(5).map(make)
    again = dataset.batch(2).unbatch()
    assert [repr(element) for element in again] == [repr(element) for element in dataset]


@given(st.integers(0, 20), st.integers(1, 7), st.booleans())
def test_batch_is_slicing(size: int, batch: int, drop: bool) -> None:
    by_block = Dataset.range(size).batch(batch, drop)
    by_element = Dataset.range(size).map(lambda x: x).batch(batch, drop)
    expected = [
        list(range(size))[i : i + batch] for i in range(0, size, batch) if not drop or i + batch <= size
    ]
    assert numbers(by_block) == numbers(by_element) == expected
    assert by_block.cardinality() == len(expected)
    assert by_block.element_spec == ArraySpec(np.int64, [batch if drop else None])


def test_batching_unequal_shapes_names_the_leaf_and_padding_fills() -> None:
    rows = Dataset.range(4).map(lambda t: {"ones": np.repeat(t, t), "s": np.repeat("ab", t)})
    with pytest.raises(ValueError, match=r"'ones'.*padded_batch"):
        list(rows.batch(2))
    first, second = rows.padded_batch(2)
    assert first["ones"].tolist() == [[0], [1]]
    assert second["ones"].tolist() == [[2, 2, 0], [3, 3, 3]]
    assert second["s"].tolist() == [["ab", "ab", ""], ["ab", "ab", "ab"]]
    assert rows.padded_batch(2).element_spec["ones"] == ArraySpec(np.int64, [None, None])


@pytest.mark.parametrize(
    "values", [[1, 2.5], [2.5, 2**53 + 1], [1, "a"], [True, 2], [np.int64(1), np.uint64(2)]]
)
def test_elements_of_different_dtypes_are_not_converted(values: list[Any]) -> None:
    dataset = Dataset.from_generator(lambda: [{"x": each} for each in values])
    for batched in (dataset.batch(2), dataset.padded_batch(2)):
        with pytest.raises(ValueError, match=r"can't batch elements of dtypes .* \(leaf 'x'\)"):
            list(batched)
    texts = Dataset.from_generator(lambda: ["a", "bcd", "x\0"]).batch(3)
    assert next(iter(texts)).tolist() == ["a", "bcd", "x\0"]


def test_texts_are_padded_with_empty_ones() -> None:
    rows = [np.array(["a", None], object), np.array(["b"], object)]
    (block,) = Dataset.from_generator(lambda: rows).padded_batch(2)
    assert block.tolist() == [["a", None], ["b", ""]]


def test_padded_batch_accepts_scalars() -> None:
    rows = Dataset.range(4).map(lambda t: {"ones": np.repeat(t, t), "label": t, "name": f"n{t}"})
    _, second = rows.padded_batch(2)
    assert second["label"].tolist() == [2, 3]
    assert second["name"].tolist() == ["n2", "n3"]
    assert numbers(Dataset.range(3).padded_batch(2)) == [[0, 1], [2]]


def test_a_remainder_that_is_left_out_need_not_fit_together() -> None:
    unequal = Dataset.range(8).batch(5)
    assert list(unequal.batch(5, drop_remainder=True)) == []


@pytest.mark.parametrize(
    "dataset",
    [
        Dataset.range(4).batch(2).cache(),
        Dataset.from_generator(lambda: [np.zeros(2)], ArraySpec(np.float64, [2])).cache(),
        Dataset.from_tensors({"x": np.zeros(2)}).map(lambda element: element["x"]),
        Dataset.from_tensor_slices(np.zeros((2, 2))),
    ],
)
def test_cached_elements_are_read_only(dataset: Dataset) -> None:
    def add(row: NDArray[Any]) -> NDArray[Any]:
        row += 1
        return row

    before = numbers(dataset)
    with pytest.raises(ValueError, match="read-only"):
        list(dataset.map(add))
    assert numbers(dataset) == before


_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(0, 8)),
        st.tuples(st.just("skip"), st.integers(0, 8)),
        st.tuples(st.just("repeat"), st.integers(0, 3)),
        st.tuples(st.just("shard"), st.integers(1, 4), st.integers(0, 3)),
        st.tuples(st.just("prefetch"), st.integers(-1, 3)),
        st.tuples(st.just("cache")),
    ).filter(lambda step: step[0] != "shard" or step[2] < step[1]),
    max_size=4,
)


@settings(max_examples=60)
@given(st.integers(0, 9), _STEPS)
def test_chains_of_transformations_agree_with_lists(size: int, steps: list[tuple[Any, ...]]) -> None:
    dataset, expected = Dataset.range(size), list(range(size))
    for name, *arguments in steps:
        dataset = getattr(dataset, name)(*arguments)
        match name, arguments:
            case "take", [n]:
                expected = expected[:n]
            case "skip", [n]:
                expected = expected[n:]
            case "repeat", [n]:
                expected = expected * n
            case "shard", [shards, index]:
                expected = expected[index::shards]
    assert numbers(dataset) == expected
    assert numbers(dataset) == expected, "again"
    assert dataset.cardinality() == len(expected)


@pytest.mark.parametrize(
    ("dataset", "cardinality"),
    [
        (Dataset.range(5).repeat(), Dataset.INFINITE),
        (Dataset.range(5).repeat(-1).take(7), 7),
        (Dataset.range(0).repeat(), 0),
        (Dataset.range(5).repeat().batch(3), Dataset.INFINITE),
        (Dataset.range(5).filter(lambda x: x > 2), Dataset.UNKNOWN),
        (Dataset.from_generator(lambda: [1, 2]).batch(2), Dataset.UNKNOWN),
        (Dataset.range(5).concatenate(Dataset.range(3)), 8),
        (Dataset.zip(Dataset.range(5), Dataset.range(9).repeat()), 5),
        (Dataset.zip((Dataset.range(5), Dataset.from_generator(lambda: [1]))), Dataset.UNKNOWN),
        (Dataset.range(9).batch(4).unbatch(), Dataset.UNKNOWN),
        (Dataset.range(9).batch(4, True).unbatch(), 8),
        (Dataset.range(9).flat_map(Dataset.range), Dataset.UNKNOWN),
    ],
)
def test_cardinality(dataset: Dataset, cardinality: int) -> None:
    assert dataset.cardinality() == cardinality


def test_endless_datasets_are_read_lazily() -> None:
    endless = Dataset.range(3).repeat().prefetch(2).map(lambda x: x * 2).batch(2)
    assert [block.tolist() for block in itertools.islice(endless, 4)] == [[0, 2], [4, 0], [2, 4], [0, 2]]
    assert list(Dataset.range(0).repeat()) == []


def test_map_and_filter_unpack_tuples_only() -> None:
    pairs = Dataset.range(4).map(lambda t: (t, t + 10))
    assert numbers(pairs.map(lambda a, b: a * b)) == [0, 11, 24, 39]
    assert [int(a) for a, _ in pairs.filter(lambda a, b: b > 11)] == [2, 3]
    assert numbers(Dataset.range(3).map(lambda t: Pair(t, t)).map(lambda pair: pair.a)) == [0, 1, 2]


@pytest.mark.parametrize("verdict", [1, np.int64(0), "x", None, np.array([True])])
def test_filter_rejects_results_other_than_bool(verdict: Any) -> None:
    with pytest.raises(ValueError, match="expected one bool"):
        list(Dataset.range(3).filter(lambda _: verdict))


def test_map_stacks_lists_and_refuses_objects() -> None:
    assert numbers(Dataset.range(2).map(lambda t: [t, t + 1])) == [[0, 1], [1, 2]]
    with pytest.raises(TypeError, match="dtype object"):
        list(Dataset.range(2).map(lambda t: {"f": lambda: t}))


def test_texts_and_bytes_keep_zeros_at_their_ends() -> None:
    pairs = Dataset.range(4).map(lambda t: {"s": "x" + "\0" * int(t), "b": b"\0" * int(t)})
    (batch,) = pairs.batch(4).map(lambda rows: rows)
    assert batch["s"].tolist() == ["x", "x\0", "x\0\0", "x\0\0\0"]
    assert batch["b"].tolist() == [b"", b"\0", b"\0\0", b"\0\0\0"]


class TestElementSpec:
    def test_map_of_a_batch_leaves_the_batch_size_open(self) -> None:
        assert Dataset.range(6).batch(3).map(lambda x: 2.0 * x).element_spec == ArraySpec(float, [None])
        fixed = Dataset.range(6).batch(3, drop_remainder=True).map(lambda x: 2.0 * x)
        assert fixed.element_spec == ArraySpec(float, [3])

    def test_the_spec_of_an_empty_map_is_derived_from_zeros(self) -> None:
        spec = Dataset.range(0).map(lambda t: {"f": np.float32(t)}).map(lambda e: (e["f"], 1)).element_spec
        assert spec == (ArraySpec(np.float32), ArraySpec(np.int64))

    def test_an_unknown_spec_can_be_declared(self) -> None:
        empty = Dataset.from_generator(list)
        with pytest.raises(ValueError, match=r"pass element_spec= to from_generator"):
            _ = empty.element_spec
        with pytest.raises(ValueError, match="pass element_spec= to map"):
            _ = Dataset.range(0).map(lambda t: 1 // t).element_spec
        declared = Dataset.from_generator(list, ArraySpec(np.uint8, [2])).batch(4)
        assert declared.element_spec == ArraySpec(np.uint8, [None, 2])

    def test_concatenation_is_merged(self) -> None:
        spec = Dataset.range(4).batch(2, True).concatenate(Dataset.range(9).batch(3, True)).element_spec
        assert spec == ArraySpec(np.int64, [None])
        with pytest.raises(ValueError, match="no common spec"):
            _ = Dataset.range(4).concatenate(Dataset.from_tensor_slices([1.5])).element_spec

    def test_array_specs_are_values(self) -> None:
        spec = ArraySpec("<U7", (None, 3))
        assert repr(spec) == "ArraySpec(str[None, 3])"
        assert len({spec, ArraySpec(str, [None, 3])}) == 1
        with pytest.raises(AttributeError, match="immutable"):
            spec.shape = ()  # type: ignore[misc]
        with pytest.raises(ValueError, match="int >= 0 or None"):
            ArraySpec(int, [-1])
        for shape in ((None, 3), [2], ()):  # the order of tf.TensorSpec
            with pytest.raises(TypeError, match="dtype first, then the shape"):
                ArraySpec(shape, np.float32)  # type: ignore[arg-type]


def test_generators_are_called_for_each_iteration() -> None:
    calls = []

    def generate() -> Iterator[tuple[int, list[int]]]:
        calls.append(1)
        for i in range(3):
            yield i, [i] * 2

    dataset = Dataset.from_generator(generate, (ArraySpec(int), ArraySpec(int, [2])))
    assert [pair[1].tolist() for pair in dataset] == [pair[1].tolist() for pair in dataset]
    assert len(calls) == 2
    with pytest.raises(TypeError, match="read only once"):
        Dataset.from_generator(generate())  # type: ignore[arg-type]


def refilled() -> Iterator[NDArray[Any]]:
    memory = np.zeros(3)
    for number in range(8):
        memory[:] = number
        yield memory


def doubling() -> Callable[[Any], Any]:
    memory = np.zeros(3)
    return lambda x: np.multiply(x, 2, out=memory)


@pytest.mark.parametrize(
    ("dataset", "factor"),
    [
        (Dataset.from_generator(refilled), 1),
        (Dataset.from_generator(lambda: ({"x": row} for row in refilled())).map(lambda e: e["x"]), 1),
        (Dataset.range(8).map(doubling()), 2),
    ],
)
def test_elements_that_share_one_memory_are_as_they_were_when_read(dataset: Dataset, factor: int) -> None:
    expected = [[factor * number] * 3 for number in range(8)]
    assert [row.tolist() for row in list(dataset)] == expected
    assert [row.tolist() for batch in dataset.batch(4) for row in batch] == expected
    assert [row.tolist() for row in dataset.prefetch(4)] == expected


def test_cache_keeps_only_complete_readings() -> None:
    reads = []
    dataset = Dataset.range(3).map(lambda x: reads.append(int(x)) or x).cache()
    iterator = iter(dataset)
    next(iterator)
    assert numbers(dataset) == [0, 1, 2]
    assert numbers(dataset) == [0, 1, 2]
    assert reads == [0, 0, 1, 2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "b.txt").write_bytes(b"b0\r\nb1\n\nb3")
    (tmp_path / "a.txt").write_text("a0\na1\n")
    (tmp_path / "empty.txt").write_text("")
    return tmp_path


class TestFiles:
    def test_lines_of_several_files(self, folder: Path) -> None:
        dataset = Dataset.text_files([folder / "b.txt", folder / "empty.txt", folder / "a.txt"])
        assert list(dataset) == ["b0", "b1", "", "b3", "a0", "a1"]
        assert dataset.cardinality() == Dataset.UNKNOWN
        assert dataset.batch(2).element_spec == ArraySpec(str, [None])

    def test_list_files_is_sorted_and_names_the_pattern_without_a_match(self, folder: Path) -> None:
        dataset = Dataset.list_files(folder / "*.txt")
        assert [Path(name).name for name in dataset] == ["a.txt", "b.txt", "empty.txt"]
        with pytest.raises(ValueError, match=r"no file matches .*\.csv"):
            Dataset.list_files(str(folder / "*.csv"))

    def test_interleave_takes_turns(self, folder: Path) -> None:
        names = Dataset.list_files(folder / "*.txt")
        assert list(names.flat_map(Dataset.text_files)) == ["a0", "a1", "b0", "b1", "", "b3"]
        assert list(names.interleave(Dataset.text_files, 2, 1)) == ["a0", "b0", "a1", "b1", "", "b3"]
        assert list(names.interleave(Dataset.text_files, 3, 2)) == ["a0", "a1", "b0", "b1", "", "b3"]
        with pytest.raises(TypeError, match=r"expected a pipedist\.Dataset, got \[1\]"):
            list(names.flat_map(lambda _: [1]))  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("combine", [lambda a, b: a.concatenate(b), lambda a, b: Dataset.zip(a, b)])
def test_the_last_policy_that_is_set_counts_as_in_tensorflow(combine: Any) -> None:
    off, data, auto = (
        Dataset.range(4).with_options(auto_shard_policy=name) for name in ("off", "data", "auto")
    )
    assert off.with_options(auto_shard_policy="auto").auto_shard_policy == "OFF"
    assert off.with_options(auto_shard_policy="data").auto_shard_policy == "DATA"
    assert combine(off, auto).auto_shard_policy == combine(auto, off).auto_shard_policy == "OFF"
    assert combine(off, data).auto_shard_policy == "DATA"
    assert combine(auto, auto).auto_shard_policy == "AUTO"


@pytest.mark.parametrize(
    ("misuse", "error"),
    [
        (lambda d: d.batch(0), ValueError),
        (lambda d: d.batch(2.0), TypeError),
        (lambda d: d.batch(True), TypeError),
        (lambda d: d.take(-2), ValueError),
        (lambda d: d.repeat(-3), ValueError),
        (lambda d: d.prefetch(-2), ValueError),
        (lambda d: d.shard(0, 0), ValueError),
        (lambda d: d.shard(2, 2), ValueError),
        (lambda d: d.shard(2, -1), ValueError),
        (lambda d: d.map(3), TypeError),
        (lambda d: d.concatenate([1]), TypeError),
        (lambda d: Dataset.zip(d, [1]), TypeError),
        (lambda d: d.with_options(auto_shard_policy="BEST"), ValueError),
        (lambda d: Dataset(d), TypeError),
        (lambda d: list(d.unbatch()), ValueError),
        (lambda d: list(d.shard(Dataset.SHARD_HINT, Dataset.SHARD_HINT)), RuntimeError),
    ],
)
def test_misuse_is_an_error(misuse: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        misuse(Dataset.range(4))


def test_numpy_datasets_want_arrays() -> None:
    numpy_dataset = DEFAULT.make_numpy_dataset
    assert numbers(numpy_dataset([np.arange(2), np.arange(2) + 5])) == [[0, 1], [5, 6]]
    with pytest.raises(TypeError, match="1 is 2 of type int"):
        numpy_dataset([np.arange(2), 2])


def test_interleave_frees_a_place_in_the_turn_that_exhausts_it() -> None:
    lengths = Dataset.from_tensor_slices([1, 4, 1])
    parts = lengths.enumerate().interleave(lambda i, n: Dataset.range(n).map(lambda x: 10 * i + x), 2, 2)
    assert numbers(parts) == [0, 10, 11, 20, 12, 13]
