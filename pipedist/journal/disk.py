"""The system calls that make things durable, in one place: tests put another one there, and watch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

BUFFERS_MAX: Final = 512
"""Buffers of one `writev`; the kernel takes 1,024."""

_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC

Buffer = bytes | memoryview


class Disk(Protocol):
    """What the journal asks of the file system; everything raises OSError."""

    def open(self, path: Path) -> int:
        """Open a file for writing, and make it if it is not there; return its descriptor."""

    def write(self, fd: int, buffers: Sequence[Buffer], at: int) -> int:
        """Write all of `buffers` from offset `at` on, and return the bytes."""

    def truncate(self, fd: int, size: int) -> None:
        """Cut a file to `size` bytes."""

    def sync(self, fd: int) -> None:
        """Return when what was written to a file is durable."""

    def sync_folder(self, path: Path) -> None:
        """Return when the names in a folder are durable."""

    def rename(self, source: Path, target: Path) -> None:
        """Put a file in the place of another one."""

    def remove(self, path: Path) -> None:
        """Remove a file; one that is not there is no fault."""

    def close(self, fd: int) -> None:
        """Close a descriptor."""


class RealDisk:
    """The operating system's."""

    def open(self, path: Path) -> int:
        """As `Disk`."""
        return os.open(path, _FLAGS, 0o666)

    def write(self, fd: int, buffers: Sequence[Buffer], at: int) -> int:
        """As `Disk`; a write that the kernel cuts short goes on where it ended."""
        begin = at
        waiting = [view.cast("B") for b in buffers if (view := memoryview(b)).nbytes]
        while waiting:
            done = os.pwritev(fd, waiting[:BUFFERS_MAX], at)
            at += done
            taken = 0
            while taken < len(waiting) and done >= waiting[taken].nbytes:
                done -= waiting[taken].nbytes
                taken += 1
            del waiting[:taken]
            if done:
                waiting[0] = waiting[0][done:]
        return at - begin

    def truncate(self, fd: int, size: int) -> None:
        """As `Disk`."""
        os.ftruncate(fd, size)

    def sync(self, fd: int) -> None:
        """As `Disk`."""
        os.fdatasync(fd)

    def sync_folder(self, path: Path) -> None:
        """As `Disk`."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        """As `Disk`."""
        os.replace(source, target)

    def remove(self, path: Path) -> None:
        """As `Disk`."""
        path.unlink(missing_ok=True)

    def close(self, fd: int) -> None:
        """As `Disk`."""
        os.close(fd)


DISK: Final[Disk] = RealDisk()
