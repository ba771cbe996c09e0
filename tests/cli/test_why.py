"""`pipedist why`, SIGUSR1, and what a run says by itself where it does not go on."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from pipedist.cli.signals import StallReporter, StallTimer
from tests import preloaded
from tests.cli.conftest import Command

PATIENCE_S = 120.0


@pytest.fixture
def stalled(tmp_path: Path, spec: Path) -> Iterator[subprocess.Popen[str]]:
    """A run that waits until there is a file `go`; what it says about that comes after 0.1 s."""
    path = tmp_path / "slow.yaml"
    path.write_text(
        "pipedist: 1\n"
        "cluster: {workers: 1, stall_s: 0.1}\n"
        "dataset: {range: 4, batch: 1}\n"
        "stages:\n"
        '  slow: {run: "squares:slow"}\n'
        "  total: {reduce: sum, of: slow, axis: 0}\n"
        "outputs: {total: total.json}\n"
    )
    command = [sys.executable, "-m", "pipedist", "run", str(path)]
    run = preloaded.Popen(command, cwd=tmp_path, text=True, stderr=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield run
    finally:
        run.kill()
        run.communicate(timeout=PATIENCE_S)


def read_until(run: subprocess.Popen[str], wanted: str) -> str:
    """Return what a run says on standard error up to a line with these words."""
    assert run.stderr is not None
    said = ""
    while wanted not in said:
        ready, _, _ = select.select([run.stderr], [], [], PATIENCE_S)
        assert ready, f"{wanted!r} was not said: {said}"
        line = os.read(run.stderr.fileno(), 2**16).decode()
        assert line, f"{wanted!r} was not said: {said}"
        said += line
    return said


def test_a_waiting_run_explains_its_wait(
    stalled: subprocess.Popen[str], pipedist: Command, tmp_path: Path
) -> None:
    said = read_until(stalled, "slow: step 0, replica 0: running on w0")
    assert "pipedist: this run waits for:" in said
    told = pipedist("why", "out/slow")
    assert told.returncode == 0, told.stderr
    assert "slow: step 0, replica 0: running on w0 (process " in told.stdout
    told_text = told.stdout
    told = pipedist("why", "out/slow", "--json")
    document = json.loads(told.stdout)
    assert document["pipedist_why"] == 1
    assert document["waits"][0]["reason"] == "running"
    pid = document["waits"][0]["pid"]
    assert f"running on w0 (process {pid}) for " in told_text
    assert os.getpgid(pid), "it is a process"
    stalled.send_signal(signal.SIGUSR1)
    read_until(stalled, "this run waits for:")
    (tmp_path / "go").touch()
    stalled.communicate(timeout=PATIENCE_S)
    assert stalled.returncode == 0
    ended = pipedist("why", "out/slow")
    assert ended.returncode == 1
    assert "has finished: it waits for nothing" in ended.stdout
    assert "the journal is consistent" in ended.stdout
    assert not (tmp_path / "out" / "slow" / ".pipedist" / "live").exists()


def test_a_run_that_was_killed(stalled: subprocess.Popen[str], pipedist: Command, tmp_path: Path) -> None:
    read_until(stalled, "running on w0")
    stalled.kill()
    stalled.wait(timeout=PATIENCE_S)
    told = pipedist("why", "out/slow")
    assert told.returncode == 1
    assert "is not executing: no process on this host replies" in told.stdout
    assert "the run has not ended" in told.stdout
    assert "\n  pipedist run slow.yaml --resume\n" in told.stdout
    elsewhere = pipedist("why", str(tmp_path / "out" / "slow"))
    assert "\n  pipedist run slow.yaml --resume\n" in elsewhere.stdout
    assert json.loads(pipedist("why", "out/slow", "--json").stdout)["state"] == "unfinished"
    (tmp_path / "go").touch()
    assert pipedist("run", "slow.yaml", "--resume").returncode == 0
    assert not (tmp_path / "out" / "slow" / ".pipedist" / "live").exists()


@pytest.mark.parametrize("command", ["why", "watch"])
def test_a_run_whose_elements_all_failed_is_not_to_be_resumed(
    pipedist: Command, tmp_path: Path, command: str
) -> None:
    (tmp_path / "wrong.py").write_text("def wrong(x):\n    raise ValueError(x)\n")
    (tmp_path / "wrong.yaml").write_text(
        "{pipedist: 1, datasets: {a: {range: 4, batch: 2}, b: {range: 4, batch: 4}}, stages: {"
        "y: {run: 'wrong:wrong', of: a, on_error: quarantine}, s: {reduce: sum, of: y, axis: 0}, "
        "n: {reduce: sum, of: b, axis: 0}}, outputs: {s: s.json, n: n.json}}"
    )
    assert pipedist("run", "wrong.yaml", "--workers", "1").returncode == 1
    done = pipedist(command, "out/wrong")
    found = done.stdout + done.stderr
    assert "all elements of a failed (4)" in found
    assert "Fix the function or the data and rerun with --reuse" in found
    assert "--resume" not in found


def test_where_there_is_no_run(pipedist: Command, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    told = pipedist("why", "empty")
    assert told.returncode == 2
    assert "there is no run in empty" in told.stderr
    assert "A run without outputs has none: use kill -USR1 PID" in told.stderr


def test_patience_is_doubled_and_begins_anew_when_something_moves() -> None:
    patience = StallTimer(10.0)
    times = [0.0, 9.9, 10.0, 10.1, 19.9, 20.0, 39.0, 41.0, 200.0, 300.0, 321.0]
    assert [t for t in times if patience.is_due(t)] == [10.0, 20.0, 41.0, 200.0, 321.0]
    assert not patience.is_due(1.0)
    assert patience.is_due(10.0)


class FakeRun:
    logged: ClassVar[list[str]] = []

    silent_s = 5.0

    def why(self) -> dict[str, Any]:
        return {"run": "r", "name": "n", "state": "starting"}

    def log_event(self, text: str) -> None:
        self.logged.append(text)


def test_the_signal_is_answered_by_the_loop(capfd: pytest.CaptureFixture[str]) -> None:
    told: list[str] = []
    before = signal.getsignal(signal.SIGUSR1)

    async def main() -> None:
        with guard.watching(FakeRun(), 5.0):
            os.kill(os.getpid(), signal.SIGUSR1)
            assert told == [], "not in the middle of something"
            while not told:  # noqa: ASYNC110 - a signal has no event
                await asyncio.sleep(0)
            guard.check()
            guard.check()

    with StallReporter(told.append) as guard:
        signal.raise_signal(signal.SIGUSR1)
        asyncio.run(main())
        guard.check()
    assert capfd.readouterr().err == "pipedist: the run has not started, or is over\n"  # no stream is used
    assert told == ["pipedist: this run waits for:\nrun r of n: starting"] * 2
    assert FakeRun.logged == ["this run waits for:\nrun r of n: starting"] * 2
    assert signal.getsignal(signal.SIGUSR1) is before
