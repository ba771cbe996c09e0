"""The command line: `pipedist run`, `validate`, `plan`, `simulate`, `replay`, `why`, `worker` and others.

It parses options, calls the packages below, and renders progress, results and errors; nothing imports it.
Entry points: `main`, called by the script `pipedist` and by `python -m pipedist`, and `app`, which declares the
commands. Its code runs in the driver's process, that of `pipedist worker` in the supervisor's process on
another host. Modules are imported when their command runs, so that a command starts fast.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext


def main() -> None:
    """Run the command line of this process, and exit with its code."""
    before, sys.unraisablehook = sys.unraisablehook, _end_if_interrupted
    try:
        gc.disable()  # imports make no garbage; a command enables it
        _open_missing_streams()
        _limit_threads()
        with _start_fork_server(sys.argv[1:]):
            from pipedist.cli.app import main as run_command_line  # imported late: start-up time matters

            run_command_line()
    except (KeyboardInterrupt, RuntimeError) as error:
        from pipedist.cli.terminal import interruption

        if interruption(error) is None:
            raise
        raise SystemExit(130) from None
    finally:
        sys.unraisablehook = before


def _end_if_interrupted(unraisable: sys.UnraisableHookArgs) -> None:
    """End the process if a signal was raised in a callback of the interpreter, which drops exceptions.

    It would print a traceback, and the process would go on. The interpreter's imports have such callbacks.
    """
    if isinstance(unraisable.exc_value, KeyboardInterrupt):
        os._exit(getattr(unraisable.exc_value, "exit_code", 130))
    sys.__unraisablehook__(unraisable)


def _open_missing_streams() -> None:
    """Open /dev/null in place of standard streams that the parent process has closed.

    Otherwise the first sockets get these descriptors, and receive what is printed.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)  # the lowest free one: the stream's own
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, mode, closefd=False))


def _limit_threads() -> None:
    """Limit numeric libraries to one thread in this process too, unless the user has set a number.

    A `function` source runs in this process, and its bits must not depend on the number of cores.
    """
    from pipedist.worker.boot import THREAD_VARIABLES

    for name in THREAD_VARIABLES:
        if not os.environ.get(name):
            os.environ[name] = "1"


def _start_fork_server(arguments: Sequence[str]) -> AbstractContextManager[object]:
    """Start the fork server of a probable run before the options are parsed: both load side by side."""
    if (
        arguments[:1] != ["run"]
        or {"-h", "--help"} & set(arguments)
        or not any(map(os.path.isfile, arguments[1:]))
    ):
        return nullcontext()
    from pipedist.cluster.launchers.server import prepare

    return prepare()
