"""Stages that are added, removed or changed: which functions are called again, and what a kill can destroy."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tests import preloaded
from tests.journal.killing import Job

STEPS = 30

MODULE = """
import time

def note(calls, name, ctx):
    with open(calls, "a") as file:
        file.write(f"{name} {ctx.step} 0\\n")

def slow(x, calls, ctx):
    note(calls, "slow", ctx)
    time.sleep(0.005)
    return x * 3

def quick(x, calls, ctx):
    note(calls, "quick", ctx)
    return x + 1

def square(x, calls, ctx):
    note(calls, "square", ctx)
    time.sleep(0.005)
    return x * x

def cube(x, calls, ctx):
    note(calls, "cube", ctx)
    return x + 1
"""

SPEC = f"""
pipedist: 1
name: stages
cluster: {{speculation: off}}
dataset: {{range: {4 * STEPS}, batch: 4}}
stages:
  slow: {{run: "mine:slow", with: {{calls: calls}}}}
  quick: {{run: "mine:quick", of: dataset, with: {{calls: calls}}}}
  total: {{reduce: sum, of: slow, axis: 0}}
  rows: {{gather: 0, of: quick}}
outputs: {{total: total.json, rows: rows.npy}}
"""

ADDED = """
  square: {run: "mine:square", of: slow, with: {calls: calls}}
  squares: {reduce: sum, of: square, axis: 0}
