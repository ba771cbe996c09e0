from __future__ import annotations

import heapq
import io
import re
import sys
from collections.abc import Callable, Iterable
from itertools import pairwise

import pytest
from msgspec.structs import replace

import pipedist
from pipedist.protocol.messages import LogLine
from pipedist.runs.progress import (
    LiveReporter,
    Pace,
    Pacer,
    PlainReporter,
    ProgressTotals,
    describe,
    duration,
    open_reporter,
)
from pipedist.runs.result import Progress, StageCount


def test_passes_add_up() -> None:
    first = StageCount("f", "d", 10, 40, 1, 4, 2, 8, 1)
    second = StageCount("g", "e", 5, 10, 1, 2, 3, 6)
    endless = StageCount("h", "c", 5, None, 1, None, 3)
    assert ProgressTotals.of(Progress((first, second), 0, 2, 4, 1.0, "reducing t")) == ProgressTotals(
        15, 50, 5, 4, 0, 2, 14, 1, "reducing t"
    )
    assert ProgressTotals.of(Progress((first, endless), 1, 2, 4, 1.0)) == ProgressTotals(
        15, None, 5, 4, 1, 2, None, 1
    )
    assert ProgressTotals.of(Progress((), 0, 1, 0, 1.0)) == ProgressTotals(0, None, 0, 0, 0, 1)


def totals(done: int, total: int | None, workers: int, **more: int) -> ProgressTotals:
    return ProgressTotals(0, None, done, workers, calls_total=total, **more)


def left_at(
    total: int, workers: int, call_s: Callable[[int], float], end_s: float
) -> dict[float, tuple[int, float]]:
    """Return (calls done, estimate) of a phase whose workers take its calls in order, by time, twice a second."""
    free = [0.0] * workers
    ends = []
    for call in range(total):
        begin = heapq.heappop(free)
        ends.append(begin + call_s(call))
        heapq.heappush(free, ends[-1])
    assert max(ends) == end_s
    pacer = Pacer()
    estimates = {}
    for half in range(int(2 * end_s) + 1):
        done = sum(end <= half / 2 for end in ends)
        left_s = pacer.pace(totals(done, total, workers), half / 2).left_s
        if left_s is not None:
            estimates[half / 2] = (done, left_s)
    return estimates


@pytest.mark.parametrize(
    ("calls", "workers", "end_s"), [(12, 2, 150.0), (13, 2, 175.0), (3, 8, 25.0), (7, 3, 75.0)]
)
def test_the_estimate_of_equal_calls_is_the_time_that_is_left(calls: int, workers: int, end_s: float) -> None:
    estimates = left_at(calls, workers, lambda _: 25.0, end_s)
    assert min(estimates) == 25.0  # unknown before the first call is done
    for at_s, (_, left_s) in estimates.items():
        assert left_s == pytest.approx(
            end_s - at_s, abs=2.5
        )  # a tenth of a call, while it is about to return


def test_the_estimate_decreases_while_no_call_returns() -> None:
    """Calls of very different durations."""
    estimates = left_at(60, 4, lambda call: 5.0 + 20.0 * (call % 7 == 0), 130.0)
    for (before, earlier_s), (done, later_s) in pairwise(estimates.values()):
        assert done > before or later_s <= earlier_s
    assert estimates[65.0][1] == pytest.approx(65.0, rel=0.25)
    assert estimates[130.0] == (60, 0.0)


def test_the_estimate_of_short_calls_is_their_rate() -> None:
    pacer = Pacer()
    for second in range(11):
        pace = pacer.pace(totals(100 * second, 10_000, 2), float(second))
    assert pace.left_s == pytest.approx(90.0, abs=0.1)
    assert pace.calls_per_s == 100.0


