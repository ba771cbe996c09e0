from __future__ import annotations

import io
import sys

import pytest

from pipedist.cli.progress import Pace, Pacer, PlainReporter, ProgressTotals, describe, duration
from pipedist.protocol.messages import LogLine
from pipedist.runs.result import Progress, StageCount


def test_passes_add_up() -> None:
    first = StageCount("f", "d", 10, 40, 1, 4, 2)
    second = StageCount("g", "e", 5, 10, 1, 2, 3)
    endless = StageCount("h", "c", 5, None, 1, None, 3)
    assert ProgressTotals.of(Progress((first, second), 0, 2, 4, 1.0)) == ProgressTotals(15, 50, 5, 4, 0, 2)
    assert ProgressTotals.of(Progress((first, endless), 1, 2, 4, 1.0)) == ProgressTotals(15, None, 5, 4, 1, 2)
    assert ProgressTotals.of(Progress((), 0, 1, 0, 1.0)) == ProgressTotals(0, None, 0, 0, 0, 1)


def test_the_pace_is_that_of_the_last_seconds() -> None:
    pacer = Pacer()
    assert pacer.pace(ProgressTotals(0, 1000, 0, 2), 0.0) == Pace(0.0, 0.0, None)
    assert pacer.pace(ProgressTotals(100, 1000, 10, 2), 1.0) == Pace(100.0, 10.0, 9.0)
    for second in range(2, 31):
        pace = pacer.pace(ProgressTotals(100 + second, 1000, 10, 2), float(second))
    assert pace == Pace(1.0, 0.0, 870.0)
    assert pacer.pace(ProgressTotals(5, None, 1, 2, phase=1, phases=2), 31.0) == Pace(0.0, 0.0, None)


def test_a_line_contains_progress_and_rates() -> None:
    assert describe("x", ProgressTotals(500, 1000, 5, 2), Pace(100.0, 0.5, 5.0)) == (
        "x: 50%, 500 of 1,000 elements, 100 elements/s, 0.5 calls/s, 2 workers, 5.0 s left"
    )
    assert describe("x", ProgressTotals(500, None, 5, 1, 1, 3), Pace(1e6, 12.0, None)) == (
        "x phase 2 of 3: 500 elements, 1,000,000 elements/s, 12 calls/s, 1 worker"
    )
    assert [duration(s) for s in (0.04, 42, 65, 3905)] == ["0.0 s", "42 s", "1:05", "1:05:05"]


def test_plain_lines_are_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    now = [0.0]
    reporter = PlainReporter("x", lambda: now[0])
    for tenth in range(130):
        now[0] = tenth / 10
        reporter.update(ProgressTotals(tenth, 1000, tenth, 2))
    reporter.log("w1", LogLine("f", 3, 0, "hello\n"))
    reporter.close()
    lines = stream.getvalue().splitlines()
    assert [line[:6] for line in lines] == ["x: 2%,", "x: 7%,", "x: 12%", "[f 3 0"]
    assert lines[-1] == "[f 3 0 w1] hello"


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    from pipedist.cli.progress import LiveReporter

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setenv("TERM", "xterm")
    reporter = LiveReporter("x[/]")
    reporter.update(ProgressTotals(500, 1000, 5, 2))
    reporter._bar.refresh()
    reporter.line("[bold]a line")
    reporter.close()
    shown = terminal.getvalue()
    assert "50%" in shown
    assert "x[/]" in shown
    assert "elements/s" in shown
    assert "2 workers" in shown
    assert "[bold]a line" in shown


def test_an_unchanged_plain_line_is_repeated_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    now_s = 0.0
    reporter = PlainReporter("s", lambda: now_s)
    for now_s in range(1, 131):
        reporter.update(ProgressTotals(0, 10, 0, 1 if now_s > 125 else 0))
    waiting, working = (
        f"s: 0%, 0 of 10 elements, 0.0 elements/s, 0.0 calls/s, {n}" for n in ("0 workers", "1 worker")
    )
    assert stream.getvalue().splitlines() == [waiting, waiting, waiting, working]
