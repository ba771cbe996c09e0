"""Runs that are killed and resumed: the same bits, and nothing that is durable is done again."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest

from pipedist.journal.history import read_history
from tests.journal.killing import (
    GANG,
    MANY,
    NEVER,
    STREAMED,
    TRAINING,
    Job,
    everything,
    kill_and_resume,
)

STEPS = 24


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("undisturbed")
    job = Job(folder, everything(folder, STEPS))
    assert job.run(kill_at=NEVER, fresh=True) == 0, job.stderr  # with another hash seed
    assert set(job.calls().values()) == {1}
    assert job.history().count == 2 * STEPS + 4  # a header, a record a step and phase, the end
    return job


@pytest.mark.parametrize(
    "share", [pytest.param(0.3, marks=pytest.mark.slow), 0.6, pytest.param(1.0, marks=pytest.mark.slow)]
)
def test_a_run_that_is_killed_at_a_record_continues_from_there(
    undisturbed: Job, tmp_path: Path, share: float
) -> None:
    """All records of a longer run: make chaos-driver."""
    last = undisturbed.history().count
    record = max(1, round(share * last))
    job = kill_and_resume(tmp_path, everything(tmp_path, STEPS), record, MANY.passes, workers=3)
    assert job.outcome() == undisturbed.outcome()


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_comes_to_its_end(undisturbed: Job, tmp_path: Path) -> None:
    job = Job(tmp_path, everything(tmp_path, STEPS))
    assert job.run(kill_at=3) == -signal.SIGKILL
    run = job.history().header.run
    for turn in range(2):
        assert job.run("--resume", kill_at=4, workers=1 + turn % 3) == -signal.SIGKILL, job.stderr
        assert not job.history().problems
    assert job.run("--resume", workers=1) == 0, job.stderr
    assert f"resuming the run {run}" in job.stderr
    assert job.document["run"] == run
    assert job.history().epoch == 3
    assert job.outcome() == undisturbed.outcome()
    assert job.run("--resume") == 0  # it is finished: shown again
    assert "is finished: these are its results" in job.stderr
    assert job.outcome() == undisturbed.outcome()


def test_without_a_flag_an_unfinished_run_is_refused_and_restart_discards_it(tmp_path: Path) -> None:
    job = Job(tmp_path, everything(tmp_path, 4))
    assert job.run(kill_at=2) == -signal.SIGKILL
    assert job.run() == 2
    assert "--resume continues it" in job.stderr
    command = job.stderr.splitlines()[-1]
    assert re.fullmatch(r"  pipedist run .*\.yaml .*--output .* --resume", command), command
    first = job.history().header.run
    assert job.run("--restart") == 0, job.stderr
    assert job.history().header.run != first


def test_a_torn_tail_is_dropped_and_a_damaged_middle_is_an_error(undisturbed: Job, tmp_path: Path) -> None:
    job = Job(tmp_path, everything(tmp_path, STEPS))
    assert job.run(kill_at=6) == -signal.SIGKILL
    path = job.journal / "journal"
    good = path.read_bytes()
    path.write_bytes(good[:40] + bytes([good[40] ^ 1]) + good[41:])
    assert job.run("--resume") == 1
    assert "record 0 at offset 0 is damaged" in job.stderr
    path.write_bytes(good + good[:50])
    assert job.run("--resume") == 0, job.stderr
    assert "dropped 50 bytes of an incomplete record" in job.stderr
    assert job.outcome() == undisturbed.outcome()


def test_a_file_that_is_gone_or_other_bytes_in_a_log_are_errors(undisturbed: Job, tmp_path: Path) -> None:
    job = Job(tmp_path, everything(tmp_path, STEPS))
    assert job.run(kill_at=2 + STEPS + 4) == -signal.SIGKILL, "in phase 2"
    log = job.journal / "0-dataset.inline.log"
    good = log.read_bytes()
    log.write_bytes(good[:100] + bytes(len(good) - 100))
    assert job.run("--resume") == 1
    assert f"{log} is damaged: the record at offset" in job.stderr
    assert "or start again with --restart" in job.stderr
    log.write_bytes(good)
    rows = tmp_path / "out" / ".pipedist" / "new" / "rows.npz"
    rows.unlink()
    assert job.run("--resume") == 0, job.stderr
    assert job.calls()["numbers", 2, 1] == 1, "it is written again from the journal"
    assert job.outcome() == undisturbed.outcome()


def test_a_changed_spec_is_refused_with_the_differences(tmp_path: Path) -> None:
    job = Job(tmp_path, everything(tmp_path, 4))
    assert job.run(kill_at=3) == -signal.SIGKILL
    there = job.history().header.digest
    (tmp_path / "spec.yaml").write_text(
        job.spec.replace("seed: 5", "seed: 6")
        .replace("sum, of: c", "max, of: c")
        .replace('calls: "', 'calls: "/other')
    )
    assert job.run("--resume") == 2
    assert f"there {there[:12]}, now " in job.stderr
    assert "seed: 5 there, 6 now" in job.stderr
    assert "stages.centred.with.calls: " in job.stderr
    assert "stages.spread.reduce: 'sum' there, 'max' now" in job.stderr
    assert read_history(job.journal) is not None  # nothing was touched
    (tmp_path / "spec.yaml").write_text(job.spec)
    assert job.run("--resume") == 0, job.stderr


def test_changed_inputs_are_refused(tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text("x\n" + "1.5\n" * 400)
    spec = f"""
