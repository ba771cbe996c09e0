"""Writing to standard output and standard error, whose readers may leave at any time."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

from pipedist.errors import OutputError


def write_out(text: str) -> None:
    """Write to standard output.

    A reader that has left (`pipedist plan | head`) has seen all it wants: what follows is
    dropped quietly.

    Raises:
        OutputError: standard output can't be written for another reason, as with a full disk.
    """
    encoding = sys.stdout.encoding or "utf-8"
    try:
        # a terminal that can't show a letter gets its escape instead
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        _drop(sys.stdout.fileno())
    except OSError as error:
        raise lost(error) from error


def lost(error: OSError) -> OutputError:
    """Return what to say of a standard output that can't be written; what waits for it is dropped."""
    _drop(sys.stdout.fileno())
    return OutputError(f"can't write to standard output: {error.strerror or error}")


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Send to standard error what anybody prints while this context is open.

    Modules of the user print when they are imported, and sources when they are read; standard
    output is for results alone. The descriptor itself is turned, so that C libraries and child
    processes are covered too.
    """
    _flush()
    saved = os.dup(1)
    try:
        os.dup2(2, 1)
        try:
            yield
        finally:
            _flush()
            os.dup2(saved, 1)
    finally:
        os.close(saved)


def _flush() -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()


def write_error(text: str) -> None:
    """Write to standard error; where that is impossible there is nobody to tell."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()


def _drop(fd: int) -> None:
    # what is still buffered is written by the interpreter's exit: let it go nowhere
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, fd)
    os.close(nowhere)
