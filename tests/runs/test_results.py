"""What a result holds: values or paths, the spec's order, retries by stage, ledgers, arguments."""

from __future__ import annotations

import asyncio
import gc
import json
import os
from pathlib import Path
from typing import Any
from weakref import ref

import numpy as np
import pytest

import pipedist
from pipedist.runs import saved_values

F = "tests.runs.functions"


def document(**stages: Any) -> dict[str, Any]:
    return {
        "pipedist": 1,
        "name": "results",
        "replicas": 2,
        "dataset": {"range": 12, "batch": 4, "epochs": 2},
        "stages": stages,
    }


def test_one_value_is_a_value_and_what_streams_into_a_file_is_its_path(tmp_path: Path) -> None:
    spec = document(
        z={"run": f"{F}:plus", "of": "y", "with": {"amount": "${stages.rows}"}},
        rows={"gather": 0, "of": "dataset"},
        other={"gather": 0, "of": "y"},
        y={"run": f"{F}:double"},
        total={"reduce": "sum", "of": "y", "axis": 0},
        steps={"reduce": "sum", "of": "y", "axis": 0, "per": "step"},
        epochs={"reduce": f"{F}:larger", "of": "y", "per": "epoch"},
        merged={"reduce": f"{F}:larger", "of": "y"},
        last={"reduce": "max", "of": "z", "axis": 0},
        inline={"reduce": "sum", "of": "y", "axis": 0, "per": "epoch"},
    )
    spec["stages"]["z"]["run"] = f"{F}:first_of"
    outputs = {
        "rows": "rows.npy", "other": "other.npz", "total": "total.json", "steps": "steps.npy",
        "epochs": "epochs.json", "merged": "merged.npy", "last": "last.json",
    }  # fmt: skip
    out = tmp_path / "out"
    result = pipedist.run({**spec, "outputs": outputs}, workers=2, output=out)
    assert list(result) == [name for name in spec["stages"] if name not in ("y", "z")]
    for name in ("rows", "other", "steps", "epochs"):
        assert result[name] == out / outputs[name], name
    assert result["total"] == 264
    assert result["merged"].tolist() == [20, 22]
    assert result["last"] == 22 + 0
    assert [int(v) for v in result["inline"]] == [132, 132]
    assert np.load(out / "rows.npy").tolist() == [*range(12), *range(12)]
    assert np.load(out / "steps.npy").tolist() == [12, 44, 76] * 2
    assert result.files == {name: out / path for name, path in outputs.items()}
    assert result.ledger == pipedist.Ledger(24, 24)
    assert set(result.timings) == {"phase 1", "phase 2", "total"}
    again = pipedist.run({**spec, "outputs": outputs}, workers=1, output=out, resume=True)
    assert again.run_id == result.run_id
    assert again.document == {**result.document, "timings": again.document["timings"]}
    assert list(again) == list(result)
    for name in result:
        assert_same(again[name], result[name])


def assert_same(a: Any, b: Any) -> None:
    """Compare two values with their types, and the order of their keys."""
    assert type(a) is type(b)
    if isinstance(a, dict | list):
        keys = list(a) if isinstance(a, dict) else range(len(a))
        assert len(a) == len(b)
        assert keys == (list(b) if isinstance(b, dict) else range(len(b)))
        for key in keys:
            assert_same(a[key], b[key])
    elif isinstance(a, np.ndarray | np.generic):
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    else:
        assert a == b


def parts_of(x: np.ndarray[Any, Any]) -> dict[str, Any]:
    return {"hists": np.outer(x, [1, 2]), "tables": {"left": {"x": x, "y": x * 2}, "right": x}}


