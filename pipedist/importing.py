"""Modules that are imported for a run: what they do at their top level must not begin another one.

A script without a `__main__` guard whose own function a spec names would run again where it is imported: in
the process of the run, which waits for it, and in every worker.
"""

from __future__ import annotations

from contextvars import ContextVar

importing: ContextVar[bool] = ContextVar("importing", default=False)
"""Whether this thread or task imports, right now, the module of a function for a run."""


awaited: ContextVar[bool] = ContextVar("awaited", default=False)
"""Whether the thread that began this one waits for it, perhaps in an import that this one then waits for."""

ADVICE = 'call it in a function, or below `if __name__ == "__main__":`'


def refuse_inside(what: str) -> None:
    """Refuse to begin something while a module is imported for a run.

    Raises:
        UsageError: this is the import of one.
    """
    if importing.get():
        from pipedist.errors import UsageError  # what begins a run imports little before it

        raise UsageError(
            f"{what} is called where the module is imported, and a run imports it for its functions: {ADVICE}"
        )
