"""Folders in the temporary folder that belong to one process; later processes remove those of dead ones.

A killed process cannot remove its folder. So each folder is locked (flock): the kernel releases the lock
when the process ends, and the next process that creates a folder of that kind removes unlocked ones. Only
folders of this user and this host with the expected name and mode are considered.

Rules
- A process owns its folder once it holds the lock AND the folder still exists: another process may have
  removed it as stale in between. Then the process creates another one.
- On file systems without such locks, or with locks of one host only, no folder of another host is removed:
  the host's name is part of the folder's name.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import zlib

from pipedist.core.files import is_file_at, try_lock

_ATTEMPTS_MAX = 100
_MODE = 0o700


class ScratchFolder:
    """A folder that only this user can enter, until `close`.

    `kind`, a word, is part of its name. Without `parent` it is in the temporary folder.
    """

    def __init__(self, kind: str, parent: str | None = None) -> None:
        if parent is None:
            import tempfile  # slow to import, and few workers create a folder

            parent = tempfile.gettempdir()
        remove_stale(kind, parent)
        self.path, self._lock = _make(parent, f"{_prefix(kind)}{os.getpid()}-")

    def close(self) -> None:
        """Remove the folder and its contents, ignoring errors."""
        if self._lock < 0:
            return
        remove(self.path)
        os.close(self._lock)
        self._lock = -1


def _make(parent: str, prefix: str) -> tuple[str, int]:
    """Return a new folder and the descriptor that holds its lock."""
    for _ in range(_ATTEMPTS_MAX):
        path = os.path.join(parent, prefix + os.urandom(2).hex())  # short: paths of sockets are limited
        with contextlib.suppress(FileExistsError, FileNotFoundError):  # the folder has just been removed
            os.mkdir(path, _MODE)
            lock = _open(path)
            try:
                is_locked = try_lock(lock)
            except OSError:  # a file system without locks: no process removes the folder as stale
                return path, lock
            if is_locked and is_file_at(path, lock):
                return path, lock
            os.close(lock)  # another process took it for a stale one
    raise OSError(f"{_ATTEMPTS_MAX} new folders in {parent} were removed at once by others")


def _prefix(kind: str) -> str:
    return f"pipedist-{kind}-{zlib.crc32(os.uname().nodename.encode()):08x}-"


def remove_stale(kind: str, parent: str) -> None:
    """Remove folders of a kind whose process has ended."""
    name = re.compile(re.escape(_prefix(kind)) + r"[0-9]+-[0-9a-f]{4}")
    try:
        found = [entry.path for entry in os.scandir(parent) if name.fullmatch(entry.name)]
    except OSError:
        return
    for path in found:
        with contextlib.suppress(OSError):  # it belongs to another user, is in use, or has just been removed
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


def remove(path: str) -> None:
    """Remove a folder and its contents, ignoring errors."""
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                os.unlink(entry.path)
        os.rmdir(path)
    except FileNotFoundError:
        return
    except OSError:
        import shutil  # slow to import, and not needed if the folder contains only sockets

        shutil.rmtree(path, ignore_errors=True)