def test_parts_of_a_value_have_files_of_their_own(tmp_path: Path) -> None:
    spec = document(
        f={"run": parts_of},
        rows={"gather": 0, "of": "f"},
        steps={"reduce": "sum", "of": "f", "axis": 0, "per": "step"},
        total={"reduce": "sum", "of": "f", "axis": 0},
        later={"run": first_rows, "of": "dataset", "with": {"rows": "${stages.rows}"}},
        last={"reduce": "max", "of": "later", "axis": 0},
    )
    out = tmp_path / "out"
    spec["outputs"] = {
        "rows": {"hists": "rows/hists.npy", "tables/left": "left.csv"},
        "steps": {"tables/right": "steps.npy"},
        "total": {"hists": "hists.json"},
    }
    result = pipedist.run(spec, workers=2, output=out)
    assert result["rows"] == {"hists": out / "rows/hists.npy", "tables/left": out / "left.csv"}
    assert np.load(out / "rows/hists.npy").tolist() == [[x, 2 * x] for x in [*range(12)] * 2]
    assert (out / "left.csv").read_text().splitlines()[:3] == ["x,y", "0,0", "1,2"]
    assert np.load(out / "steps.npy").tolist() == [6, 22, 38] * 2
    assert json.loads((out / "hists.json").read_text()) == [132, 264]
    assert result["total"]["tables"]["right"] == 132, "a value in memory is whole"
    assert result["last"] == 11
    assert set(result.files) == {"rows/hists", "rows/tables/left", "steps/tables/right", "total/hists"}
    assert result.document["results"]["total"] == {"hists": {"file": str(out / "hists.json")}}
    again = pipedist.run(spec, workers=1, output=out, resume=True)
    assert again.run_id == result.run_id
    assert again["rows"] == result["rows"]
    assert_same(again["total"], result["total"])
    before = {path.name: path.read_bytes() for path in (out / "left.csv", out / "hists.json")}
    spec["outputs"]["rows"] = {"hists": "other.npy", "tables/left": "left.csv"}  # written from the journal
    reused = pipedist.run(spec, workers=1, output=out, resume="reuse")
    assert reused.timings.stages == []
    assert np.load(out / "other.npy").tolist() == [[x, 2 * x] for x in [*range(12)] * 2]
    assert before == {path.name: path.read_bytes() for path in (out / "left.csv", out / "hists.json")}


def first_rows(x: np.ndarray[Any, Any], rows: Any) -> np.ndarray[Any, Any]:
    return rows["tables"]["right"][x]


def test_a_part_that_a_value_lacks_is_reported_with_the_first_step(tmp_path: Path) -> None:
    spec = document(f={"run": parts_of}, rows={"gather": 0, "of": "f"})
    spec["outputs"] = {"rows": {"hists": "h.npy", "tables/lift": "l.npy"}}
    there = r"outputs\.rows: the value has no part 'tables/lift' \('lift' is not among: left, right\)"
    with pytest.raises(pipedist.OutputError, match=there):
        pipedist.run(spec, workers=1, output=tmp_path / "out")


@pytest.mark.parametrize("first", [0, 2])
def test_retries_are_those_of_the_stage_that_raised(first: int, tmp_path: Path) -> None:
    """Both stages run in one call; the other one's retries do not count."""
    spec = document(
        a={"run": f"{F}:fails_twice", "with": {"folder": str(tmp_path)}, "retries": first},
        b={"run": f"{F}:double", "of": "a", "retries": 2 - first},
        out={"gather": 0, "of": "b"},
    )
    if first:
        assert len(pipedist.run(spec, workers=2)["out"]) == 24
        return
    with pytest.raises(pipedist.CallError) as caught:
        pipedist.run(spec, workers=2)
    assert (caught.value.stage, caught.value.attempts) == ("a", 1)


def test_a_run_that_failed_leaves_no_file_and_is_not_replaced_unasked(tmp_path: Path) -> None:
    spec = document(y={"run": f"{F}:fails_on_eleven_once", "with": {"folder": str(tmp_path)}})
    spec["stages"]["rows"] = {"gather": 0, "of": "y"}
    spec["outputs"] = {"rows": "rows.npy"}
    out = tmp_path / "out"
    with pytest.raises(pipedist.CallError):
        pipedist.run(spec, workers=1, output=out)
    assert [path.name for path in out.iterdir()] == [".pipedist"]
    with pytest.raises(pipedist.UsageError, match=r"holds the failed run \w+: --resume continues") as caught:
        pipedist.run(spec, workers=1, output=out)
    assert "resume=True" in "".join(caught.value.__notes__)
    result = pipedist.run(spec, workers=1, output=out, restart=True)
    assert np.load(result["rows"]).tolist() == [*range(12), *range(12)]


