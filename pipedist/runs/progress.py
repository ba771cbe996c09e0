"""Show progress and logs: a live bar on a terminal or in a notebook, else plain lines on standard error.

Progress is counted in calls, because elements count only when their step is complete, which may be the only one.
"""

from __future__ import annotations

import contextlib
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from logging import WARNING
from typing import TYPE_CHECKING, Any, ClassVar, Self

from msgspec import Struct

from pipedist.core.names import plural
from pipedist.protocol import messages

if TYPE_CHECKING:
    from pipedist.runs.result import Progress

REFRESH_S = 0.2  # between two updates of a reporter
_FIRST_LINE_S = 2.0
_BAR_WIDTH = 20
_PERCENT_WIDTH = 7  # with the spaces between the columns
_INTERVAL_GROWTH = 1.5  # plain lines are 10 in the first two minutes, 27 in a day, 32 in a week


class ProgressTotals(Struct, frozen=True):
    """Progress of a run, summed over the passes of its current phase, whose total may be unknown (None)."""

    elements_done: int
    elements_total: int | None
    calls_done: int
    workers: int
    phase: int = 0
    phases: int = 1
    calls_total: int | None = None
    calls_past: int = 0  # those among the calls done that this process need not execute
    activity: str = ""  # the work on the results after the last call, or ""
    elements_ahead: int = 0  # those that are over, of calls that are not

    @classmethod
    def of(cls, progress: Progress) -> Self:
        passes = progress.passes
        return cls(
            elements_done=sum(count.elements_done for count in passes),
            elements_total=_sum([count.elements_total for count in passes]),
            calls_done=sum(count.calls_done for count in passes),
            workers=progress.workers_ready,
            phase=progress.phase,
            phases=progress.phases,
            calls_total=_sum([count.calls_total for count in passes]),
            calls_past=sum(count.calls_past for count in passes),
            elements_ahead=sum(count.elements_ahead for count in passes),
            activity=progress.activity,
        )


def _sum(totals: Sequence[int | None]) -> int | None:
    known = [total for total in totals if total is not None]
    return sum(known) if totals and len(known) == len(totals) else None


class Pace(Struct, frozen=True):
    """Progress of a phase in time."""

    elapsed_s: float  # since its first worker was ready
    elements_per_s: float  # mean over this time, without what earlier processes did
    calls_per_s: float
    left_s: float | None  # the estimated time until its last call returns; None if unknown


class Pacer:
    """Computes the pace of a phase from successive totals and their times alone.

    Workers are modelled as slots that execute one call after the other, all of the mean duration. When a call is
    done, it is that of the slot whose call began first; the slot begins the next call at once. The mean duration
    follows from the calls done since the phase began, so the estimate only decreases between two of them.
    """

    def __init__(self) -> None:
        self._phase = -1

    def _begin(self, totals: ProgressTotals, now_s: float) -> None:
        self._phase = totals.phase
        self._first = totals
        self._began_s: float | None = None
        self._starts: deque[float] = deque()  # when the running calls began, the oldest first
        self._executed = totals.calls_done - totals.calls_past
        self._returned = 0
        self._busy_s = 0.0  # time that slots spent on the calls returned

    def pace(self, totals: ProgressTotals, now_s: float) -> Pace:
        if totals.phase != self._phase:
            self._begin(totals, now_s)
        if self._began_s is None:
            if not totals.workers:
                return Pace(0.0, 0.0, 0.0, None)
            self._began_s = now_s
        left = None if totals.calls_total is None else max(0, totals.calls_total - totals.calls_done)
        self._count_returned(totals, now_s)
        self._fill_slots(totals.workers if left is None else min(totals.workers, left), now_s)
        elapsed_s = now_s - self._began_s
        if elapsed_s <= 0:
            return Pace(0.0, 0.0, 0.0, None)
        elements = totals.elements_done - self._first.elements_done
        return Pace(elapsed_s, elements / elapsed_s, self._returned / elapsed_s, self._left_s(left, now_s))

    def _count_returned(self, totals: ProgressTotals, now_s: float) -> None:
        executed = totals.calls_done - totals.calls_past
        new, self._executed = executed - self._executed, executed
        slots = len(self._starts)
        if new <= 0 or not slots:
            return
        self._returned += new
        for _ in range(min(new, slots)):
            self._busy_s += now_s - self._starts.popleft()
        self._starts.extend([now_s] * min(new, slots))

    def _fill_slots(self, slots: int, now_s: float) -> None:
        """Adjust the slots to the workers that have calls; those that began last are idle."""
        while len(self._starts) > slots:
            self._starts.pop()
        self._starts.extend([now_s] * (slots - len(self._starts)))

    def _left_s(self, left: int | None, now_s: float) -> float | None:
        """Return when the last of the remaining calls returns, if free slots take the next ones in turn."""
        if left == 0:
            return 0.0
        if left is None or not self._returned or not self._starts:
            return None
        call_s = self._busy_s / self._returned
        # A call that takes longer than the mean is assumed to be about to return.
        running_s = [max(call_s - (now_s - start_s), call_s / 10) for start_s in self._starts]
        rounds, rest = divmod(left - len(running_s), len(running_s))
        return max(
            [running_s[-1] + rounds * call_s, *([running_s[rest - 1] + (rounds + 1) * call_s] * (rest > 0))]
        )


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


