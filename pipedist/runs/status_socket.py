"""The door through which another process asks a run what it waits for.

It is a unix socket in a private folder, 0700, of the run's output folder: who may not write there may
not ask. Whoever connects is sent the answer, and nothing is read from it. The folder is removed when the
run ends; what a killed run has left, the next one removes, and who asks there finds that nobody listens.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

from pipedist.errors import UsageError

NAME = "why"
"""Of the socket."""

ANSWER_BYTES_MAX = 16 * 2**20
_ASKERS_MAX = 16
"""That wait at one time."""

Answer = Callable[[], bytes]


class _Answering(asyncio.Protocol):
    """Sends the answer to whoever connects, and hangs up."""

    def __init__(self, answer: Answer, open_: set[asyncio.Transport], over: asyncio.Event) -> None:
        self._answer = answer
        self._open = open_
        self._over = over
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if not isinstance(transport, asyncio.Transport):
            raise TypeError("a connection that can't be written to")
        if self._over.is_set():  # who came in the very moment of the end
            transport.abort()
            return
        self._transport = transport
        self._open.add(transport)
        transport.write(self._answer())
        transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._transport is not None:
            self._open.discard(self._transport)


@contextlib.asynccontextmanager
async def answering(folder: Path, answer: Answer) -> AsyncIterator[bool]:
    """While this context is open, answer whoever asks.

    Args:
        folder: made here, removed at the end; whoever enters holds the run's lock.
        answer: returns what is sent.

    Yields:
        Whether anybody can ask; not on a file system without sockets.
    """
    open_: set[asyncio.Transport] = set()
    over = asyncio.Event()
    server: asyncio.Server | None = None
    try:
        with contextlib.suppress(OSError):  # then nobody can ask; the run needs no answers
            _make(folder)
            with _door(folder) as path, socket.socket(socket.AF_UNIX) as listening:
                listening.bind(path)
                server = await asyncio.get_running_loop().create_unix_server(
                    lambda: _Answering(answer, open_, over), sock=listening.dup(), backlog=_ASKERS_MAX
                )
        yield server is not None
    finally:
        over.set()
        if server is not None:
            server.close()
        for transport in list(open_):
            transport.abort()
        with contextlib.suppress(OSError):
            _remove(folder)


def ask(folder: Path, timeout_s: float) -> bytes | None:
    """Return what a run says; None where none is there.

    Args:
        folder: that the run has made.

    Raises:
        UsageError: a run is there and does not answer, or may not be asked.
    """
    said = bytearray()
    try:
        with _door(folder) as path, socket.socket(socket.AF_UNIX) as asking:
            asking.settimeout(timeout_s)
            asking.connect(path)
            while part := asking.recv(2**16):
                said += part
                if len(said) > ANSWER_BYTES_MAX:
                    raise UsageError(f"{folder}: the run's answer is longer than {ANSWER_BYTES_MAX} bytes")
    except (TimeoutError, BlockingIOError):
        raise UsageError(
            f"the run in {folder.parent.parent} is alive, and has not answered within {timeout_s:g} s: its "
            "own process is busy, perhaps in a dataset function that blocks"
        ) from None
    except PermissionError:
        raise UsageError(f"{folder} belongs to another user, who alone may ask") from None
    except OSError:  # it is not there, or nobody listens
        return None
    return bytes(said) or None


@contextlib.contextmanager
def _door(folder: Path) -> Iterator[str]:
    """Give a path of the socket which is short enough, however long that of the folder is."""
    if not sys.platform.startswith("linux"):
        yield str(folder / NAME)
        return
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{NAME}"
    finally:
        os.close(fd)


def _make(folder: Path) -> None:
    _remove(folder)
    folder.mkdir(mode=0o700)


def _remove(folder: Path) -> None:
    if folder.is_symlink() or folder.exists():
        shutil.rmtree(folder)
