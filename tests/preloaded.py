"""Processes of tests, forked from one that has imported what they need.

An interpreter imports a command of pipedist for half a second of CPU time, and a fork server for a third; a run of
a small spec takes a tenth. So tests start most of them with the `Popen` of this module: each is still a child of
the process that starts it, with its own arguments, environment, streams, memory and end. What a fork shows
differently starts an interpreter as ever: import order, limits and variables that are read at its start (hash
seed, threads), and everything in tests/cluster and tests/architecture.

    python -m tests.preloaded DESCRIPTOR MODULE...

imports modules, and serves the requests of a socket one by one, until that ends.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import fcntl
import gc
import importlib
import io
import json
import os
import platform
import resource
import runpy
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

from pipedist.worker import boot

ROOT = Path(__file__).parents[1]
_MESSAGE_BYTES_MAX = 1 << 20
_FDS_MAX = 64
_DESCRIPTORS_MAX = (1 << 31) - 1
_CLONE_PARENT = 0x8000
_CLONE = {"x86_64": 56, "aarch64": 220}.get(platform.machine()) if sys.platform == "linux" else None
"""The number of the system call; None: this system forks nothing that way."""
_COMMANDS = (
    "pipedist.cli.app",
    "pipedist.cli.run_command",
    "pipedist.runs.run",
    "pipedist.worker.supervisor",
)
_WORKERS = ("pipedist.cluster.launchers.forkserver",)
_Executing = subprocess.Popen
_AT_START = ("PYTHON", "LD_", "MALLOC_", "GLIBC_", "LC_", "LANG", "NPY_", "OPENBLAS_CORETYPE")
_SET_IN_FORK = ("PYTHONPATH", "PYTHONUNBUFFERED")
_IGNORED = {signal.SIGPIPE, signal.SIGXFSZ}  # by every interpreter


class Server:
    """A process that forks others, which are children of this one.

    Args:
        serve: starts it with its end of a socket pair, and returns a function that waits for its end.
    """

    def __init__(self, serve: Callable[[socket.socket], Callable[[], object]]) -> None:
        self._pid = os.getpid()
        self._environment = boot.environment(1)
        self._limits = _limits()
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._wait = serve(theirs)

    def fits(self, env: Mapping[str, str], at_start: tuple[str, ...]) -> bool:
        """Return whether an interpreter of that environment would start like the server, in what matters."""
        names = {name for name in {*env, *self._environment} if name.startswith(at_start)} - set(_SET_IN_FORK)
        return (
            os.getpid() == self._pid
            and _limits() == self._limits
            and all(env.get(name) == self._environment.get(name) for name in names)
        )

    def fork(self, request: Mapping[str, object], fds: Sequence[int]) -> int:
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], fds)
            return int(json.loads(self._socket.recv(_MESSAGE_BYTES_MAX)))

    def end(self) -> None:
        if os.getpid() == self._pid:
            self._socket.close()
            self._wait()


def _limits() -> object:
    """Return what a process inherits besides its environment and streams."""
    umask = os.umask(0o22)
    os.umask(umask)
    limits = [
        resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")
    ]
    ignored = [number for number in signal.valid_signals() if signal.getsignal(number) == signal.SIG_IGN]
    return umask, limits, sorted(set(ignored) - _IGNORED), os.sched_getaffinity(0)


_own: Server | None = None
"""Forks workers of this process, which was forked itself."""


@cache
def _server(*modules: str) -> Server:
    def execute(theirs: socket.socket) -> Callable[[], object]:
        return _Executing(
            [sys.executable, "-m", "tests.preloaded", str(theirs.fileno()), *modules],
            cwd=ROOT,
            env=boot.environment(1),
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        ).wait

    server = Server(execute)
    atexit.register(server.end)
    return server


class Popen(subprocess.Popen[Any]):
    """A process of `python -m MODULE ...`, `python -c CODE ...`, `python FILE.py ...` or of `boot.start`."""

    def _execute_child(  # type: ignore[override]
        self,
        args: Any,
        executable: Any,
        preexec_fn: Any,
        close_fds: Any,
        pass_fds: Any,
        cwd: Any,
        env: Any,
        *rest: Any,
    ) -> None:
        names = dict(os.environ if env is None else env)
        server = _server_for([*map(str, args)], names) if preexec_fn is None else None
        if server is None:
            super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest)  # type: ignore[misc]
            return
        pipes = rest[3:9]
        streams = [number if fd < 0 else fd for number, fd in enumerate((pipes[0], pipes[3], pipes[5]))]
        request = {
            "command": [*map(str, args)],
            "env": names,
            "pass_fds": pass_fds,
            "session": rest[-2],
            "group": rest[-1],
        }
        folder = os.open(cwd or ".", os.O_RDONLY)
        try:
            self.pid = server.fork(request, [folder, *streams, *pass_fds])
            self._child_created = True
        finally:
            os.close(folder)
            self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def _server_for(command: list[str], env: Mapping[str, str]) -> Server | None:
    if _CLONE is None:
        return None
    if _is_boot(command):
        server, at_start = _own or _server(*_WORKERS), _AT_START + boot.THREAD_VARIABLES
    elif len(command) > 1 and (command[1] in ("-m", "-c") or command[1].endswith(".py")):
        server, at_start = _server(*_WORKERS, *_COMMANDS), _AT_START
    else:
        return None
    return server if server.fits(env, at_start) else None


def _is_boot(command: list[str]) -> bool:
    return boot._BOOT in command


def run(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[Any]:
    """Do what `subprocess.run` does."""
    with mock.patch.object(subprocess, "Popen", Popen):
        return subprocess.run(command, check=options.pop("check", False), **options)


async def create_subprocess_exec(*command: str, **options: Any) -> asyncio.subprocess.Process:
    """Do what asyncio's does."""
    with mock.patch.object(subprocess, "Popen", Popen):
        return await asyncio.create_subprocess_exec(*command, **options)