class LineTimes:
    """Decides when plain lines are due: 2 s after the beginning, and then at growing intervals."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._began_s = clock_s()
        self._due_s = _FIRST_LINE_S

    @property
    def elapsed_s(self) -> float:
        return self._clock_s() - self._began_s

    def is_due(self, *, early: bool = False) -> bool:
        """Return whether to print a line now; `early`: also within an interval."""
        elapsed_s = self.elapsed_s
        if elapsed_s < _FIRST_LINE_S or (elapsed_s < self._due_s and not early):
            return False
        while self._due_s <= elapsed_s:
            self._due_s *= _INTERVAL_GROWTH
        return True


class PlainReporter(Reporter):
    """A few lines, for files, pipes and CI: at growing intervals, and when a phase or its reduction begins."""

    def __init__(self, name: str, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._clock_s = clock_s
        self._pacer = Pacer()
        self._times = LineTimes(clock_s)
        self._shown = (0, False)  # the phase of the last line, and whether its calls were done

    def update(self, totals: ProgressTotals) -> None:
        pace = self._pacer.pace(totals, self._clock_s())
        now = (totals.phase, bool(totals.activity))
        if not self._times.is_due(early=now > self._shown):
            return
        self._shown = now
        self.line(describe(self._name, totals, pace))

    def line(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # standard error is closed
            print(text, file=sys.stderr, flush=True)  # noqa: T201

    def close(self) -> None:
        """Do nothing: the lines stay."""


class QuietReporter(PlainReporter):
    """Warnings and errors: no progress, no lines of standard output, no records below WARNING."""

    def update(self, totals: ProgressTotals) -> None:
        """Show nothing."""

    def log(self, worker: str, log: messages.LogLine) -> None:
        if log.level >= WARNING or log.logger == "stderr":
            super().log(worker, log)


class LiveReporter(Reporter):
    """A bar that is redrawn in place: on a terminal with lines above it, or in the output of a notebook's cell."""

    on_terminal: ClassVar[int] = 0  # a terminal shows one bar at a time

    def __init__(self, name: str, *, in_notebook: bool = False) -> None:
        # imported here because rich takes 60 ms to import
        from rich.console import Console
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn
        from rich.progress import Progress as Bar

        self._name = name
        self._pacer = Pacer()
        self._console = Console(stderr=True, highlight=False)
        text = TextColumn("{task.description}", markup=False)
        details = TextColumn("{task.fields[details]}", markup=False)
        columns = (text, BarColumn(_BAR_WIDTH), TaskProgressColumn(), details)
        if in_notebook:  # in colours that are readable on light and on dark pages
            bar = BarColumn(_BAR_WIDTH, "grey50", "dodger_blue2", "dark_cyan", "grey50")
            columns = (text, bar, TaskProgressColumn("{task.percentage:>3.0f}%"), details)
        self._bar = Bar(*columns, console=self._console, transient=True)
        self._task: Any = self._bar.add_task(name, total=None, details="starting")
        self._display: Any = None
        self._is_open = True
        self._has_begun = False
        if in_notebook:
            from IPython.display import display

            self._display = display(self._bar, display_id=True)  # type: ignore[no-untyped-call, unused-ignore]
        else:
            LiveReporter.on_terminal += 1
            self._bar.start()

    def update(self, totals: ProgressTotals) -> None:
        self._has_begun = True
        pace = self._pacer.pace(totals, time.monotonic())
        title, details = _title(self._name, totals), _details(totals, pace)
        if self._display is None:
            room = self._console.width - len(title) - _PERCENT_WIDTH
            details = _fitting(details, room - _BAR_WIDTH)
            if len(", ".join(details)) >= room:  # even without a bar: the percentage has the calls
                details = details[-1:]
        self._bar.update(
            self._task,
            description=title,
            completed=totals.calls_done,
            total=totals.calls_total,
            details=", ".join(details),
        )
        if self._display is not None:
            self._display.update(self._bar)

    def line(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def close(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        if self._display is None:
            self._bar.stop()
            LiveReporter.on_terminal -= 1
        elif not self._has_begun:
            self._bar.update(self._task, details="no call was executed")
            self._display.update(self._bar)


def is_interactive() -> bool:
    """Return whether progress is shown by default: on a terminal, and in a notebook."""
    return _on_terminal() or _in_notebook()


def open_reporter(name: str, *, quiet: bool = False) -> Reporter:
    """Return a live bar in a notebook, or if standard error is a terminal without a bar; else plain lines.

    A `quiet` one shows neither.
    """
    if quiet:
        return QuietReporter(name)
    if _in_notebook():
        return LiveReporter(name, in_notebook=True)
    return LiveReporter(name) if _on_terminal() and not LiveReporter.on_terminal else PlainReporter(name)


def _on_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


def _in_notebook() -> bool:
    """Return whether this process is a kernel of IPython, whose cells show rich output."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


def describe(name: str, totals: ProgressTotals, pace: Pace) -> str:
    percent = [f"{100 * totals.calls_done // totals.calls_total}%"] if totals.calls_total else []
    return f"{_title(name, totals)}: {', '.join([*percent, *_details(totals, pace)])}"


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
    details = [_count(totals.calls_done, totals.calls_total, "call")]
    if totals.elements_done:  # none before the first step is complete
        details.append(_count(totals.elements_done, totals.elements_total, "element"))
    if totals.elements_ahead:
        details.append(f"{_count(totals.elements_ahead, None, 'element')} of running calls")
    rate = _rate(pace.elements_per_s, "elements") or _rate(pace.calls_per_s, "calls")
    if rate and not totals.activity:  # after the last call, a mean only decreases
        details.append(rate)
    details.append(_count(totals.workers, None, "worker") if totals.workers else "waiting for workers")
    if pace.elapsed_s:
        details.append(f"{duration(pace.elapsed_s)} so far")
    if totals.activity:
        details.append(totals.activity)
    elif pace.left_s:
        phase = " in this phase" if totals.phases > 1 else ""
        details.append(f"about {duration(pace.left_s)} left{phase}")
    return details


def _fitting(details: list[str], width: int) -> list[str]:
    """Return the details that a line of this width shows: the calls first, then those nearest to the end."""
    kept = list(details)
    while len(kept) > 2 and len(", ".join(kept)) > width:
        del kept[1]
    return kept


def _count(done: int, total: int | None, what: str) -> str:
    if total is not None:
        return f"{done:,} of {plural(total, what)}"
    return plural(done, what)


def _rate(per_s: float, what: str) -> str:
    """Return a rate as text, per second, minute or hour: at least 1 if possible; "" for 0."""
    if not per_s:
        return ""
    seconds, unit = (1, "s") if per_s >= 1 else (60, "min") if per_s >= 1 / 60 else (3600, "h")
    value = per_s * seconds
    return f"{value:,.0f} {what}/{unit}" if value >= 10 else f"{value:.1f} {what}/{unit}"
