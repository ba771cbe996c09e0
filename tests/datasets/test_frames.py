from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import pipedist
from pipedist.datasets import frames
from pipedist.datasets.frames import FrameError, columns_of, form_of
from pipedist.errors import PlanError
from pipedist.protocol.encoder import UnsendableError
from pipedist.worker.array_isolation import as_readonly, take_ownership


class Lazy:
    """A module that is imported when a test uses it: collecting takes no seconds."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)


pandas, pyarrow, polars = Lazy("pandas"), Lazy("pyarrow"), Lazy("polars")
MISSING = [name for name in ("pandas", "pyarrow", "polars") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"{MISSING} not installed: make install")

DATA: dict[str, list[Any]] = {
    "n": [1, 2, 3],
    "x": [0.5, None, 2.0],
    "s": ["a", None, "ccc"],
    "l": [[1, 2], [], [3]],
}


def test_frames_of_all_libraries_are_the_same_columns() -> None:
    expected = {
        "n": np.array([1, 2, 3]),
        "x": np.array([0.5, np.nan, 2.0]),
        "s": np.array(["a", "", "ccc"]),
    }
    table = pyarrow.table(DATA)
    polar = polars.DataFrame(DATA)
    for frame in (table, table.to_batches()[0], polar, table.to_pandas(), table.to_reader()):
        columns = columns_of(frame)
        lists = columns.pop("l")
        assert list(columns) == list(expected)
        for name, column in columns.items():
            assert column.dtype == expected[name].dtype
            np.testing.assert_array_equal(column, expected[name])
        assert [each.tolist() for each in lists] == DATA["l"]


@pytest.mark.slow
def test_series_are_arrays() -> None:
    for series in (
        pandas.Series([1, 2]),
        polars.Series("a", [1, 2]),
        pyarrow.array([1, 2]),
        pyarrow.chunked_array([[1, 2]]),
    ):
        np.testing.assert_array_equal(columns_of(series), [1, 2])


@pytest.mark.slow
def test_named_levels_of_an_index_are_columns() -> None:
    frame = pandas.DataFrame({"k": ["a", "b", "a"], "v": [1, 2, 3]})
    columns = columns_of(frame.groupby("k").sum())
    assert {name: column.tolist() for name, column in columns.items()} == {"k": ["a", "b"], "v": [4, 2]}
    assert list(columns_of(frame[frame.v > 1])) == ["k", "v"]


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (
            lambda: pandas.DataFrame({"a": pandas.array([1, None], "Int64")}),
            r"column 'a', row 1: a value of type int64 is missing. Fill it",
        ),
        (
            lambda: polars.DataFrame({"b": [None, True]}),
            r"column 'b', row 0: a value of type bool is missing",
        ),
        (
            lambda: pyarrow.table({"d": pyarrow.array([1], pyarrow.decimal128(5, 2))}),
            r"column 'd' is decimal128",
        ),
        (lambda: pandas.DataFrame([[1, 2]]), r"column 0 of a pandas DataFrame has the name 0"),
        (lambda: pyarrow.table([[1], [2]], names=["a", "a"]), r"has two columns named 'a'"),
        (lambda: pandas.DataFrame({"o": [1, "a"]}), r"column 'o' of dtype object has no Arrow type"),
    ],
)
def test_frames_that_are_no_columns_name_the_column(frame: Any, message: str) -> None:
    with pytest.raises(FrameError, match=message):
        columns_of(frame())


def test_pandas_needs_no_pyarrow_for_numbers_and_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    columns = columns_of(pandas.DataFrame({"n": [1], "s": ["a"]}))
    assert [column.tolist() for column in columns.values()] == [[1], ["a"]]
    with pytest.raises(
        FrameError, match=r"a polars DataFrame needs pyarrow: pip install 'pipedist\[arrow\]'"
    ):
        columns_of(polars.DataFrame({"n": [1]}))


def test_forms_share_the_memory_of_numbers() -> None:
    x = np.arange(4.0)
    x.flags.writeable = False
    shard = {
        "x": x,
        "day": np.array(["2020-01-01"] * 4, "M8[s]"),
        "s": np.array(list("abcd")),
        "v": np.eye(4),
    }
    frame = form_of(shard, "pandas")
    assert np.shares_memory(frame["x"].to_numpy(), x)
    with pytest.raises(ValueError, match="read-only"):
        frame.loc[0, "x"] = 7
    assert np.shares_memory(form_of(shard, "arrow")["x"].to_numpy(), x)
    polar = form_of(shard, "polars")
    assert np.shares_memory(polar["x"].to_numpy(), x)
    polar[0, "x"] = 7.0
    assert x[0] == 0.0
    for given in (frame, polar, form_of(shard, "arrow")):
        back = columns_of(given)
        assert list(back) == list(shard)
        np.testing.assert_array_equal(back["s"], shard["s"])
        np.testing.assert_array_equal(np.stack(list(back["v"])), shard["v"])
        np.testing.assert_array_equal(back["day"], shard["day"])


@pytest.mark.slow
def test_bare_arrays_and_nested_keys_have_names() -> None:
    assert form_of(np.arange(3), "arrow").column_names == ["value"]
    assert form_of({"b": {"c": np.arange(3)}, "a": np.arange(3)}, "arrow").column_names == ["b/c", "a"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shard", "message"),
    [
        ({"a": np.arange(2), "b": np.arange(3)}, r"have one length"),
        ({"a": 5}, r"'a' of the input is a int"),
        ({"a": np.array([1j])}, r"column 'a' of dtype complex128"),
    ],
)
def test_shards_that_are_no_frame_are_errors(shard: Any, message: str) -> None:
    with pytest.raises(FrameError, match=message):
        form_of(shard, "arrow")


@pytest.mark.torch
def test_tensors_are_copies_of_numbers() -> None:
    torch = pytest.importorskip("torch", reason="make bench-torch, then make test-torch")
    x = np.arange(3)
    x.flags.writeable = False
    shard = form_of({"x": x, "s": np.array(["a"])}, "torch")
    shard["x"] += 1
    assert isinstance(shard["x"], torch.Tensor)
    assert x.tolist() == [0, 1, 2]
    assert shard["s"].tolist() == ["a"]


def test_frames_in_results_become_columns_that_nothing_else_can_change() -> None:
    frame = pandas.DataFrame({"x": np.arange(1000.0)})
    value, size = take_ownership([{"table": frame, "n": 3}])
    assert size >= 8000
    assert value["n"] == 3
    assert not np.shares_memory(value["table"]["x"], frame["x"].to_numpy())
    read = as_readonly({"table": frame})
    assert not read["table"]["x"].flags.writeable
    with pytest.raises(UnsendableError, match=r"column 'a', row 0: .*, at table"):
        take_ownership([{"table": polars.DataFrame({"a": [None, 1]})}])


def late(frame: Any) -> Any:
    assert isinstance(frame, pandas.DataFrame)
    return frame[frame["x"] % 3 == 0]


def sums(frame: Any) -> Any:
    assert isinstance(frame, polars.DataFrame)
    return frame.with_columns(name=polars.format("n{}", "x"), even=frame["x"] % 2 == 0)


SPEC: dict[str, Any] = {
    "pipedist": 1,
    "replicas": 3,
    "dataset": {"arrays": {"x": np.arange(40)}, "batch": 16},
    "stages": {
        "late": {"run": late, "as": "pandas"},
        "named": {"run": sums, "of": "late", "as": "polars"},
        "rows": {"gather": 0, "of": "named"},
        "total": {"reduce": "sum", "of": "late", "axis": 0},
    },
}


def test_functions_get_and_return_frames() -> None:
    result = pipedist.run(SPEC, workers=1)
    assert list(result["rows"]) == ["x", "name", "even"]
    assert result["rows"]["x"].tolist() == list(range(0, 40, 3))
    assert result["rows"]["name"].tolist() == [f"n{x}" for x in range(0, 40, 3)]
    assert result["total"]["x"] == sum(range(0, 40, 3))


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ({"as": "pandas", "per": "element"}, "a function with `per: element` gets no pandas input"),
        (
            {"as": "polars"},
            r"`as: polars` needs a package that is not installed here.*pip install 'pipedist\[polars\]'",
        ),
    ],
)
def test_forms_that_are_not_possible_are_errors_of_the_plan(
    run: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(frames, "find_spec", lambda name: None if name == "polars" else find(name))
    spec = {
        **SPEC,
        "stages": {"late": {"run": late, **run}, "total": {"reduce": "sum", "of": "late", "axis": 0}},
    }
    with pytest.raises(PlanError, match=f"(?s){message}"):
        pipedist.run(spec)


@pytest.mark.slow
def test_workers_import_no_library_that_they_do_not_need() -> None:
    code = (
        "import sys, pipedist.worker.process; print({'pandas', 'polars', 'pyarrow', 'jax'} & {*sys.modules})"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        == "set()\n"
    )
