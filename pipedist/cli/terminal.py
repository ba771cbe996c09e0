"""Standard streams, exit codes, and error messages on standard error.

Exit codes: 0 all elements committed; 1 the run failed; 2 the spec or the command line is wrong; 3 finished, with
quarantined elements; 129, 130, 143 interrupted by SIGHUP, SIGINT, SIGTERM. The readers of standard streams may
close them at any time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator

from pipedist.errors import OutputError, PipedistError, SpecError

OK = 0
FAILED = 1
USAGE = 2
QUARANTINED = 3

CONTINUE = "Fix the problem, then rerun with --resume (--reuse if the spec or a module has changed)"


class Interrupted(KeyboardInterrupt):
    """A signal that ends the process before a run starts; not SystemExit, which a user's module may raise."""

    def __init__(self, exit_code: int) -> None:
        self.exit_code = exit_code
        super().__init__(exit_code)


def interrupted(signal_number: int) -> int:
    """Return the exit code of a process that ends because of a signal."""
    return 128 + signal_number


def guarded(command: Callable[[], int]) -> int:
    """Run a command; report what it raises, and return the exit code."""
    try:
        return command()
    except KeyboardInterrupt as interrupt:
        return _exit_code(interrupt)
    except PipedistError as error:
        report(error)
        return error.exit_code
    except Exception as error:
        cause = interruption(error)
        return report_defect() if cause is None else _exit_code(cause)


def interruption(error: BaseException) -> KeyboardInterrupt | None:
    """Return the KeyboardInterrupt that an exception is or was raised from, or None.

    Python 3.11 wraps exceptions raised in `__set_name__` in a RuntimeError: an import that is interrupted
    there ends with one.
    """
    for each in (error, error.__cause__):
        if isinstance(each, KeyboardInterrupt):
            return each
    return None


def _exit_code(interrupt: KeyboardInterrupt) -> int:
    return interrupt.exit_code if isinstance(interrupt, Interrupted) else interrupted(signal.SIGINT)


def report(error: PipedistError) -> None:
    # Spec errors begin with `file:line:column:`, which editors parse: no prefix.
    prefix = "" if isinstance(error, SpecError) else "pipedist: "
    write_error(f"{prefix}{error}\n")


def report_defect() -> int:
    """Print the unexpected exception that is being handled, and return the exit code."""
    import platform
    import traceback

    from pipedist._version import __version__

    write_error(
        "pipedist: this is a defect in pipedist, not in your spec; please report it with the traceback below "
        f"(pipedist {__version__}, Python {platform.python_version()}, {platform.system()})\n"
        f"{traceback.format_exc()}"
    )
    return FAILED


def write_out(text: str) -> None:
    """Write to standard output, or raise OutputError, such as for a full disk.

    If the reader has closed the pipe (`pipedist plan | head`), the rest is dropped without an error.
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


def write_json(document: object) -> None:
    """Write a document to standard output, on one line of ASCII, which any terminal shows."""
    import json

    write_out(json.dumps(document, allow_nan=False) + "\n")


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


def write_error_at_once(text: str) -> None:
    """Write to descriptor 2; for signal handlers, which may interrupt the code of a stream."""
    data = text.encode(errors="backslashreplace")
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(2, data) :]


def _drop(fd: int) -> None:
    # The interpreter writes its buffer at exit: redirect that to /dev/null.
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, fd)
    os.close(null)
