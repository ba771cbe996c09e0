"""What SIGINT, SIGTERM and SIGHUP do to a run.

Before anything is opened, a signal ends the process. While a run runs, the first one drains: nothing new
is issued, running calls have the cluster's grace time. The second one ends the run at once. While it is being
opened the first one cancels that, and while it is being closed that goes on: an exception out of nowhere
would leave sockets half made, whose end is waited for in vain. Should any of this take long, the process
is ended (its workers die with it). The handlers are plain signal handlers, not the
event loop's: a loop that is busy must not make Ctrl-C deaf.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any, Protocol, Self

from pipedist.cli.exits import Interrupted, interrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_END_S = 5.0
"""How long the run may take to end at once, until the process is ended."""


class Stoppable(Protocol):
    """What a run offers to whoever interrupts it."""

    def drain(self) -> object:
        """Issue nothing new."""

    def cancel(self) -> object:
        """End at once."""


class Interruption:
    """Handles the signals while its context is open; only in the main thread.

    Args:
        tell: shows a line to the user; called inside the run's event loop.
        end: ends the process at once with an exit code.
    """

    def __init__(self, tell: Callable[[str], None], end: Callable[[int], None] = os._exit) -> None:
        self.tell = tell
        self._end = end
        self._run: Stoppable | None = None
        self._task: asyncio.Task[Any] | None = None
        """It opens the run, and closes it."""
        self._has_run = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watchdog: threading.Timer | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._grace_s = 0.0
        self._count = 0
        self.exit_code: int | None = None

    def __enter__(self) -> Self:
        # a signal that is ignored stays so: `nohup` means that the run outlives its terminal
        handled = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._on_signal) for number in handled}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._call_off()

    @contextlib.contextmanager
    def lifetime(self) -> Iterator[None]:
        """While this context is open, in the task that opens and closes the run, no signal raises."""
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        try:
            yield
        finally:
            self._task = None

    @contextlib.contextmanager
    def watching(self, run: Stoppable, grace_s: float) -> Iterator[None]:
        """While this context is open, inside the run's event loop, signals drain and cancel the run."""
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
            self._post(self._leave, signal.Signals(number).name)
            if self._run is None:
                self._end_soon()
        elif self._count == 2 and self._run is not None:
            self._post(self.tell, f"pipedist: {signal.Signals(number).name}: the run is ended at once")
            self._post(self._run.cancel)
            self._end_soon()
        else:
            self._end(self.exit_code)

    def _leave(self, name: str) -> None:
        """Do what the first signal asks for, in the loop."""
        if self._run is not None:
            self._call_off()
            self.tell(
                f"pipedist: {name}: no new calls are issued; running calls have {self._grace_s:g} s "
                "to finish (a second signal ends the run at once)"
            )
            self._run.drain()
        elif self._task is not None and not self._has_run:
            self._task.cancel()

    def _end_soon(self) -> None:
        """End the process after `_END_S`, unless it has ended by then."""
        self._watchdog = threading.Timer(_END_S, self._end, (self.exit_code,))
        self._watchdog.daemon = True
        self._watchdog.start()

    def _call_off(self) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()

    def _post(self, call: Callable[..., object], *args: object) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, *args)
