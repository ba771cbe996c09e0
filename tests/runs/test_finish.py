"""The `finish` of a reduction or gather: a function of the whole value, called once on a worker."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pipedist
from pipedist.plan.compiler import compile_plan
from pipedist.plan.view import as_text
from pipedist.runs.call_keys import CallKey
from pipedist.runs.call_replay import Replayed
from pipedist.runs.replay import open_replay
from pipedist.spec import load
from pipedist.testing import Faults
from pipedist.testing.spec_simulation import SpecSimulation

F = "tests.runs.finish_functions"


def document(**stages: Any) -> dict[str, Any]:
    dataset = {"range": 12, "batch": 4, "epochs": 2}
    return {"pipedist": 1, "name": "finish", "replicas": 2, "dataset": dataset, "stages": stages}


def again(run: Path, key: str) -> Replayed:
    with open_replay(run, CallKey.of(key)) as replay:
        return replay.execute()


STAGES = {
    "m": {"run": f"{F}:moments", "of": "dataset"},
    "std": {"reduce": "sum", "of": "m", "axis": 0, "finish": f"{F}:std", "with": {"ddof": 1}},
    "folded": {"reduce": "operator:add", "of": "dataset", "finish": f"{F}:largest", "with": {"top": 2}},
    "top": {"gather": 0, "of": "dataset", "finish": f"{F}:largest", "with": {"top": 3}},
    "scaled": {"gather": 0, "of": "dataset", "finish": f"{F}:centred", "with": {"spread": "${stages.std}"}},
    "by_epoch": {"reduce": "sum", "of": "m", "axis": 0, "per": "epoch", "finish": f"{F}:std"},
    "by_step": {"gather": 0, "of": "dataset", "per": "step", "finish": f"{F}:largest", "with": {"top": 1}},
    "top_of_epoch": {
        "gather": 0,
        "of": "dataset",
        "per": "epoch",
        "finish": f"{F}:largest",
        "with": {"top": 2},
    },
}
OUTPUTS = {"top": "top.npy", "by_epoch": "epochs.jsonl", "by_step": "steps.npy", "scaled": "scaled.npy"}


def test_values_are_finished_on_workers_and_survive_a_resume(tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = pipedist.run({**document(**STAGES), "outputs": OUTPUTS}, workers=2, output=out)
    numbers = np.tile(np.arange(12), 2)
    assert result["std"] == pytest.approx(numbers.std(ddof=1))
    assert result["top"].tolist() == [11, 11, 10]
    assert np.load(out / "top.npy").tolist() == [11, 11, 10]
    assert np.load(out / "scaled.npy") == pytest.approx(numbers / numbers.std(ddof=1))
    assert result["folded"].tolist() == [2 * (1 + 3 + 5 + 7 + 9 + 11), 2 * (0 + 2 + 4 + 6 + 8 + 10)]
    epochs = [json.loads(line) for line in (out / "epochs.jsonl").read_text().splitlines()]
    assert [each["value"] for each in epochs] == pytest.approx([np.arange(12).std()] * 2)
    assert np.load(out / "steps.npy").tolist() == [[3], [7], [11]] * 2
    assert [each.tolist() for each in result["top_of_epoch"]] == [[11, 10], [11, 10]]
    counts = {stage.name: stage.calls for stage in result.timings.stages}
    assert {name: counts[name] for name in ("std.finish", "by_epoch.finish", "by_step.finish")} == {
        "std.finish": 1, "by_epoch.finish": 2, "by_step.finish": 6,
    }  # fmt: skip
    reused = pipedist.run(
        {**document(**STAGES), "outputs": {"top": "t.json", "by_step": "s.json", "top_of_epoch": "e.json"}},
        workers=1,
        output=out,
        resume="reuse",
    )
    assert reused.timings.stages == [], "finished values are in the journal"
    assert json.loads((out / "t.json").read_text()) == [11, 11, 10]
    assert json.loads((out / "s.json").read_text()) == [[3], [7], [11]] * 2
    assert json.loads((out / "e.json").read_text()) == [[11, 10], [11, 10]], "without the gathered components"


def test_a_finish_that_fails_costs_no_step_and_can_be_replayed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    spec = tmp_path / "spec.yaml"
    spec.write_text(
        f"""pipedist: 1
replicas: 2
dataset: {{range: 12, batch: 4}}
stages:
  x: {{run: "{F}:called", with: {{folder: "{tmp_path}"}}}}
  rows: {{gather: 0, of: x, finish: "{F}:fails", with: {{folder: "{tmp_path}"}}}}
  sums: {{reduce: sum, of: x, axis: null, finish: "{F}:fails", with: {{folder: "{tmp_path}"}}}}
