"""Locks on files, and files that are replaced as a whole.

- A lock is flock(2) on an open descriptor: the kernel releases it when the last process that holds
  the descriptor ends, so no lock is ever stale.
- A file, or a folder of files, is written beside its path, made durable, and renamed: a reader finds
  the old content or the new one, also after a kill or a power failure.

Everything here raises OSError; the caller turns it into an error that names the user's file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import BinaryIO

_SYNCED_MAX = 256  # files of a folder that are made durable one by one

_NOT_REPLACED = (errno.ENOTEMPTY, errno.EEXIST, errno.EISDIR, errno.ENOTDIR)
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FLAGS = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Lock an open file or folder; return False if another process holds the lock.

    A shared lock excludes only others that are not; over NFS, a file that is open for reading can have no other.
    """
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_file_at(path: str | Path, descriptor: int) -> bool:
    """Return whether an open file is the one at `path`: it may be removed before it is locked."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except OSError:
        return False


def is_replaceable(path: Path) -> bool:
    """Return whether root may put a file there without harm: not for a device, a pipe, or a link as /dev/stdout."""
    is_special = path.exists() and not path.is_file() and not path.is_dir()
    return not is_special and os.path.realpath(path.parent) != "/dev"


class AtomicFile:
    """A file that appears at its path (in an existing folder) complete, on `commit`, or not at all.

    A process that is killed before `commit` leaves at most a hidden `.NAME.*.partial`. Raises OSError if a device or
    a pipe is there, such as /dev/null: root could replace it, for all processes of the system.
    """

    def __init__(self, path: Path) -> None:
        if not is_replaceable(path):
            raise FileExistsError(errno.EEXIST, "it is a device or a pipe", str(path))
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


class AtomicPath:
    """A file or folder that a library writes, and that appears at its path complete, on `commit`, or not at all.

    Attributes:
        written: the path at which the library writes; files that it makes beside that are removed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._folder = path.with_name(f".{path.name}.{os.urandom(4).hex()}.partial")
        self._folder.mkdir()
        self.written = self._folder / path.name

    def commit(self) -> None:
        """Make what was written durable and rename it to `path`."""
        sync_tree(self.written)
        if self.path.is_dir():  # a folder is not replaced in one step, and replaces no file
            remove_tree(self.path)
        elif self.written.is_dir():
            self.path.unlink(missing_ok=True)
        os.replace(self.written, self.path)
        sync_folder(self.path.parent)
        self.abort()

    def abort(self) -> None:
        """Remove what was written; harmless after `commit`, and twice."""
        remove_tree(self._folder, ignore_errors=True)


def remove_tree(path: Path, *, ignore_errors: bool = False) -> None:
    """Remove a folder, or do nothing if it is not there; others may remove files in it meanwhile."""
    import shutil  # rarely needed

    while os.path.lexists(path):
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(path, ignore_errors=ignore_errors)
            return


def sync_tree(path: Path) -> None:
    """Make a file, or the files and names in a folder, durable."""
    if not path.is_dir():
        _sync_file(path)
        return
    files = [each for each in path.rglob("*") if not each.is_dir()]
    if len(files) > _SYNCED_MAX:
        os.sync()  # one by one they take longer than the rest of the system's data
        return
    for file in files:
        _sync_file(file)
    for folder in [path, *(each for each in path.rglob("*") if each.is_dir())]:
        sync_folder(folder)


def _sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file atomically and durably; if it can't be written, the old content stays."""
    out = AtomicFile(path)
    try:
        out.file.write(content)
        out.commit()
    finally:
        out.abort()


def link_or_copy(source: Path, target: Path) -> None:
    """Replace a file or folder by hard links to another, or by copies on a file system without links."""
    if source.is_dir() and not source.is_symlink():
        remove_tree(target)
        target.mkdir()
        for child in source.iterdir():
            link_or_copy(child, target / child.name)
        return
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


def move(source: Path, path: Path, name: PurePath) -> None:
    """Move a file or folder to `path/name`, in place of what is there; do nothing if it was moved before.

    Symbolic links below `path` are not followed.
    """
    with _parent(path, name, make=True) as target:
        with contextlib.suppress(FileNotFoundError):  # moved before the kill
            try:
                os.replace(source, name.name, dst_dir_fd=target)
            except OSError as error:
                if error.errno not in _NOT_REPLACED:
                    raise
                _unlink(name.name, target)  # a folder is replaced in two steps
                os.replace(source, name.name, dst_dir_fd=target)
        os.fsync(target)


def remove(path: Path, name: PurePath) -> None:
    """Remove the file or folder `path/name`, if it is there; symbolic links below `path` are not followed."""
    with contextlib.suppress(FileNotFoundError), _parent(path, name, make=False) as target:
        _unlink(name.name, target)


def _unlink(name: str, folder: int) -> None:
    """Remove a file, or a folder with all that is in it; links in it are not followed."""
    if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
        import shutil  # rarely needed

        shutil.rmtree(name, dir_fd=folder)
    else:
        os.unlink(name, dir_fd=folder)


@contextlib.contextmanager
def _parent(path: Path, name: PurePath, *, make: bool) -> Iterator[int]:
    """Open the folder that holds `path/name`, following no symbolic link below `path`."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in name.parts[:-1]:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, dir_fd=fd)
            below = os.open(part, _DIRECTORY, dir_fd=fd)
            os.close(fd)
            fd = below
        yield fd
    finally:
        os.close(fd)
