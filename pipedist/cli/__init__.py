"""The command `pipedist`: run | validate | plan | schema | worker.

| module | what it decides |
|---|---|
| `app` | names, options and help of the commands |
| `exits` | exit codes, and what a person reads when something is wrong |
| `streams` | writing to stdout and stderr, which may be closed on the way |
| `run_command` | a run from its spec to its last line |
| `interruption` | what signals do |
| `progress` | a live bar, or plain lines |
| `table`, `summary` | the results for people |
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext


def main() -> None:
    """Carry out the command line of this process, and end the process with its exit code."""
    try:
        _whole_streams()
        _one_thread()
        with _head_start(sys.argv[1:]):
            # nothing is imported before it is needed: the time until a command begins is a feature
            from pipedist.cli.app import main as carry_out

            carry_out()
    except (KeyboardInterrupt, RuntimeError) as error:
        from pipedist.cli.exits import interruption

        if interruption(error) is None:
            raise
        raise SystemExit(130) from None


def _whole_streams() -> None:
    """Have the standard streams lead nowhere that whoever started this process has closed.

    The first sockets would have their descriptors otherwise, and get what anybody prints.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)  # the lowest that is free: the one that is closed
            os.set_inheritable(nowhere, True)
            setattr(sys, name, os.fdopen(nowhere, mode, closefd=False))


def _one_thread() -> None:
    """Have numeric libraries compute in one thread here too, unless the user says otherwise.

    A `function` source is made in this process, and its bits must not depend on the machine's cores.
    """
    from pipedist.worker.boot import THREAD_VARIABLES

    for name in THREAD_VARIABLES:
        if not os.environ.get(name):
            os.environ[name] = "1"


def _head_start(words: Sequence[str]) -> AbstractContextManager[object]:
    """Start the fork server of what looks like a run, before so much as the options are read."""
    if words[:1] != ["run"] or {"-h", "--help"} & set(words) or not any(map(os.path.isfile, words[1:])):
        return nullcontext()
    from pipedist.launchers.server import prepare

    return prepare()