def test_a_run_that_failed_before_anything_was_done_is_replaced(tmp_path: Path) -> None:
    spec = document(y={"run": f"{F}:fails_on_13"})
    spec |= {"replicas": 1, "dataset": {"range": {"start": 13, "stop": 25}, "batch": 4}}
    spec["stages"]["rows"] = {"gather": 0, "of": "y"}
    spec["outputs"] = {"rows": "rows.npy"}
    for _ in range(2):
        with pytest.raises(pipedist.CallError):
            pipedist.run(spec, workers=1, output=tmp_path / "out")


@pytest.mark.asyncio
async def test_an_unfinished_folder_is_not_overwritten_unasked(tmp_path: Path) -> None:
    spec = document(rows={"gather": 0, "of": "dataset"})
    spec["outputs"] = {"rows": "rows.npy"}
    out = tmp_path / "out"
    async with pipedist.open(spec, workers=1, output=out) as run:
        async for _ in run.steps("rows"):
            break  # the run is left before its end
    assert not (out / "rows.npy").exists()
    with pytest.raises(pipedist.UsageError, match="unfinished"):
        async with pipedist.open(spec, workers=1, output=out):
            pass
    async with pipedist.open(spec, workers=1, output=out, restart=True) as run:
        result = await run.results()
    assert np.load(result["rows"]).tolist() == [*range(12), *range(12)]


def tree_of_arrays(shard: Any) -> dict[str, Any]:
    return {"n": len(shard), "arr": np.ones(3)}


def nothing(shard: Any) -> None:
    """Forget to return."""


def texts(shard: Any) -> list[str]:
    return [str(n) for n in shard]


def sums(a: Any, b: Any) -> Any:
    return {"total": a, "list": [np.ones(2), np.ones(3)]}


@pytest.mark.parametrize("file", ["t.csv", "t.npy", "t.parquet"])
def test_a_value_that_does_not_fit_its_file_is_reported_with_the_first_step(
    tmp_path: Path, file: str
) -> None:
    spec = document(
        y={"run": tree_of_arrays},
        g={"gather": 0, "of": "dataset"},
        t={"reduce": "sum", "of": "y", "axis": None},
    )
    spec["dataset"] = {"range": 100_000, "batch": 10}
    spec["outputs"] = {"g": "g.json", "t": file}
    with pytest.raises(pipedist.OutputError, match=rf"outputs\.t \({file}\): ") as caught:
        pipedist.run(spec, workers=1, output=tmp_path / "out")
    assert ".pipedist" not in str(caught.value)
    assert caught.value.result is None, "it did not run to its end"
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".pipedist"]


def test_an_output_that_fails_at_the_end_costs_no_other_value(tmp_path: Path) -> None:
    spec = document(
        g={"gather": 0, "of": "dataset"},
        t={"reduce": sums, "of": "dataset"},
        inline={"reduce": "sum", "of": "dataset", "axis": 0},
    )
    spec["outputs"] = {"g": "g.json", "t": "t.csv"}
    out = tmp_path / "out"
    with pytest.raises(pipedist.OutputError, match=r"outputs\.t \(t\.csv\)") as caught:
        pipedist.run(spec, workers=1, output=out)
    result = caught.value.result
    assert isinstance(result, pipedist.Result)
    assert (result.ledger.lost, result["inline"]) == (0, 132)
    assert result.files == {"g": out / "g.json"}
    assert (out / "g.json").exists()
    assert not (out / "t.csv").exists()
    assert set(result["t"]) == {"total", "list"}, "the value itself is there"
    with pytest.raises(pipedist.OutputError):  # it is no finished run
        pipedist.run(spec, workers=1, output=out, resume=True)


