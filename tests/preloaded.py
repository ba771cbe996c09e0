"""Commands in processes that are forked from one that has imported what they need.

A command imports for half a second of CPU time; its run of a small spec takes a tenth. So tests start most
commands here: each is still a process of its own, with its own arguments, environment, streams, memory and
end. What a fork shows differently starts an interpreter itself: import order, settings that libraries read
when they are imported (threads, hash seed), signals that a test sends.

    python -m tests.preloaded DESCRIPTOR

serves the requests of a socket one by one, until that ends.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

ROOT = Path(__file__).parents[1]
_MESSAGE_BYTES_MAX = 1 << 20


def run_module(
    module: str,
    *args: str | Path,
    cwd: Path,
    env: Mapping[str, str] | None = None,
    stdin: str = "",
    timeout_s: float = 100,
) -> subprocess.CompletedProcess[str]:
    """Do what `python -m MODULE ARGS...` does, in a fork, and capture what it prints.

    Args:
        module: a module with a part for `__main__`.
        env: set besides what this process has.
    """
    with TemporaryFile() as typed, TemporaryFile() as out, TemporaryFile() as err:
        typed.write(stdin.encode())
        typed.seek(0)
        request = {
            "module": module,
            "args": [*map(str, args)],
            "cwd": str(cwd),
            "env": {**os.environ, **(env or {})},
            "timeout_s": timeout_s,
        }
        server = _server()
        socket.send_fds(server, [json.dumps(request).encode()], [file.fileno() for file in (typed, out, err)])
        code = json.loads(server.recv(_MESSAGE_BYTES_MAX))
        out.seek(0)
        err.seek(0)
        stdout, stderr = out.read().decode(), err.read().decode()
    command = [module, *request["args"]]
    if code is None:
        raise subprocess.TimeoutExpired(command, timeout_s, stdout, stderr)
    return subprocess.CompletedProcess(command, code, stdout, stderr)


@cache
def _server() -> socket.socket:
    """Return the socket of this process's server, which ends with it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.preloaded", str(theirs.fileno())],
            cwd=ROOT,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )

    def end() -> None:
        ours.close()
        process.wait(10)

    atexit.register(end)
    return ours


def _serve(requests: socket.socket) -> None:
    import pipedist.cli.app
    import pipedist.cli.run_command
    import pipedist.runs.run  # noqa: F401

    while True:
        data, fds, _, _ = socket.recv_fds(requests, _MESSAGE_BYTES_MAX, 3)
        if not data:
            return
        request = json.loads(data)
        pid = os.fork()
        if pid == 0:
            requests.close()
            _become(request, *fds)
            return
        for fd in fds:
            os.close(fd)
        requests.send(json.dumps(_end_of(pid, request["timeout_s"])).encode())


def _become(request: dict[str, Any], *streams: int) -> None:
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    added = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [request["cwd"], *added, *(path for path in sys.path if path != str(ROOT))]
    sys.argv[:] = [request["module"], *request["args"]]
    sys.orig_argv[:] = [sys.executable, "-m", *sys.argv]  # with which a command may execute itself again
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


def _end_of(pid: int, timeout_s: float) -> int | None:
    """Return its exit code, negative where a signal ended it; None: it was killed after that time."""
    handle = os.pidfd_open(pid)
    try:
        ended = bool(select.select([handle], [], [], timeout_s)[0])
    finally:
        os.close(handle)
    if not ended:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code if ended else None


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
