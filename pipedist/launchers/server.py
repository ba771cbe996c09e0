"""The process of a fork server, as its launcher holds it; and spare ones, started ahead of time.

A fork server takes about as long to load as everything else that a run needs. So the doors of
pipedist start one before they import the rest, and both load side by side: this module imports
next to nothing. The launcher takes the spare over when it opens; one that nobody wants, because
the spec has mistakes or its workers dial in, is ended by whoever started it.
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
from types import TracebackType
from typing import Final, Self

from pipedist.worker import boot

END_S: Final = 2.0
"""How long a fork server may take to kill its workers and end, before it is killed itself."""

_lock = threading.Lock()
_spares: list[ServerProcess] = []
"""Servers that no launcher has taken over yet."""


class ServerProcess:
    """A fork server's process, and this end of its control socket; needs no event loop.

    Args:
        threads: BLAS and OpenMP threads of its workers.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._surroundings = _surroundings()
        self.socket, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = _exec(theirs, threads)
        except BaseException:
            self.socket.close()
            raise

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def fits(self, threads: int) -> bool:
        """Whether it is what a server that is started now would be."""
        return (
            threads == self._threads
            and self._surroundings == _surroundings()
            and self._process.poll() is None  # of a forked process it is no child, and counts as gone
        )

    def discard(self) -> None:
        """End it, if it has no workers: at once, however far it is."""
        self.socket.close()
        self.kill()
        self.wait()

    def kill(self) -> None:
        """End it now; the kernel ends its workers."""
        self._process.kill()

    def wait(self) -> None:
        """Wait until the process is gone; its socket has ended, so that takes milliseconds."""
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def code(self, within_s: float = 0.0) -> int | None:
        """Return how the process ended, as `Popen.returncode`; None if it is still there after so long."""
        try:
            return self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            return None


class Spare:
    """Sees to it that a server started ahead of time is ended if no launcher takes it over.

    Use `with`, or `end`; when it is forgotten, or the interpreter ends, that happens by itself.

    Args:
        server: None: there is none.
    """

    def __init__(self, server: ServerProcess | None = None) -> None:
        self._end = weakref.finalize(self, _end_spare, server)

    def end(self) -> None:
        """End the server, unless a launcher has taken it over; harmless twice."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


def prepare(threads: int = 1) -> Spare:
    """See to it that `take` finds a fork server: start one, unless one is there; returns at once.

    Args:
        threads: BLAS and OpenMP threads of its workers.

    Returns:
        What ends it, if nobody has taken it. Where several have prepared the same one, the first of them
        that ends it does; the others start one of their own when they need it.
    """
    with _lock:
        for server in _spares:
            if server.fits(threads):
                return Spare(server)
        try:
            server = ServerProcess(threads)
        except OSError:
            return Spare()  # the launcher will try again, and say so
        _spares.append(server)
        return Spare(server)


def take(threads: int) -> ServerProcess:
    """Return a fork server that is the caller's from now on: a spare one, or a new one.

    Args:
        threads: BLAS and OpenMP threads of its workers.
    """
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


def _surroundings() -> tuple[object, ...]:
    """Return what a process inherits, and user code may have changed in the meantime."""
    try:
        folder = os.getcwd()
    except OSError:
        folder = ""  # it was removed
    return sys.executable, folder, dict(os.environ)


def _exec(control: socket.socket, threads: int) -> subprocess.Popen[bytes]:
    arguments = {"control": control.fileno(), "launcher": os.getpid()}
    # A Ctrl-C must not hit the server before it has said that it ignores it: it inherits the mask.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        return subprocess.Popen(
            boot.command("pipedist.launchers.forkserver", arguments),
            env=boot.environment(threads),
            pass_fds=(control.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=stderr(),  # what user code writes to descriptor 1 must not mix with our output
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def stderr() -> int:
    """Return the descriptor of this process's stderr; where it has none, of nothing."""
    with contextlib.suppress(OSError, ValueError):
        if sys.__stderr__ is not None:
            return sys.__stderr__.fileno()
    return subprocess.DEVNULL
