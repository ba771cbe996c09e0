"""Threads that take turns with the event loop of a simulation: exactly one of all runs at a time.

A simulated worker runs the real driver, which blocks. It has a thread of its own, and whenever it would
wait (for a message, or for time to pass) it is PARKED, until the simulation lets it go on. The loop
waits meanwhile. So the order in which anything happens follows from the simulation alone.
"""

from __future__ import annotations

import contextvars
import os
import sys
import threading
import traceback
from collections.abc import Callable

import pipedist
from pipedist.errors import UsageError
from pipedist.runs.api import TURN_S
from pipedist.worker import process_setup

_PACKAGE = os.path.dirname(pipedist.__file__) + os.sep


class Killed(BaseException):
    """The simulated process has been killed: every thread of it ends. Never an Exception."""


_current: contextvars.ContextVar[Fiber | None] = contextvars.ContextVar("pipedist_fiber", default=None)


def current_fiber() -> Fiber | None:
    """Return the simulated process whose thread this is, None in any other."""
    return _current.get()


def leave_in_copy() -> None:
    """Let this copy of the process, just forked, wait for no simulation; its function's end is its own."""
    if _current.get() is not None:
        _current.set(None)
        process_setup.is_copy = True


class Fiber:
    """The threads of one simulated process.

    Args:
        main: what its main thread does; whatever it raises is kept in `error`.
        sleep: parks it for a time, seconds.
        is_interrupted: whether the simulation is to end soon: then nobody waits for a thread that blocks.
    """

    def __init__(
        self,
        main: Callable[[], None],
        sleep: Callable[[float], None],
        is_interrupted: Callable[[], bool] = lambda: False,
    ) -> None:
        self._main = main
        self.sleep = sleep
        self._is_interrupted = is_interrupted
        self.is_killed = False
        self.is_over = False
        self.is_parked = False
        self.error: BaseException | None = None
        """What its main thread raised."""
        self.left_at = ""
        """Where it blocked when nobody waited for it any more, as in a traceback."""
        self._go = threading.Semaphore(0)
        self._stopped = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, name="pipedist-simulated", daemon=True)

    # -- in the loop's thread --------------------------------------------------------------------

    def start(self) -> None:
        """Run it until it parks, or ends."""
        self._thread.start()
        self._await_turn()

    def resume(self) -> None:
        """Let it go on until it parks again, or ends."""
        if self.is_over or not self.is_parked:
            return
        self.is_parked = False
        self._go.release()
        self._await_turn()

    def _await_turn(self) -> None:
        while not self._stopped.acquire(timeout=TURN_S):
            if self._is_interrupted():
                self.left_at = self._place()
                self.is_killed = True  # where it waits next, it ends
                return

    def _place(self) -> str:
        """Return where its thread is: the lines of the function alone, as in a traceback."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        stack = traceback.extract_stack(frame) if frame is not None else []
        ours = [place for place, line in enumerate(stack) if line.filename.startswith(_PACKAGE)]
        return "".join(traceback.format_list(stack[ours[-1] + 1 :] if ours else stack))

    def kill(self) -> None:
        """End its threads; harmless twice."""
        self.is_killed = True
        while self.is_parked and not self.is_over:
            self.resume()

    # -- in its own threads -----------------------------------------------------------------------

    def park(self) -> None:
        """Wait until the simulation lets it go on.

        Raises:
            Killed: it has been killed.
            UsageError: another thread of the same process is parked.
        """
        if self.is_killed:
            raise Killed
        if self.is_parked:
            raise UsageError(
                "a simulation can't let two threads of a worker wait at the same time: an async replica "
                "function that waits for something else while it is in a collective is not simulated"
            )
        self.is_parked = True
        self._stopped.release()
        self._go.acquire()
        if self.is_killed:
            raise Killed

    def _run(self) -> None:
        _current.set(self)
        try:
            self._main()
        except BaseException as error:
            self.error = error
        finally:
            self.is_over = True
            self._stopped.release()
