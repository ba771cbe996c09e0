from __future__ import annotations

import csv
import datetime as dt
import itertools
import json
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipedist.errors import OutputError
from pipedist.outputs import open_sink
from pipedist.outputs import spool as spool_module
from pipedist.outputs.formats import SUFFIXES
from tests import preloaded

Shape = Literal["run", "per"]


def write(
    path: Path, values: list[Any], *, shape: Shape = "run", gather: bool = False, axis: int = 0
) -> Path:
    sink = open_sink(path, shape=shape, gather=gather, axis=axis)
    try:
        for value in values:
            sink.append(value)
        return sink.finish()
    finally:
        sink.abort()


def read(path: Path) -> Any:
    match path.suffix:
        case ".json":
            return json.loads(path.read_text())
        case ".jsonl":
            return [json.loads(line) for line in path.read_text().splitlines()]
        case ".npy":
            return np.load(path)
        case ".npz":
            with np.load(path) as archive:
                return {name: archive[name] for name in archive.files}
        case ".csv":
            with path.open(newline="") as file:
                return list(csv.reader(file))
        case ".parquet":
            import pyarrow.parquet as pq

            return pq.read_table(path).to_pydict()
    raise AssertionError(path)


ROWS = {"n": np.arange(5), "x": np.array([0.1, 2, np.nan, 4, 5], np.float32), "s": np.array(list("abcde"))}


def pieces(tree: Any, cuts: list[int]) -> list[Any]:
    bounds = [0, *cuts, 5]
    return [{k: v[a:b] for k, v in tree.items()} for a, b in itertools.pairwise(bounds)]


# --- one value -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("a.json", {"b": np.float32(0.1), "a": [1, None]}, {"a": [1, None], "b": 0.1}),
        ("a.json", None, None),
        ("a.jsonl", {"x": np.array([1, 2])}, [{"x": 1}, {"x": 2}]),
        ("a.jsonl", np.array([[1, 2], [3, 4]]), [{"value": [1, 2]}, {"value": [3, 4]}]),
        ("a.jsonl", 1.5, [{"value": 1.5}]),
        ("a.csv", np.array([1.5, np.inf]), [["value"], ["1.5"], ["Infinity"]]),
        ("a.csv", {"n": 3, "mean": np.float32(0.1)}, [["n", "mean"], ["3", "0.1"]]),
        ("a.jsonl", [{"b": 1, "a": [{"c": None}]}, {"b": "x"}], [{"b": 1, "a": [{"c": None}]}, {"b": "x"}]),
        ("a.csv", [{"b": 1, "a": True}, {"b": None, "a": "x"}], [["b", "a"], ["1", "true"], ["", "x"]]),
        (
            "a.parquet",
            [{"b": 1, "a": {"c": [1.5]}}, {"b": None}],
            {"b": [1, None], "a": [{"c": [1.5]}, None]},
        ),
        ("a.parquet", {"e": np.ones((2, 1, 2), np.float16)}, {"e": [[[1, 1]]] * 2}),
        (
            "a.parquet",
            {"s": np.array(["a\0", None], object), "b": np.array([b"\0", b""], object)},
            {"s": ["a\0", None], "b": [b"\0", b""]},
        ),
        (
            "a.jsonl",
            {"s": np.array(["a\0", None], object), "b": np.array([b"\0", b""], object)},
            [{"s": "a\0", "b": "AA=="}, {"s": None, "b": ""}],
        ),
        ("a.json", [np.array(["a\0"], object), np.fromiter([np.arange(2)], object, 1)], [["a\0"], [[0, 1]]]),
        ("a.csv", {"a": {"b": np.array([True])}}, [["a/b"], ["true"]]),
        ("a.csv", np.array(["a,b", 'say "x"', "two\nlines", ""]), None),
        ("a.parquet", {"x": np.array([1.5]), "s": np.array(["é"])}, {"s": ["é"], "x": [1.5]}),
        ("a.parquet", np.array([b"\x01"]), {"value": [b"\x01"]}),
        ("a.parquet", 3, {"value": [3]}),
        (
            "a.parquet",
            [{"day": np.datetime64("2026-01-02"), "days": np.array(["2026-01-03"], "M8[D]")}],
            {"day": [dt.date(2026, 1, 2)], "days": [[dt.date(2026, 1, 3)]]},
        ),
    ],
)
def test_one_value(tmp_path: Path, name: str, value: Any, expected: Any) -> None:
    path = write(tmp_path / name, [value])
    if expected is None and name == "a.csv":
        expected = [["value"], *([text] for text in value.tolist())]
    assert read(path) == expected
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize(
    "value",
    [
        np.arange(6).reshape(2, 3),
        np.float32(2.5),
        7,
        np.zeros((0, 3), np.float16),
        np.array(["a", "bcd"]),
        np.array([b"ab"]),
        np.array([1 + 2j]),
        np.array([True]),
        np.array(["2020-01-01"], "M8[s]"),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.arange(3, dtype=">i4"),
    ],
)
def test_npy_holds_any_array(tmp_path: Path, value: Any) -> None:
    back = read(write(tmp_path / "a.npy", [value]))
    np.testing.assert_array_equal(back, value)
    assert back.dtype == np.asarray(value).dtype.newbyteorder("=")


