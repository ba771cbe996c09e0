"""Exit codes, and what a person reads on standard error when something is wrong.

0: all committed. 1: the run failed. 2: the spec or the command line is wrong. 3: finished, with
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
    """A signal ends the process before anything runs; no SystemExit, which a module may raise itself.

    Args:
        exit_code: of the process.
    """

    def __init__(self, exit_code: int) -> None:
        self.exit_code = exit_code
        super().__init__(exit_code)


def interrupted(signal_number: int) -> int:
    """Return the exit code of a process that ends because of a signal."""
    return 128 + signal_number


def guarded(command: Callable[[], int]) -> int:
    """Carry out a command, and turn what it raises into words and an exit code.

    Args:
        command: returns the exit code where nothing is wrong.
    """
    try:
        return command()
    except KeyboardInterrupt as signalled:
        return _end_of(signalled)
    except PipedistError as error:
        report(error)
        return error.exit_code
    except Exception as error:
        cause = interruption(error)
        return defect() if cause is None else _end_of(cause)


def interruption(error: BaseException) -> KeyboardInterrupt | None:
    """Return the interruption that an exception is, or came of; None if it has nothing to do with one.

    Python 3.11 makes a RuntimeError of whatever is raised where a class names its fields: an import that is
    interrupted there ends with one.
    """
    for each in (error, error.__cause__):
        if isinstance(each, KeyboardInterrupt):
            return each
    return None


def _end_of(signalled: KeyboardInterrupt) -> int:
    return signalled.exit_code if isinstance(signalled, Interrupted) else interrupted(signal.SIGINT)


def report(error: PipedistError) -> None:
    """Tell a person about an error that pipedist raised on purpose."""
    # a mistake in a spec is `file:line:column: ...`, which editors understand, and nothing else
    prefix = "" if isinstance(error, SpecError) else "pipedist: "
    write_error(f"{prefix}{error}\n")


def defect() -> int:
    """Tell a person about the exception that is being handled, which nobody foresaw."""
    import platform
    import traceback  # only for what should not happen

    from pipedist.version import __version__

    write_error(
        "pipedist: this is a defect in pipedist, not in your spec; please report it with what follows "
        f"(pipedist {__version__}, Python {platform.python_version()}, {platform.system()})\n"
    )
    write_error(traceback.format_exc())
    return FAILED
