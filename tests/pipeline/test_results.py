"""What a result holds: values or paths, the spec's order, retries by stage, ledgers, arguments."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pipedist

F = "tests.pipeline.functions"


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
    assert set(result.timings) == {"phase 0", "phase 1", "total"}
    again = pipedist.run({**spec, "outputs": outputs}, workers=1, output=out, resume=True)
    assert again.run_id == result.run_id
    assert again.document == {**result.document, "timings": again.document["timings"]}
    assert set(again) == set(result)


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


def test_an_unfinished_folder_is_not_overwritten_unasked(tmp_path: Path) -> None:
    spec = document(y={"run": f"{F}:fails_on_eleven_once", "with": {"folder": str(tmp_path)}})
    spec["stages"]["rows"] = {"gather": 0, "of": "y"}
    spec["outputs"] = {"rows": "rows.npy"}
    out = tmp_path / "out"
    with pytest.raises(pipedist.CallError):
        pipedist.run(spec, workers=1, output=out)
    assert not (out / "rows.npy").exists()
    assert list((out / ".pipedist" / "new").iterdir()) == []
    with pytest.raises(pipedist.UsageError, match="unfinished"):
        pipedist.run(spec, workers=1, output=out)
    result = pipedist.run(spec, workers=1, output=out, restart=True)
    assert np.load(result["rows"]).tolist() == [*range(12), *range(12)]


@pytest.mark.asyncio
async def test_arguments_that_make_no_sense(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pipedist.spec import load

    monkeypatch.chdir(tmp_path)
    spec = document(t={"reduce": "sum", "of": "dataset", "axis": 0})
    loaded = load(spec)
    closed = pipedist.LocalCluster(workers=1)
    with pytest.raises(pipedist.UsageError, match="not both"):
        pipedist.open(spec, cluster=closed, workers=2)
    with pytest.raises(pipedist.UsageError, match="too late"):
        pipedist.open(loaded, params={"a": 1})
    for workers in (0, -1, True, "4", 1.5):
        with pytest.raises(pipedist.UsageError, match="workers: expected an integer"):
            pipedist.run(spec, workers=workers)  # type: ignore[arg-type]
        with pytest.raises(pipedist.UsageError, match="workers: expected an integer"):
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
        assert cluster.coordinator._handles == {}
