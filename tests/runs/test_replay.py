"""`pipedist replay`: a call of a run is executed again, with the inputs that it had."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pipedist
from pipedist.coordinator import pass_handle
from pipedist.errors import CallError, JournalError, UsageError
from pipedist.journal.history import audit, read_history
from pipedist.journal.log_format import unpacked
from pipedist.outputs.run_record import PRIVATE
from pipedist.runs import state_history
from pipedist.runs.call_keys import CallKey
from pipedist.runs.call_replay import Replayed
from pipedist.runs.execution import Execution
from pipedist.runs.replay import Replay, open_replay
from pipedist.worker.boot import environment
from tests.preloaded import run_module

ROOT = Path(__file__).parents[2]
F = "tests.runs.replay_functions"

NOISY = f"""
pipedist: 1
name: noisy
replicas: 2
seed: 7
code: {ROOT}
params: {{scale: 3.0, bad: []}}
dataset: {{range: 42, batch: 8, shuffle: true, epochs: 2}}
stages:
  y:
    run: "{F}:noisy"
    with: {{scale: "${{params.scale}}", bad: "${{params.bad}}"}}
    on_error: POLICY
  total: {{reduce: sum, of: y, axis: 0}}
  each: {{gather: 0, of: y, per: step}}
  z: {{run: "{F}:centred", of: y, with: {{total: "${{stages.total}}"}}}}
  rows: {{gather: 0, of: z}}
outputs: {{each: each.jsonl, rows: rows.npy}}
"""


def written(folder: Path, spec: str, policy: str = "fail") -> Path:
    path = folder / "spec.yaml"
    path.write_text(spec.replace("POLICY", policy))
    return path


def again(run: Path, key: str, *elements: int) -> tuple[Replay, Replayed]:
    with open_replay(run, CallKey.of(key), elements) as replay:
        return replay, replay.execute()


def refused(run: Path, key: str, *elements: int) -> str:
    with pytest.raises(UsageError) as caught, open_replay(run, CallKey.of(key), elements):
        pass
    return str(caught.value)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    pipedist.run(written(folder, NOISY), workers=2, output=folder / "out", params={"scale": 5.0})
    return folder / "out"


@pytest.fixture(scope="module")
def steps(finished: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (finished / "each.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("call", [(0, 0), (2, 1), (5, 0), (7, 1), (11, 0)])
def test_a_call_gets_the_inputs_that_it_had(finished: Path, steps: list[Any], call: tuple[int, int]) -> None:
    step, replica = call
    replay, made = again(finished, f"y/{step}/{replica}")
    rows = steps[step]
    parts = np.array_split(np.arange(len(rows["ids"])), 2) if len(rows["ids"]) > 1 else [np.array([0])]
    mine = parts[replica]
    assert replay.elements == tuple(rows["ids"][i] for i in mine)
    assert replay.epoch == step // 6
    assert made.failure is None
    assert made.value["y"].tolist() == [rows["y"][i] for i in mine]
    assert set(made.value["step"].tolist()) == {step}


def test_a_call_of_a_later_phase_reads_what_earlier_ones_made(finished: Path) -> None:
    rows = np.load(finished / "rows.npy")
    _, made = again(finished, "z/1/1")
    assert made.value.tobytes() == rows[12:16].tobytes()


def test_the_part_of_a_reduction_is_that_of_its_call(finished: Path) -> None:
    _, whole = again(finished, "y/3/1")
    _, part = again(finished, "total/3/1")
    assert part.value["y"] == pytest.approx(whole.value["y"].sum())


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("y/12/0", "there is no call y/12/0: dataset has 12 steps, numbered from 0"),
        ("y/0/2", "replicas are numbered from 0 to 1"),
        ("z/12/1", "y has 12 steps"),
        ("nothing/0/0", "the spec has no stage nothing; its stages are y, total, each, z, rows"),
    ],
)
def test_a_call_that_does_not_exist_is_refused(finished: Path, key: str, text: str) -> None:
    assert text in refused(finished, key)


@pytest.mark.parametrize("text", ["y", "y/1", "y/1/x", "/1/2", "y/-1/0", "y/1/2/3", "y/\u0661/0"])
def test_a_malformed_key_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"expected STAGE/STEP/REPLICA"):
        CallKey.of(text)


def test_an_empty_shard_has_no_call(tmp_path: Path) -> None:
    spec = NOISY.replace("range: 42, batch: 8", "range: 9, batch: 8")
    pipedist.run(written(tmp_path, spec), workers=1, output=tmp_path / "out")
    assert "the shard of replica 1 in step 1 is empty" in refused(tmp_path / "out", "y/1/1")


def test_a_changed_spec_is_refused_and_changed_code_is_reported(tmp_path: Path) -> None:
    (tmp_path / "mine_replayed.py").write_text("def f(x):\n    return x * 2\n")
    spec = """
