"""What is combined by key, as a table: a row a key, in every format that has rows."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pipedist
from pipedist.combiners import (
    ByKey,
    by_key_counter,
    by_key_moments,
    by_key_sum,
    counter,
    moments,
    top_k,
)
from pipedist.outputs.tables import table_of

by_key_top_2 = ByKey("by_key_top_2", top_k, lambda rows: top_k.of(rows, 2))
plain = ByKey("plain", max)
M = "tests.values.test_tables"


def flights(x: np.ndarray) -> dict[str, Any]:
    names = np.array(["UA", "AA", "B,6"])[x % 3]
    return by_key_moments.of(names, x.astype(np.float32))


def stops(x: np.ndarray) -> dict[str, Any]:
    return by_key_counter.of(x % 3 * 10, np.array(["late", "early"])[x // 3 % 2])


def sums(x: np.ndarray) -> dict[str, Any]:
    return by_key_sum.of(x % 3, np.stack([x, -x], axis=1))


def kinds(x: np.ndarray) -> dict[str, Any]:
    return counter.of(x % 2)


def largest(x: np.ndarray) -> dict[str, Any]:
    return by_key_top_2.of(x % 3, x)


def deep(x: np.ndarray) -> dict[str, Any]:
    return by_key_sum.of((x % 2, ["x"] * len(x)), x)


def written(tmp_path: Path, run: str, combine: str, **more: Any) -> dict[str, Path]:
    """Return the files of one combined value, by ending."""
    endings = more.pop("endings", ("csv", "jsonl", "parquet"))
    if "parquet" in endings:
        pytest.importorskip("pyarrow", reason="an extra: pip install 'pipedist[parquet]'")
    spec = {
        "pipedist": 1,
        "name": "table",
        "replicas": 2,
        "dataset": {"range": 12, "batch": 4},
        "stages": {
            "y": {"run": f"{M}:{run}"},
            **{ending: {"reduce": combine, "of": "y", **more} for ending in endings},
        },
        "outputs": {ending: f"t.{ending}" for ending in endings},
    }
    return dict(pipedist.run(spec, workers=2, output=tmp_path / "out").files)


def test_moments_by_key_are_a_row_a_key(tmp_path: Path) -> None:
    files = written(tmp_path, "flights", "pipedist.combiners:by_key_moments")
    rows = list(csv.reader(files["csv"].read_text().splitlines()))
    names = ["key", "count", "missing", "mean", "m2", "min", "max"]
    assert rows == [
        names,
        ["AA", "4", "0", "5.5", "45.0", "1.0", "10.0"],
        ["B,6", "4", "0", "6.5", "45.0", "2.0", "11.0"],
        ["UA", "4", "0", "4.5", "45.0", "0.0", "9.0"],
    ]
    objects = [json.loads(line) for line in files["jsonl"].read_text().splitlines()]
    assert [list(each) for each in objects] == [names] * 3
    assert objects[0] == {
        "key": "AA",
        "count": 4,
        "m2": 45.0,
        "max": 10.0,
        "mean": 5.5,
        "min": 1.0,
        "missing": 0,
    }
    import pyarrow.parquet as parquet

    table = parquet.read_table(files["parquet"])
    assert table.column_names == names
    assert [str(field.type) for field in table.schema] == ["string", *["int64"] * 2, *["double"] * 4]
    assert table.column("key").to_pylist() == ["AA", "B,6", "UA"]


def test_integer_keys_stay_integers_and_arrays_spread_over_columns(tmp_path: Path) -> None:
    files = written(tmp_path, "sums", "pipedist.combiners:by_key")
    assert files["csv"].read_text() == "key,value/0,value/1\n0,18,-18\n1,22,-22\n2,26,-26\n"
    assert files["jsonl"].read_text().splitlines()[0] == '{"key": 0, "value": [18, -18]}'
    import pyarrow.parquet as parquet

    assert str(parquet.read_table(files["parquet"]).schema.field("key").type) == "int64"


def test_counts_are_a_row_a_value(tmp_path: Path) -> None:
    files = written(tmp_path, "kinds", "pipedist.combiners:counter")
    assert files["csv"].read_text() == "value,count\n0,6\n1,6\n"


def test_counts_by_key_are_a_row_a_key_and_value(tmp_path: Path) -> None:
    files = written(tmp_path, "stops", "pipedist.combiners:by_key_counter")
    lines = ["key,value,count", *(f"{key},{value},2" for key in (0, 10, 20) for value in ("early", "late"))]
    assert files["csv"].read_text().splitlines() == lines


def test_a_combine_function_of_ones_own_by_key(tmp_path: Path) -> None:
    files = written(tmp_path, "largest", f"{M}:by_key_top_2", endings=("csv",))
    assert files["csv"].read_text() == "key,value\n0,9\n0,6\n1,10\n1,7\n2,11\n2,8\n"


def test_several_key_columns_are_columns(tmp_path: Path) -> None:
    assert table_of(moments) is None
    files = written(tmp_path, "deep", "pipedist.combiners:by_key", endings=("csv",))
    assert files["csv"].read_text() == "key/0,key/1,value\n0,x,30\n1,x,36\n"


def test_a_value_for_each_step_is_a_row_for_each_step(tmp_path: Path) -> None:
    files = written(tmp_path, "kinds", "pipedist.combiners:counter", per="step", endings=("jsonl",))
    assert files["jsonl"].read_text() == '{"0": 2, "1": 2}\n' * 3


def test_no_keys_and_one_component_whose_keys_have_another_order() -> None:
    table = table_of(plain)
    assert table is not None
    assert {name: len(column) for name, column in table({}).items()} == {"key": 0}
    columns = table({"b": 1, "a": 2})
    assert (columns["key"].tolist(), columns["value"].tolist()) == (["a", "b"], [2, 1])


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([1, -(2**63)], "int64"),
        ([1, 2**64 - 1], "uint64"),
        ([np.int32(1), np.int32(2)], "int32"),
        ([1, 2.5], "float64"),
        ([np.float32(1), np.float32(2)], "float32"),
        ([True, False], "bool"),
    ],
)
def test_a_column_has_the_dtype_of_its_values(values: list[Any], dtype: str) -> None:
    table = table_of(plain)
    assert table is not None
    column = table(dict(enumerate(values)))["value"]
    assert column.dtype == dtype
    assert column.tolist() == [np.asarray(value).item() for value in values]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({1: 1, "1": 2}, "some keys are text and some integers"),
        ({1: -1, 2: 2**63}, "fit neither int64 nor uint64"),
        ({1: 2**70}, "fit neither int64 nor uint64"),
        ({1: 2**60 + 1, 2: 0.5}, "dtypes float64 and int64"),
        ({1: -(2**63), 2: 0.5}, "dtypes float64 and int64"),
        ({1: "x", 2: 2}, "dtypes"),
        ({1: np.zeros(2), 2: np.zeros(3)}, r"shapes \(2,\) and \(3,\)"),
        ({1: {"a": 1}, 2: {"b": 1}}, "keys 1 and 2 have components of different structures"),
        ({1: {"key": 1}}, "two columns have the name 'key'"),
    ],
)
def test_a_value_that_fits_no_table_is_an_error(value: Any, text: str) -> None:
    table = table_of(plain)
    assert table is not None
    with pytest.raises(ValueError, match=text):
        table(value)


def test_what_is_no_table_costs_its_file_alone(tmp_path: Path) -> None:
    spec = {
        "pipedist": 1,
        "dataset": {"range": 2, "batch": 2},
        "stages": {"t": {"reduce": f"{M}:plain", "of": "dataset"}},
        "outputs": {"t": "t.csv"},
    }
    with pytest.raises(
        pipedist.OutputError, match=r"outputs\.t \(t\.csv\): expected a dict by key, got ndarray"
    ):
        pipedist.run(spec, workers=1, output=tmp_path)
    del spec["outputs"]
    spec["stages"]["t"]["reduce"] = "pipedist.combiners:by_key"
    wrong = (
        "stage t, step 0, replica 0, worker .*: by_key_sum combines dicts and by_key_sum.of.*, not ndarray"
    )
    with pytest.raises(pipedist.CallError, match=wrong):
        pipedist.run(spec, workers=1)