@pytest.mark.parametrize(
    "stage",
    [{"reduce": "sum", "axis": None}, {"reduce": "max", "axis": 0}, {"gather": 0}, {"reduce": sums},
     {"gather": 0, "per": "step"}],
)  # fmt: skip
@pytest.mark.parametrize("file", [None, "t.npy", "t.csv"])
def test_a_forgotten_return_is_named(stage: dict[str, Any], file: str | None, tmp_path: Path) -> None:
    if stage.get("per") and file == "t.csv":
        return  # refused before it runs
    spec = document(f={"run": nothing}, t={"of": "f", **stage})
    if file:
        spec["outputs"] = {"t": file}
    with pytest.raises(
        pipedist.FoldError, match="stage t: stage f returned None on every call: is a `return` missing"
    ):
        pipedist.run(spec, workers=1, output=tmp_path / "out")


def forgets(a: Any, b: Any) -> None:
    del a, b


def test_a_combine_function_that_forgets_its_return_is_named() -> None:
    spec = document(t={"of": "dataset", "reduce": forgets})
    spec["dataset"] = {"range": 4, "batch": 2}
    with pytest.raises(
        pipedist.FoldError, match=r"stage t: the combine function returned None.*`return` missing"
    ):
        pipedist.run(spec, workers=1)


def a_range(x: Any) -> range:
    return range(int(x[0]), int(x[0]) + len(x))


@pytest.mark.parametrize("file", [None, "t.npy"])
def test_a_range_is_gathered_as_an_array(file: str | None, tmp_path: Path) -> None:
    spec = document(f={"run": a_range}, t={"of": "f", "gather": 0})
    spec["dataset"] = {"range": 9, "batch": 4}
    if file:
        spec["outputs"] = {"t": file}
    result = pipedist.run(spec, workers=1, output=tmp_path / "out")
    assert (np.load(result.files["t"]) if file else result["t"]).tolist() == list(range(9))


def test_what_can_not_be_sent_in_with_is_located() -> None:
    spec = document(
        f={"run": "tests.runs.test_results:keyed", "with": {"k": {"a": [object()]}}},
        t={"of": "f", "gather": 0},
    )
    with pytest.raises(TypeError, match="stage f: `with`: can't send an object, at k/a/0"):
        pipedist.run(spec, workers=1)


def keyed(x: Any, k: Any) -> Any:
    return x


