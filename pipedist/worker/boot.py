"""Start of a new interpreter that runs a module of the same pipedist.

The new process imports pipedist from the same folder as this one, whatever its own import path is. The current
directory is not on that path (a `numpy.py` in it is never imported); `PYTHONPATH`, the virtual environment and
`-E`, `-s`, `-I` are kept.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping
from subprocess import DEVNULL, Popen

_BOOT = """\
import ctypes, gc, importlib.util, json, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
gc.disable()  # imports make no garbage
init, folder, module, arguments, death_signal = sys.argv[1:]
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, int(death_signal), 0, 0, 0)  # PR_SET_PDEATHSIG
spec = importlib.util.spec_from_file_location("pipedist", init, submodule_search_locations=[folder])
package = importlib.util.module_from_spec(spec)
sys.modules["pipedist"] = package
spec.loader.exec_module(package)
main = importlib.import_module(module).main
gc.enable()
main(json.loads(arguments))
"""

THREAD_VARIABLES = (  # numeric libraries read their number of threads from these when they are loaded
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)


def start(
    module: str,
    arguments: Mapping[str, object],  # JSON values, and no secrets: other users can see command lines
    *,
    env: Mapping[str, str],
    death_signal: signal.Signals,
    pass_fds: tuple[int, ...],
    stdin: int = DEVNULL,
    stdout: int | None = None,
    stderr: int | None = None,
) -> Popen[bytes]:
    """Start a process that calls `main(arguments)` of a module, in a process group of its own.

    The process ignores SIGINT from its first instruction: the driver handles Ctrl-C, and imports that are interrupted
    print a traceback. The kernel sends it `death_signal` when the thread that calls this function ends: only SIGCONT,
    which lets a stopped process notice the end of its parent, is safe in every thread.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # the process inherits it
    try:
        return Popen(
            _command(module, arguments, death_signal),
            env=env,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            pass_fds=pass_fds,
            process_group=0,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def kill_group(pid: int) -> None:
    """Kill the process group of a process that `start` or the fork server has started.

    It may have been reaped just before: the kernel assigns process ids in turn, so none is reused at once.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: only zombies are left
        os.killpg(pid, signal.SIGKILL)


def _command(module: str, arguments: Mapping[str, object], death_signal: int) -> list[str]:
    folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    flags = ["-P"]
    if sys.flags.isolated:
        flags.append("-I")
    if sys.flags.ignore_environment:
        flags.append("-E")
    if sys.flags.no_user_site:
        flags.append("-s")
    init = os.path.join(folder, "__init__.py")
    return [
        sys.executable,
        *flags,
        "-c",
        _BOOT,
        init,
        folder,
        module,
        json.dumps(arguments),
        str(int(death_signal)),
    ]


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
