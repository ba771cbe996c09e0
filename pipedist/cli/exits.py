"""Exit codes, and error messages on standard error.

0: all elements committed. 1: the run failed. 2: the spec or the command line is wrong. 3: finished, with
quarantined elements. 129, 130, 143: interrupted by SIGHUP, SIGINT, SIGTERM.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

from pipedist.cli.streams import write_error
from pipedist.errors import PipedistError, SpecError

OK = 0
FAILED = 1
USAGE = 2
QUARANTINED = 3


class Interrupted(KeyboardInterrupt):
    """A signal that ends the process before a run starts.

    Not SystemExit, which a user's module may raise itself.
    """

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
    """Print an error that pipedist raised."""
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
    )
    write_error(traceback.format_exc())
    return FAILED
