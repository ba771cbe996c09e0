"""Write to standard output and standard error, whose readers may close them at any time."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

from pipedist.errors import OutputError


def write_out(text: str) -> None:
    """Write to standard output.

    If the reader has closed the pipe (`pipedist plan | head`), the rest is dropped without an error.

    Raises:
        OutputError: standard output can't be written for another reason, such as a full disk.
    """
    encoding = sys.stdout.encoding or "utf-8"
    try:
        # Characters that the terminal can't show are escaped.
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        _drop(sys.stdout.fileno())
    except OSError as error:
        raise output_error(error) from error


def output_error(error: OSError) -> OutputError:
    """Drop buffered output, and return the error to raise for an unwritable standard output."""
    _drop(sys.stdout.fileno())
    return OutputError(f"can't write to standard output: {error.strerror or error}")


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Redirect standard output to standard error while this context is open.

    The user's modules may print when they are imported, and sources when they are read; standard output
    is for results alone. The descriptor itself is redirected, so that C libraries and child processes are
    covered too.
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
    """Write to standard error; a stream that can't be written is ignored."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()


def _drop(fd: int) -> None:
    # The interpreter writes its buffer at exit: redirect that to /dev/null.
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, fd)
    os.close(null)
