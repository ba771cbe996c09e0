"""Every reduction with every output format: refused by the plan, or written to a file that can be read."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pipedist
from pipedist.combiners import ByKey, by_key_moments, by_key_sum, counter, moments, top_k
from pipedist.plan import compile_plan
from pipedist.spec import load

by_key_top_k = ByKey("by_key_top_k", top_k)

C = "pipedist.combiners"


def keys(x: np.ndarray) -> np.ndarray:
    return np.array(["even", "odd"])[x % 2]


def number(x: np.ndarray) -> Any:
    return float(x.sum())


def components(x: np.ndarray) -> Any:
    return {"n": len(x), "total": x.sum()}


def noted(x: np.ndarray, calls: str, ctx: Any) -> Any:
    with Path(calls).open("a") as file:
        file.write(f"{ctx.step}/{ctx.replica_id_in_sync_group} ")
    return components(x)


def counted(x: np.ndarray) -> Any:
    return counter.of(keys(x))


def moved(x: np.ndarray) -> Any:
    return moments.of(x)


def largest(x: np.ndarray) -> Any:
    return top_k.of(x, 2, {"name": keys(x), "twice": 2 * x})


def summed(x: np.ndarray) -> Any:
    return by_key_sum.of(keys(x), x)


def counted_by_key(x: np.ndarray) -> Any:
    from pipedist.combiners import by_key_counter

    return by_key_counter.of(keys(x), x % 3)


def moved_by_key(x: np.ndarray) -> Any:
    return by_key_moments.of(keys(x), x)


def largest_by_key(x: np.ndarray) -> Any:
    return {str(key): top_k.of(x[keys(x) == key], 2) for key in np.unique(keys(x))}


def add(a: Any, b: Any) -> Any:
    return {name: a[name] + b[name] for name in a}


M = "tests.outputs.test_pairs"
REDUCERS = {
    **{op: (f"{M}:number", {"reduce": op, "axis": None}) for op in ("sum", "mean", "min", "max", "prod")},
    "sum of rows": (None, {"reduce": "sum", "axis": 0}),
    "own": (f"{M}:components", {"reduce": f"{M}:add"}),
    "counter": (f"{M}:counted", {"reduce": f"{C}:counter"}),
    "moments": (f"{M}:moved", {"reduce": f"{C}:moments"}),
    "top_k": (f"{M}:largest", {"reduce": f"{C}:top_k"}),
    "by_key_sum": (f"{M}:summed", {"reduce": f"{C}:by_key_sum"}),
    "by_key_min": (f"{M}:summed", {"reduce": f"{C}:by_key_min"}),
    "by_key_max": (f"{M}:summed", {"reduce": f"{C}:by_key_max"}),
    "by_key_counter": (f"{M}:counted_by_key", {"reduce": f"{C}:by_key_counter"}),
    "by_key_moments": (f"{M}:moved_by_key", {"reduce": f"{C}:by_key_moments"}),
    "by_key_top_k": (f"{M}:largest_by_key", {"reduce": f"{M}:by_key_top_k"}),
    "gather": (None, {"gather": 0}),
}
ENDINGS = ("json", "npy", "npz", "csv", "parquet", "jsonl")
STOCK = ("counter", "moments", "top_k", "by_key")


def is_refused(reducer: str, ending: str, per: str) -> bool:
    """Return whether the plan must refuse a pair."""
    if reducer == "gather":
        return per != "run" and ending in ("csv", "parquet")
    if not reducer.startswith(STOCK):
        return False
    if ending == "npy":
        return True
    if per == "run" or reducer == "moments" or ending in ("json", "jsonl"):
        return False
    return reducer != "top_k" or ending != "npz"


def read(path: Path) -> Any:
    """Return the content of a file, read by another library."""
    if path.suffix == ".json":
        return json.loads(path.read_text())
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    if path.suffix == ".csv":
        with path.open(newline="") as file:
            return list(csv.DictReader(file))
    if path.suffix == ".parquet":
        import pyarrow.parquet

        return pyarrow.parquet.read_table(path).to_pylist()
    loaded = np.load(path, allow_pickle=False)
    return loaded if isinstance(loaded, np.ndarray) else dict(loaded)


def spec_of(pairs: list[tuple[str, str, str]]) -> dict[str, Any]:
    """Return a spec with a stage and an output for each (reducer, ending, per)."""
    stages: dict[str, Any] = {}
    outputs = {}
    for place, (reducer, ending, per) in enumerate(pairs):
        function, stage = REDUCERS[reducer]
        of = "dataset" if function is None else function.rpartition(":")[2]
        if function is not None:
            stages[of] = {"run": function, "of": "dataset"}
        stages[f"s{place}"] = {**stage, "of": of, "per": per}
        outputs[f"s{place}"] = f"s{place}.{ending}"
    return {
        "pipedist": 1,
        "name": "pairs",
        "replicas": 2,
        "code": str(Path(__file__).parents[2]),
        "dataset": {"range": 24, "batch": 12},
        "stages": stages,
        "outputs": outputs,
    }


PAIRS = [
    (reducer, ending, per)
    for reducer in REDUCERS
    for ending in ENDINGS
    for per in ("run", "step", "epoch")
    if (reducer, ending) != ("own", "npy")  # known only when it runs: see test_a_misfit_can_be_resumed
]


@pytest.mark.parametrize("pair", [p for p in PAIRS if is_refused(*p)], ids="-".join)
def test_a_pair_that_cannot_fit_is_refused_before_the_run(pair: tuple[str, str, str]) -> None:
    with pytest.raises((pipedist.SpecError, pipedist.PlanError)) as caught:
        compile_plan(load(spec_of([pair])), workers=1).close()
    assert f"`.{pair[1]}` file" in str(caught.value) or "a row for each" in str(caught.value)
    assert "write ." in str(caught.value) or ".jsonl" in str(caught.value)


def test_every_other_pair_is_written_and_can_be_read(tmp_path: Path) -> None:
    pairs = [pair for pair in PAIRS if not is_refused(*pair)]
    result = pipedist.run(spec_of(pairs), workers=1, output=tmp_path / "out")
    assert len(result.files) == len(pairs)
    for place, (reducer, ending, per) in enumerate(pairs):
        content = read(result.files[f"s{place}"])
        assert len(np.atleast_1d(content)) > 0, (reducer, ending, per)
        if per == "step" and ending in ("csv", "parquet", "jsonl", "json"):
            assert len(content) == 2, (reducer, ending)
    top = read(result.files[f"s{pairs.index(('top_k', 'csv', 'run'))}"])
    assert top == [
        {"value": "23", "name": "odd", "twice": "46"},
        {"value": "22", "name": "even", "twice": "44"},
    ]
    by_key = read(result.files[f"s{pairs.index(('by_key_top_k', 'parquet', 'run'))}"])
    assert [(row["key"], row["value"]) for row in by_key] == [
        ("even", 22), ("even", 20), ("odd", 23), ("odd", 21)
    ]  # fmt: skip


@pytest.mark.parametrize("per", ["run", "step"])
def test_a_misfit_can_be_resumed(tmp_path: Path, per: str) -> None:
    """What a function returns is known only when it runs: with another format, its results are written."""
    calls, out = tmp_path / "calls", tmp_path / "out"
    spec = spec_of([("own", "npy", per), ("gather", "npy", "run")])
    spec["stages"]["components"] |= {"run": f"{M}:noted", "with": {"calls": str(calls)}}
    with pytest.raises(pipedist.OutputError, match="holds one array, got a dict"):
        pipedist.run(spec, workers=1, output=out)
    before = calls.read_text().split() if per == "run" else []
    if per == "run":
        with pytest.raises(pipedist.UsageError, match="--resume continues it"):
            pipedist.run(spec, workers=1, output=out)
    spec["outputs"] = {"s0": "own.json", "s1": "rows.csv"}
    result = pipedist.run(spec, workers=1, output=out, resume=True)
    total = {"n": 24, "total": sum(range(24))}
    assert read(result.files["s0"]) == (
        total if per == "run" else [{"n": 12, "total": 66}, {"n": 12, "total": 210}]
    )
    assert [int(row["value"]) for row in read(result.files["s1"])] == [*range(24)]
    if per == "run":
        assert calls.read_text().split() == before
    assert not (out / "s1.npy").exists()
