"""Finished calls of steps that are not complete: they are durable too, and a resumed run does not repeat them."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pipedist
from pipedist.journal.history import FORMAT, Header, PassHistory, audit, read_history
from pipedist.journal.writer import Journal
from pipedist.runs.pass_journal import CALLS, FinishedCallLog, PassJournal
from tests import preloaded
from tests.preloaded import ROOT

F = "tests.journal.functions"


def spec_of(
    folder: Path, *, n: int, batch: int, replicas: int, waiting: list[int], **more: Any
) -> dict[str, Any]:
    options = {"folder": str(folder), "waiting": waiting, "replicas": replicas}
    return {
        "pipedist": 1,
        "replicas": replicas,
        "cluster": {"speculation": "off"},
        "dataset": {"range": n, "batch": batch},
        "stages": {
            "y": {"run": f"{F}:gated", "with": options, "retries": 0},
            "total": {"reduce": "sum", "of": "y", "axis": 0},
            "rows": {"gather": 0, "of": "y"},
        },
        "outputs": {"rows": "rows.npy"},
        **more,
    }


def calls_in(folder: Path) -> Counter[int]:
    """Return how often each call of `replicas` a step was executed, by its place."""
    path = folder / "calls"
    return Counter(path.read_text().splitlines()) if path.exists() else Counter()


async def interrupted(
    spec: dict[str, Any], folder: Path, *, done: int, began: int, resume: bool = False
) -> int:
    """Run until `done` calls have returned and `began` have begun, then cancel; return how many are durable."""
    async with (
        asyncio.timeout(60),
        pipedist.open(spec, workers=2, output=folder / "out", resume=resume) as run,
    ):
        results = asyncio.ensure_future(run.results())
        while sum(calls_in(folder).values()) < began or _done(run) < done:  # noqa: ASYNC110 - workers note them
            await asyncio.sleep(0.005)
        run.cancel()
        with pytest.raises(pipedist.RunCancelled):
            await results
    return durable_calls(folder)


def durable_calls(folder: Path) -> int:
    journal = folder / "out" / ".pipedist" / "journal"
    history = read_history(journal) if (journal / "journal").exists() else None
    if history is None:
        return 0
    return sum(each.steps * history.header.replicas + each.progress.calls for each in history.passes.values())


def _done(run: pipedist.Run) -> int:
    progress = run.progress()
    return 0 if progress is None else progress.passes[0].calls_done


def finish(spec: dict[str, Any], folder: Path) -> pipedist.Result:
    (folder / "go").touch()
    result = pipedist.run(spec, workers=2, output=folder / "out", resume=True)
    assert audit(folder / "out" / ".pipedist" / "journal", finished=True, ledger=None).problems == ()
    assert [*(folder / "out" / ".pipedist" / "journal").glob("*calls.*")] == []
    return result


def test_calls_of_the_only_step_are_not_executed_again(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, n=16, batch=16, replicas=8, waiting=[4, 5, 6, 7])
    assert asyncio.run(interrupted(spec, tmp_path, done=4, began=6)) == 4
    result = finish(spec, tmp_path)
    assert "durable: y: 0 steps and 4 calls" in result.notice
    assert result.resumed == {"y": {"steps": 0, "calls": 4, "elements": 0}}
    assert result["total"] == pytest.approx(np.sqrt(np.arange(16)).sum())
    assert np.load(result.files["rows"]).tolist() == np.sqrt(np.arange(16.0)).tolist()
    counts = calls_in(tmp_path)
    assert [counts[f"gated 0 {replica}"] for replica in range(4)] == [1] * 4
    assert sum(counts.values()) == 8 + 2  # those that were running


def test_calls_of_steps_behind_an_incomplete_one_are_not_executed_again(tmp_path: Path) -> None:
    """Interrupted twice: what the first resumed process did not use is durable after the second one too."""
    spec = spec_of(tmp_path, n=24, batch=4, replicas=2, waiting=[4])
    asyncio.run(interrupted(spec, tmp_path, done=7, began=8))
    began = sum(calls_in(tmp_path).values())
    durable = asyncio.run(interrupted(spec, tmp_path, done=7, began=began + 1, resume=True))
    assert durable >= 7
    began = sum(calls_in(tmp_path).values())
    result = finish(spec, tmp_path)
    assert result["total"] == pytest.approx(np.sqrt(np.arange(24)).sum())
    assert sum(calls_in(tmp_path).values()) == began + 12 - durable


@pytest.mark.parametrize("replicas", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_a_call_with_quarantined_elements_is_not_executed_again(tmp_path: Path, replicas: int) -> None:
    """Interrupted twice: of a shard of two elements one remains, of a shard of one none."""
    spec = spec_of(tmp_path, n=0, batch=8, replicas=replicas, waiting=[replicas - 1])
    spec["dataset"] = {"function": {"call": f"{F}:one_negative", "with": {"count": 8}}, "batch": 8}
    spec["stages"]["y"]["on_error"] = "quarantine"
    spec["quarantine_max"] = 1
    asyncio.run(interrupted(spec, tmp_path, done=replicas - 1, began=replicas))
    first = calls_in(tmp_path)
    assert durable_calls(tmp_path) == replicas - 1
    asyncio.run(interrupted(spec, tmp_path, done=replicas - 1, began=first.total() + 1, resume=True))
    result = finish(spec, tmp_path)
    assert result.ledger == pipedist.Ledger(elements=8, committed=7, quarantined=1)
    assert [(x["element"], x["cause"]) for x in result.quarantined] == [(1, "ValueError: negative")]
    waiting = f"gated 0 {replicas - 1}"
    assert calls_in(tmp_path) == first + Counter({waiting: 2})
    entry = json.loads((tmp_path / "out" / "quarantine.jsonl").read_text())
    assert (entry["input"], entry["alone"]) == (-1, True)


def test_quarantined_calls_are_executed_again_if_the_run_could_only_fail(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, n=0, batch=8, replicas=8, waiting=[7])
    source = {"call": f"{F}:one_negative", "with": {"count": 8, "last": 2}}
    spec["dataset"] = {"function": source, "batch": 8}
    spec["stages"]["y"]["on_error"] = "quarantine"
    asyncio.run(interrupted(spec, tmp_path, done=7, began=8))
    first = calls_in(tmp_path)
    (tmp_path / "go").touch()
    with pytest.raises(pipedist.PipedistError, match="may be quarantined"):
        pipedist.run({**spec, "quarantine_max": 1}, workers=2, output=tmp_path / "out", resume=True)
    again = calls_in(tmp_path) - first
    assert (again.pop("gated 0 1"), again.pop("gated 0 2")) == (1, 1)
    assert set(again) <= {"gated 0 7"}


@pytest.mark.asyncio
async def test_calls_that_were_logged_when_the_run_was_cancelled_are_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is cancelled after its last finished call was logged, and before that is committed."""
    spec = spec_of(tmp_path, n=8, batch=8, replicas=8, waiting=[7])
    loop, add, is_cancelled = asyncio.get_running_loop(), FinishedCallLog.add, threading.Event()

    async with pipedist.open(spec, workers=2, output=tmp_path / "out") as run:

        def cancel() -> None:
            run.cancel()
            is_cancelled.set()

        def cancelling(self: FinishedCallLog, before: int, results: Any) -> None:
            add(self, before, results)
            if len(results) == 7 and not is_cancelled.is_set():
                loop.call_soon_threadsafe(cancel)
                is_cancelled.wait(30)

        monkeypatch.setattr(FinishedCallLog, "add", cancelling)
        with pytest.raises(pipedist.RunCancelled):
            await run.results()
    assert durable_calls(tmp_path) == 7