def test_the_estimate_counts_from_the_first_worker_without_earlier_processes_and_by_phase() -> None:
    pacer = Pacer()
    resumed = ProgressTotals(40, 100, 40, 0, calls_total=100, calls_past=40)
    assert pacer.pace(resumed, 0.0) == pacer.pace(resumed, 30.0) == Pace(0.0, 0.0, 0.0, None)
    assert pacer.pace(replace(resumed, workers=2), 60.0).left_s is None
    later = replace(resumed, workers=2, elements_done=50, calls_done=50)
    assert pacer.pace(later, 70.0) == Pace(10.0, 1.0, 1.0, 50.0)
    skipped = replace(later, calls_done=80, calls_past=70)  # such as those of quarantined elements
    assert pacer.pace(skipped, 70.0).left_s == pytest.approx(20.0)
    assert pacer.pace(replace(skipped, workers=4), 70.0).left_s == pytest.approx(10.0)
    assert pacer.pace(replace(skipped, workers=0), 71.0).left_s is None
    assert pacer.pace(totals(0, None, 2, phase=1, phases=2), 80.0).left_s is None
    assert pacer.pace(totals(5, None, 2, phase=1, phases=2), 85.0) == Pace(5.0, 0.0, 1.0, None)


def test_a_line_contains_what_is_known() -> None:
    known = ProgressTotals(500, 1000, 5, 2, calls_total=10)
    assert describe("x", known, Pace(4.0, 125.0, 1.25, 5.0)) == (
        "x: 50%, 5 of 10 calls, 500 of 1,000 elements, 125 elements/s, 2 workers, 4.0 s so far, about 5.0 s left"
    )
    one_step = totals(4, 12, 2)
    assert describe("x", one_step, Pace(50.0, 0.0, 0.08, 100.0)) == (
        "x: 33%, 4 of 12 calls, 4.8 calls/min, 2 workers, 50 s so far, about 1:40 left"
    )
    reducing = replace(one_step, calls_done=12, activity="reducing t, 3 of 9 steps")
    assert describe("x", reducing, Pace(7200.0, 0.0, 0.001, 0.0)) == (
        "x: 100%, 12 of 12 calls, 2 workers, 2:00:00 so far, reducing t, 3 of 9 steps"
    )
    ahead = describe("x", replace(one_step, elements_ahead=30), Pace(50.0, 0.0, 0.08, 100.0))
    assert ahead.startswith("x: 33%, 4 of 12 calls, 30 elements of running calls, 4.8 calls/min, ")
    endless = ProgressTotals(500, None, 5, 1, 1, 3)
    assert describe("x", endless, Pace(1.0, 1e6, 12.0, None)) == (
        "x phase 2 of 3: 5 calls, 500 elements, 1,000,000 elements/s, 1 worker, 1.0 s so far"
    )
    assert ", 3.6 calls/h, " in describe("x", one_step, Pace(7200.0, 0.0, 0.001, None))
    assert describe("x", ProgressTotals(0, 1, 0, 0, calls_total=1), Pace(0.0, 0.0, 0.0, None)) == (
        "x: 0%, 0 of 1 call, waiting for workers"
    )
    assert "left in this phase" in describe("x", replace(known, phases=2), Pace(4.0, 125.0, 1.25, 5.0))
    assert [duration(s) for s in (0.04, 42, 65, 3905)] == ["0.0 s", "42 s", "1:05", "1:05:05"]


def lines_of(monkeypatch: pytest.MonkeyPatch, updates: Iterable[tuple[float, ProgressTotals]]) -> list[str]:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    now = [0.0]
    reporter = PlainReporter("x", lambda: now[0])
    for at_s, each in updates:
        now[0] = at_s
        reporter.update(each)
    reporter.log("w1", LogLine("f", 3, 0, "hello\n"))
    reporter.close()
    *lines, log = stream.getvalue().splitlines()
    assert log == "[f 3 0 w1] hello"
    return lines


def test_plain_lines_come_at_growing_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    day_s = 24 * 3600
    lines = lines_of(monkeypatch, ((float(at), totals(at, day_s, 2)) for at in range(day_s)))
    assert [line.split(",")[1] for line in lines[:4]] == [f" {at} of 86" for at in (2, 3, 5, 7)]
    assert len(lines) == 27


