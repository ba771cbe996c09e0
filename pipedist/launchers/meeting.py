"""Where a run meets its local workers, also those that a run which was killed has left behind.

    RUN/.pipedist/workers.json   says where that is (0600); removed when the run ends in order
    TMPDIR/pipedist-XXXXXXXX/    0700
        0123456789abcdef         the socket of the run's process
        run.lock                 locked while there is such a process
        worker-0                 locked by the worker of slot 0, with its process id and its terms

Locks are those of flock(2): the kernel lets go of them when their process ends, however it does, so there
is nothing stale to be found. The directory is not in the run's folder, which may be on a file system
without sockets, or too deep for one. Whoever is last removes it: the process of the run, or, where that
was killed and nobody came, the worker that leaves last.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from pipedist.errors import UsageError
from pipedist.launchers.private_files import read_document, write_document
from pipedist.records import record
from pipedist.transport.endpoints import (
    SHARED_MEMORY_SUFFIX,
    ipc_endpoint,
    make_private_directory,
    private_directory_of,
    remove_private_directory,
)

_FORMAT: Final = 1
_RUN: Final = "run.lock"
_WORKER: Final = "worker-"
_SOCKET: Final = re.compile(r"[0-9a-f]{16}", re.ASCII)
_LAST_S: Final = 1.0
"""How long a worker that leaves may wait for another one to find out that it is not the last."""
_TRY_S: Final = 0.01


@record
class Holder:
    """The worker that has a slot.

    Args:
        pid: of its supervisor; 0 where it has not said it yet.
        terms: what it was started with.
    """

    pid: int
    terms: str


class Slot:
    """A place for one worker.

    Args:
        number: its own.
        path: of its file.
    """

    def __init__(self, number: int, path: Path) -> None:
        self.number = number
        self._path = path

    def take(self, terms: str) -> int | None:
        """Take the slot, if it is free.

        Args:
            terms: what its worker is started with.

        Returns:
            The descriptor that holds it, for the worker's process to inherit; None: it is taken.
        """
        descriptor = _lock(self._path, make=True)
        if descriptor is not None:
            self.write(descriptor, Holder(0, terms))
        return descriptor

    @staticmethod
    def write(descriptor: int, holder: Holder) -> None:
        """Say who has the slot.

        Args:
            descriptor: that holds it.
        """
        # Of one length whatever the number: who reads it meanwhile finds the one or the other.
        text = f'{{"pid": {holder.pid:>10}, "terms": {json.dumps(holder.terms)}}}'
        os.ftruncate(descriptor, os.pwrite(descriptor, text.encode("ascii"), 0))

    @property
    def holder(self) -> Holder | None:
        """Who has the slot, None if it is free."""
        descriptor = _lock(self._path, make=False)
        if descriptor is not None:
            os.close(descriptor)
            return None
        document = read_document(self._path) or {}
        pid, terms = document.get("pid"), document.get("terms")
        if self._path.exists():
            return Holder(pid if isinstance(pid, int) else 0, terms if isinstance(terms, str) else "")
        return None


class Meeting:
    """A place where a run meets its workers.

    Args:
        directory: of the sockets and slots.
        socket: the name of the run's.
        pointer: the file in the run's folder that says where it is; None: for a worker, which does not
            know it.
    """

    def __init__(self, directory: Path, socket: str, pointer: Path | None = None) -> None:
        self.directory = directory
        self._socket = socket
        self._pointer = pointer

    def remove(self) -> None:
        """Remove it, whoever may be there."""
        if self._pointer is not None:
            with contextlib.suppress(OSError):  # it names a directory that is not there: nobody is misled
                self._pointer.unlink(missing_ok=True)
        remove_private_directory(str(self.directory))

    @property
    def endpoint(self) -> str:
        """Where the run's process listens."""
        return f"ipc://{self.directory}/{self._socket}"

    def slot(self, number: int) -> Slot:
        """Return a slot."""
        return Slot(number, self.directory / f"{_WORKER}{number}")

    @property
    def taken(self) -> dict[int, Holder]:
        """Who is there, by slot."""
        found = {}
        for path in self.directory.glob(f"{_WORKER}*"):
            number = path.name.removeprefix(_WORKER)
            holder = self.slot(int(number)).holder if number.isdecimal() else None
            if holder is not None:
                found[int(number)] = holder
        return dict(sorted(found.items()))


@contextmanager
def meeting(pointer: Path) -> Iterator[Meeting]:
    """Open the place of a run: the one that its killed process has left, or a new one.

    Args:
        pointer: the file that says where that is; whoever enters holds the run's lock.

    Raises:
        UsageError: no directory can be made.
    """
    place, lock = _left(pointer) or _made(pointer)
    try:
        write_document(
            pointer,
            {"format": _FORMAT, "directory": str(place.directory), "socket": place.endpoint[-16:]},
        )
        yield place
    finally:
        place.remove()
        os.close(lock)


def leave(directory: Path, slot: int) -> None:
    """Leave a slot for good; remove the directory if this was the last worker, and no run is there.

    Args:
        slot: the leaving worker's.
    """
    place = Meeting(directory, "")
    with contextlib.suppress(OSError):  # it is removed already
        (directory / f"{_WORKER}{slot}").unlink()
    until = time.monotonic() + _LAST_S
    are_others = False
    # One that left while this one had the lock may have given up: it was the last then, and nobody's.
    while not are_others:
        while (lock := _lock(directory / _RUN, make=False)) is None:  # a run is there, or another one leaves
            if time.monotonic() >= until or not directory.exists():
                return
            time.sleep(_TRY_S)
        try:
            if not place.taken:
                place.remove()
                return
        finally:
            os.close(lock)
        are_others = bool(place.taken)


def _left(pointer: Path) -> tuple[Meeting, int] | None:
    """Return the place that a killed process has left, and the lock on it; None if there is none."""
    document = read_document(pointer) or {}
    directory, socket = document.get("directory"), document.get("socket")
    if document.get("format") != _FORMAT or not isinstance(directory, str) or not isinstance(socket, str):
        return None
    place = Meeting(Path(directory), socket, pointer)
    if _SOCKET.fullmatch(socket) is None or private_directory_of(place.endpoint) != directory:
        return None
    lock = _lock(place.directory / _RUN, make=False)
    if lock is None:  # the last worker removes it, or it was never such a place
        return None
    for suffix in ("", SHARED_MEMORY_SUFFIX):  # nobody listens there: its process is gone
        with contextlib.suppress(OSError):
            (place.directory / f"{socket}{suffix}").unlink()
    return place, lock


def _made(pointer: Path) -> tuple[Meeting, int]:
    directory = make_private_directory()
    lock = _lock(directory / _RUN, make=True)
    if lock is None:
        raise UsageError(f"somebody else uses {directory}, which was made a moment ago: try again")
    return Meeting(directory, ipc_endpoint(directory).rpartition("/")[2], pointer), lock


def _lock(path: Path, *, make: bool) -> int | None:
    """Lock a file, and return the descriptor that holds the lock; None: somebody else has it, or it is gone.

    Args:
        make: make it, where there is none.
    """
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_CREAT if make else 0)
    try:
        descriptor = os.open(path, flags, 0o600)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.stat(path, follow_symlinks=False).st_ino == os.fstat(descriptor).st_ino:
            return descriptor
    except OSError:
        pass  # somebody else has it, or has removed it meanwhile
    os.close(descriptor)
    return None
