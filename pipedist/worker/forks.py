"""Copies of the worker process: a function that calls `os.fork` is left by two processes.

The copy has the worker's connection, and the memory in which its parent reads what it executes. It would
report the call, too, go on with the next one, and stay when the worker ends. So it ends where it leaves the
function; it meets no other replicas, and prints to the process's stderr. It has not the worker's answers to
signals either: `terminate()` of a `multiprocessing.Process` ends it, whatever SIGTERM is to the worker, and
however soon it comes.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

_ANSWERED = (signal.SIGTERM, signal.SIGHUP)
"""Signals that end other processes: to a worker, or to who speaks for it, they are a request, or nothing."""

is_copy = False
"""Whether this process is a copy of a worker."""

_forking = threading.local()
"""`mask`: the signals that this thread had blocked before it began to fork."""


def answer(handler: Callable[[int, FrameType | None], object]) -> dict[signal.Signals, Any]:
    """Install a handler for SIGTERM and SIGHUP, if they are not ignored (`nohup`); return what was there."""
    numbers = [number for number in _ANSWERED if signal.getsignal(number) is not signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in numbers}


def pass_over(_number: int, _frame: FrameType | None) -> None:
    """Leave a signal to who ends this process; being a function, it is nothing that a program inherits."""


def watch() -> None:
    """Take note of copies that are made of this process from now on."""
    os.register_at_fork(before=_hold_signals, after_in_parent=_release_signals, after_in_child=_note)


def _hold_signals() -> None:
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _ANSWERED)


def _release_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _note() -> None:
    global is_copy
    is_copy = True
    for number in _ANSWERED:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    _release_signals()


def end_copy(stage: str) -> None:
    """End this copy of a worker, which has left the function of a stage; never returns."""
    error = sys.exc_info()[1]
    how = "returned" if error is None else f"raised {type(error).__name__}: {error}"
    text = f"a process that the function made with os.fork {how}: it ends here; let it call os._exit"
    try:
        # Not by a stream: its lock may be held by a thread that is not here.
        os.write(2, f"pipedist worker: stage {stage}: {text}\n".encode())
    finally:
        os._exit(1)
