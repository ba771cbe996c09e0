"""A disk that notes what is asked of it, and can be made to fail."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from pipedist.journal.log_format import Buffer, Disk


class WatchedDisk(Disk):
    """The real one, watched.

    Args:
        room_bytes: as many bytes can be written; the write that does not fit is cut short, and fails.
    """

    def __init__(self, room_bytes: int | None = None) -> None:
        self.done: list[tuple[str, str]] = []
        """What was asked, and of which file."""
        self.dirty: set[str] = set()
        """Files that were written and not synced."""
        self.room_bytes = room_bytes
        self._names: dict[int, str] = {}

    def open(self, path: Path) -> int:
        fd = super().open(path)
        self._names[fd] = path.name
        return fd

    def write(self, fd: int, buffers: Sequence[Buffer], at: int) -> int:
        name = self._names[fd]
        self.done.append(("write", name))
        self.dirty.add(name)
        if self.room_bytes is not None:
            data = b"".join(bytes(memoryview(b).cast("B")) for b in buffers)
            if len(data) > self.room_bytes:
                super().write(fd, [data[: self.room_bytes]], at)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.room_bytes -= len(data)
        return super().write(fd, buffers, at)

    def sync(self, fd: int) -> None:
        name = self._names[fd]
        self.done.append(("sync", name))
        self.dirty.discard(name)
        super().sync(fd)

    def sync_folder(self, path: Path) -> None:
        self.done.append(("sync folder", path.name))
        super().sync_folder(path)

    def rename(self, source: Path, target: Path) -> None:
        self.done.append(("rename", target.name))
        super().rename(source, target)

    def remove(self, path: Path) -> None:
        self.done.append(("remove", path.name))
        super().remove(path)