pipedist: 1
name: csv
code: {Path(__file__).parents[2]}
dataset: {{csv: {{path: data.csv, columns: {{x: float64}}}}, batch: 8}}
stages:
  y: {{run: "tests.journal.functions:column", with: {{calls: "{tmp_path}/calls"}}}}
  t: {{reduce: sum, of: y, axis: 0}}
outputs: {{t: t.json}}
"""
    job = Job(tmp_path, spec)
    assert job.run(kill_at=5) == -signal.SIGKILL, job.stderr
    (tmp_path / "data.csv").write_text("x\n" + "2.5\n" * 400)
    assert job.run("--resume") == 2
    assert "datasets.dataset: " in job.stderr
    assert "data.csv has changed" in job.stderr


def test_another_platform_is_refused_without_force(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(tmp_path / "job", everything(tmp_path / "job", STEPS))
    assert job.run(kill_at=4) == -signal.SIGKILL
    first = job.history().header.run
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    assert job.run("--resume") == 2
    assert f"the run {first} in {job.folder}/out was started on another platform" in job.stderr
    assert "without OPENBLAS_CORETYPE=Haswell (now: " in job.stderr
    assert "To continue it here, use --force" in job.stderr
    assert job.run("--resume", "--force") == 0, job.stderr
    assert job.document["run"] == first
    assert "without OPENBLAS_CORETYPE=Haswell (now: " in job.stderr
    assert job.calls()["numbers", 2, 1] == 1, "committed steps are kept"

    monkeypatch.setenv("OPENBLAS_CORETYPE", "Zen")
    assert job.run("--resume") == 0
    assert "without OPENBLAS_CORETYPE=Zen (now: " in job.stderr, "reported for a finished run"
    assert job.run("--reuse") == 0
    assert job.calls()["numbers", 2, 1] == 2, "another platform's results are not reused"
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    assert job.run("--reuse", "--force") == 0
    assert "reusing all steps of numbers" in job.stderr
    assert job.calls()["numbers", 2, 1] == 2


def test_a_failed_run_can_be_resumed_after_its_function_is_fixed(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def f(x, ctx):\n    assert ctx.step < 9, 'broken'\n    return x * 2\n")
    spec = """
