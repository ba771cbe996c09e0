"""Run one process of `run_in_processes`: python -m pipedist.testing.process_child FOLDER NUMBER."""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipedist.core import functions
from pipedist.core.files import replace_file
from pipedist.core.record_format import pack
from pipedist.core.types import FunctionRef
from pipedist.protocol.codec import UnsendableError, decode, encode
from pipedist.testing.processes import frames_in


def main(folder: Path, number: int) -> None:
    (label, name, pickled), args, kwargs, paths = decode(
        frames_in((folder / "call").read_bytes()), may_import=True
    )
    sys.path[:] = [*paths, *(entry for entry in sys.path if entry not in paths)]
    value: Any = None
    exception = formatted = ""
    try:
        function = functions.load(FunctionRef(label, name, pickled), ())
        if "worker" not in kwargs and _takes_worker(function):
            kwargs["worker"] = number
        value = function(*args, **kwargs)
        frames = encode([value, "", ""])
    except (Exception, UnsendableError) as error:
        exception, formatted = f"{type(error).__name__}: {error}", traceback.format_exc()
        frames = encode([None, exception, formatted])
    replace_file(folder / f"result-{number}", b"".join(pack(frames)))
    if exception:
        sys.exit(1)


def _takes_worker(function: Callable[..., Any]) -> bool:
    try:
        return "worker" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # a built-in without a signature
        return False


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
