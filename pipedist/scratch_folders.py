"""Folders in the temporary folder that belong to one process; where it was killed, the next one removes them.

A process that is killed can't remove its folder. So each folder has a lock (flock), which the kernel opens
when its process is gone, however; whoever makes the next one of that kind removes those whose lock is open.
Looked at are only folders of this user and this host, with the name and mode that are given here.

Rules
- A folder is its maker's from the moment that its lock is held AND it is still there: another process may
  have taken it for a stale one in between. Then the maker makes another one.
- Where a file system has no such locks, or they count on one host only, nothing is removed that another host
  may use: the host's name is part of the folder's.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import zlib

from pipedist.files import is_file_at, try_lock

_ATTEMPTS_MAX = 100
_MODE = 0o700


class ScratchFolder:
    """A folder that only this user can enter, until `close`.

    Args:
        kind: what it is for: a word; it is part of the folder's name.
        parent: where it is made; None: the temporary folder.

    Raises:
        OSError: it can't be made.
    """

    def __init__(self, kind: str, parent: str | None = None) -> None:
        parent = parent or _temporary()
        prefix = f"pipedist-{kind}-{zlib.crc32(os.uname().nodename.encode()):08x}-"
        _sweep(parent, re.compile(re.escape(prefix) + r"[0-9]+-[0-9a-f]{4}"))
        self.path, self._lock = _make(parent, f"{prefix}{os.getpid()}-")

    def close(self) -> None:
        """Remove the folder and what is in it; what can't be removed stays."""
        if self._lock < 0:
            return
        remove(self.path)
        os.close(self._lock)
        self._lock = -1


def _make(parent: str, prefix: str) -> tuple[str, int]:
    """Return a new folder and the descriptor that holds its lock."""
    for _ in range(_ATTEMPTS_MAX):
        path = os.path.join(
            parent, prefix + os.urandom(2).hex()
        )  # short: paths of sockets may lead through it
        with contextlib.suppress(
            FileExistsError, FileNotFoundError
        ):  # the name is taken; or the folder is gone
            os.mkdir(path, _MODE)
            lock = _open(path)
            try:
                is_ours = try_lock(lock)
            except OSError:  # a file system without locks: no process removes the folder as stale
                return path, lock
            if is_ours and is_file_at(path, lock):
                return path, lock
            os.close(lock)  # another process took it for a stale one
    raise OSError(f"{_ATTEMPTS_MAX} new folders in {parent} were removed at once by others")


def _sweep(parent: str, name: re.Pattern[str]) -> None:
    """Remove the folders whose process is gone."""
    try:
        found = [entry.path for entry in os.scandir(parent) if name.fullmatch(entry.name)]
    except OSError:
        return
    for path in found:
        with contextlib.suppress(OSError):  # it is somebody else's, or in use, or has just been removed
            lock = _open(path)
            try:
                facts = os.fstat(lock)
                if facts.st_uid != os.geteuid() or stat.S_IMODE(facts.st_mode) != _MODE:
                    continue
                if try_lock(lock) and is_file_at(path, lock):
                    remove(path)
            finally:
                os.close(lock)


def _open(path: str) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _temporary() -> str:
    import tempfile  # takes milliseconds to import, and hardly any worker makes a folder

    return tempfile.gettempdir()


def remove(path: str) -> None:
    """Remove a folder, and whatever is in it; what can't be removed stays."""
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                os.unlink(entry.path)
        os.rmdir(path)
    except OSError:
        import shutil  # takes milliseconds to import, and is never needed where sockets are all there is

        shutil.rmtree(path, ignore_errors=True)
