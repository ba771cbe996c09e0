"""The process of a fork server, for its launcher, and spare ones.

A fork server takes about as long to load as everything else that a run needs. So the entry points of pipedist
start one before they import the rest, and both load at the same time: this module must import next to
nothing. The launcher takes the spare over when it opens; a spare that is not needed, because the spec has
mistakes or its workers dial in, is ended by the entry point that has started it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from typing import Final, Self

from pipedist.worker import boot

END_S: Final = 2.0  # how long a fork server may take to kill its workers and end; then it is killed

_lock = threading.Lock()
_spares: list[ServerProcess] = []  # servers that no launcher has taken over


class ServerProcess:
    """A fork server's process, and the launcher's end of its control socket.

    It needs no event loop.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._inherited = _inherited()
        self.socket, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = _exec(theirs, threads)
            self.pid = self._process.pid
        except BaseException:
            self.socket.close()
            raise

    def fits(self, threads: int) -> bool:
        """Return whether a server that is started now would be the same."""
        return (
            threads == self._threads
            and self._inherited == _inherited()
            and self._process.poll() is None  # also false in a forked process, of which it is no child
        )

    def discard(self) -> None:
        """Kill the server, which has no workers, however far it has loaded."""
        self.socket.close()
        self.kill()
        self.wait()

    def kill(self) -> None:
        """Kill the server; the kernel kills its workers."""
        self._process.kill()

    def wait(self) -> None:
        """Wait, for milliseconds, until a process has ended whose socket has."""
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def code(self, within_s: float = 0.0) -> int | None:
        """Return the exit code, as `Popen.returncode`; None: it still runs."""
        try:
            return self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            return None


class Spare:
    """Ends a spare server, unless a launcher takes it over.

    It does so at the end of `with`, in `end`, and when it is garbage collected or the interpreter ends.
    """

    def __init__(self, server: ServerProcess | None = None) -> None:
        self.end = weakref.finalize(self, _end_spare, server)  # unless a launcher has it; may be called twice

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def prepare(threads: int = 1) -> Spare:
    """Start a spare fork server, unless there is one, and return at once.

    Returns the object that ends the spare. If several callers have prepared the same one, the first `end` ends it; the
    others start a server of their own when they need one.
    """
    with _lock:
        server = next((spare for spare in _spares if spare.fits(threads)), None)
        if server is None:
            try:
                server = ServerProcess(threads)
            except OSError:
                return Spare()  # the launcher will try again, and report the error
            _spares.append(server)
        return Spare(server)


def take(threads: int) -> ServerProcess:
    """Return a fork server that the caller owns: a spare one, or a new one."""
    with _lock:
        for server in _spares:
            if server.fits(threads):
                _spares.remove(server)
                return server
    return ServerProcess(threads)


def _end_spare(server: ServerProcess | None) -> None:
    with _lock:
        if server is None or server not in _spares:
            return
        _spares.remove(server)
    server.discard()


def _inherited() -> tuple[object, ...]:
    """Return the state that a process inherits, which user code may change."""
    try:
        folder = os.getcwd()
    except OSError:
        folder = ""  # the folder was removed
    return sys.executable, folder, dict(os.environ)


def _exec(control: socket.socket, threads: int) -> subprocess.Popen[bytes]:
    arguments = {"control": control.fileno(), "launcher": os.getpid()}
    return boot.start(
        "pipedist.cluster.launchers.forkserver",
        arguments,
        env=boot.environment(threads),
        death_signal=signal.SIGCONT,
        pass_fds=(control.fileno(),),
        stdout=_stderr(),  # what user code writes to descriptor 1 must not mix with our output
    )


def _stderr() -> int:
    with contextlib.suppress(OSError, ValueError):
        if sys.__stderr__ is not None:
            return sys.__stderr__.fileno()
    return subprocess.DEVNULL
