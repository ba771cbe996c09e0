"""`Result.frame`: a stage's value as a DataFrame, from memory or from its file."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pipedist

pandas = pytest.importorskip("pandas")


def columns(x: np.ndarray[Any, Any]) -> dict[str, Any]:
    return {"x": x, "s": np.array([f"n{each}" for each in x])}


def keyed(x: np.ndarray[Any, Any]) -> dict[int, Any]:
    return {int(key): int(count) for key, count in zip(*np.unique(x % 2, return_counts=True), strict=True)}


def records(x: np.ndarray[Any, Any]) -> list[dict[str, Any]]:
    return [{"x": int(each), "s": "a" * int(each)} for each in x]


STAGES: dict[str, Any] = {
    "c": {"run": columns, "of": "dataset"},
    "k": {"run": keyed, "of": "dataset"},
    "r": {"run": records, "of": "dataset"},
    "table": {"gather": 0, "of": "c"},
    "parts": {"gather": 0, "of": "c"},
    "written": {"gather": 0, "of": "c"},
    "records": {"gather": 0, "of": "r"},
    "bare": {"gather": 0, "of": "dataset"},
    "total": {"reduce": "sum", "of": "dataset", "axis": 0},
    "steps": {"reduce": "sum", "of": "dataset", "axis": 0, "per": "step"},
    "by_key": {"reduce": "pipedist.combiners:by_key_sum", "of": "k"},
    "counts": {"reduce": "pipedist.combiners:counter", "of": "k"},
    "uneven": {"reduce": "pipedist.combiners:moments", "of": "m"},
    "m": {"run": lambda x: {"a": x.astype(float), "b": x.astype(float)[:1]}, "of": "dataset"},
}


def test_values_become_frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stages = {name: stage for name, stage in STAGES.items() if name not in ("uneven", "m")}
    outputs = {"written": "w.csv", "parts": {"x": "x.npy"}, "bare": "bare.json"}
    spec = {
        "pipedist": 1, "name": "frames", "dataset": {"range": 6, "batch": 3}, "stages": stages, "outputs": outputs,
    }  # fmt: skip
    result = pipedist.run(spec, workers=1, output=tmp_path / "out")
    wanted = pandas.DataFrame({"x": range(6), "s": [f"n{x}" for x in range(6)]})
    for name in ("table", "written"):
        assert result.frame(name).to_dict("list") == wanted.to_dict("list"), name
    assert result.frame("parts/x").to_dict("list") == {"value": [*range(6)]}
    assert result.frame("table/s").to_dict("list") == {"value": [*wanted["s"]]}
    assert result.frame("records").to_dict("records") == [{"x": x, "s": "a" * x} for x in range(6)]
    assert result.frame("bare").to_dict("list") == {"value": [*range(6)]}
    assert result.frame("total").to_dict("list") == {"value": [15]}
    assert result.frame("steps").to_dict("list") == {"value": [3, 12]}
    assert result.frame("by_key").to_dict("list") == {"key": [0, 1], "value": [3, 3]}
    assert result.frame("counts").to_dict("list") == {"value": [0, 1], "count": [3, 3]}
    again = pipedist.run(spec, workers=1, output=tmp_path / "out", resume=True)
    assert again.frame("written").to_dict("list") == wanted.to_dict("list")
    assert again.frame("steps").to_dict("list") == {"value": [3, 12]}
    with pytest.raises(KeyError, match="no value 'tabel'; available: table"):
        result.frame("tabel")
    with pytest.raises(KeyError, match="no value 'table/y': there is no 'y' in it"):
        result.frame("table/y")
    with pytest.raises(pipedist.UsageError, match="there is no library 'pandsa'"):
        result.frame("total", library="pandsa")  # type: ignore[call-overload]
    ragged = pipedist.Result(
        "job", "0" * 16, {"s": {"a": [1.0], "b": np.zeros(2)}}, {}, result.ledger, result.timings
    )
    with pytest.raises(pipedist.UsageError, match=r"result\.frame\('s'\): the value is no table"):
        ragged.frame("s")
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "pipedist.datasets.frames.find_spec", lambda name: None if name == "polars" else found(name)
    )
    with pytest.raises(pipedist.UsageError, match=r"not installed: pip install 'pipedist\[polars\]'"):
        result.frame("total", library="polars")


@pytest.mark.slow
def test_frames_of_other_libraries() -> None:
    polars = pytest.importorskip("polars")
    arrow = pytest.importorskip("pyarrow")
    spec = {"pipedist": 1, "dataset": {"range": 6, "batch": 3}, "stages": {
        name: STAGES[name] for name in ("c", "table", "r", "records")
    }}  # fmt: skip
    result = pipedist.run(spec, workers=1)
    for name in ("table", "records"):
        frame, table = result.frame(name, library="polars"), result.frame(name, library="arrow")
        assert isinstance(frame, polars.DataFrame)
        assert isinstance(table, arrow.Table)
        assert frame["x"].to_list() == table["x"].to_pylist() == [*range(6)]