def run_module(
    module: str, *args: str | Path, cwd: Path, env: Mapping[str, str] | None = None, stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    """Do what `python -m MODULE ARGS...` does, and capture what it prints.

    Args:
        env: set besides what this process has.
    """
    return run(
        [sys.executable, "-m", module, *map(str, args)],
        cwd=cwd,
        env={**os.environ, **(env or {})},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=100,
    )


def _serve(requests: socket.socket, path: list[str]) -> bool:
    """Fork processes until the socket ends.

    Returns:
        False in the server; True in a process that was forked, when it has done what was asked.
    """
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.closerange(3, requests.fileno())
    os.closerange(requests.fileno() + 1, _DESCRIPTORS_MAX)
    while True:
        data, fds, _, _ = socket.recv_fds(requests, _MESSAGE_BYTES_MAX, _FDS_MAX)
        if not data:
            return False
        request = json.loads(data)
        pid = _fork_sibling()
        if pid == 0:
            requests.detach()
            _become(request, fds, path)
            return True
        for fd in fds:
            os.close(fd)
        requests.send(json.dumps(pid).encode())


def _fork_sibling() -> int:
    """Fork a child of this process's parent; this process must have one thread."""
    ctypes.pythonapi.PyOS_BeforeFork()
    pid = int(ctypes.PyDLL(None).syscall(_CLONE, _CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0))
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    else:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError("the system has forked no process")
    return pid


def _become(request: Mapping[str, Any], fds: list[int], path: list[str]) -> None:
    """Do what an interpreter would do that is executed with a command."""
    command = request["command"]
    if request["session"]:
        os.setsid()
    elif request["group"] >= 0:
        os.setpgid(0, request["group"])
    _place(fds, request["pass_fds"])
    if not _is_boot(command):
        _own_server(path)
    os.environ.clear()
    os.environ.update(request["env"])
    if os.environ.get("PYTHONUNBUFFERED"):
        sys.stdout = sys.__stdout__ = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), write_through=True)
    added = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [*(os.path.abspath(entry) for entry in added if entry), *path]
    sys.orig_argv[:] = command
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    importlib.invalidate_caches()
    if _is_boot(command):
        sys.argv[:] = command[command.index("-c") :]
        module, arguments, death_signal = command[-3:]
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        ctypes.CDLL(None).prctl(1, int(death_signal), 0, 0, 0)  # PR_SET_PDEATHSIG
        importlib.import_module(module).main(json.loads(arguments))
        return
    _, how, *rest = command
    if how == "-m":
        sys.argv[:] = rest
        sys.path.insert(0, os.getcwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif how == "-c":
        sys.argv[:] = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        sys.argv[:] = [how, *rest]
        sys.path.insert(0, os.path.dirname(os.path.abspath(how)))
        runpy.run_path(how, run_name="__main__")


def _own_server(path: list[str]) -> None:
    """Start a server for the workers of this process."""

    def fork(theirs: socket.socket) -> Callable[[], object]:
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)  # signals to this process's group are not for the server
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            null = os.open(os.devnull, os.O_RDWR)
            for number in (1, 2):  # readers of this process's output wait for their ends
                os.dup2(null, number)
            if not _serve(theirs, path):
                os._exit(0)
            raise SystemExit
        return lambda: os.waitpid(pid, 0)

    global _own
    _own = Server(fork)
    boot.Popen = Popen  # type: ignore[misc]


def _place(fds: list[int], numbers: list[int]) -> None:
    """Give the descriptors of a request their numbers, and close all others."""
    highest = max(*numbers, *fds) + 1 if numbers else max(fds) + 1
    folder, *rest = [fcntl.fcntl(fd, fcntl.F_DUPFD, highest) for fd in fds]
    os.fchdir(folder)
    kept = dict(zip((0, 1, 2, *numbers), rest, strict=True))
    for number, fd in kept.items():
        os.dup2(fd, number)
    closed = 3
    for number in sorted(kept):
        if number >= closed:
            os.closerange(closed, number)
            closed = number + 1
    os.closerange(closed, _DESCRIPTORS_MAX)


if __name__ == "__main__":
    gc.disable()  # imports make no garbage
    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.enable()
    gc.freeze()
    added = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    _serve(socket.socket(fileno=int(sys.argv[1])), [entry for entry in sys.path if entry not in added])