pipedist: 1
name: changing
dataset: {range: 8, batch: 4}
stages: {y: {run: "mine_replayed:f"}, rows: {gather: 0, of: y}}
outputs: {rows: rows.npy}
"""
    path = written(tmp_path, spec)
    out = tmp_path / "out"
    pipedist.run(path, workers=1, output=out)
    (tmp_path / "mine_replayed.py").write_text("def f(x):\n    return x * 3\n")
    replay, _ = again(out, "y/0/0")
    assert "module mine_replayed" in replay.notes[0]
    path.write_text(spec.replace("batch: 4", "batch: 2"))
    assert "datasets.dataset.batch: 4 there, 2 now" in refused(out, "y/0/0")
    path.unlink()
    assert "spec.yaml does not exist any more: put it back" in refused(out, "y/0/0")


def test_a_run_without_journal_or_file_is_refused(tmp_path: Path) -> None:
    assert "there is no run in" in refused(tmp_path, "y/0/0")
    document = {
        "pipedist": 1,
        "name": "in python",
        "dataset": {"range": 4, "batch": 2},
        "stages": {"rows": {"gather": 0, "of": "dataset"}},
        "outputs": {"rows": "rows.npy"},
    }
    pipedist.run(document, workers=1, output=tmp_path / "out")
    assert "did not come from a file" in refused(tmp_path / "out", "rows/0/0")
    (tmp_path / "out/.pipedist/journal/journal").unlink()
    assert "there is no journal" in refused(tmp_path / "out", "rows/0/0")


def test_replaying_writes_nothing(finished: Path) -> None:
    def state() -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in finished.rglob("*") if path.is_file()}

    before = state()
    again(finished, "z/3/0")
    assert state() == before


def test_a_damaged_journal_is_an_error(finished: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(finished, tmp_path / "out")
    log = tmp_path / "out/.pipedist/journal/0-dataset.y.log"
    data = bytearray(log.read_bytes())
    data[len(data) // 2] ^= 1
    log.write_bytes(bytes(data))
    with pytest.raises(JournalError, match="damaged"), open_replay(tmp_path / "out", CallKey.of("z/3/0")):
        pass


# -- failed and quarantined calls --------------------------------------------------------------------


def test_the_error_of_a_call_names_the_command_and_the_command_finds_it(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(CallError) as caught:
        pipedist.run(written(tmp_path, NOISY), workers=2, output=out, params={"bad": [17]})
    error = caught.value
    key = f"y/{error.step}/{error.replica}"
    assert error.replay == f"pipedist replay {out} --call {key}"
    assert str(error).endswith(f"\nTo execute only this call again: {error.replay}")
    replay, made = again(out, key)
    assert 17 in replay.elements
    assert made.failure is not None
    assert (made.failure.name, made.failure.text) == ("Indigestible", "elements [17]")
    assert made.failure.traceback == error.remote_traceback
    assert made.error is not None
    assert "the run did not reach call z/0/0: the earlier pass y is incomplete" in refused(out, "z/0/0")


def test_quarantined_elements_are_skipped_and_can_be_replayed_alone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = pipedist.run(
        written(tmp_path, NOISY, "quarantine"), workers=2, output=out, params={"bad": [17, 20]}
    )
    assert len(result.quarantined) == 2
    lines = [json.loads(line) for line in (out / "quarantine.jsonl").read_text().splitlines()]
    rows = [json.loads(line) for line in (out / "each.jsonl").read_text().splitlines()]
    for line in lines:
        key = f"y/{line['step']}/{line['replica']}"
        assert (line["call"], line["alone"]) == (key, True)
        replay, made = again(out, key)
        assert line["element"] in replay.skipped
        assert line["element"] not in replay.elements
        row = rows[line["step"]]
        at = row["ids"].index(replay.elements[0])
        assert made.value["y"].tolist() == row["y"][at : at + len(replay.elements)]
        alone, failed = again(out, key, line["element"])
        assert alone.elements == (line["element"],)
        assert failed.failure is not None
        assert failed.failure.text == f"elements [{line['element']}]"
    assert "element 99 does not belong to call" in refused(out, key, 99)


def test_a_quarantined_shard_is_replayed_with_all_its_elements(tmp_path: Path) -> None:
    spec = f"""