def test_a_short_run_prints_no_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lines_of(monkeypatch, ((at / 10, totals(at, 20, 2)) for at in range(20))) == []


def test_a_phase_and_its_reduction_have_a_plain_line(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = totals(0, 9, 2, phases=2), totals(0, 9, 2, phase=1, phases=2)
    reducing = replace(second, calls_done=9, activity="reducing t")
    updates = [
        *((at, first) for at in range(100)),
        (100, second),
        (101, second),
        (102, reducing),
        (103, reducing),
    ]
    lines = lines_of(monkeypatch, updates)
    assert [line.partition(":")[0] for line in lines[-3:]] == [
        "x phase 1 of 2",
        "x phase 2 of 2",
        "x phase 2 of 2",
    ]
    assert "0 of 9 calls" in lines[-2]
    assert lines[-1].endswith("reducing t")


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_of(monkeypatch, columns=140)
    reporter = LiveReporter("x[/]")
    reporter.update(ProgressTotals(500, 1000, 5, 2, calls_total=10))
    reporter._bar.refresh()
    reporter.line("[bold]a line")
    reporter.close()
    shown = terminal.getvalue()
    assert "50%" in shown
    assert "x[/]" in shown
    assert "5 of 10 calls" in shown
    assert "2 workers" in shown
    assert "[bold]a line" in shown


def last_line(monkeypatch: pytest.MonkeyPatch, columns: int) -> str:
    """Return what follows the name in the last line of a run that is 20% done."""
    terminal = terminal_of(monkeypatch, columns=columns)
    reporter = LiveReporter("circle")
    monkeypatch.setattr(reporter._pacer, "pace", lambda totals, now_s: Pace(2.0, 10_000_000.0, 100.0, 8.0))
    reporter.update(ProgressTotals(20_000_000, 100_000_000, 200, 2, calls_total=1000))
    reporter._bar.refresh()
    reporter.close()
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.getvalue()).strip().split("circle ")[-1]


def test_a_narrow_terminal_shows_the_bar_and_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    last = last_line(monkeypatch, columns=80)
    assert last.startswith("━" * 4 + "╺" + "━" * 15)
    assert "20% 200 of 1,000 calls, about 8.0 s left" in last


def test_a_very_narrow_terminal_cuts_neither_the_name_nor_the_time_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    last = last_line(monkeypatch, columns=40)
    assert last.rstrip().endswith(" 20% about 8.0 s left")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal_of(monkeypatch: pytest.MonkeyPatch, columns: int) -> Terminal:
    """Have stderr be a terminal of some width, and return it."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    return terminal


@pytest.mark.asyncio
async def test_runs_show_progress_on_a_terminal_unless_it_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = {
        "pipedist": 1,
        "name": "job",
        "dataset": {"range": 6, "batch": 2},
        "stages": {"y": {"run": abs}, "all": {"gather": 0, "of": "y"}},
    }
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setenv("TERM", "xterm")
    async with pipedist.LocalCluster(1) as cluster:

        async def shown(stderr: io.StringIO, progress: bool | None) -> str:
            monkeypatch.setattr(sys, "stderr", stderr)
            async with pipedist.open(spec, cluster=cluster, progress=progress) as run:
                await run.results()
                inside = stderr.getvalue()
            assert stderr.getvalue() == inside, "the bar is closed with the run, not with its context"
            assert sys.stderr is stderr, "it is redirected no longer"
            return inside

        assert "3 of 3 calls" in await shown(Terminal(), None)
        assert "3 of 3 calls" in await shown(Terminal(), True)
        assert await shown(Terminal(), False) == ""
        assert await shown(io.StringIO(), None) == ""


def test_a_terminal_shows_one_bar_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    first = open_reporter("first")
    assert isinstance(first, LiveReporter)
    assert isinstance(open_reporter("second"), PlainReporter)
    first.close()
    first.close()
    third = open_reporter("third")
    assert isinstance(third, LiveReporter)
    third.close()
