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
    _one_thread()
    try:
        with _head_start(sys.argv[1:]):
            # nothing is imported before it is needed: the time until a command begins is a feature
            from pipedist.cli.app import main as carry_out

            carry_out()
    except (KeyboardInterrupt, RuntimeError) as error:
        from pipedist.cli.exits import interruption

        if interruption(error) is None:
            raise
        raise SystemExit(130) from None


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
