from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipedist.datasets.sources import Source, SourceError, open_source
from pipedist.protocol.encoder import UnsendableError, encode
from tests.datasets.sources.reading import assert_sealed


def _open(call: Callable[..., Any], **kwargs: Any) -> Source:
    return open_source("function", {"call": call, "with": kwargs}, folder=Path())


def test_a_tree_of_arrays_has_random_access() -> None:
    source = _open(lambda n: {"x": np.arange(n), "y": (np.zeros((n, 2)),)}, n=6)
    assert (source.length, source.random_access, source.portable) == (6, True, False)
    shard = source.read(source.locate(np.array([5, 1])))
    assert_sealed(shard)
    assert shard["x"].tolist() == [5, 1]


def test_a_generator_is_stacked_and_read_anew_each_epoch() -> None:
    begun = []

    def elements(n: int) -> Iterator[Any]:
        begun.append(n)
        for i in range(n):
            yield {"i": i, "f": float(i), "s": "x" * i, "a": np.full(2, i, np.int8), "b": i > 1, "n": None}

    source = _open(elements, n=5)
    assert (source.length, source.random_access, source.portable) == (None, False, False)
    for _ in range(2):
        blocks = list(source.blocks(3))
        assert [block["i"].tolist() for block in blocks] == [[0, 1, 2], [3, 4]]
        assert_sealed(blocks[0])
        assert {k: v.dtype.str for k, v in blocks[1].items() if v is not None} == {
            "i": "<i8",
            "f": "<f8",
            "s": "<U4",
            "a": "|i1",
            "b": "|b1",
        }
        assert blocks[1]["a"].tolist() == [[3, 3], [4, 4]]
        assert blocks[1]["n"] is None
    assert begun == [5, 5]


def test_elements_that_share_one_memory_are_as_they_were_when_read() -> None:
    def refilled() -> Iterator[Any]:
        memory = np.zeros(3)
        for i in range(5):
            memory[:] = i
            yield {"row": memory, "first": memory[:1], "view": memory[::2]}

    blocks = list(_open(refilled).blocks(3))
    for key, width in (("row", 3), ("first", 1), ("view", 2)):
        assert [block[key].tolist() for block in blocks] == [
            [[i] * width for i in (0, 1, 2)],
            [[i] * width for i in (3, 4)],
        ]


def test_an_iterable_that_can_be_read_again_and_one_that_is_endless() -> None:
    class Squares:
        def __iter__(self) -> Iterator[int]:
            return (i * i for i in range(4))

    source = _open(Squares)
    assert [[b.tolist() for b in source.blocks(3)] for _ in range(2)] == [[[0, 1, 4], [9]]] * 2

    def endless() -> Iterator[int]:
        i = 0
        while True:
            yield i
            i += 1

    blocks = _open(endless).blocks(2)
    assert [next(blocks).tolist() for _ in range(3)] == [[0, 1], [2, 3], [4, 5]]


def test_sequential_sources_refuse_random_access() -> None:
    source = _open(lambda: iter([1]))
    with pytest.raises(SourceError, match="only be read in order"):
        source.locate(range(1))
    with pytest.raises(SourceError, match="only be read in order"):
        source.read(None)


@pytest.mark.parametrize(
    ("odd", "text"),
    [
        ({"a": np.zeros(3)}, r"element 4, a is float64\[3\], but element 0 is float64\[2\]"),
        ({"a": np.zeros(2, np.float32)}, r"element 4, a is float32\[2\], but element 0 is float64\[2\]"),
        ({"b": np.zeros(2)}, r"element 4 is \{'b': \*\}, but element 0 is \{'a': \*\}"),
        ({"a": "x"}, r"element 4, a is str\[\], but element 0 is float64\[2\]"),
        ({"a": b"x"}, r"element 4, a is object\[\], but element 0 is float64\[2\]"),
        ({"a": {1}}, "element 4, a: a set can't be stacked"),
        ({"a": 2**70}, "element 4, a: 1180591620717411303424 does not fit int64"),
        ({"a": np.array([1, None])}, "element 4, a: arrays of dtype object"),
        ({"a": np.ma.masked_array([1.0, 2.0], [False, True])}, "element 4, a: a masked array"),
    ],
)
@pytest.mark.parametrize("batch", [1, 3, 100])
def test_an_element_that_differs_is_named_by_its_index(odd: Any, text: str, batch: int) -> None:
    source = _open(lambda: iter([{"a": np.zeros(2)}] * 4 + [odd]))
    with pytest.raises(SourceError, match=text) as caught:
        list(source.blocks(batch))
    assert caught.value.key == "call"


