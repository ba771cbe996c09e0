"""Locks on files, and files that are replaced as a whole.

- A lock is flock(2) on an open descriptor: the kernel releases it when the last process that holds
  the descriptor ends, so no lock is ever stale.
- A file is written beside its path, made durable, and renamed: a reader finds the old content or
  the new one, also after a kill or a power failure.

Everything here raises OSError; the caller turns it into an error that names the user's file.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path
from typing import BinaryIO

_NEW_FLAGS = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def try_lock(descriptor: int) -> bool:
    """Lock an open file or folder; return False if another process holds the lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_file_at(path: str | Path, descriptor: int) -> bool:
    """Return whether an open file is the one at `path`: it may be removed before it is locked."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except OSError:
        return False


class AtomicFile:
    """A file that appears at its path (in an existing folder) complete, on `commit`, or not at all.

    A process that is killed before `commit` leaves at most a hidden `.NAME.*.partial`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}.partial")
        self.file: BinaryIO = os.fdopen(os.open(self._temporary, _NEW_FLAGS, 0o666), "w+b")

    def commit(self) -> None:
        """Make the file durable and rename it to `path`."""
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        os.replace(self._temporary, self.path)
        sync_folder(self.path.parent)

    def abort(self) -> None:
        """Remove what was written; harmless after `commit`, and twice."""
        with contextlib.suppress(OSError):  # closing may flush to a full disk
            self.file.close()
        with contextlib.suppress(OSError):  # on a disk that fails the hidden file stays
            self._temporary.unlink()


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file atomically and durably; if it can't be written, the old content stays."""
    out = AtomicFile(path)
    try:
        out.file.write(content)
        out.commit()
    finally:
        out.abort()


def link_or_copy(source: Path, target: Path) -> None:
    """Replace a file by a hard link to another, or by a copy on a file system without links."""
    target.unlink(missing_ok=True)
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        import shutil  # rarely needed

        shutil.copy2(source, target, follow_symlinks=False)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