pipedist: 1
name: whole
code: {ROOT}
dataset: {{range: 16, batch: 8}}
stages:
  y: {{run: "tests.runs.poison_functions:together", on_error: quarantine}}
  n: {{gather: 0, of: y}}
outputs: {{n: n.json}}
"""
    out = tmp_path / "out"
    result = pipedist.run(written(tmp_path, spec), workers=1, output=out)
    assert len(result.quarantined) == 8
    lines = [json.loads(line) for line in (out / "quarantine.jsonl").read_text().splitlines()]
    assert {(line["call"], line["alone"]) for line in lines} == {("y/0/0", False)}
    replay, made = again(out, "y/0/0")
    assert replay.elements == tuple(range(8))
    assert "the whole shard was quarantined" in replay.notes[0]
    assert made.failure is not None


# -- async functions, gangs, other sources ------------------------------------------------------------


def test_async_functions_and_sources_without_random_access(tmp_path: Path) -> None:
    spec = f"""
pipedist: 1
name: sequential
replicas: 2
code: {ROOT}
dataset: {{function: {{call: "{F}:one_by_one", with: {{count: 30}}}}, batch: 8, epochs: 2}}
stages: {{y: {{run: "{F}:slow"}}, rows: {{gather: 0, of: y, per: step}}}}
outputs: {{rows: rows.jsonl}}
"""
    out = tmp_path / "out"
    pipedist.run(written(tmp_path, spec), workers=2, output=out)
    rows = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    replay, made = again(out, "y/5/1")
    assert made.value.tolist() == rows[5]["value"][4:]
    assert replay.elements == (42, 43, 44, 45)
    assert "has 8 steps" in refused(out, "y/8/0")


GANG = f"""
pipedist: 1
name: gang
replicas: 3
code: {ROOT}
params: {{bad: []}}
dataset: {{range: 20, batch: 6}}
stages:
  y: {{run: "{F}:together", collectives: true, with: {{bad: "${{params.bad}}"}}}}
  rows: {{gather: 0, of: y, per: step}}
outputs: {{rows: rows.jsonl}}
"""


def test_of_a_gang_all_replicas_run_as_threads(tmp_path: Path) -> None:
    out = tmp_path / "out"
    pipedist.run(written(tmp_path, GANG), workers=2, output=out)
    rows = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    assert again(out, "y/1/2")[1].value.tolist() == rows[1]["value"][4:]
    assert again(out, "y/3/1")[1].value.tolist() == rows[3]["value"][1:]
    assert again(out, "y/3/2")[1].value.tolist() == []
    assert "can't be executed with some of its elements only" in refused(out, "y/1/2", 10)


def test_the_replica_of_a_gang_that_failed_is_named(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(CallError):
        pipedist.run(written(tmp_path, GANG), workers=2, output=out, params={"bad": [9]})
    for asked in (0, 1):
        _, made = again(out, f"y/1/{asked}")
        assert made.failure is not None
        assert (made.culprit, made.failure.text) == (1, "replica 1")


# -- states ------------------------------------------------------------------------------------------


TRAINING = f"""
pipedist: 1
name: descent
replicas: 2
code: {ROOT}
params: {{fails_at: -1}}
datasets:
  train: {{range: 20, batch: 5, epochs: 3}}
  held_out: {{range: 4, batch: 2}}