outputs: {{rows: rows.json, sums: sums.json}}
"""
    )
    with pytest.raises(pipedist.CallError, match=r"rows\.finish, step 0.*no value of 12 numbers") as caught:
        pipedist.run(spec, workers=1, output=out)
    assert caught.value.replay.endswith("--call rows.finish/0/0")
    for call, text in (("rows.finish/0/0", "no value of 12"), ("sums.finish/0/0", "no value of 2 ")):
        assert text in str(again(out, call).error)
    (tmp_path / "fixed").touch()
    result = pipedist.run(spec, workers=1, output=out, resume=True)
    assert (result["rows"], result["sums"]) == (66, 66)
    assert len((tmp_path / "calls").read_text()) == 6, "no call was executed again"
    for call in ("rows.finish/0/0", "sums.finish/0/0"):
        assert again(out, call).value == 66


def test_a_resumed_run_finishes_each_value_once(tmp_path: Path) -> None:
    stages: dict[str, Any] = {
        "x": {"run": f"{F}:fails_late", "of": "dataset", "with": {"folder": str(tmp_path)}},
        "sum": {"reduce": "sum", "of": "x", "axis": None, "per": "step"},
    }
    noted = {"gather": 0, "of": "x", "finish": f"{F}:noted", "with": {"folder": str(tmp_path)}}
    stages |= {f"{per}s": {**noted, "per": per} for per in ("step", "epoch", "run")}
    stages["written"] = {**noted, "per": "epoch"}
    spec = {**document(**stages), "outputs": {"written": "w.npy", "steps": "s.jsonl"}}
    with pytest.raises(pipedist.CallError, match="step 5"):
        pipedist.run(spec, workers=1, output=tmp_path / "out")
    (tmp_path / "fixed").touch()
    result = pipedist.run(spec, workers=1, output=tmp_path / "out", resume=True)
    assert result.resumed["x"]["steps"] == 5
    assert len((tmp_path / "finished").read_text()) == 6 + 2 + 1 + 2, "6 steps, 2 epochs twice, the run"
    whole = pipedist.run(spec, workers=1, output=tmp_path / "whole")
    for name in ("epochs", "runs"):
        assert np.array_equal(result[name], whole[name]), name
    for name in ("w.npy", "s.jsonl"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_finish_is_retried_and_outlives_its_worker(tmp_path: Path) -> None:
    finish = {"finish": f"{F}:once_dead", "with": {"folder": str(tmp_path)}, "retries": 1}
    result = pipedist.run(document(rows={"gather": 0, "of": "dataset", **finish}), workers=1)
    assert result["rows"] == 132
    assert result.retries == {"rows.finish": {"death": 1, "error": 1}}


def test_a_finish_that_returns_none_is_named() -> None:
    spec = document(rows={"gather": 0, "of": "dataset", "finish": f"{F}:nothing"})
    with pytest.raises(pipedist.FoldError, match="stage rows: the function of `finish` returned None"):
        pipedist.run(spec, workers=1)


def test_updates_get_finished_values_and_until_gets_arguments() -> None:
    spec = document(
        total={"reduce": "sum", "of": "dataset", "axis": 0, "per": "step", "finish": f"{F}:doubled"},
        state={
            "update": f"{F}:add",
            "of": "total",
            "init": 0,
            "until": {"function": f"{F}:above", "with": {"limit": 40}},
        },
    )
    assert pipedist.run(spec, workers=1)["state"] == 2 * (6 + 22)


def test_a_value_without_rows_is_finished_too() -> None:
    spec = document(
        some={"run": f"{F}:above_four", "of": "dataset"},
        total={"reduce": "sum", "of": "some", "axis": 0, "per": "step", "finish": f"{F}:doubled"},
    )
    assert [float(each) for each in pipedist.run(spec, workers=1)["total"]] == [0, 36, 76] * 2


@pytest.mark.asyncio
async def test_a_stream_has_finished_values() -> None:
    spec = document(total={"reduce": "sum", "of": "dataset", "axis": 0, "finish": f"{F}:doubled"})
    async with pipedist.open(spec, workers=1) as run:
        assert [int(step["total"]) async for step in run.steps("total")] == [12, 44, 76] * 2
        assert (await run.results())["total"] == 2 * 132


def test_a_finish_has_the_same_bits_under_faults() -> None:
    simulation = SpecSimulation(document(**STAGES), faults=Faults(drop=0.02, crash=0.05))
    for seed in range(3):
        simulation.check(seed)


def test_what_a_finish_gets_is_checked_before_the_run(tmp_path: Path) -> None:
    spec = document(
        a={"gather": 0, "of": "dataset", "finish": f"{F}:largest"},
        b={"gather": 0, "of": "dataset", "finish": f"{F}:gone"},
    )
    with pytest.raises(pipedist.PlanError) as caught:
        pipedist.run(spec, workers=1)
    assert "stages.a.finish" in str(caught.value)
    assert "missing a required argument: 'top'" in str(caught.value)
    assert "stages.b.finish" in str(caught.value)


def test_a_plan_shows_what_finishes_a_value_and_waits_for_its_arguments() -> None:
    plan = compile_plan(load(document(**STAGES)), workers=1)
    try:
        text = as_text(plan)
        assert f"reduce  std: sum of m, axis 0, per run, then {F}:std (on a worker)" in text
        assert f"gather  scaled: axis 0 of dataset, per run, then {F}:centred (on a worker), with std" in text
        assert [pass_.folds for pass_ in plan.phases[1]] == [("scaled",)]
    finally:
        plan.close()