def test_texts_and_bytes_of_any_length_are_stacked() -> None:
    rows = [{"s": "y" * 100_000, "b": b"\0"}, *[{"s": "x", "b": b""}] * 99, {"s": "ends\0", "b": b"a"}]
    (block,) = _open(lambda: iter(rows)).blocks(200)
    assert block["s"].tolist() == [row["s"] for row in rows]
    assert block["b"].tolist() == [row["b"] for row in rows]
    assert sum(len(bytes(frame)) for frame in encode(block)) < 110_000


def test_the_error_of_user_code_is_the_cause() -> None:
    def broken() -> Iterator[int]:
        yield 1
        yield 2
        raise KeyError("gone")

    with pytest.raises(SourceError, match=r"broken, element 2: KeyError: 'gone'") as caught:
        list(_open(broken).blocks(2))
    assert isinstance(caught.value.__cause__, KeyError)

    def refuses() -> None:
        raise OSError("no data")

    with pytest.raises(SourceError, match="refuses: OSError: no data"):
        _open(refuses)

    def ends() -> Iterator[int]:
        yield 1
        sys.exit(0)  # not the end of the run, least of all one without an error

    with pytest.raises(SourceError, match="ends, element 1: SystemExit: 0"):
        list(_open(ends).blocks(2))
    with pytest.raises(SourceError, match="SystemExit: 3"):
        _open(lambda: sys.exit(3))


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (3, "a int, not an array"),
        ("text", "a str, not an array"),
        (None, "no array in it"),
        ([{"x": 1.0}], "0/x: a float, not an array"),
        ({"a", "b"}, "a set has no defined order"),
        ({"x": np.zeros(2), "y": np.zeros(3)}, "2 rows, .* has 3"),
    ],
)
def test_results_that_are_no_data_are_refused(result: Any, text: str) -> None:
    with pytest.raises(SourceError, match=text) as caught:
        _open(lambda: result)
    assert caught.value.key == "call"


def test_a_list_of_elements_says_how_to_return_it() -> None:
    with pytest.raises(SourceError, match="not an array") as caught:
        _open(lambda: [{"x": 1.0}])
    assert "iter(...)" in caught.value.expected
    source = _open(lambda: iter([{"x": 1.0}, {"x": 2.0}]))
    assert [block["x"].tolist() for block in source.blocks(4)] == [[1.0, 2.0]]


def test_a_factory_returns_one_kind_and_elements_have_leaves() -> None:
    results = [iter([1]), np.zeros(3)]
    source = _open(lambda: results.pop(0))
    assert [block.tolist() for block in source.blocks(4)] == [[1]]
    with pytest.raises(SourceError, match="returned an iterable at first, and now a ndarray"):
        list(source.blocks(4))
    with pytest.raises(SourceError, match="element 0 has no leaf"):
        list(_open(lambda: iter([None])).blocks(1))


@dataclasses.dataclass
class StoredArray:
    """An array that is implemented as a dataclass, as those of zarr are."""

    path: object

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.arange(3.0)


class Key:
    """A typed key of jax.random, which NumPy cannot convert."""

    dtype = "key<fry>"

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        raise TypeError("JAX array with PRNGKey dtype cannot be converted to a NumPy array")


def test_an_array_that_is_a_dataclass_is_an_array() -> None:
    assert _open(lambda: StoredArray(object())).read(range(3)).tolist() == [0.0, 1.0, 2.0]
    (block,) = _open(lambda: iter([StoredArray(object())])).blocks(4)
    assert block.tolist() == [[0.0, 1.0, 2.0]]
    with pytest.raises(
        UnsendableError, match=r"StoredArray, as the whole value; np.asarray\(...\) makes a plain"
    ):
        encode(StoredArray(object()))


def test_a_value_that_numpy_can_not_convert_has_a_hint() -> None:
    with pytest.raises(SourceError, match="a Key can't be converted to an array: TypeError: JAX") as caught:
        _open(lambda: Key())
    assert caught.value.expected.startswith("plain arrays: jax.random.key_data(...)")
    with pytest.raises(UnsendableError, match=r"Key, as the whole value; jax.random.key_data\(...\) makes"):
        encode(Key())


def test_elements_of_different_shapes_have_an_error_that_says_what_to_do() -> None:
    with pytest.raises(
        SourceError, match=r"element 1 is int64\[2\], but element 0 is int64\[1\].*: pad them"
    ):
        list(_open(lambda: (np.arange(n) for n in (1, 2))).blocks(4))
