"""Imports of a run: a guard against runs inside of them, and no garbage collections during them.

Without the guard, a script that lacks a `__main__` guard and whose own function a spec names would start its run
again at each import: in the process of the run, which would wait for itself, and in every worker.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator
from contextvars import ContextVar

# True while this thread or task imports the module of a function for a run.
importing: ContextVar[bool] = ContextVar("importing", default=False)
# True if the thread that started this one is blocked on it (possibly inside an import lock).
caller_is_waiting: ContextVar[bool] = ContextVar("caller_is_waiting", default=False)

ADVICE = 'call it in a function, or below `if __name__ == "__main__":`'


def reject_during_import(what: str) -> None:
    """Raise UsageError if the current thread or task imports a module for a run."""
    if importing.get():
        from pipedist.errors import UsageError  # entry points import little before they start a run

        raise UsageError(
            f"{what} is called at the top level of a module that a run imports for its functions: {ADVICE}"
        )


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Suspend garbage collection while this process imports what runs need.

    Imports make no garbage, and a fifth of their time would be spent on looking for it.
    """
    if not gc.isenabled() or "pipedist.coordinator" in sys.modules:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        is_frozen = gc.get_freeze_count() > 0
        gc.freeze()  # the next collection does not visit what was imported
        if not is_frozen:  # else objects that the user has frozen would be thawed
            gc.unfreeze()  # into the oldest generation
        gc.enable()
