"""Writes a journal: first what a record speaks of is made durable, then the record that says so."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgpack
from msgspec import Struct

from pipedist.errors import JournalError
from pipedist.journal.disk import DISK, Buffer, Disk
from pipedist.journal.frames import FIRST, digest_of, pack_record
from pipedist.journal.history import NAME, Header, History, Part, PassHistory
from pipedist.journal.logs import EMPTY, End, Log

INLINE_BYTES_MAX: Final = 4096
"""A larger value has a file of its own."""


class Snapshot(Struct, frozen=True):
    """What a pass has come to, at a moment between two steps.

    Args:
        key: of the pass.
        replicas: call number = step * replicas + replica.
        first, last: steps [first, last) are committed since the snapshot before.
        elements: of these steps.
        parts: values that changed, as the buffers of a record.
        logs: where each log ends.
        complete: there are no more steps, and its values are complete.
        dropped: logs that nobody needs any more.
        quarantined: element and step of what is set aside in these steps.
    """

    key: str
    replicas: int
    first: int
    last: int
    elements: int
    parts: Mapping[str, Sequence[Buffer]]
    logs: Mapping[str, End]
    complete: bool = False
    dropped: tuple[str, ...] = ()
    quarantined: tuple[tuple[int, int], ...] = ()


class Journal:
    """A journal that is being written; its methods may be called from any thread, one after the other.

    Made by `create` or `reopen`.

    Args:
        folder: that it is in.
        fd: of its file.
        size, digest: where it ends.
        disk: system calls.
    """

    def __init__(self, folder: Path, fd: int, size: int, digest: bytes, disk: Disk) -> None:
        self.folder = folder
        self._fd = fd
        self._size = size
        self._digest = digest
        self._disk = disk
        self._lock = threading.Lock()
        self._broken: str | None = None
        self._logs: dict[str, Log] = {}
        self._synced: dict[str, int] = {}
        self._fresh_names = False
        """Files were made whose names may not be durable."""
        self._files: dict[tuple[str, str], str] = {}
        """The file that holds a part now, by pass and name."""
        self._number = 0

    @classmethod
    def create(cls, folder: Path, header: Header, disk: Disk = DISK) -> Journal:
        """Begin a journal in an empty folder.

        Raises:
            JournalError: it can't be written.
        """
        return cls._open(folder, NAME, 0, FIRST, header.payload(), disk)

    @classmethod
    def reopen(cls, folder: Path, history: History, disk: Disk = DISK) -> Journal:
        """Go on with a journal, behind its last good record.

        Args:
            history: what it says.

        Raises:
            JournalError: it can't be written.
        """
        resumed = {"kind": "resumed", "epoch": history.epoch + 1}
        journal = cls._open(folder, NAME, history.size, history.digest, resumed, disk)
        for key, pass_ in history.passes.items():
            journal._files.update(((key, name), part.file) for name, part in pass_.parts.items() if part.file)
        journal._number = history.count
        return journal

    @classmethod
    def replace(
        cls, folder: Path, header: Header, passes: Mapping[str, PassHistory], disk: Disk = DISK
    ) -> None:
        """Put a journal of another spec in the place of the one that is there, with some of its passes.

        Args:
            passes: what goes on to count, by the keys of the new spec.

        Raises:
            JournalError: it can't be written.
        """
        journal = cls._open(folder, f"{NAME}.new", 0, FIRST, header.payload(), disk)
        try:
            entries = [
                {
                    "pass": key,
                    "calls": [0, pass_.steps * header.replicas],
                    "elements": pass_.elements,
                    "complete": pass_.complete,
                    "parts": {name: part.plain() for name, part in pass_.parts.items()},
                    "logs": {name: [end.bytes, end.crc] for name, end in pass_.logs.items()},
                    "dropped": [],
                    "quarantined": [list(each) for each in pass_.quarantined.items()],
                }
                for key, pass_ in passes.items()
            ]
            if entries:
                journal._write({"kind": "steps", "passes": entries})
            with journal._writing():
                disk.rename(folder / f"{NAME}.new", folder / NAME)
                disk.sync_folder(folder)
        finally:
            journal.close()

    @classmethod
    def _open(
        cls, folder: Path, name: str, size: int, digest: bytes, first: Mapping[str, Any], disk: Disk
    ) -> Journal:
        """Open a journal's file and write a record at its end."""
        journal = cls(folder, -1, size, digest, disk)
        try:
            with journal._writing():
                folder.mkdir(parents=True, exist_ok=True)
                journal._fd = disk.open(folder / name)
                disk.truncate(journal._fd, size)
                disk.sync_folder(folder)
            journal._write(first)
        except BaseException:
            journal.close()
            raise
        return journal

    def log(self, name: str, end: End | None = None) -> Log:
        """Open a file that grows; it is closed with the journal.

        Args:
            end: how far it is durable; None: it is new.

        Raises:
            JournalError: it can't be opened.
        """
        durable = end or EMPTY
        with self._writing():
            fd = self._disk.open(self.folder / name)
            log = self._logs[name] = Log(fd, durable, self.broke, self._disk)
            self._disk.truncate(fd, durable.bytes)
        self._synced[name] = durable.bytes
        self._fresh_names = self._fresh_names or end is None
        return log

    # -- records ---------------------------------------------------------------------------------

    def commit(
        self, snapshots: Sequence[Snapshot], *, phase: int | None = None, unwritten: Mapping[str, str] = {}
    ) -> None:
        """Return when the snapshots are durable: the calls that they cover need not be done again.

        Args:
            phase: the phase that is complete with them; None: none is.
            unwritten: why an output of it has no file, by stage.

        Raises:
            JournalError: it can't be written; then nothing more is, and the record does not count.
        """
        with self._lock, self._writing():
            stale: list[str] = []
            entries = [self._entry(snapshot, stale) for snapshot in snapshots]
            for snapshot in snapshots:
                for name, end in snapshot.logs.items():
                    if end.bytes > self._synced[name]:
                        self._disk.sync(self._logs[name].fd)
                        self._synced[name] = end.bytes
            if self._fresh_names:
                self._fresh_names = False
                self._disk.sync_folder(self.folder)
            said: dict[str, Any] = {"kind": "steps" if phase is None else "phase", "passes": entries}
            if phase is not None:
                said |= {"phase": phase, "unwritten": dict(unwritten)}
            self._append(said)
            for name in [*stale, *(name for snapshot in snapshots for name in snapshot.dropped)]:
                self._forget(name)

    def _entry(self, snapshot: Snapshot, stale: list[str]) -> dict[str, Any]:
        parts = {}
        for name, buffers in snapshot.parts.items():
            size = sum(memoryview(b).nbytes for b in buffers)
            if size <= INLINE_BYTES_MAX:
                part = Part(b"".join(buffers))
            else:
                part = self._file(snapshot.key, name, buffers)
            before = self._files.pop((snapshot.key, name), None)
            if before is not None:
                stale.append(before)
            if part.file:
                self._files[snapshot.key, name] = part.file
            parts[name] = part.plain()
        return {
            "pass": snapshot.key,
            "calls": [snapshot.first * snapshot.replicas, snapshot.last * snapshot.replicas],
            "elements": snapshot.elements,
            "complete": snapshot.complete,
            "parts": parts,
            "logs": {n: [end.bytes, end.crc] for n, end in snapshot.logs.items()},
            "dropped": list(snapshot.dropped),
            "quarantined": [list(each) for each in snapshot.quarantined],
        }

    def _file(self, key: str, name: str, buffers: Sequence[Buffer]) -> Part:
        """Write a value into a file of its own; its name becomes durable with those of the logs."""
        from zlib import crc32

        self._number += 1
        file = f"{file_name(key, name)}.{self._number}"
        fd = self._disk.open(self.folder / file)
        try:
            self._disk.truncate(fd, 0)
            size = self._disk.write(fd, buffers, 0)
            self._disk.sync(fd)
        finally:
            self._disk.close(fd)
        crc = 0
        for buffer in buffers:
            crc = crc32(buffer, crc)
        self._fresh_names = True
        return Part(None, file, End(size, crc))

    def end(self, ledger: Mapping[str, int]) -> None:
        """Say that the run is over.

        Raises:
            JournalError: it can't be written.
        """
        self._write({"kind": "end", "ledger": dict(ledger)})

    def _write(self, said: Mapping[str, Any]) -> None:
        with self._lock, self._writing():
            self._append(said)

    def _append(self, said: Mapping[str, Any]) -> None:
        packed = pack_record(msgpack.packb(said, unicode_errors="surrogatepass"), self._digest)
        written = self._disk.write(self._fd, [packed], self._size)
        self._disk.sync(self._fd)
        self._size += written
        self._digest = digest_of(packed)

    # -- files ---------------------------------------------------------------------------------

    def keep(self, names: Iterable[str]) -> None:
        """Remove every file of the folder but the journal, what it writes, and these.

        Raises:
            JournalError: one can't be removed.
        """
        kept = {NAME, *names, *self._logs, *self._files.values()}
        with self._writing():
            for path in [path for path in self.folder.iterdir() if path.name not in kept]:
                self._forget(path.name)

    def _forget(self, name: str) -> None:
        log = self._logs.pop(name, None)
        if log is not None:
            log.close()
        self._disk.remove(self.folder / name)

    def close(self) -> None:
        """Close all files; harmless twice."""
        with self._lock:
            for log in self._logs.values():
                log.close()
            self._logs.clear()
            if self._fd >= 0:
                self._disk.close(self._fd)
                self._fd = -1

    def _writing(self) -> _Guard:
        if self._broken is not None:
            raise JournalError(self._broken)
        return _Guard(self)

    def broke(self, error: OSError) -> JournalError:
        """Take note that a system call failed: after that nothing is certain, and nothing is tried again."""
        failure = _unwritable(self.folder, error)
        self._broken = str(failure)
        return failure


class _Guard:
    """Turns the first error of the operating system into the journal's last one."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            raise self._journal.broke(error) from error


def _unwritable(folder: Path, error: OSError) -> JournalError:
    return JournalError(
        f"the journal in {folder} can't be written: {error.strerror or error}. The run has stopped; what was "
        "committed is safe: mend the cause, and run again with --resume"
    )


def file_name(key: str, name: str) -> str:
    """Return the name of a file that holds something of a pass."""
    return f"{key.replace('/', '-')}.{name}"
