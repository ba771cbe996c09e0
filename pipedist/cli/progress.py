"""Progress and logs on standard error: a live bar on a terminal, plain lines otherwise."""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from pipedist import messages
from pipedist.cli.streams import write_error

if TYPE_CHECKING:
    from pipedist.pipeline.result import Progress

_WINDOW_S = 10.0
"""Rates are those of the last so many seconds."""
_FIRST_LINE_S = 2.0
_LINE_EVERY_S = 5.0
_SAME_LINE_EVERY_S = 60.0
"""How often a line is written that says what the last one has said, as of a run that waits for workers."""


@dataclass(frozen=True, slots=True)
class Amount:
    """How far a run is, all passes of its current phase taken together.

    Args:
        elements_done: elements of the steps that are visible.
        elements_total: elements of the phase, None where that is not known before its end.
        calls_done: replica calls that came back.
        workers: worker processes that are there.
        phase, phases: the current one, from 0, and their number.
    """

    elements_done: int
    elements_total: int | None
    calls_done: int
    workers: int
    phase: int = 0
    phases: int = 1

    @classmethod
    def of(cls, progress: Progress) -> Self:
        """Return the amount that a run's progress adds up to."""
        totals = [count.elements_total for count in progress.passes]
        known = [total for total in totals if total is not None]
        return cls(
            elements_done=sum(count.elements_done for count in progress.passes),
            elements_total=sum(known) if totals and len(known) == len(totals) else None,
            calls_done=sum(count.calls_done for count in progress.passes),
            workers=progress.workers_ready,
            phase=progress.phase,
            phases=progress.phases,
        )


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast a run is.

    Args:
        elements_per_s, calls_per_s: of the last seconds.
        left_s: seconds until the phase is complete, None where that can't be said.
    """

    elements_per_s: float
    calls_per_s: float
    left_s: float | None


class Pacer:
    """Turns successive amounts into rates."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int, int]] = deque()
        self._phase = -1

    def pace(self, amount: Amount, now_s: float) -> Pace:
        """Return the pace at a time.

        Args:
            amount: at that time.
            now_s: of a clock that never goes back; seconds.
        """
        if amount.phase != self._phase:
            self._phase = amount.phase
            self._seen.clear()
        self._seen.append((now_s, amount.elements_done, amount.calls_done))
        while len(self._seen) > 2 and now_s - self._seen[0][0] > _WINDOW_S:
            self._seen.popleft()
        then_s, elements, calls = self._seen[0]
        passed_s = now_s - then_s
        if passed_s <= 0:
            return Pace(0.0, 0.0, None)
        rate = (amount.elements_done - elements) / passed_s
        left = None
        if amount.elements_total is not None and rate > 0:
            left = max(0, amount.elements_total - amount.elements_done) / rate
        return Pace(rate, (amount.calls_done - calls) / passed_s, left)


class Reporter(ABC):
    """Shows a run to the person who waits for it."""

    @abstractmethod
    def update(self, amount: Amount) -> None:
        """Show how far the run is."""

    @abstractmethod
    def line(self, text: str) -> None:
        """Show a line of text."""

    def log(self, worker: str, log: messages.LogLine) -> None:
        """Show what a replica function printed or logged, each line led by the call it comes from."""
        for line in log.text.splitlines():
            self.line(f"[{log.stage} {log.step} {log.replica} {worker}] {line}")

    @abstractmethod
    def close(self) -> None:
        """Stop showing progress; lines may follow."""


class PlainReporter(Reporter):
    """A line now and then: for files, pipes and continuous integration."""

    def __init__(self, name: str, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._clock_s = clock_s
        self._pacer = Pacer()
        self._next_s = clock_s() + _FIRST_LINE_S
        self._last = ("", 0.0)
        """The last line, and when it was written."""

    def update(self, amount: Amount) -> None:
        """Write a line if the last one is some seconds old, and a minute if it says the same."""
        now_s = self._clock_s()
        pace = self._pacer.pace(amount, now_s)
        if now_s >= self._next_s:
            self._next_s = now_s + _LINE_EVERY_S
            text, (last, written_s) = describe(self._name, amount, pace), self._last
            if text != last or now_s - written_s >= _SAME_LINE_EVERY_S:
                self._last = (text, now_s)
                self.line(text)

    def line(self, text: str) -> None:
        """Write the line."""
        write_error(text + "\n")

    def close(self) -> None:
        """Nothing is on the screen."""


class LiveReporter(Reporter):
    """A bar that is redrawn in place; lines appear above it."""

    def __init__(self, name: str) -> None:
        # rich takes 60 ms to import: only where there is a bar to draw
        from rich.console import Console
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn
        from rich.progress import Progress as Bar

        self._name = name
        self._pacer = Pacer()
        self._console = Console(stderr=True, highlight=False)
        text = TextColumn("{task.description}", markup=False)
        details = TextColumn("{task.fields[details]}", markup=False)
        self._bar = Bar(
            text, BarColumn(), TaskProgressColumn(), details, console=self._console, transient=True
        )
        self._task: Any = self._bar.add_task(name, total=None, details="starting")
        self._bar.start()

    def update(self, amount: Amount) -> None:
        """Redraw the bar."""
        pace = self._pacer.pace(amount, time.monotonic())
        self._bar.update(
            self._task,
            description=_title(self._name, amount),
            completed=amount.elements_done,
            total=amount.elements_total,
            details=", ".join(_details(amount, pace)),
        )

    def line(self, text: str) -> None:
        """Write the line above the bar."""
        self._console.print(text, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Take the bar off the screen."""
        self._bar.stop()


def open_reporter(name: str) -> Reporter:
    """Return a live bar where standard error is a terminal, plain lines otherwise."""
    if sys.stderr is not None and sys.stderr.isatty():
        return LiveReporter(name)
    return PlainReporter(name)


def describe(name: str, amount: Amount, pace: Pace) -> str:
    """Return progress as one line of text."""
    total = amount.elements_total
    done = f"{amount.elements_done:,} elements"
    if total:
        percent = 100 * amount.elements_done // total
        done = f"{percent}%, {amount.elements_done:,} of {total:,} elements"
    return f"{_title(name, amount)}: {', '.join([done, *_details(amount, pace)])}"


def duration(seconds: float) -> str:
    """Return a duration for people: "0.3 s", "42 s", "1:05:03"."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _title(name: str, amount: Amount) -> str:
    return f"{name} phase {amount.phase + 1} of {amount.phases}" if amount.phases > 1 else name


def _details(amount: Amount, pace: Pace) -> list[str]:
    workers = amount.workers
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