"""

ELEMENTS = range(4 * STEPS)


def job_of(folder: Path, spec: str = SPEC) -> Job:
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "mine.py").write_text(MODULE)
    return Job(folder, spec)


def change(job: Job, spec: str) -> None:
    job.spec = spec
    (job.folder / "spec.yaml").write_text(spec)


def added(spec: str = SPEC) -> str:
    return spec.replace("outputs:", f"{ADDED}outputs:").replace("{total:", "{squares: squares.json, total:")


def called(job: Job) -> Counter[str]:
    return Counter(stage for stage, _, _ in job.calls().elements())


def steps(job: Job, key: str = "0/dataset") -> int:
    return job.history().passes[key].steps


def check_results(job: Job) -> None:
    out = job.folder / "out"
    assert json.loads((out / "total.json").read_text()) == sum(3 * n for n in ELEMENTS)
    assert json.loads((out / "squares.json").read_text()) == sum(9 * n * n for n in ELEMENTS)


def interrupted(job: Job, how: str) -> None:
    """End a run after 17 steps by SIGKILL, or after a few steps by SIGINT."""
    if how == "killed":
        assert job.run(kill_at=18) == -signal.SIGKILL, job.stderr
        assert steps(job) == 17
        return
    command = [sys.executable, "-m", "pipedist", "run", "spec.yaml", "--workers", "1", "--output", "out"]
    with preloaded.Popen(command, cwd=job.folder, stderr=subprocess.PIPE) as process:
        until = time.monotonic() + 60
        while called(job)["slow"] < 3 and time.monotonic() < until:
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 130
    assert steps(job) >= 1


@pytest.mark.parametrize("how", ["killed", "interrupted"])
def test_stages_that_are_added_read_stored_values_and_keep_committed_steps(tmp_path: Path, how: str) -> None:
    job = job_of(tmp_path)
    interrupted(job, how)
    done, before = steps(job), called(job)
    change(job, added())
    assert job.run("--resume") == 2
    assert "--reuse" in job.stderr
    assert job.run("--reuse") == 0, job.stderr
    assert f"reusing the first {done} steps" in job.stderr
    check_results(job)
    assert called(job)["slow"] - before["slow"] == STEPS - done
    assert called(job)["quick"] - before["quick"] == STEPS - done
    assert called(job)["square"] == STEPS
    assert job.run("--resume") == 0
    assert "is finished" in job.stderr


def test_stages_that_are_added_in_turn_read_the_values_stored_last(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    assert job.run() == 0, job.stderr
    change(job, added())
    assert job.run("--reuse", kill_at=14) == -signal.SIGKILL, job.stderr
    done, before = job.history().passes["0+1/slow"].steps, called(job)
    assert 5 < done < STEPS
    cube = '  cube: {run: "mine:cube", of: square, with: {calls: calls}}\n'
    change(job, added().replace("outputs:", f"{cube}  cubes: {{reduce: sum, of: cube, axis: 0}}\noutputs:"))
    assert job.run("--reuse") == 0, job.stderr
    assert "reusing all steps of slow" in job.stderr
    assert f"reusing the first {done} steps of square" in job.stderr
    assert "executing cube with the stored values of square" in job.stderr
    check_results(job)
    assert job.document["results"]["cubes"] == sum(9 * n * n + 1 for n in ELEMENTS)
    assert called(job)["slow"] == before["slow"]
    assert called(job)["square"] - before["square"] == STEPS - done
    assert called(job)["cube"] == STEPS


def test_a_stage_that_is_removed_keeps_the_others(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    interrupted(job, "killed")
    before = called(job)
    change(job, SPEC.replace("  rows: {gather: 0, of: quick}\n", "").replace(", rows: rows.npy", ""))
    assert job.run("--reuse") == 0, job.stderr
    assert called(job)["slow"] - before["slow"] == STEPS - 17


def test_going_back_to_the_earlier_spec_finds_its_steps(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    interrupted(job, "killed")
    before = called(job)
    change(job, SPEC.replace("pipedist: 1", "pipedist: 1\nseed: 1"))
    assert job.run("--reuse", kill_at=6) == -signal.SIGKILL, job.stderr
    assert "seed: 0 there, 1 now" in job.stderr
    begun = called(job)
    change(job, SPEC)
    assert job.run("--resume") == 2
    assert job.run("--reuse") == 0, job.stderr
    assert "reusing the first 17 steps" in job.stderr
    assert called(job)["slow"] - begun["slow"] == STEPS - 17
    assert begun["slow"] > before["slow"]
    assert json.loads((tmp_path / "out" / "total.json").read_text()) == sum(3 * n for n in ELEMENTS)
    assert not any(path.name.startswith("spare") for path in job.journal.iterdir())


# -- kills while the journal is replaced ---------------------------------------------------------------

REPLACING = (
    "pipedist.runs.reuse:_taken",
    "pipedist.runs.reuse:_spares",
    "pipedist.journal.writer:Journal.replace",
    "pipedist.journal.log_format:Disk.rename",
    "pipedist.outputs.run_folder:RunFolder.take_over",
    "pipedist.outputs.run_folder:write_record",
    "pipedist.journal.writer:Journal.reopen",
    "pipedist.journal.writer:Journal.keep",
)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Job:
    job = job_of(tmp_path_factory.mktemp("killed"))
    interrupted(job, "killed")
    return job


@pytest.mark.parametrize(
    ("function", "where"),
    [
        pytest.param(f, w, marks=() if "take_over" in f else pytest.mark.slow)
        for f in REPLACING
        for w in ("before", "after")
    ],
)
def test_a_kill_while_the_run_is_replaced_loses_nothing(
    killed: Job, tmp_path: Path, function: str, where: str
) -> None:
    """The spec that is resumed then may be the new one or the old one."""
    folder = tmp_path / "job"
    shutil.copytree(killed.folder, folder, ignore=shutil.ignore_patterns("live"))
    job = Job(folder, added())
    before = job.calls()
    command = [sys.executable, "-m", "tests.journal.killed_in", function, where, "run", "spec.yaml"]
    command += ["--workers", "1", "--output", "out", "--reuse"]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = preloaded.run(command, cwd=folder, env=env, capture_output=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    change(job, SPEC if where == "before" else added())
    assert job.run("--reuse") == 0, job.stderr
    again = {step for (stage, step, _), n in (job.calls() - before).items() if stage == "slow"}
    assert again <= {*range(17, STEPS)}, "committed steps are kept; finished calls may be, too"
    assert json.loads((folder / "out" / "total.json").read_text()) == sum(3 * n for n in ELEMENTS)
