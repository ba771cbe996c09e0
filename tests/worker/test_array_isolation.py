"""Isolation of values between functions, and on their way out of the process."""

from __future__ import annotations

import collections
import datetime
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipedist.protocol.codec import UnsendableError, decode, encode
from pipedist.worker.array_isolation import as_readonly, take_ownership


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclass
class Record:
    a: Any
    b: Any


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: {"a": x}, lambda x: [(x,)], lambda x: Pair(1, x)])
@pytest.mark.parametrize("shape", [(100,), (10, 10)])
def test_a_fresh_array_is_not_copied(wrap: Any, shape: tuple[int, ...]) -> None:
    fresh = np.arange(100.0)
    if len(shape) > 1:
        fresh = fresh.reshape(shape)
    where = address(fresh)
    box = [wrap(fresh)]
    del fresh
    value, size = take_ownership(box)
    while not isinstance(value, np.ndarray):
        value = list(value.values())[-1] if isinstance(value, dict) else value[-1]
    assert address(value) == where
    assert size >= 800


def test_an_array_with_another_reference_is_copied() -> None:
    held = np.zeros(10)
    value, _ = take_ownership([{"x": held}])
    held[:] = 1
    assert value["x"].tolist() == [0] * 10


def test_a_view_of_memory_with_another_reference_is_copied() -> None:
    held = np.zeros(10)
    value, _ = take_ownership([held[2:5]])
    held[:] = 1
    assert value.tolist() == [0] * 3


@pytest.mark.parametrize("mode", ["r+", "r"])
def test_a_mapped_file_is_copied(mode: Any, tmp_path: Path) -> None:
    held = np.memmap(tmp_path / "file", np.int64, "w+", shape=(100,))
    mapped = np.memmap(tmp_path / "file", np.int64, mode)
    value, size = take_ownership([{"x": mapped, "few": mapped[:2]}])
    held[:] = 9
    assert [(type(part), part.sum()) for part in value.values()] == [(np.ndarray, 0)] * 2
    assert size == 816


def test_a_mapped_file_is_read_only_to_functions(tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "file", np.int64, "w+", shape=(2,))
    seen = as_readonly(mapped)
    with pytest.raises(ValueError, match="read-only"):
        seen[0] = 1
    mapped[0] = 1


def test_an_array_that_occurs_twice_is_safe() -> None:
    twice = np.zeros(3)
    value, _ = take_ownership([[twice, twice]])
    twice[:] = 1
    assert [v.tolist() for v in value] == [[0] * 3] * 2


def test_containers_and_buffers_are_new() -> None:
    inner = [1]
    buffer = bytearray(b"ab")
    tree = {"a": inner, "b": (buffer, Record(inner, None))}
    value, _ = take_ownership([tree])
    inner.append(2)
    buffer[0] = 0
    tree["c"] = 1
    assert value == {"a": [1], "b": (b"ab", Record([1], None))}


def test_results_are_in_c_order() -> None:
    value, _ = take_ownership([np.arange(6).reshape(2, 3).T])
    assert value.flags.c_contiguous
    assert value.tolist() == [[0, 3], [1, 4], [2, 5]]


def test_an_array_is_read_only_to_functions_and_the_callers_stays_writable() -> None:
    array = np.arange(6).reshape(2, 3).T
    tree = {"x": [array, 1]}
    seen = as_readonly(tree)
    assert seen["x"][0].flags.c_contiguous
    assert not seen["x"][0].flags.writeable
    assert array.flags.writeable
    seen["x"].append(2)
    assert len(tree["x"]) == 2


def test_zero_dimensional_arrays_stay_so() -> None:
    assert as_readonly(np.array(3.0)).shape == ()
    assert take_ownership([np.array(3.0)])[0].shape == ()


trees = st.recursive(
    st.none() | st.integers() | st.text() | st.binary() | st.floats(allow_nan=False),
    lambda x: st.lists(x) | st.dictionaries(st.text(), x) | st.tuples(x, x),
    max_leaves=10,
)


@given(trees)
def test_values_are_unchanged(tree: Any) -> None:
    assert as_readonly(tree) == tree
    assert take_ownership([tree])[0] == tree


def test_a_build_of_python_without_the_gil_is_refused() -> None:
    code = "import sys; sys.abiflags = 't'; import pipedist.worker.process"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "ImportError: pipedist needs Python with a GIL" in done.stderr
    assert "Install a standard build of Python" in done.stderr


def test_cells_of_object_arrays_belong_to_one_reader() -> None:
    numbers, record = np.arange(3), {"a": [1]}
    given_array = np.fromiter([numbers, record, "text", None], object, 4)
    owned, _ = take_ownership([given_array])
    seen, again = as_readonly(given_array), as_readonly(given_array)
    assert (numbers.flags.writeable, seen.flags.writeable, seen[0].flags.writeable) == (True, False, False)
    seen[1]["a"].append(2)
    numbers[0] = 9
    record["a"].append(3)
    assert (owned[0].tolist(), owned[1], owned[2:].tolist()) == ([0, 1, 2], {"a": [1]}, ["text", None])
    assert again[1] == {"a": [1]}


def test_the_size_of_a_result_counts_the_texts() -> None:
    _, size_bytes = take_ownership([np.array(["x" * 1000, "y"], object)])
    assert 1000 < size_bytes < 1100


def test_dicts_and_dates_of_the_standard_library_are_sent_as_dicts_and_dates_of_numpy() -> None:
    day, time = datetime.date(2024, 2, 29), datetime.datetime(2024, 2, 29, 12)
    nested = collections.defaultdict(dict, {"a": collections.Counter(x=2), "days": [day, time]})
    owned, _ = take_ownership([collections.OrderedDict(n=nested, wait=datetime.timedelta(hours=1))])
    found = decode(encode(owned))
    assert type(found) is type(found["n"]) is type(found["n"]["a"]) is dict
    assert found == {
        "n": {"a": {"x": 2}, "days": [np.datetime64(day), np.datetime64(time)]},
        "wait": np.timedelta64(1, "h"),
    }
    counts = collections.Counter(x=2)
    (held, _) = take_ownership([counts])
    counts["x"] = 3
    assert held == {"x": 2}
    with pytest.raises(UnsendableError, match="with a time zone, at t"):
        take_ownership([{"t": time.replace(tzinfo=datetime.UTC)}])
    with pytest.raises(UnsendableError, match=r"a dict with the key \(1, 2\) of type tuple"):
        encode(collections.defaultdict(int, {(1, 2): 3}))
