"""Copies of the worker process: a function that calls `os.fork` is left by two processes.

The copy has the worker's connection, and the memory in which its parent reads what it executes. It would
report the call, too, go on with the next one, and stay when the worker ends. So it ends where it leaves the
function.
"""

from __future__ import annotations

import os
import sys

is_copy = False
"""Whether this process is a copy of a worker."""


def watch() -> None:
    """Take note of copies that are made of this process from now on."""
    os.register_at_fork(after_in_child=_note)


def _note() -> None:
    global is_copy
    is_copy = True


def end_copy(stage: str) -> None:
    """End this copy of a worker, which has left the function of a stage; never returns."""
    error = sys.exc_info()[1]
    how = "returned" if error is None else f"raised {type(error).__name__}"
    text = f"a process that the function made with os.fork {how}: it ends here; let it call os._exit"
    try:
        # Not by a stream: its lock may be held by a thread that is not here.
        os.write(2, f"pipedist worker: stage {stage}: {text}\n".encode())
    finally:
        os._exit(1)