def test_npy_has_the_bytes_of_numpy_save(tmp_path: Path) -> None:
    array = np.arange(12, dtype=np.float32).reshape(4, 3)
    np.save(tmp_path / "numpy.npy", array)
    whole = write(tmp_path / "whole.npy", [array])
    grown = write(tmp_path / "grown.npy", [array[:1], array[1:]], gather=True)
    assert whole.read_bytes() == grown.read_bytes() == (tmp_path / "numpy.npy").read_bytes()


def test_npz_members_are_leaf_paths(tmp_path: Path) -> None:
    path = write(tmp_path / "a.npz", [{"w": [np.arange(2), {"b": np.zeros((1, 2))}], "n": 3}])
    back = read(path)
    assert sorted(back) == ["n", "w/0", "w/1/b"]
    assert back["n"] == 3
    assert list(read(write(tmp_path / "b.npz", [np.arange(2)]))) == ["data"]
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


# --- pieces of a gather ------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [s for s in SUFFIXES if s not in (".npy", ".zarr", ".duckdb")])
@pytest.mark.parametrize("cuts", [[], [2], [1, 3, 3, 4], [0, 5]])
def test_pieces_give_the_bytes_of_the_whole(tmp_path: Path, suffix: str, cuts: list[int]) -> None:
    one = write(tmp_path / f"one{suffix}", [ROWS])
    many = write(tmp_path / f"many{suffix}", pieces(ROWS, cuts), gather=True)
    assert many.read_bytes() == one.read_bytes()


@pytest.mark.parametrize("suffix", [".csv", ".json", ".jsonl", ".parquet"])
@pytest.mark.parametrize("cuts", [[], [2], [1, 3, 3, 4], [0, 5]])
def test_pieces_of_texts_and_records_give_the_bytes_of_the_whole(
    tmp_path: Path, suffix: str, cuts: list[int]
) -> None:
    texts = np.array([None, "a\0", "", "x" * 70, "é"], object)
    records = [{"id": n, "text": text} for n, text in enumerate(texts)]
    bounds = list(itertools.pairwise([0, *cuts, 5]))
    for name, whole, parts in [
        ("t", {"t": texts}, [{"t": texts[a:b]} for a, b in bounds]),
        ("r", records, [records[a:b] for a, b in bounds]),
    ]:
        one = write(tmp_path / f"{name}one{suffix}", [whole])
        many = write(tmp_path / f"{name}many{suffix}", parts, gather=True)
        if suffix == ".json":
            assert read(many) == read(one)
        else:
            assert many.read_bytes() == one.read_bytes()


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    shape=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    suffix=st.sampled_from([".npy", ".npz", ".json", ".jsonl"]),
)
def test_any_axis_gives_the_bytes_of_the_whole(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, shape: list[int], suffix: str
) -> None:
    folder = tmp_path_factory.mktemp("axis")
    array = np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape)
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    cuts = sorted(data.draw(st.lists(st.integers(0, shape[axis]), max_size=3)))
    parts = np.split(array, cuts, axis=axis)
    block = spool_module.BLOCK_BYTES
    try:
        spool_module.BLOCK_BYTES = 16  # many blocks
        many = write(folder / f"many{suffix}", parts, gather=True, axis=axis)
    finally:
        spool_module.BLOCK_BYTES = block
    one = write(folder / f"one{suffix}", [array])
    assert many.read_bytes() == one.read_bytes()