stages:
  g: {{run: "{F}:gradient", of: train, with: {{w: "${{state.w}}", fails_at: "${{params.fails_at}}"}}}}
  m: {{reduce: mean, of: g, axis: null, per: step}}
  w: {{update: "{F}:moved", of: m, init: {{function: "{F}:origin"}}}}
  d: {{run: "{F}:distance", of: held_out, with: {{w: "${{state.w}}"}}}}
  seen: {{gather: 0, of: d, per: epoch}}
outputs: {{w: w.json, m: m.jsonl}}
"""


@pytest.mark.parametrize("step", [0, 1, 6])
def test_a_call_that_failed_reads_the_state_that_it_read(tmp_path: Path, step: int) -> None:
    out = tmp_path / "out"
    with pytest.raises(CallError) as caught:
        pipedist.run(written(tmp_path, TRAINING), workers=2, output=out, params={"fails_at": step})
    replay, made = again(out, f"g/{step}/0")
    assert made.failure is not None
    assert caught.value.cause == f"Indigestible: {made.failure.text}"
    assert made.failure.text.endswith(f"after {step}")
    assert replay.states == {"w": step}
    if step:
        assert again(out, "g/0/1")[1].failure is None  # the first version needs no journal
    if step > 1:
        assert again(out, "g/1/0")[0].states == {"w": 1}
        text = refused(out, f"g/{step + 1}/0")
        assert f"read version {step + 1} of state w (one a step), which is not kept" in text
        assert f"the journal has versions 1 to {step}. " in text
        assert "let the function raise at this step" in text


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    pipedist.run(written(folder, TRAINING), workers=2, output=folder / "out")
    return folder / "out"


def test_each_call_of_a_training_reads_the_state_that_it_read(trained: Path) -> None:
    means = [json.loads(line)["value"] for line in (trained / "m.jsonl").read_text().splitlines()]
    assert len(means) == 12
    for step, mean in enumerate(means):
        replays = [again(trained, f"g/{step}/{replica}") for replica in (0, 1)]
        assert [replay.states for replay, _ in replays] == [{"w": step}] * 2
        assert sum(made.value for _, made in replays) / 2 == mean


def test_held_out_data_is_read_with_the_state_of_its_epoch(trained: Path) -> None:
    w = json.loads((trained / "w.json").read_text())
    replay, made = again(trained, "d/5/1")
    assert made.value.tolist() == [[w["w"], 12.0]]
    assert replay.states == {"w": 12}
    for key, version in (("d/0/1", 4), ("d/3/0", 8)):
        replay, made = again(trained, key)
        assert replay.states == {"w": version}
        assert made.value[0, 1] == version
    assert "updates and combine functions don't work on shards" in refused(trained, "w/0/0")


def test_what_is_kept_of_versions_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_history, "PART_BYTES_MAX", 200)  # of two entries or three
    out = tmp_path / "out"
    pipedist.run(written(tmp_path, TRAINING), workers=2, output=out)
    logs = [path.name for path in (out / PRIVATE / "journal").iterdir() if ".versions." in path.name]
    assert 1 <= len(logs) <= 2
    assert again(out, "g/11/0")[0].states == {"w": 11}
    assert "read version 1 of state w (one a step), which is not kept" in refused(out, "g/1/0")
    assert audit(out / PRIVATE / "journal").problems == ()


def test_a_version_that_is_large_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_history, "VERSION_BYTES_MAX", 10)
    out = tmp_path / "out"
    pipedist.run(written(tmp_path, TRAINING), workers=2, output=out)
    assert again(out, "d/5/1")[0].states == {"w": 12}
    assert "which is not kept: the journal has version 12. " in refused(out, "g/11/0")


def test_snapshots_of_large_versions_are_kept_as_often_and_as_many_as_the_spec_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An hour between two snapshots: one after the first step, and one at the end."""
    monkeypatch.setattr(state_history, "VERSION_BYTES_MAX", 10)
    monkeypatch.setattr(pass_handle, "BATCH_STEPS_MAX", 1)
    out = tmp_path / "out"
    spec = TRAINING.replace("pipedist: 1", "pipedist: 1\ncheckpoint: {every_s: 3600, keep: 2}")
    assert spec != TRAINING
    pipedist.run(written(tmp_path, spec), workers=2, output=out)
    files = [path.name for path in (out / PRIVATE / "journal").iterdir() if ".state." in path.name]
    history = read_history(out / PRIVATE / "journal")
    assert history is not None
    kept = {name for name in history.passes["0/train"].parts if name.startswith("state.")}
    assert kept == {"state.0.w", "state.1.w"}
    text = refused(out, "g/11/0")
    (first,) = re.findall(r"the journal has versions (\d+), 12", text)
    assert again(out, f"g/{first}/0")[0].states == {"w": int(first)}
    assert len(files) <= 2