def test_a_stream_of_a_resumed_run_has_all_parts_of_an_incomplete_step(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, n=8, batch=8, replicas=4, waiting=[3])
    asyncio.run(interrupted(spec, tmp_path, done=3, began=4))
    (tmp_path / "go").touch()

    async def main() -> list[int]:
        async with pipedist.open(spec, workers=1, output=tmp_path / "out", resume=True) as run:
            return sorted([part.replica async for part in run.as_completed("y")])

    assert asyncio.run(main()) == [0, 1, 2, 3]
    assert calls_in(tmp_path)["gated 0 0"] == 1


def test_calls_of_a_long_step_survive_a_killed_process(tmp_path: Path) -> None:
    """Finished calls are committed periodically; here, soon."""
    spec = spec_of(tmp_path, n=16, batch=16, replicas=8, waiting=[4, 5, 6, 7])
    (tmp_path / "spec.yaml").write_text(json.dumps({**spec, "code": str(ROOT)}))
    soon = "from pipedist.runs import pass_execution; pass_execution.CALLS_S = 0.05"
    code = f"{soon}; from pipedist.cli.app import main; main()"
    command = [sys.executable, "-c", code, "run", "spec.yaml", "--output", "out", "--workers", "2"]
    with preloaded.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 60
        while durable_calls(tmp_path) < 4:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.kill()
    (tmp_path / "go").touch()
    resumed = preloaded.run(
        [*command, "--resume"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert resumed.returncode == 0, resumed.stderr
    assert "y: 0 steps and 4 calls" in resumed.stderr
    counts = calls_in(tmp_path)
    assert [counts[f"gated 0 {replica}"] for replica in range(4)] == [1] * 4
    assert len(counts) == 8


def header() -> Header:
    passes = {"0/d": {"name": "y", "dataset": "d"}}
    return Header(FORMAT, pipedist.__version__, "run", "name", {}, "", {}, {}, 2, {}, passes)


def reopened(folder: Path, stamp: str) -> PassJournal:
    history = read_history(folder)
    assert history is not None
    assert history.problems == []
    return PassJournal(Journal.reopen(folder, history), "0/d", 2, history.passes["0/d"], stamp)


def test_a_log_of_finished_calls_ends_with_its_last_step_and_counts_for_the_same_code_only(
    tmp_path: Path,
) -> None:
    journal = Journal.create(tmp_path, header())
    durable = PassJournal(journal, "0/d", 2, PassHistory(), "stamp")
    calls = FinishedCallLog(durable)

    def commit(steps: int, results: dict[Any, Any]) -> list[str]:
        calls.add(2 * steps, results)
        dropped = calls.dropped(2 * steps)
        taken = durable.snapshot(
            steps, steps, {CALLS: calls.count}, quarantined={}, dropped=dropped, complete=False
        )
        journal.commit([taken.snapshot])
        durable.committed(taken)
        return sorted(path.name for path in tmp_path.glob("*calls.*"))

    def found(stamp: str = "stamp") -> dict[Any, Any]:
        chunks, _, elements = reopened(tmp_path, stamp).finished_calls()
        return {chunk.lo: chunk.calls[0]["y"] for chunk in chunks} | elements

    assert not calls.is_used
    commit(0, {1: {"y": 10}, 5: {"y": 50}})
    assert not calls.lacks({1: {"y": 10}})
    commit(0, {1: {"y": 10}, 2: {"y": 20}, 5: {"y": 50}, (3, 0, 7): 37})
    assert found() == {1: 10, 2: 20, 5: 50, (3, 0, 7): 37}
    assert found("other code") == {}
    first = commit(1, {2: {"y": 20}, 5: {"y": 50}, (3, 0, 7): 37})
    assert found() == {2: 20, 5: 50, (3, 0, 7): 37}
    assert commit(2, {5: {"y": 50}}) == first  # nothing is logged twice
    assert found() == {5: 50}
    assert commit(3, {}) == []
    assert found() == {}
    second = commit(3, {6: {"y": 60}})
    resumed = FinishedCallLog(reopened(tmp_path, "stamp"))
    assert resumed.lacks({6: {"y": 60}})  # it is logged again before the old log is dropped
    resumed.add(6, {6: {"y": 60}})
    assert [f"0-d.{name}.log" for name in resumed.dropped(6)] == second != first


def test_a_failed_run_whose_only_results_are_finished_calls_is_protected(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, n=12, batch=12, replicas=12, waiting=[])
    spec["dataset"] = {"function": {"call": f"{F}:one_negative", "with": {"count": 12}}, "batch": 12}
    out = tmp_path / "out"
    (tmp_path / "go").touch()
    with pytest.raises(pipedist.CallError):
        pipedist.run(spec, workers=2, output=out)
    assert durable_calls(tmp_path) == 11
    with pytest.raises(pipedist.UsageError, match="--resume continues it"):
        pipedist.run(spec, workers=2, output=out)
    began = sum(calls_in(tmp_path).values())
    with pytest.raises(pipedist.CallError):
        pipedist.run(spec, workers=2, output=out, resume=True)
    assert sum(calls_in(tmp_path).values()) == began + 1