@pytest.mark.parametrize("suffix", [".npy", ".npz"])
@pytest.mark.parametrize("axis", [0, 1])
def test_texts_grow_to_the_widest(
    tmp_path: Path, suffix: str, axis: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool_module, "BLOCK_BYTES", 32)
    parts = [
        np.array([["a", "b"], ["c", "d"]]),
        np.array([["long text", "e"], ["", "f"]]),
        np.array([["g", "h"]] * 2),
    ]
    back = read(write(tmp_path / f"a{suffix}", parts, gather=True, axis=axis))
    array = back if suffix == ".npy" else back["data"]
    expected = np.concatenate(parts, axis=axis)
    np.testing.assert_array_equal(array, expected)
    assert array.dtype == expected.dtype


def test_pieces_of_a_dataclass_become_an_object(tmp_path: Path) -> None:
    from collections import namedtuple

    Pair = namedtuple("Pair", "b a")
    parts = [Pair(np.arange(2), [np.zeros((2, 1))]), Pair(np.arange(1), [np.ones((1, 1))])]
    assert read(write(tmp_path / "a.json", parts, gather=True)) == {
        "a": [[[0.0], [0.0], [1.0]]],
        "b": [0, 1, 0],
    }


@pytest.mark.parametrize(
    ("suffix", "expected"), [(".json", None), (".jsonl", []), (".csv", []), (".npz", {}), (".parquet", {})]
)
def test_no_pieces_at_all(tmp_path: Path, suffix: str, expected: Any) -> None:
    assert read(write(tmp_path / f"a{suffix}", [], gather=True)) == expected


@pytest.mark.parametrize(
    ("suffix", "parts", "words"),
    [
        (".npy", [np.zeros((2, 3)), np.zeros((2, 4))], ["(2, 3)", "(2, 4)"]),
        (".npz", [{"a": np.zeros(2)}, {"a": np.zeros(2, np.float32)}], ["'a'", "float64", "float32"]),
        (".npz", [{"a": np.zeros(2)}, {"b": np.zeros(2)}], ["'a'", "'b'", "structure"]),
        (".json", [np.zeros(2), np.zeros((2, 2))], ["(2,)", "(2, 2)"]),
        (".csv", [np.zeros(2), np.zeros(2, int)], ["float64", "int64"]),
        (".csv", [{"a": np.zeros((2, 2))}], ["'a'", "npz"]),
        (".parquet", [{"a": np.zeros((2, 0))}], ["'a'", "no values"]),
        (".parquet", [np.array([{"a": 1}]), np.array(["x"], object)], ["several types", "jsonl"]),
        (".parquet", [np.array([["x"], [{}]], object)], ["'value'", "parquet column"]),
        (".csv", [np.array([["x"]], object)], ["'value'", "axes"]),
        (".csv", [np.array([{}])], ["'value'", "lists or dicts", "parquet"]),
        (".csv", [[{"a": 1}], [{"a": 1, "b": 2}]], ["key 'b'", "columns", "a", ".jsonl"]),
        (".npz", [[{"a": 1}]], ["records", ".jsonl"]),
        (".npz", [{"a": 1}], ["no axis 0"]),
        (".npz", [{"a": np.array(["ends\0"], object)}], ["'a'", "zero byte", "parquet"]),
        (
            ".npz",
            [{"a": np.array(["x" * 100_000, *["y"] * 99], object)}],
            ["100,000 characters", "100 values"],
        ),
        (".csv", [{"a": np.zeros(2), "b": np.zeros(3)}], ["'a'", "'b'", "2", "3"]),
        (".csv", [np.zeros(2, complex)], ["complex"]),
        (".npy", [{"a": np.zeros(2)}], ["one array", ".npz"]),
        (".npy", [], ["no call"]),
        (".npy", [np.float64(1)], ["no axis 0"]),
        (".npz", [{"a": np.array([object()])}], ["'a'"]),
        (".npz", [{"a/b": np.zeros(1), "a": {"b": np.zeros(1)}}], ["'a/b'", "same path"]),
        (".npz", [{"a\0": np.zeros(1)}], ["zip"]),
        (".jsonl", [{"a": np.zeros(2), "b": np.float64(1)}], ["'b'"]),
    ],
)
def test_a_value_that_does_not_fit_is_rejected_and_leaves_no_file(
    tmp_path: Path, suffix: str, parts: list[Any], words: list[str]
) -> None:
    with pytest.raises(OutputError) as caught:
        write(tmp_path / f"a{suffix}", parts, gather=True)
    for word in words:
        assert word in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_values_that_arrays_cannot_hold(tmp_path: Path) -> None:
    for value in [2**70, b"ends with zero\0", "ends with zero\0", {"a": object()}, {"a": np.array([{}])}]:
        with pytest.raises(OutputError, match="leaf"):
            write(tmp_path / "a.npz", [value])
    with pytest.raises(OutputError, match="second"):
        write(tmp_path / "a.npz", [1, 2])


