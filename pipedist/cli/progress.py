"""Show progress and logs on standard error: a live bar on a terminal, plain lines otherwise."""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from pipedist.cli.terminal import write_error
from pipedist.protocol import messages

if TYPE_CHECKING:
    from pipedist.runs.result import Progress

_WINDOW_S = 10.0  # over which rates are computed
_FIRST_LINE_S = 2.0
_LINE_EVERY_S = 5.0
_SAME_LINE_EVERY_S = 60.0  # for a run that waits for workers


@dataclass(frozen=True, slots=True)
class ProgressTotals:
    """Progress of a run, summed over the passes of its current phase, whose total may be unknown (None)."""

    elements_done: int
    elements_total: int | None
    calls_done: int
    workers: int
    phase: int = 0
    phases: int = 1

    @classmethod
    def of(cls, progress: Progress) -> Self:
        counts = [count.elements_total for count in progress.passes]
        known = [total for total in counts if total is not None]
        return cls(
            elements_done=sum(count.elements_done for count in progress.passes),
            elements_total=sum(known) if counts and len(known) == len(counts) else None,
            calls_done=sum(count.calls_done for count in progress.passes),
            workers=progress.workers_ready,
            phase=progress.phase,
            phases=progress.phases,
        )


@dataclass(frozen=True, slots=True)
class Pace:
    """Rates over the last seconds, and the estimated time until the phase is complete; None if unknown."""

    elements_per_s: float
    calls_per_s: float
    left_s: float | None


class Pacer:
    """Computes rates from successive totals."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int, int]] = deque()
        self._phase = -1

    def pace(self, totals: ProgressTotals, now_s: float) -> Pace:
        if totals.phase != self._phase:
            self._phase = totals.phase
            self._seen.clear()
        self._seen.append((now_s, totals.elements_done, totals.calls_done))
        while len(self._seen) > 2 and now_s - self._seen[0][0] > _WINDOW_S:
            self._seen.popleft()
        then_s, elements, calls = self._seen[0]
        passed_s = now_s - then_s
        if passed_s <= 0:
            return Pace(0.0, 0.0, None)
        rate = (totals.elements_done - elements) / passed_s
        left = None
        if totals.elements_total is not None and rate > 0:
            left = max(0, totals.elements_total - totals.elements_done) / rate
        return Pace(rate, (totals.calls_done - calls) / passed_s, left)


class Reporter(ABC):
    """Shows progress and logs of a run."""

    @abstractmethod
    def update(self, totals: ProgressTotals) -> None: ...

    @abstractmethod
    def line(self, text: str) -> None: ...

    def log(self, worker: str, log: messages.LogLine) -> None:
        """Show the output of a replica function; each line begins with its call."""
        for line in log.text.splitlines():
            self.line(f"[{log.stage} {log.step} {log.replica} {worker}] {line}")

    @abstractmethod
    def close(self) -> None:
        """Stop showing progress; lines may still follow."""


class PlainReporter(Reporter):
    """Periodic lines, for files, pipes and CI."""

    def __init__(self, name: str, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._clock_s = clock_s
        self._pacer = Pacer()
        self._next_s = clock_s() + _FIRST_LINE_S
        self._last = ("", 0.0)
        """The last line and the time when it was written."""

    def update(self, totals: ProgressTotals) -> None:
        now_s = self._clock_s()
        pace = self._pacer.pace(totals, now_s)
        if now_s >= self._next_s:
            self._next_s = now_s + _LINE_EVERY_S
            text, (last, written_s) = describe(self._name, totals, pace), self._last
            if text != last or now_s - written_s >= _SAME_LINE_EVERY_S:
                self._last = (text, now_s)
                self.line(text)

    def line(self, text: str) -> None:
        write_error(text + "\n")

    def close(self) -> None:
        """Do nothing: the lines stay."""


class LiveReporter(Reporter):
    """A bar that is redrawn in place, with lines above it."""

    def __init__(self, name: str) -> None:
        # imported here because rich takes 60 ms to import
        from rich.console import Console
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn
        from rich.progress import Progress as Bar

        self._name = name
        self._pacer = Pacer()
        self._console = Console(stderr=True, highlight=False)
        text = TextColumn("{task.description}", markup=False)
        details = TextColumn("{task.fields[details]}", markup=False)
        columns = (text, BarColumn(), TaskProgressColumn(), details)
        self._bar = Bar(*columns, console=self._console, transient=True)
        self._task: Any = self._bar.add_task(name, total=None, details="starting")
        self._bar.start()

    def update(self, totals: ProgressTotals) -> None:
        pace = self._pacer.pace(totals, time.monotonic())
        self._bar.update(
            self._task,
            description=_title(self._name, totals),
            completed=totals.elements_done,
            total=totals.elements_total,
            details=", ".join(_details(totals, pace)),
        )

    def line(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def close(self) -> None:
        self._bar.stop()


def open_reporter(name: str) -> Reporter:
    """Return a live bar if standard error is a terminal, else plain lines."""
    if sys.stderr is not None and sys.stderr.isatty():
        return LiveReporter(name)
    return PlainReporter(name)


def describe(name: str, totals: ProgressTotals, pace: Pace) -> str:
    done = f"{totals.elements_done:,} elements"
    if total := totals.elements_total:
        percent = 100 * totals.elements_done // total
        done = f"{percent}%, {totals.elements_done:,} of {total:,} elements"
    return f"{_title(name, totals)}: {', '.join([done, *_details(totals, pace)])}"


def duration(seconds: float) -> str:
    """Return a duration as text: "0.3 s", "42 s", "1:05:03"."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _title(name: str, totals: ProgressTotals) -> str:
    return f"{name} phase {totals.phase + 1} of {totals.phases}" if totals.phases > 1 else name


def _details(totals: ProgressTotals, pace: Pace) -> list[str]:
    workers = totals.workers
    details = [
        f"{_rate(pace.elements_per_s)} elements/s",
        f"{_rate(pace.calls_per_s)} calls/s",
        f"{workers} worker{'' if workers == 1 else 's'}",
    ]
    if pace.left_s is not None:
        details.append(f"{duration(pace.left_s)} left")
    return details


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"
