"""The log of a run, and `logging` records of replica functions."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from pathlib import Path
from subprocess import PIPE
from typing import Any

import anyio
import pytest

import pipedist
from pipedist.protocol.messages import LogLine
from pipedist.runs import run_log
from pipedist.runs.run_log import RECORD_LINES_MAX, RunLog
from tests.preloaded import ROOT, Popen, run_module
from tests.runs.test_feeds import until

ENV = os.environ | {"PYTHONPATH": str(ROOT)}
LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (\S+) (\S+) (\S+) (\S+): (.*)")


def spec_of(function: str, count: int = 8, **more: Any) -> dict[str, Any]:
    return {
        "pipedist": 1,
        "name": "logs",
        "dataset": {"range": count, "batch": 2},
        "stages": {
            "y": {"run": f"tests.runs.logging_functions:{function}", **more},
            "out": {"gather": 0, "of": "y"},
        },
        "outputs": {"out": "out.npy"},
    }


def text_of(folder: Path) -> str:
    path = folder / ".pipedist" / "run.log"
    return path.read_text() if path.exists() else ""


def lines_of(folder: Path, name: str = "run.log") -> list[tuple[str, ...]]:
    """Return (level, logger, call, worker, text) of each line, all of which are complete."""
    found = [LINE.fullmatch(line) for line in (folder / ".pipedist" / name).read_text().splitlines()]
    assert all(found)
    return [match.groups() for match in found if match]


def test_lines_and_records_keep_their_level_logger_and_call(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    pipedist.run(spec_of("speaks"), workers=1, output=tmp_path)
    lines = lines_of(tmp_path)
    found = [(level, logger, text) for level, logger, call, worker, text in lines if call == "y/0/0"]
    assert found[:4] == [
        ("-", "stdout", "printed"),
        ("-", "stderr", "to stderr"),
        ("INFO", "app.first", "three is 3"),
        ("WARNING", "app.second", "careful"),
    ]
    assert ("-", "stderr") in [each[:2] for each in found if "UserWarning: deprecated thing" in each[2]]
    failed = next(place for place, each in enumerate(found) if each[2].endswith("it failed"))
    assert {each[:2] for each in found[failed:]} == {("ERROR", "app.second")}, "the traceback is part of it"
    assert found[failed + 1][2] == "Traceback (most recent call last):"
    assert found[-1][2] == "ValueError: inner"
    # In this process, which has a handler, records reach `logging`; printed lines reach stderr.
    records = {(each.levelname, each.name): each.getMessage() for each in caplog.records}
    assert records["WARNING", "app.second"] == "[y 0 0 w0] careful"
    assert "ValueError: inner" in records["ERROR", "app.second"]
    stderr = capsys.readouterr().err
    assert "[y 0 0 w0] printed\n" in stderr
    assert "[y 0 0 w0] careful" not in stderr


def test_the_log_has_the_events_of_the_run(tmp_path: Path) -> None:
    spec = spec_of("dies_once", **{"with": {"folder": str(tmp_path)}, "on_error": "quarantine"})
    pipedist.run(spec, workers=1, output=tmp_path / "out")
    events = [(level, text) for level, _, _, worker, text in lines_of(tmp_path / "out") if worker == "driver"]
    assert [level for level, _ in events if level not in ("INFO", "WARNING")] == []
    texts = "\n".join(f"{level} {text}" for level, text in events)
    for expected in (
        r"INFO run \w{16} of logs begins",
        r"INFO worker w0 joined",
        r"INFO phase 1 of 1 begins: y",
        r"WARNING worker w0 died: signal 9.*",
        r"WARNING element 3 is quarantined, call y/1/0: ValueError: 3 is bad",
        r"INFO phase 1 of 1 has ended",
        r"INFO the run has finished after .* 7 of 8 elements committed, 1 quarantined, 0 lost",
    ):
        assert re.search(f"(?m)^{expected}", texts), (expected, texts)


def test_a_failed_run_ends_its_log_with_the_error(tmp_path: Path) -> None:
    with pytest.raises(pipedist.CallError):
        pipedist.run(
            spec_of("dies_once", **{"with": {"folder": str(tmp_path)}}), workers=1, output=tmp_path / "out"
        )
    errors = [text for level, _, _, _, text in lines_of(tmp_path / "out") if level == "ERROR"]
    assert errors[0].startswith("the run failed: CallError: ")


def test_logging_that_a_function_configures_is_kept_as_configured(tmp_path: Path) -> None:
    seen: list[LogLine] = []
    pipedist.run(
        spec_of("configures", 2), workers=1, output=tmp_path, on_log=lambda _worker, line: seen.append(line)
    )
    (line,) = [line for line in seen if line.logger == "app.second"]
    assert (line.level, line.text) == (logging.DEBUG, "<DEBUG formatted>"), "once, in its format"


def test_lines_above_the_rate_are_counted_in_the_log(tmp_path: Path) -> None:
    pipedist.run(spec_of("floods", 2, **{"with": {"lines": 100_000}}), workers=1, output=tmp_path)
    lines = [each for each in lines_of(tmp_path) if each[2] == "y/0/0"]
    kept = [text for _, logger, _, _, text in lines if logger == "stdout"]
    dropped = [
        re.fullmatch(r"\[(\d+) lines dropped: .*\]", text)
        for level, _, _, _, text in lines
        if level == "WARNING"
    ]
    assert len(kept) + sum(int(match[1]) for match in dropped if match) == 100_000


def test_a_killed_run_leaves_its_lines_and_the_resumed_run_appends(tmp_path: Path) -> None:
    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps(spec_of("waits", **{"with": {"folder": str(tmp_path)}})))
    command = [sys.executable, "-m", "pipedist", "run", spec, "--workers", "1", "--output", tmp_path / "out"]
    with Popen(command, cwd=tmp_path, env=ENV, stdout=PIPE, stderr=PIPE, text=True) as driver:
        anyio.run(until, lambda: "y/1/0 w0: step 1" in text_of(tmp_path / "out"))
        driver.kill()
        driver.communicate(timeout=60)
    first = lines_of(tmp_path / "out")
    (tmp_path / "go").touch()
    again = run_module("pipedist", *command[3:], "--resume", cwd=tmp_path, env=ENV)
    assert again.returncode == 0, again.stderr
    both = lines_of(tmp_path / "out")
    assert both[: len(first)] == first
    assert sum(" begins in process " in text for *_, text in both) == 2
    assert any(text.startswith("resuming the run") for *_, text in both[len(first) :])
    other = run_module("pipedist", *command[3:], "--restart", cwd=tmp_path, env=ENV)
    assert other.returncode == 0, other.stderr
    assert sum(" begins in process " in text for *_, text in lines_of(tmp_path / "out")) == 1


def write(path: Path, *lines: LogLine) -> None:
    async def main() -> None:
        log = RunLog(path, appends=True)
        for line in lines:
            log.line("w0", line)
        with anyio.fail_after(30):
            await log.aclose()

    anyio.run(main)


def test_the_oldest_half_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_log, "RUN_LOG_BYTES_MAX", 20_000)
    write(tmp_path / "run.log", *(LogLine("s", step, 0, "x" * 50) for step in range(1_000)))
    assert {path.name for path in tmp_path.iterdir()} == {"run.log", "run.log.1"}
    assert max(path.stat().st_size for path in tmp_path.iterdir()) <= 10_000
    assert " s/999/0 w0: xxx" in (tmp_path / "run.log").read_text().splitlines()[-1]


def test_records_that_the_queue_can_not_hold_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_log, "RECORDS_WAITING_MAX", 5)
    write(tmp_path / "run.log", *(LogLine("s", step, 0, "x") for step in range(5_000)))
    text = (tmp_path / "run.log").read_text()
    missing = sum(
        int(count.replace(",", "")) for count in re.findall(r"driver: (\S+) records are missing", text)
    )
    assert text.count(" w0: x\n") + missing == 5_000
    assert missing > 0


def test_a_record_can_not_imitate_others_or_grow_without_limit(tmp_path: Path) -> None:
    write(tmp_path / "run.log", LogLine("s", 0, 0, "a\nb\r\x0b" + "\n" * 5_000, 35, "two words"))
    lines = (tmp_path / "run.log").read_text().splitlines()
    assert len(lines) == RECORD_LINES_MAX + 1
    assert all(" 35 two_words s/0/0 w0: " in line for line in lines)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_ends_only_the_log(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    (tmp_path / "run.log").symlink_to("/dev/full")
    write(tmp_path / "run.log", LogLine("s", 0, 0, "one"), LogLine("s", 0, 0, "two"))
    (message,) = [each.getMessage() for each in caplog.records]
    assert (
        "run.log can't be written: [Errno 28] No space left on device. The run goes on without it" in message
    )


@pytest.mark.parametrize("option", ["-v", "-q"])
def test_the_command_shows_events_or_only_problems(tmp_path: Path, option: str) -> None:
    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps(spec_of("speaks")))
    out = tmp_path / "out"
    done = run_module(
        "pipedist", "run", spec, "--workers", "1", "--output", out, option, cwd=tmp_path, env=ENV
    )
    assert done.returncode == 0, done.stderr
    assert "out.npy" in done.stdout, "results are printed"
    assert (", total " in done.stdout) == (option == "-v"), "quiet runs print no timings"
    err = done.stderr
    shown = {
        "phase": "pipedist: phase 1 of 1 begins: y" in err,
        "joined": "pipedist: worker w0 joined" in err,
        "printed": "[y 0 0 w0] printed" in err,
        "info": "three is 3" in err,
    }
    assert set(shown.values()) == {option == "-v"}, (shown, err)
    assert "[y 0 0 w0] careful" in err
    assert "[y 0 0 w0] to stderr" in err


def test_verbose_and_quiet_exclude_each_other(tmp_path: Path) -> None:
    done = run_module("pipedist", "run", "spec.yaml", "-v", "-q", cwd=tmp_path)
    assert done.returncode == 2
    assert "--verbose and --quiet exclude each other" in done.stderr