def test_a_finish_that_fails_leaves_nothing(tmp_path: Path) -> None:
    sink = open_sink(tmp_path / "a.npy", shape="run", gather=True)
    with pytest.raises(OutputError, match="no call"):
        sink.finish()
    assert os.listdir(tmp_path) == []


# --- one value a step -----------------------------------------------------------------------------


STEPS = [{"n": 1, "loss": np.float32(0.5)}, {"n": 2, "loss": np.float32(0.25)}]


@pytest.mark.parametrize(
    ("suffix", "expected"),
    [
        (".json", [{"loss": 0.5, "n": 1}, {"loss": 0.25, "n": 2}]),
        (".jsonl", [{"loss": 0.5, "n": 1}, {"loss": 0.25, "n": 2}]),
        (".csv", [["n", "loss"], ["1", "0.5"], ["2", "0.25"]]),
        (".parquet", {"loss": [0.5, 0.25], "n": [1, 2]}),
    ],
)
def test_values_of_steps_are_rows(tmp_path: Path, suffix: str, expected: Any) -> None:
    assert read(write(tmp_path / f"a{suffix}", STEPS, shape="per")) == expected


def test_values_of_steps_are_stacked(tmp_path: Path) -> None:
    back = read(write(tmp_path / "a.npz", STEPS, shape="per"))
    np.testing.assert_array_equal(back["loss"], np.array([0.5, 0.25], np.float32))
    assert back["loss"].dtype == np.float32
    steps = [np.arange(3), np.arange(3, 6)]
    np.testing.assert_array_equal(
        read(write(tmp_path / "a.npy", steps, shape="per", gather=True, axis=1)), np.stack(steps)
    )
    with pytest.raises(OutputError, match=r"\(1, 3\).*\(1, 2\)"):
        write(tmp_path / "b.npy", [np.arange(3), np.arange(2)], shape="per")


def test_null_among_the_values_of_steps(tmp_path: Path) -> None:
    assert read(write(tmp_path / "a.jsonl", [None, {"a": None, "b": [1]}], shape="per")) == [
        {"value": None},
        {"a": None, "b/0": 1},
    ]
    with pytest.raises(OutputError, match="null"):
        write(tmp_path / "a.csv", [None], shape="per")
    assert read(write(tmp_path / "a.json", [], shape="per")) == []


# --- bytes, atomicity -------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".csv", ".json", ".jsonl", ".npy", ".npz", ".parquet"])
def test_equal_values_are_equal_bytes(tmp_path: Path, suffix: str) -> None:
    value: Any = ROWS["x"] if suffix == ".npy" else ROWS
    keeps_order = suffix in (".csv", ".jsonl", ".parquet")
    turned: Any = value if keeps_order or suffix == ".npy" else dict(reversed(ROWS.items()))
    first = write(tmp_path / f"first{suffix}", [value]).read_bytes()
    script = (
        "import os, sys, pickle; from pathlib import Path; from pipedist.outputs import open_sink\n"
        "sink = open_sink(Path(sys.argv[1]), shape='run', gather=False)\n"
        "sink.append(pickle.loads(sys.stdin.buffer.read())); sink.finish()"
    )
    import pickle

    env = {**os.environ, "TZ": "Asia/Tokyo", "PYTHONHASHSEED": "7"}
    second = tmp_path / f"second{suffix}"
    subprocess.run([sys.executable, "-c", script, second], input=pickle.dumps(turned), env=env, check=True)
    assert second.read_bytes() == first


