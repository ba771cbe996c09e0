"""Handle SIGINT, SIGTERM, SIGHUP and SIGUSR1 during a run, and explain long standstills.

Before a run opens, the first three signals end the process. While the run executes, the first signal drains it:
no new calls start, and running calls get the cluster's grace time; the second one ends it at once. A signal while
the run opens cancels that; one while it closes changes nothing. An exception here could leave a half-open socket
and block shutdown. If the end takes long, the process exits, and its workers end with it.

SIGUSR1 prints what the run waits for, in the event loop: the scheduler's state is consistent only between two
events. Plain signal handlers are used so that a busy event loop cannot delay Ctrl-C.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

from pipedist.cli.terminal import Interrupted, interrupted, write_error_at_once

if TYPE_CHECKING:
    from pipedist.runs.run import Run

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_END_S = 5.0  # time for a run to end at once; after that the process exits


class Interruption:
    """Handles the signals while its context is open; only in the main thread.

    `show` prints a line for the user, in the run's event loop; `end` exits the process at once with a code.
    """

    def __init__(self, show: Callable[[str], None], end: Callable[[int], None] = os._exit) -> None:
        self.show = show
        self._end = end
        self._run: Run | None = None
        self._task: asyncio.Task[Any] | None = None  # the task that opens and closes the run
        self._has_run = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watchdog: threading.Timer | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._grace_s = 0.0
        self._count = 0
        self.exit_code: int | None = None

    def __enter__(self) -> Self:
        # Ignored signals stay ignored: under `nohup` a run outlives its terminal.
        handled = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._on_signal) for number in handled}
        return self

    def __exit__(self, *_error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._cancel_watchdog()

    @contextlib.contextmanager
    def lifetime(self) -> Iterator[None]:
        """Let no signal raise in this task, which opens and closes the run."""
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        try:
            yield
        finally:
            self._task = None

    @contextlib.contextmanager
    def watching(self, run: Run, grace_s: float) -> Iterator[None]:
        """Let signals drain and cancel the run while this context is open."""
        self._loop = asyncio.get_running_loop()
        self._run = run
        self._grace_s = grace_s
        try:
            yield
        finally:
            self._run = None
            self._has_run = True

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._count += 1
        if self.exit_code is None:
            self.exit_code = interrupted(number)
        if self._run is None and self._task is None:
            raise Interrupted(self.exit_code)
        if self._count == 1:
            self._post(self._on_first_signal, signal.Signals(number).name)
            if self._run is None:
                self._end_soon()
        elif self._count == 2 and self._run is not None:
            self._post(self.show, f"pipedist: {signal.Signals(number).name}: ending the run at once")
            self._post(self._run.cancel)
            self._end_soon()
        else:
            self._end(self.exit_code)

    def _on_first_signal(self, name: str) -> None:
        """Drain the run or cancel its opening; called in the loop."""
        if self._run is not None:
            self._cancel_watchdog()
            self.show(
                f"pipedist: {name}: no new calls start; running calls have {self._grace_s:g} s to finish "
                "(a second signal ends the run at once)"
            )
            self._run.drain()
        elif self._task is not None and not self._has_run:
            self._task.cancel()

    def _end_soon(self) -> None:
        """Exit the process after `_END_S`, unless it has ended by then."""
        self._watchdog = threading.Timer(_END_S, self._end, (self.exit_code,))
        self._watchdog.daemon = True
        self._watchdog.start()

    def _cancel_watchdog(self) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()

    def _post(self, call: Callable[..., object], *args: object) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, *args)


class StallTimer:
    """Decides when a standstill is reported: after a time, then each time it has doubled."""

    def __init__(self, first_s: float) -> None:
        self._first_s = first_s
        self._next_s = first_s

    def is_due(self, silent_s: float) -> bool:
        """Return whether to report now; True once per threshold."""
        if silent_s < self._first_s:
            self._next_s = self._first_s  # the run has made progress
            return False
        if silent_s < self._next_s:
            return False
        while self._next_s <= silent_s:
            self._next_s *= 2
        return True


class StallReporter:
    """Reports what a run waits for; its context handles SIGUSR1, in the main thread only."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self.show = show
        self._run: Run | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer = StallTimer(1.0)
        self._before: Any = None

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGUSR1, self._on_signal)
        return self

    def __exit__(self, *_error: object) -> None:
        signal.signal(signal.SIGUSR1, self._before)

    @contextlib.contextmanager
    def watching(self, run: Run, stall_s: float) -> Iterator[None]:
        """Report on this run while the context is open, inside its event loop."""
        self._loop = asyncio.get_running_loop()
        self._run = run
        self._timer = StallTimer(stall_s)
        try:
            yield
        finally:
            self._run = None

    def check(self) -> None:
        """Report if the run has made no progress for long; called periodically."""
        if self._run is not None and self._timer.is_due(self._run.silent_s):
            self.explain()

    def explain(self) -> None:
        from pipedist.runs.diagnostics import lines

        if self._run is None:
            self.show("pipedist: the run has not started")
        else:
            text = "\n".join(["this run waits for:", *lines(dict(self._run.why()))])
            self._run.log_event(text)
            self.show(f"pipedist: {text}")

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self._run is None or self._loop is None or self._loop.is_closed():
            write_error_at_once("pipedist: the run has not started, or is over\n")
        else:
            self._loop.call_soon_threadsafe(self.explain)
