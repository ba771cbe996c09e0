"""A file that appears whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from pipedist.errors import OutputError


class AtomicFile:
    """A file that is written beside its place and renamed into it when it is complete.

    A process that is killed in the middle leaves at most a hidden `.NAME.*.partial` behind, and
    what was at `path` before.

    Args:
        path: where the file will be; its folder exists.
        label: what errors call it; "": its path.

    Raises:
        OutputError: the folder can't be written.
    """

    def __init__(self, path: Path, label: str = "") -> None:
        self.path = path
        self._label = label or str(path)
        self._temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
        with writing(self._label):
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            self.file: BinaryIO = os.fdopen(os.open(self._temporary, flags, 0o666), "w+b")

    def commit(self) -> Path:
        """Make the file durable and put it in its place.

        Returns:
            `path`.

        Raises:
            OutputError: the disk is full, or fails.
        """
        with writing(self._label):
            self.file.flush()
            os.fsync(self.file.fileno())
            self.file.close()
            os.replace(self._temporary, self.path)
            sync_folder(self.path.parent)
        return self.path

    def abort(self) -> None:
        """Remove what was written; harmless after `commit`, and twice."""
        with contextlib.suppress(OSError):  # closing may flush to a full disk; the file goes anyway
            self.file.close()
        with contextlib.suppress(OSError):  # on a disk that fails it stays, hidden: why is told already
            self._temporary.unlink()


@contextlib.contextmanager
def writing(label: object) -> Iterator[None]:
    """Turn the operating system's errors into an OutputError which names the file."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"can't write {label}: {error.strerror or error}") from error


def sync_folder(path: Path) -> None:
    """Make renames in a folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
