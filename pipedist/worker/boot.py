"""Start of a new interpreter that runs a module of the same pipedist.

The new process imports pipedist from the same folder as this one, whatever its own import path is. The current
directory is not on that path (a `numpy.py` in it is never imported); `PYTHONPATH`, the virtual environment and
`-E`, `-s`, `-I` are kept.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping

_BOOT = """\
import gc, importlib.util, json, sys
gc.disable()  # imports make no garbage
init, folder, module, arguments = sys.argv[1:]
spec = importlib.util.spec_from_file_location("pipedist", init, submodule_search_locations=[folder])
package = importlib.util.module_from_spec(spec)
sys.modules["pipedist"] = package
spec.loader.exec_module(package)
main = importlib.import_module(module).main
gc.enable()
main(json.loads(arguments))
"""

THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)
"""Variables from which numeric libraries read their number of threads when they are loaded."""


def command(module: str, arguments: Mapping[str, object]) -> list[str]:
    """Return the command line that calls `main(arguments)` of a module.

    `arguments` are JSON values, and no secrets: other users can see command lines.
    """
    folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    flags = ["-P"]
    if sys.flags.isolated:
        flags.append("-I")
    if sys.flags.ignore_environment:
        flags.append("-E")
    if sys.flags.no_user_site:
        flags.append("-s")
    init = os.path.join(folder, "__init__.py")
    return [sys.executable, *flags, "-c", _BOOT, init, folder, module, json.dumps(arguments)]


def environment(threads: int) -> dict[str, str]:
    """Return this environment with a number of BLAS and OpenMP threads."""
    return {**os.environ, **dict.fromkeys(THREAD_VARIABLES, str(threads))}


def describe_exit(code: int) -> str:
    """Return a `Popen.returncode` as text: "exit code 3", "signal 9 (SIGKILL)"."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"signal {-code}"  # a real-time signal has no name
