"""Runs the command line, and kills this process, like `kill -9`, before or after the first call of a function.

python -m tests.journal.killed_in MODULE:NAME before|after run SPEC ...
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from typing import Any


def main() -> None:
    target, where = sys.argv.pop(1), sys.argv.pop(1)
    module, _, path = target.partition(":")
    *outer, name = path.split(".")
    owner: Any = importlib.import_module(module)
    for part in outer:
        owner = getattr(owner, part)
    raw = vars(owner)[name]
    function = raw.__func__ if isinstance(raw, classmethod) else raw

    def killed(*args: Any, **kwargs: Any) -> Any:
        if where == "after":
            function(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, classmethod(killed) if isinstance(raw, classmethod) else killed)
    from pipedist.cli.app import main as pipedist

    pipedist()


if __name__ == "__main__":
    main()
