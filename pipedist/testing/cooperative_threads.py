"""Threads that take turns with the event loop of a simulation: exactly one of them runs at a time.

A simulated worker runs the real driver, which blocks, so it has its own thread. When the driver would wait
(for a message, or for time to pass), its thread is PARKED until the simulation resumes it; the loop waits
meanwhile. So the order of all events depends only on the simulation.
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
    """The simulated process was killed: each of its threads ends. Not an Exception, so that no code catches it."""


_current: contextvars.ContextVar[CooperativeThreads | None] = contextvars.ContextVar(
    "pipedist_cooperative_threads", default=None
)


def current_threads() -> CooperativeThreads | None:
    """Return the threads of the simulated process that the calling thread belongs to, or None."""
    return _current.get()


def leave_after_fork() -> None:
    """Detach a forked copy of this process from the simulation; the copy ends with its function."""
    if _current.get() is not None:
        _current.set(None)
        process_setup.is_copy = True


class CooperativeThreads:
    """The threads of one simulated process."""

    def __init__(
        self,
        main: Callable[[], None],  # of its main thread; an exception is stored in `error`
        sleep: Callable[[float], None],  # parks the calling thread for a time, seconds
        is_interrupted: Callable[[], bool] = lambda: False,  # then it does not wait for a blocked thread
    ) -> None:
        self._main = main
        self.sleep = sleep
        self._is_interrupted = is_interrupted
        self.is_killed = False
        self.is_over = False
        self.is_parked = False
        self.error: BaseException | None = None  # the exception that ended the main thread
        self.blocked_at = ""  # the thread's place when the simulation was interrupted, as in a traceback
        self._resumed = threading.Semaphore(0)
        self._stopped = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, name="pipedist-simulated", daemon=True)

    # -- in the loop's thread --------------------------------------------------------------------

    def start(self) -> None:
        """Run the main thread until it parks or ends."""
        self._thread.start()
        self._await_turn()

    def resume(self) -> None:
        """Resume the parked thread until it parks again or ends."""
        if self.is_over or not self.is_parked:
            return
        self.is_parked = False
        self._resumed.release()
        self._await_turn()

    def _await_turn(self) -> None:
        while not self._stopped.acquire(timeout=TURN_S):
            if self._is_interrupted():
                self.blocked_at = self._user_stack()
                self.is_killed = True  # it ends at its next wait
                return

    def _user_stack(self) -> str:
        frame = sys._current_frames().get(self._thread.ident or 0)
        stack = traceback.extract_stack(frame) if frame is not None else []
        ours = [place for place, line in enumerate(stack) if line.filename.startswith(_PACKAGE)]
        return "".join(traceback.format_list(stack[ours[-1] + 1 :] if ours else stack))

    def kill(self) -> None:
        """End its threads; does nothing the second time."""
        self.is_killed = True
        while self.is_parked and not self.is_over:
            self.resume()

    # -- in its own threads -----------------------------------------------------------------------

    def park(self) -> None:
        """Wait until the simulation resumes the calling thread; raise Killed if the process was killed."""
        if self.is_killed:
            raise Killed
        if self.is_parked:
            raise UsageError(
                "two threads of a simulated worker wait at the same time: a simulation does not support an async "
                "replica function that awaits something else during a collective"
            )
        self.is_parked = True
        self._stopped.release()
        self._resumed.acquire()
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