@pytest.mark.parametrize("suffix", [".csv", ".json", ".jsonl", ".npy", ".npz", ".parquet", ".zarr"])
def test_a_kill_in_the_middle_leaves_the_old_file(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    path.write_bytes(b"old")
    script = (
        "import os, signal, sys, numpy; from pathlib import Path; from pipedist.outputs import open_sink\n"
        "sink = open_sink(Path(sys.argv[1]), shape='run', gather=True)\n"
        "sink.append(numpy.zeros(100_000)); sink.append(numpy.zeros(100_000))\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = preloaded.run([sys.executable, "-c", script, path], check=False)
    assert done.returncode == -signal.SIGKILL
    assert path.read_bytes() == b"old"
    assert not [name for name in os.listdir(tmp_path) if not name.startswith(".") and name != path.name]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_abort_leaves_the_old_file_and_nothing_else(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    path.write_bytes(b"old")
    sink = open_sink(path, shape="run", gather=True)
    sink.append(np.zeros(100_000))
    sink.abort()
    sink.abort()
    assert os.listdir(tmp_path) == [path.name]
    assert path.read_bytes() == b"old"


def test_abort_hides_no_error_where_the_file_can_not_be_removed(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    folder.mkdir()
    sink = open_sink(folder / "a.json", shape="run", gather=False)
    sink.append(1)
    folder.rename(tmp_path / "away")
    folder.touch()
    with pytest.raises(OutputError, match=r"a\.json: Not a directory"):
        sink.finish()
    sink.abort()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux's /dev/full")
def test_a_full_disk_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    sink = open_sink(tmp_path / "a.csv", shape="run", gather=True)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, sink._out.file.fileno())
    os.close(full)
    with pytest.raises(OutputError, match=r"a\.csv.*No space left on device\. Free some, or .*--output"):
        sink.append(np.zeros(1_000_000))
    sink.abort()
    assert os.listdir(tmp_path) == []


def test_memory_stays_bounded(tmp_path: Path) -> None:
    """120 MB through sinks in a process that may have 50 MB more than it has at the start."""
    script = (
        "import resource, sys, numpy; from pathlib import Path; from pipedist.outputs import open_sink\n"
        "sinks = [open_sink(Path(sys.argv[1]) / n, shape='run', gather=True, axis=a)"
        " for n, a in [('a.npy', 0), ('b.npz', 0), ('c.npy', 1)]]\n"
        "piece = numpy.ones((100, 5_000))\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "for _ in range(10): [s.append(piece) for s in sinks]\n"
        "for s in sinks: s.finish()\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    done = subprocess.run([sys.executable, "-c", script, tmp_path], check=True, capture_output=True)
    assert int(done.stdout) < 38_000  # kB; one of the three files has 40,000
    assert np.load(tmp_path / "c.npy", mmap_mode="r").shape == (100, 50_000)


def test_an_unknown_ending(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="parquet"):
        open_sink(tmp_path / "a.txt", shape="run", gather=False)
    with pytest.raises(OutputError, match="missing"):
        open_sink(tmp_path / "missing" / "a.csv", shape="run", gather=False)


def test_many_leaves_need_few_descriptors(tmp_path: Path) -> None:
    tree = {str(index): np.zeros(1) for index in range(5_000)}
    assert len(read(write(tmp_path / "a.npz", [tree, tree], gather=True))) == 5_000


def test_large_parquet_has_row_groups_that_do_not_depend_on_the_pieces(tmp_path: Path) -> None:
    rows = np.arange(150_000)
    one = write(tmp_path / "one.parquet", [rows])
    many = write(tmp_path / "many.parquet", np.split(rows, [10, 70_000, 70_001]), gather=True)
    assert one.read_bytes() == many.read_bytes()
    assert read(one) == {"value": rows.tolist()}