def test_a_resumed_training_executes_the_steps_after_its_last_snapshot_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def killed(self: Execution, executions: Any) -> None:
        """Commit nothing at the end, like a killed process."""

    out, limit = tmp_path / "out", tmp_path / "limit"
    spec = _limited(limit).replace("pipedist: 1", "pipedist: 1\ncheckpoint: {every_s: 3600}")
    undisturbed = pipedist.run(written(tmp_path, TRAINING), workers=2, output=tmp_path / "undisturbed")
    limit.write_text("9")
    with monkeypatch.context() as patch:
        patch.setattr(Execution, "_flush", killed)
        with pytest.raises(CallError):
            pipedist.run(written(tmp_path, spec), workers=2, output=out)
    history = read_history(out / PRIVATE / "journal")
    assert history is not None
    assert not any(done.steps >= 9 for done in history.passes.values())
    limit.write_text("100")
    result = pipedist.run(written(tmp_path, spec), workers=1, output=out, resume=True, force_code=True)
    assert result.ledger == undisturbed.ledger
    for name in ("w.json", "m.jsonl"):
        assert (out / name).read_bytes() == (tmp_path / "undisturbed" / name).read_bytes()


def test_a_resumed_training_keeps_the_snapshots_of_earlier_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process has one snapshot, after its first step."""
    monkeypatch.setattr(pass_handle, "BATCH_STEPS_MAX", 1)
    out, limit = tmp_path / "out", tmp_path / "limit"
    spec = _limited(limit).replace("pipedist: 1", "pipedist: 1\ncheckpoint: {every_s: 3600, keep: 2}")
    kept = []
    for updates in (3, 6, 9):
        limit.write_text(str(updates))
        with pytest.raises(CallError):
            pipedist.run(written(tmp_path, spec), workers=2, output=out, resume=bool(kept), force_code=True)
        history = read_history(out / PRIVATE / "journal")
        assert history is not None
        parts = history.passes["0/train"].parts.items()
        states = [unpacked(part.inline) for name, part in parts if name.startswith("state.") and part.inline]
        kept.append(sorted(version for _, version in states))
    assert kept == [[1], [1, 2], [2, 3]]


def _limited(limit: Path) -> str:
    """Return the training whose update fails after the number of updates that a file has."""
    return TRAINING.replace("fails_at: -1", f"fails_at: -1, limit: {limit}").replace(
        f'"{F}:moved", of: m,', f'"{F}:moved_so_far", of: m, with: {{limit: "${{params.limit}}"}},'
    )


@pytest.mark.parametrize("part_bytes_max", [200, state_history.PART_BYTES_MAX])
def test_versions_continue_in_a_resumed_run(
    tmp_path: Path, part_bytes_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_history, "PART_BYTES_MAX", part_bytes_max)
    out, limit = tmp_path / "out", tmp_path / "limit"
    spec = _limited(limit)
    limit.write_text("5")
    with pytest.raises(CallError):
        pipedist.run(written(tmp_path, spec), workers=2, output=out)
    limit.write_text("100")
    result = pipedist.run(written(tmp_path, spec), workers=1, output=out, resume=True, force_code=True)
    assert result["w"]["updates"] == 12
    assert audit(out / PRIVATE / "journal").problems == ()
    first = 0 if part_bytes_max > 200 else 10
    for step in range(first, 12):
        assert again(out, f"g/{step}/1")[0].states == {"w": step}
        assert again(out, f"g/{step}/1")[1].failure is None


# -- the command --------------------------------------------------------------------------------------


def command(*args: str | Path, cwd: Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    env = {**environment(2), "PYTHONPATH": str(ROOT)}
    return run_module("pipedist", "replay", *args, cwd=cwd, env=env, stdin=stdin)


def test_the_command_prints_the_result_as_text_and_as_json(finished: Path, steps: list[Any]) -> None:
    done = command("out", "--call", "y/2/1", "--json", cwd=finished.parent)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["call"] == "y/2/1"
    assert document["result"]["y"] == steps[2]["y"][4:]
    assert document["elements"] == steps[2]["ids"][4:]
    done = command("out", "--call", "y/2/1", cwd=finished.parent)
    assert f"ids: {steps[2]['ids'][4:]}\n" in done.stdout
    assert "stage y, step 2, replica 1 of run" in done.stderr
    done = command("out", "--call", "y/99/1", cwd=finished.parent)
    assert (done.returncode, done.stdout) == (2, "")
    assert "has 12 steps" in done.stderr


def test_the_command_stops_in_the_debugger_where_the_call_fails(tmp_path: Path) -> None:
    with pytest.raises(CallError) as caught:
        pipedist.run(written(tmp_path, NOISY), workers=2, output=tmp_path / "out", params={"bad": [17]})
    key = f"y/{caught.value.step}/{caught.value.replica}"
    done = command("out", "--call", key, "--pdb", cwd=tmp_path, stdin="p found\nq\n")
    assert done.returncode == 1
    assert "(Pdb) [17]" in done.stdout
    assert "Indigestible: elements [17]" in done.stderr
    done = command("out", "--call", key, "--json", cwd=tmp_path)
    assert done.returncode == 1
    error = json.loads(done.stdout)["error"]
    assert (error["class"], error["message"]) == ("Indigestible", "elements [17]")
    assert "Traceback" in error["traceback"]


def test_a_call_that_kills_its_process_shows_where(tmp_path: Path) -> None:
    document = {
        "pipedist": 1,
        "code": str(ROOT),
        "dataset": {"range": 40, "batch": 8},
        "stages": {"y": {"run": f"{F}:deadly", "on_error": "quarantine"}, "rows": {"gather": 0, "of": "y"}},
    }
    (tmp_path / "spec.yaml").write_text(json.dumps(document))
    pipedist.run(tmp_path / "spec.yaml", workers=2, output=tmp_path / "out")
    [line] = (tmp_path / "out" / "quarantine.jsonl").read_text().splitlines()
    entry = json.loads(line)
    done = command("out", "--call", entry["call"], "--element", str(entry["element"]), cwd=tmp_path)
    assert done.returncode == -signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in done.stderr
    assert "in deadly" in done.stderr


def test_a_damaged_journal_is_no_failure_of_the_call(tmp_path: Path) -> None:
    pipedist.run(written(tmp_path, NOISY), workers=2, output=tmp_path / "out")
    journal = tmp_path / "out" / PRIVATE / "journal" / "journal"
    data = bytearray(journal.read_bytes())
    data[40] ^= 1
    journal.write_bytes(data)
    done = command("out", "--call", "y/2/1", cwd=tmp_path)
    assert done.returncode == 2
    assert "is damaged" in done.stderr