def test_a_large_value_without_an_output_is_in_a_file_of_the_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next run in the folder removes it."""
    stages = {
        "y": {"run": f"{F}:double"},
        "ys": {"gather": 0, "of": "y"},
        "t": {"reduce": "sum", "of": "y", "axis": 0},
    }
    large = document(**stages) | {"dataset": {"range": 20_000, "batch": 5_000}}
    result = pipedist.run(large, workers=1, output=tmp_path)
    assert result["ys"].shape == (20_000,)
    results = json.loads((tmp_path / ".pipedist/results.json").read_bytes())["results"]
    file = tmp_path / f".pipedist/values/{result.run_id}/ys.npy"
    assert results == {"ys": {"file": str(file), "dtype": "int64", "shape": [20_000]}, "t": int(result["t"])}
    assert result.document["results"] == results
    assert_same(pipedist.run(large, workers=1, output=tmp_path, resume=True)["ys"], result["ys"])
    assert file.with_name(".values").stat().st_size < 1_000, "it is in one of them"
    monkeypatch.setattr(saved_values, "VALUE_BYTES_MAX", 100_000)  # very large values are their files
    pipedist.run(large, workers=1, output=tmp_path)
    again = pipedist.run(large, workers=1, output=tmp_path, resume=True)
    assert isinstance(again["ys"], Path)
    np.testing.assert_array_equal(np.load(again["ys"]), result["ys"])
    assert_same(again["t"], result["t"])
    pipedist.run(document(**stages), workers=1, output=tmp_path)
    assert not list((tmp_path / ".pipedist").glob("values/*/ys.npy"))


def names(shard: Any) -> Any:
    return np.array([f"name {n:09}" for n in shard], dtype=object)


def test_large_values_are_restored_with_their_dtype_and_damaged_ones_as_paths(tmp_path: Path) -> None:
    stages = {
        "y": {"run": f"{F}:double"},
        "ys": {"gather": 0, "of": "y"},
        "n": {"run": names},
        "ns": {"gather": 0, "of": "n"},
    }
    large = document(**stages) | {"dataset": {"range": 20_000, "batch": 5_000}}
    result = pipedist.run(large, workers=1, output=tmp_path)
    (file,) = (tmp_path / ".pipedist").glob("values/*/ys.npy")
    os.truncate(file, 1_000)
    again = pipedist.run(large, workers=1, output=tmp_path, resume=True)
    np.testing.assert_array_equal(again["ns"], result["ns"])
    assert again["ns"].dtype == object
    assert again["ys"] == file


def keys_in_no_order(x: Any) -> dict[str, Any]:
    return {"n": len(x), "bmi": float(x[0]), "at": 1}


@pytest.mark.parametrize("outputs", [{}, {"t": "t.json"}])
def test_resume_of_a_finished_run_keeps_the_order_of_keys(outputs: dict[str, str], tmp_path: Path) -> None:
    spec = document(y={"run": keys_in_no_order}, t={"reduce": "sum", "of": "y", "axis": None})
    for resume in (False, True):
        result = pipedist.run(spec | {"outputs": outputs}, workers=1, output=tmp_path, resume=resume)
        assert [*result["t"]] == ["n", "bmi", "at"], resume


def test_a_damaged_value_of_a_finished_run_is_taken_from_its_document(tmp_path: Path) -> None:
    spec = document(
        y={"run": f"{F}:double"},
        steps={"reduce": "sum", "of": "y", "axis": 0, "per": "step"},
        t={"reduce": "sum", "of": "y", "axis": 0},
    ) | {"outputs": {"t": "t.json"}}
    result = pipedist.run(spec, workers=1, output=tmp_path)
    (file,) = (tmp_path / ".pipedist").glob("values/*/.values")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1  # of the last value
    file.write_bytes(data)
    again = pipedist.run(spec, workers=1, output=tmp_path, resume=True)
    assert_same(again["steps"], result["steps"])
    assert again["t"] == tmp_path / "t.json"


def test_no_calls_give_null() -> None:
    spec = document(f={"run": nothing}, t={"of": "f", "reduce": "sum", "axis": 0})
    spec["dataset"] = {"range": 0, "batch": 4}
    assert pipedist.run(spec, workers=1)["t"] is None


def test_what_can_not_be_gathered_is_located() -> None:
    spec = document(f={"run": texts}, t={"of": "f", "gather": 0})
    with pytest.raises(pipedist.FoldError, match=r"stage t: step 0, replica 0: .*np\.array"):
        pipedist.run(spec, workers=1)


def test_the_error_of_a_missing_value_lists_the_available_ones() -> None:
    spec = document(y={"run": f"{F}:double"}, t={"reduce": "sum", "of": "y", "axis": 0})
    result = pipedist.run(spec, workers=1)
    assert "y" not in result
    assert result.get("y") is None
    with pytest.raises(KeyError) as caught:
        result["y"]
    assert str(caught.value).startswith("no value 'y'; available: t. ")
    assert "steps" in str(caught.value)


@pytest.mark.asyncio
async def test_invalid_arguments_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pipedist.spec import load

    monkeypatch.chdir(tmp_path)
    spec = document(t={"reduce": "sum", "of": "dataset", "axis": 0})
    loaded = load(spec)
    closed = pipedist.LocalCluster(workers=1)
    with pytest.raises(pipedist.UsageError, match="not both"):
        pipedist.open(spec, cluster=closed, workers=2)
    with pytest.raises(pipedist.UsageError, match="a spec that is already loaded"):
        pipedist.open(loaded, params={"a": 1})
    for workers in (0, -1, True, "4", 1.5):
        with pytest.raises(pipedist.UsageError, match="`workers` must be an integer"):
            pipedist.run(spec, workers=workers)  # type: ignore[arg-type]
        with pytest.raises(pipedist.UsageError, match="`workers` must be an integer"):
            pipedist.LocalCluster(workers=workers)  # type: ignore[arg-type]
    run = pipedist.open(spec, cluster=closed)
    for early in (run.results(), anext(run.steps("t"))):
        with pytest.raises(pipedist.UsageError, match="inside"):
            await early
    with pytest.raises(pipedist.UsageError, match="async with LocalCluster"):
        await run.__aenter__()
    async with pipedist.LocalCluster(workers=1) as cluster:
        with pytest.raises(pipedist.UsageError, match="open already"):
            await cluster.__aenter__()
    assert os.listdir(tmp_path) == []


@pytest.mark.asyncio
async def test_progress_and_ledger_follow_the_run() -> None:
    spec = document(
        y={"run": f"{F}:double"},
        t={"reduce": "sum", "of": "y", "axis": 0},
        z={"run": f"{F}:plus", "of": "y", "with": {"amount": "${stages.t}"}},
    )
    async with pipedist.LocalCluster(workers=1) as cluster:
        async with pipedist.open(spec, cluster=cluster) as run:
            assert run.progress() is None
            assert run.ledger() == pipedist.Ledger()
            await run.results()
            progress = run.progress()
            assert progress is not None
            assert (progress.phase, progress.phases, progress.workers_ready) == (1, 2, 1)
            (count,) = progress.passes
            assert (count.elements_done, count.elements_total) == (24, 24)
            assert (count.steps_done, count.steps_total, count.calls_done) == (6, 6, 12)
            assert (count.calls_total, count.calls_past) == (12, 0)
        assert cluster.coordinator._passes.handles == {}


@pytest.mark.asyncio
async def test_progress_counts_the_calls_of_a_step_that_is_not_complete(tmp_path: Path) -> None:
    def waits(x: np.ndarray, ctx: Any) -> np.ndarray:
        import time

        while ctx.replica_id_in_sync_group == 2 and not (tmp_path / "go").exists():
            time.sleep(0.005)
        return x

    def join(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        import time

        while not (tmp_path / "join").exists():
            time.sleep(0.005)
        return a + b

    spec = document(y={"run": waits}, t={"reduce": join, "of": "y"})
    spec |= {"replicas": 4, "dataset": {"range": 5, "batch": 5}}
    async with asyncio.timeout(60), pipedist.open(spec, workers=2) as run:
        parts = run.as_completed("y")
        assert {(await anext(parts)).replica for _ in range(2)} == {0, 1}
        progress = run.progress()
        assert progress is not None
        (count,) = progress.passes
        assert (count.calls_done, count.calls_total) == (2, 3)  # the last shard is empty
        assert (count.elements_done, count.elements_total) == (0, 5)
        assert progress.activity == ""
        (tmp_path / "go").touch()
        await anext(parts)
        while (progress := run.progress()) is None or not progress.activity:  # noqa: ASYNC110 - no event tells it
            await asyncio.sleep(0.01)
        assert progress.activity in ("reducing t, 0 of 1 steps", "reducing t")
        (tmp_path / "join").touch()
        await run.results()


@pytest.mark.asyncio
async def test_values_of_a_run_are_freed_with_it_and_need_no_garbage_collection() -> None:
    """A program that makes many runs has the results of one in memory, not those since the last collection."""
    spec = document(
        y={"run": f"{F}:fails_on_13", "on_error": "quarantine"},
        rows={"gather": 0, "of": "y"},
        merged={"reduce": f"{F}:larger", "of": "y"},
        z={"run": f"{F}:first_of", "of": "y", "with": {"amount": "${stages.rows}"}},
        last={"gather": 0, "of": "z"},
    )
    spec["dataset"] = {"range": {"start": 12, "stop": 36}, "batch": 4}
    async with pipedist.LocalCluster(workers=2) as cluster:
        gc.disable()
        try:
            async with pipedist.open(spec, cluster=cluster) as run:
                result = await run.results()
            assert result.ledger.quarantined == 1
            values = [ref(result[name]) for name in ("rows", "merged", "last")]
            del run, result
            assert [value() is None for value in values] == [True] * 3
        finally:
            gc.enable()