pipedist: 1
name: mended
dataset: {range: 100, batch: 4}
stages: {y: {run: "mine:f"}, t: {reduce: sum, of: y, axis: 0}}
outputs: {t: t.json}
"""
    job = Job(tmp_path, spec)
    assert job.run() == 1
    assert job.history().passes["0/dataset"].steps == 9  # what was done is kept, whatever the clock says
    (tmp_path / "mine.py").write_text(
        "def f(x, ctx):\n    assert ctx.step >= 9, 'done again'\n    return x * 2\n"
    )
    assert job.run("--resume") == 2
    assert "module mine has changed" in job.stderr
    assert job.run("--resume", "--force-code") == 0, job.stderr
    assert "module mine has changed" in job.stderr
    assert (tmp_path / "out" / "t.json").read_text() == f"{2 * sum(range(100))}\n"


@pytest.mark.slow
def test_gangs_and_sources_without_random_access_are_resumed(tmp_path: Path) -> None:
    """All records: make chaos-driver."""
    straight = Job(tmp_path / "straight", GANG.spec(tmp_path / "straight", 10))
    assert straight.run(kill_at=NEVER) == 0, straight.stderr
    record = straight.history().count // 2
    job = kill_and_resume(tmp_path / "job", GANG.spec(tmp_path / "job", 10), record, GANG.passes)
    assert job.outcome() == straight.outcome()


@pytest.mark.parametrize("record", [14, pytest.param(9, marks=pytest.mark.slow)])
def test_runs_that_read_each_others_values_are_resumed(tmp_path: Path, record: int) -> None:
    """All records: make chaos-driver."""
    straight = Job(tmp_path / "straight", STREAMED.spec(tmp_path / "straight", 10))
    assert straight.run(workers=1) == 0, straight.stderr
    job = kill_and_resume(tmp_path / "job", STREAMED.spec(tmp_path / "job", 10), record, STREAMED.passes, 3)
    assert job.outcome() == straight.outcome()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("trained")
    job = Job(folder, TRAINING.spec(folder, 5))
    assert job.run(kill_at=NEVER, fresh=True) == 0, job.stderr  # with another hash seed
    return job


@pytest.mark.parametrize("record", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_a_training_continues_from_any_record(trained: Job, tmp_path: Path, record: int) -> None:
    """Record 8 is of the first epoch's evaluation: the state must be that of its end.

    All records: make chaos-driver.
    """
    assert trained.history().count > 20
    spec = TRAINING.spec(tmp_path, 5)
    job = kill_and_resume(tmp_path, spec, record, TRAINING.passes, workers=1 + record % 2)
    assert job.outcome() == trained.outcome()


def test_values_that_were_dropped_are_not_resumed_into_a_new_output(tmp_path: Path) -> None:
    job = Job(tmp_path, TRAINING.spec(tmp_path, 5))
    assert job.run(kill_at=6) == -signal.SIGKILL
    assert job.history().passes["0/train"].steps
    (tmp_path / "spec.yaml").write_text(job.spec.replace("outputs: {", "outputs: {sums: sums.npz, "))
    assert job.run("--resume") == 2
    assert "sums.npz, an output of the unfinished run" in job.stderr
    assert "--reuse" in job.stderr
    assert job.run("--reuse") == 0, job.stderr
    assert "did not keep the values of sums" in job.stderr
    assert (tmp_path / "out/sums.npz").is_file()


# -- streams ---------------------------------------------------------------------------------------------


async def _steps(spec: dict[str, Any], folder: Path, count: int | None, **how: Any) -> list[int]:
    import pipedist

    seen = []
    async with pipedist.open(spec, workers=2, output=folder, **how) as run:
        stream = run.steps("t")
        async for step in stream:
            seen.append(step.index)
            if len(seen) == count:
                break
        await stream.aclose()
        if count is None:
            await run.results()
    return seen


@pytest.mark.asyncio
async def test_a_stream_continues_where_its_subscriber_was(tmp_path: Path) -> None:
    spec = {
        "pipedist": 1,
        "name": "stream",
        "dataset": {"range": 400, "batch": 4},
        "stages": {
            "y": {"run": "tests.runs.functions:double"},
            "t": {"reduce": "sum", "of": "y", "axis": 0},
        },
        "outputs": {"t": "t.json"},
    }
    seen = await _steps(spec, tmp_path / "out", 30)
    again = await _steps(spec, tmp_path / "out", None, resume=True)
    assert seen == list(range(30))
    assert again[-1] == 99
    assert again == list(range(again[0], 100))
    assert again[0] <= 30  # no step is passed over that the first one had not seen
